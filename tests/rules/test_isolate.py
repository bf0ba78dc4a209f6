"""What runs in a process of its own leaves this one alone."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import pytest
import torch

from autopar.errors import InvalidRuleError
from autopar.rules.discover.isolate import CrashError, isolated

SECONDS = 60.0


def test_results_and_errors_come_back() -> None:
    large = isolated(lambda n: list(range(n)), 100_000, seconds=SECONDS)  # more than a pipe holds at once
    assert large == list(range(100_000))

    def fails() -> None:
        raise InvalidRuleError("no such rule")

    with pytest.raises(InvalidRuleError, match="no such rule"):
        isolated(fails, seconds=SECONDS)


def test_the_process_is_another_one_and_random_numbers_stay() -> None:
    state = torch.get_rng_state()
    assert isolated(lambda: (torch.randn(3).shape, os.getpid())[1], seconds=SECONDS) != os.getpid()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("crash", [lambda: ctypes.string_at(0), lambda: os.abort()])
def test_a_crash_is_an_error(crash: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashError, match=r"crashes \(SIG(SEGV|ABRT)\)"):
        isolated(crash, seconds=SECONDS)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("status", [0, 3])
def test_a_kernel_that_exits_is_an_error(status: int) -> None:
    with pytest.raises(CrashError, match=f"ends its process with status {status}"):
        isolated(os._exit, status, seconds=SECONDS)


def test_what_does_not_end_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(CrashError, match=r"does not end within 0\.2 s"):
        isolated(time.sleep, 600, seconds=0.2)
    assert time.monotonic() - began < SECONDS


def test_beside_threads_and_after_parallel_kernels() -> None:
    torch.set_num_threads(2)
    try:
        torch.randn(512, 512) @ torch.randn(512, 512)
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        total = isolated(lambda: float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()), seconds=SECONDS)
        done.set()
        thread.join()
    finally:
        torch.set_num_threads(1)
    assert total == 512.0**3
