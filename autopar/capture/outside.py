"""What a model gets from outside of it, which is another value each time: a graph would repeat the first for ever.

The clock, random bytes, files, threads, memory in use, flags of cuDNN and oneDNN, the state of torch's generator, and
derivatives that torch folds to constants. While a model is traced, functions that give these are replaced by ones that
refuse; torch and libraries may go on calling them.
Where a library seeds or sets back torch's generator, that is noted, and refused if the model draws numbers: the graph
would draw others.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import gc
import io
import multiprocessing.queues
import os
import queue
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.capture.origins import is_installed, is_standard, is_users_file
from autopar.errors import CaptureError
from autopar.ir.graph import user_line

_AUTOPAR = str(Path(__file__).parent.parent)
_CLOCK = "reads the clock", "measure time outside of the model"
_BYTES = "draws random bytes", "draw with torch (torch.rand), or outside and pass what was drawn as an argument"
_FILE = "reads a file", "read it before the call, and keep what it says in an attribute or a buffer"
_ENTRY = "asks for files or folders", "ask before the call, and keep the answer in an attribute"
_THREADS = "asks about threads", "ask before the call, and keep the answer in an attribute"
_FREE = (
    "asks how much memory is in use",
    "decide before the call, and keep the decision in an attribute; what a plan may use is memory= of parallelize()",
)
_TRACED = "asks for a setting of torch that is another one while it is captured", _ENTRY[1]
_OBJECTS = "asks about Python's objects", "ask before the call, and keep the answer in an attribute"
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
    (os, ("getcwd", "listdir", "scandir", "stat"), _ENTRY),
    (os.path, ("exists", "isfile", "isdir", "getmtime", "getsize"), _ENTRY),
    (threading, ("active_count", "current_thread", "get_ident", "get_native_id"), _THREADS),
    (torch, ("get_num_threads", "get_num_interop_threads"), _THREADS),
    (torch, ("is_anomaly_enabled",), _TRACED),
    (gc, ("get_count", "get_objects", "get_referrers", "get_stats"), _OBJECTS),
    (sys, ("getrefcount",), _OBJECTS),
    (torch.cuda, ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info",
                  "memory_stats"), _FREE),
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


_BETWEEN_THREADS = (
    (threading.Event, ("set", "clear", "wait")),
    (threading.Condition, ("wait", "wait_for", "notify", "notify_all")),
    (threading.Barrier, ("wait",)),
    (threading.Thread, ("start", "join")),
    (queue.Queue, ("put", "put_nowait", "get", "get_nowait", "qsize", "empty", "full", "join", "task_done")),
    (multiprocessing.queues.Queue, ("put", "put_nowait", "get", "get_nowait", "qsize", "empty", "full")),
    (multiprocessing.queues.JoinableQueue, ("put", "join", "task_done")),
    (multiprocessing.queues.SimpleQueue, ("put", "get", "empty")),
    (Connection.__bases__[0], ("send", "send_bytes", "recv", "recv_bytes", "recv_bytes_into", "poll")),
)
"""What threads tell one another by; a graph does none of it again, and nobody would be woken."""

_FLAGS = (
    (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (torch.backends.mkldnn, ("enabled",)),
)
"""Flags of torch's libraries, which are read as attributes of a module; capture sets some of them itself."""

_OF_ITSELF = (_CLOCK, _ENTRY, _THREADS, _FREE, _OBJECTS)
"""What Python's own code asks for itself, and not for its caller: of a record of `logging`, say, or to show a line."""

