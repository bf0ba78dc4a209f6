"""Calls in a process of their own: a kernel that writes where it should not takes only that process with it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autopar.errors import AutoparError


class CrashError(AutoparError):
    """A call that ended its process, or did not end."""


def isolated(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What ``function(*args)`` returns in a forked process, or raises there; both are pickled.

    The fork has every operator that was registered here, and one thread. It cannot use a GPU that this process uses.
    What kernels print to the standard error stream is dropped. Where there are no forks (Windows) it runs in this one.

    Raises:
        CrashError: the process was ended, by a signal or otherwise, or ran for longer than ``seconds``; says which.
    """
    if not hasattr(os, "fork"):
        return function(*args)
    # A fork, not a spawn: operators that a user registered in this process are not in a fresh one.
    receive, send = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads, whose locks nobody gives back: should one be needed, time runs out.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(receive)
        _run(send, function, args)
    os.close(send)
    sent = None
    try:
        # Read to the end before waiting: a child whose pipe is full would never exit.
        sent = _read(receive, time.monotonic() + seconds)
    finally:
        os.close(receive)
        if sent is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if sent is None:
        raise CrashError(f"does not end within {seconds:g} s")
    if os.WIFSIGNALED(status):
        raise CrashError(f"crashes ({signal.Signals(os.WTERMSIG(status)).name})")
    if os.WEXITSTATUS(status) or not sent:
        raise CrashError(f"ends its process with status {os.WEXITSTATUS(status)}")
    failed, value = pickle.loads(sent)
    if failed:
        raise value
    return value


def _run(send: int, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """In the fork; never returns to the code of its parent."""
    import resource

    try:
        faulthandler.disable()  # its traceback would be taken for the parent's
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)  # the threads of its parent are not here
        try:
            answer = pickle.dumps((False, function(*args)))
        except Exception as e:
            answer = pickle.dumps((True, e))
        with os.fdopen(send, "wb") as stream:
            stream.write(answer)
        # Without handlers: they would flush the parent's buffers and close its connections a second time.
        os._exit(0)
    finally:
        os.kill(os.getpid(), signal.SIGABRT)


def _read(stream: int, deadline: float) -> bytes | None:
    """Everything up to the end of a stream; None if the deadline passes before."""
    found = []
    while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        found.append(os.read(stream, 1 << 16))
        if not found[-1]:
            return b"".join(found)
    return None
