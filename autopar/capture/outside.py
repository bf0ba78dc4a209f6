"""What a model gets from outside of it, which is another value each time: a graph would repeat the first for ever.

The clock, random bytes, files, the state of torch's generator, and derivatives that torch folds to constants. While a
model is traced, functions that give these are replaced by ones that refuse; torch and libraries may go on calling them.
Where a library seeds or sets back torch's generator, that is noted, and refused if the model draws numbers: the graph
would draw others.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.capture.origins import is_installed, is_standard, is_users_file
from autopar.errors import CaptureError
from autopar.ir.graph import user_line

_AUTOPAR = str(Path(__file__).parent.parent)
_CLOCK = "reads the clock", "measure time outside of the model"
_BYTES = "draws random bytes", "draw with torch (torch.rand), or outside and pass what was drawn as an argument"
_FILE = "reads a file", "read it before the call, and keep what it says in an attribute or a buffer"
_SEED = "seeds torch's generator", "seed it before the call, or draw the numbers outside and pass them"
_FOLDED = (
    "linearizes a function, whose derivative torch folds to constants",
    "use torch.func.jvp(function, primals, tangents)[1], which is the same, with gradients of the primals, too",
)
_STATE = "handles the state of torch's generator", "do that outside of the model, or draw there and pass what was drawn"

_SOURCES: tuple[tuple[ModuleType, tuple[str, ...], tuple[str, str]], ...] = (
    (time, ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
            "process_time_ns"), _CLOCK),
    (os, ("urandom", "getrandom"), _BYTES),
    (random, ("_urandom",), _BYTES),
    (uuid, ("uuid1", "uuid4"), _BYTES),
    (secrets, ("token_bytes", "token_hex", "randbelow", "randbits", "choice"), _BYTES),
    (builtins, ("open",), _FILE),
    (io, ("open",), _FILE),
    (np, ("load", "loadtxt", "genfromtxt", "fromfile", "memmap"), _FILE),
    (torch, ("load", "from_file"), _FILE),
    (torch, ("manual_seed", "seed"), _SEED),
    (torch.random, ("manual_seed", "seed"), _SEED),
    (torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all"), _SEED),
    (torch, ("initial_seed", "get_rng_state", "set_rng_state"), _STATE),
    (torch.random, ("initial_seed", "get_rng_state", "set_rng_state", "fork_rng"), _STATE),
    (torch.func, ("linearize",), _FOLDED),
    (torch.cuda, ("initial_seed", "get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"), _STATE),
)  # fmt: skip


_SETS = frozenset(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"))
"""Functions after which the generator draws other numbers."""

_TRACING = tuple(str(Path(torch.__file__).parent / p) for p in ("_dynamo", "_functorch", "_inductor", "fx"))
"""Where torch traces, which sets the generator back to what it was before."""


@contextlib.contextmanager
def refused(spaces: Sequence[dict[str, Any]], seeded: list[str]) -> Iterator[None]:
    """While it lasts, the user's code may not ask for what is another value each time.

    Args:
        spaces: globals of that code.
        seeded: gets what libraries do to torch's generator, and where.
    """
    refusing: dict[int, Any] = {}
    put: list[tuple[dict[str, Any], str, Any]] = []
    for module, names, why in _SOURCES:
        for name in (n for n in names if hasattr(module, n)):
            function = vars(module)[name]
            refusing.setdefault(
                id(function), functools.partial(_refuse, f"{module.__name__}.{name}", why, function, seeded)
            )
            put.append((vars(module), name, function))
    for space in spaces:  # from time import time
        put += [(space, n, v) for n, v in space.items() if id(v) in refusing]
    try:
        for space, name, function in put:
            space[name] = refusing[id(function)]
        yield
    finally:
        for space, name, function in put:
            space[name] = function


def _refuse(
    name: str, why: tuple[str, str], function: Callable[..., Any], seeded: list[str], *args: Any, **kwargs: Any
) -> Any:
    """Call the function for a library, and refuse to for the user's code."""
    if why is _FILE and name.endswith("open") and not _is_read(*args, **kwargs):
        return function(*args, **kwargs)
    frame = sys._getframe(1)
    # Python's own code asks on behalf of its caller, but for the time: of a record of `logging`, say. Torch, and every
    # installed library, asks for itself, but for what `fork_rng` does.
    while frame.f_back is not None and (
        frame.f_code.co_filename == torch.random.__file__
        or (why is not _CLOCK and is_standard(frame.f_code.co_filename))
    ):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not is_users_file(file) or is_installed(file):
        if name.rpartition(".")[2] in _SETS and not file.startswith((*_TRACING, _AUTOPAR)):
            seeded.append(f"{name} at {file}:{line}")
        return function(*args, **kwargs)
    raise CaptureError(
        f"the model {why[0]} ({name.removeprefix('builtins.')}) at {file}:{line}: a graph would repeat what it got the "
        f"first time; {why[1]}"
    )


def require_own_seeds(seeded: Sequence[str], graph: fx.Graph) -> None:
    """Refuse a trace in which a library has set torch's generator, if numbers are drawn in it.

    Raises:
        CaptureError: some are.
    """
    drawn = next((n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())), None)
    if seeded and drawn is not None:
        raise CaptureError(
            f"a library that the model calls seeds torch's generator, or sets it back, in forward ({seeded[0]}), and "
            f"the model draws numbers ({drawn.target}, {user_line(drawn)}): a graph would draw others than eager mode; "
            "draw them outside and pass them, or seed before the call"
        )


def _is_read(file: Any = None, mode: str = "r", *_: Any, **__: Any) -> bool:
    return "r" in mode or "+" in mode
