"""`keep_open`: the store at which torch's agents meet, in a process of its own.

Else the first of the nodes has it, and a run whose first node is lost is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta


def keep_open(host: str, port: int, opened: Callable[[], None]) -> None:
    """Have the store at a port of this machine until the process ends.

    Args:
        host: name or address of this machine, as nodes know it.
        port: that is free.
        opened: called when nodes may come.

    Raises:
        ValueError: the store cannot be there.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    try:
        _store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    except (DistError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"no rendezvous at {host}:{port}: {first}; give a name of this machine and a free port"
        ) from None
    opened()
    threading.Event().wait()  # as long as that, `_store` is there
