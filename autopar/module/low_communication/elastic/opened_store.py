"""The store at which elastic workers meet: an argument, and the connection to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from autopar.errors import RankError


def is_store(value: Any) -> str | None:
    """What an argument should be, if it is no store."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    fine = isinstance(value, Store) or (host and port.isdecimal())
    return None if fine else "HOST:PORT of a store (`autopar rendezvous HOST:PORT`), or a torch.distributed.Store"


def opened(store: str | Store, seconds: float) -> Store:
    """A connection, each answer of which is waited for so long.

    Raises:
        RankError: the store does not answer.
    """
    if isinstance(store, Store):
        return store
    host, _, port = store.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
    except RuntimeError as e:
        first = (str(e).splitlines() or [""])[0][:200]
        raise RankError(
            f"no store at {store} within {seconds:g} s ({first}): start `autopar rendezvous {store}` on that machine"
        ) from e
