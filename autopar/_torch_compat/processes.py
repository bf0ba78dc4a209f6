"""Process groups, and where torch waits for other processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch


def interrupt_gloo(group: Any) -> None:
    """End all waits of this process in a process group, if it is Gloo's: its connections are closed for good.

    Gloo closes all connections of a group when one receipt times out; its ``abort()`` does not end waits.
    """
    if "cpu:gloo" not in str(torch.distributed.get_backend_config(group)):
        return
    backend = group._get_backend(torch.device("cpu"))
    for other in range(group.size()):
        if other != group.rank():
            try:
                backend.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as e:
                if "Timed out" in str(e):  # of any other error only the connection to this rank would know
                    return


_UNUSED_TAG = 0x7FFF1234
"""Of messages that nobody sends."""


def put_around_collectives(around: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have ``around(what)`` entered where torch waits for others: operators of DTensors, and checkpoints.

    Once: a later call changes nothing.
    """
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.checkpoint.utils import _DistWrapper

    def wrapped(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            with around(what):
                return original(*args, **kwargs)

        call.is_put_around = True  # type: ignore[attr-defined]
        return call

    for owner, names, what in (
        (functional, ("wait_tensor",), "an operator of DTensors"),
        (_DistWrapper, ("broadcast_object", "gather_object", "all_gather_object", "scatter_object", "barrier"),
         "torch.distributed.checkpoint"),
    ):  # fmt: skip
        for name in names:
            original = getattr(owner, name)
            if not getattr(original, "is_put_around", False):
                setattr(owner, name, wrapped(original, what))


def number_of_groups() -> int:
    """How many process groups this process has: names of groups that only their ranks make are counted by it."""
    return len(torch.distributed.distributed_c10d._world.pg_names)