_SETS = frozenset(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"))
"""Functions after which the generator draws other numbers."""

_TRACING = tuple(str(Path(torch.__file__).parent / p) for p in ("_dynamo", "_functorch", "_inductor", "fx"))
"""Where torch traces, which sets the generator back to what it was before."""


@contextlib.contextmanager
def refused(spaces: Sequence[dict[str, Any]], seeded: list[str]) -> Iterator[None]:
    """While it lasts, the user's code may not ask for what is another value each time; other threads may, for theirs.

    Args:
        spaces: globals of that code.
        seeded: gets what libraries do to torch's generator, and where.
    """
    thread = get_ident()
    refusing: dict[int, Any] = {}
    put: list[tuple[dict[str, Any], str, Any]] = []
    for module, names, why in _SOURCES:
        for name in (n for n in names if hasattr(module, n)):
            function = vars(module)[name]
            refusing.setdefault(
                id(function), functools.partial(_refuse, f"{module.__name__}.{name}", why, function, seeded, thread)
            )
            put.append((vars(module), name, function))
    for kind in (datetime.datetime, datetime.date):  # whose methods cannot be replaced
        refusing[id(kind)] = _OfDates(kind.__name__, (), {"own": kind, "seeded": seeded, "thread": thread})
        put.append((vars(datetime), kind.__name__, kind))
    for space in spaces:  # from time import time
        put += [(space, n, v) for n, v in space.items() if id(v) in refusing]
    try:
        for space, name, function in put:
            space[name] = refusing[id(function)]
        with _flags_refused(), _messages_refused():
            yield
    finally:
        for space, name, function in put:
            space[name] = function


@contextlib.contextmanager
def counting_optimizers_refused() -> Iterator[None]:
    """While it lasts, only optimizers that count no steps may run in the model's forward; in other threads all may."""
    thread = get_ident()

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            _refuse_counting(optimizer)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _refuse_counting(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.SGD):
        return
    raise CaptureError(
        f"the model runs the optimizer {type(optimizer).__name__} in forward, whose count of steps is a tensor in "
        "float32: a graph would compute with that, where eager mode takes the number in it; use SGD, or write the "
        "update out"
    )


class _OfDates(type):
    """Classes of dates that refuse to be asked for now, and are otherwise those of `datetime`."""

    own: type
    seeded: list[str]
    thread: int

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.own)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.own(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name not in ("now", "utcnow", "today"):
            return getattr(cls.own, name)
        return functools.partial(
            _refuse, f"datetime.{cls.own.__name__}.{name}", _CLOCK, getattr(cls.own, name), cls.seeded, cls.thread
        )


class _Flag:
    """A flag of one of torch's libraries, which the user's code may not read."""

    def __init__(self, name: str, own: Any) -> None:
        """``own`` is torch's descriptor, which reads and sets it."""
        self.name, self.own, self.thread = name, own, get_ident()

    def __get__(self, module: Any, kind: type) -> Any:
        frame = sys._getframe(1)
        file, line = frame.f_code.co_filename, frame.f_lineno
        if get_ident() == self.thread and is_users_file(file) and not is_installed(file):
            raise CaptureError(
                f"the model reads the flag {self.name} at {file}:{line}, which is another one while it is captured; "
                "read it before the call, and keep it in an attribute"
            )
        return self.own.__get__(module, kind)

    def __set__(self, module: Any, value: Any) -> None:
        self.own.__set__(module, value)


@contextlib.contextmanager
def _flags_refused() -> Iterator[None]:
    found = [(type(m), n, vars(type(m))[n], m.__name__) for m, names in _FLAGS for n in names if n in vars(type(m))]
    try:
        for kind, name, own, module in found:
            setattr(kind, name, _Flag(f"{module}.{name}", own))
        yield
    finally:
        for kind, name, own, _ in found:
            setattr(kind, name, own)


@contextlib.contextmanager
def _messages_refused() -> Iterator[None]:
    found = [(kind, name, vars(kind)[name]) for kind, names in _BETWEEN_THREADS for name in names]
    try:
        for kind, name, own in found:
            setattr(kind, name, _message(f"{kind.__qualname__}.{name}", own))
        yield
    finally:
        for kind, name, own in found:
            setattr(kind, name, own)


def _message(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    thread = get_ident()

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        file, line = frame.f_code.co_filename, frame.f_lineno
        if get_ident() == thread and is_users_file(file) and not is_installed(file):
            raise CaptureError(
                f"the model deals with other threads in forward ({name} at {file}:{line}), which a graph would not do "
                "again; do it before or after the call, and pass what comes of it as an argument"
            )
        return function(*args, **kwargs)

    return refusing


def _refuse(
    name: str,
    why: tuple[str, str],
    function: Callable[..., Any],
    seeded: list[str],
    thread: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the function for a library and in other threads than the model's, and refuse to for the user's code."""
    if get_ident() != thread or (why is _FILE and name.endswith("open") and not _is_read(*args, **kwargs)):
        return function(*args, **kwargs)
    frame = sys._getframe(1)
    # Python's own code asks on behalf of its caller, but for some. Torch, and every installed library, asks for itself,
    # but for what `fork_rng` does.
    while frame.f_back is not None and (
        frame.f_code.co_filename == torch.random.__file__
        or (why not in _OF_ITSELF and is_standard(frame.f_code.co_filename))
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
