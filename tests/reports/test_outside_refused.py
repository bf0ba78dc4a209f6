"""What differs each time that it is asked for, or what no graph has: a model that reads it in forward gets an error."""

from __future__ import annotations

import datetime
import gc
import io
import logging
import multiprocessing
import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import CaptureError
from tests.reports.test_outside_state import BYTES, Scaled, X, assert_equal

SPAWN = multiprocessing.get_context("spawn")


def draw_twice(m: Any) -> Any:
    with torch.random.fork_rng():
        first = torch.rand(())
    return first + torch.rand(())


def inner_step(m: Any) -> Any:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    torch.optim.Adam([weight]).step()
    return weight.detach().sum()


SOURCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "time": (lambda m: time.time() % 1, "reads the clock"),
    "perf_counter": (lambda m: perf_counter() % 1, "reads the clock"),
    "date": (lambda m: datetime.datetime.now().microsecond, "reads the clock"),
    "optimizer": (inner_step, "runs the optimizer Adam in forward"),
    "objects": (lambda m: gc.get_count()[0], "asks about Python's objects"),
    "anomalies": (lambda m: 1 + torch.is_anomaly_enabled(), "asks for a setting of torch"),
    "uuid": (lambda m: uuid.uuid4().int % 3, "random bytes"),
    "urandom": (lambda m: os.urandom(1)[0], "random bytes"),
    "system random": (lambda m: random.SystemRandom().random(), "random bytes"),
    "open": (lambda m: open(__file__).tell(), "reads a file"),
    "path": (lambda m: len(Path(__file__).read_text()), "reads a file"),
    "generator's state": (lambda m: float(torch.get_rng_state().sum()), "state of torch's generator"),
    "initial seed": (lambda m: torch.initial_seed() % 3, "state of torch's generator"),
    "fork": (draw_twice, "state of torch's generator"),
    "gradient": (lambda m: 1 + (m.linear.weight.grad is None), "reads a tensor's gradient"),
    "version": (lambda m: m.linear.weight._version, "reads how often a tensor was written to"),
    "memory": (lambda m: m.linear.weight.data_ptr() % 7, "reads the memory of a tensor"),
    "folder": (lambda m: len(os.getcwd()), "asks for files or folders"),
    "file": (lambda m: 1 + os.path.exists(__file__), "asks for files or folders"),
    "threads": (lambda m: torch.get_num_threads(), "asks about threads"),
    "flag": (lambda m: 1 + torch.backends.mkldnn.enabled, "reads the flag torch.backends.mkldnn.enabled"),
    "place": (lambda m: 1 + m.linear.weight.storage_offset(), "asks where a tensor lies"),
    "gradients off": (lambda m: 1 + (torch.set_grad_enabled(False) is None), "a call of the model disables gradients"),
    "seed": (lambda m: torch.manual_seed(3).initial_seed(), "seeds torch's generator"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_differs_each_time_is_refused(name: str) -> None:
    read, text = SOURCES[name]
    kind: Any = type("Case", (Scaled,), {"scale": read})
    functions = time.time, os.urandom, io.open, torch.manual_seed, globals()["perf_counter"]
    with pytest.raises(CaptureError, match=f"the model {text.replace('(', '.')}.*test_outside_refused.py:|{text}"):
        autopar.parallelize(kind().double(), None)(X)
    assert functions == (time.time, os.urandom, io.open, torch.manual_seed, globals()["perf_counter"])


def test_lines_may_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A record has the time, which `logging` asks for itself."""

    class Logs(Scaled):
        def scale(self) -> Any:
            logging.getLogger("a model").warning("a call")
            return 1.0

    assert autopar.parallelize(Logs().double(), None)(X).item() == pytest.approx(Logs().double()(X).item())
    assert "a call" in caplog.text


def test_files_may_be_written(tmp_path: Path) -> None:
    """As lines may be printed."""

    class Writes(Scaled):
        def scale(self) -> Any:
            (tmp_path / "seen").write_text("a call")
            return 1.0

    assert autopar.parallelize(Writes().double(), None)(X).item() == pytest.approx(Writes().double()(X).item())


def test_elements_of_bytes_that_a_call_writes() -> None:
    class Writes(Scaled):
        def scale(self) -> Any:
            BYTES[0] += 1
            return BYTES[0]

    before = bytes(BYTES)
    with pytest.raises(CaptureError, match=r"elements of the bytearray .*BYTES"):
        autopar.parallelize(Writes().double(), None)(X)
    assert bytes(BYTES) == before


def test_copies_of_parameters() -> None:
    class Copies(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            import copy

            return copy.deepcopy(self.linear)(x).square().mean() + super().forward(x)

    with pytest.raises(CaptureError, match=r"copies a parameter .*test_outside_refused.py:\d+: .*functional_call"):
        autopar.parallelize(Copies().double(), None)(X)


@pytest.mark.parametrize("exact", [True, False])
def test_hooks_on_what_is_saved(exact: bool) -> None:
    """Those that give back what they were given may be left out; others change gradients."""
    pack = (lambda t: t.clone()) if exact else (lambda t: t.bfloat16())
    unpack = (lambda t: t) if exact else (lambda t: t.double())

    class Hooked(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return super().forward(x).tanh().square()

    if exact:
        assert_equal(Hooked, lambda m, i: None)
    else:
        with pytest.raises(CaptureError, match=r"saved_tensors_hooks changes what is saved .*autograd.Function"):
            autopar.parallelize(Hooked().double(), None)(X)


BEGUN, ASKED = threading.Lock(), threading.Lock()


class Waiting(Scaled):
    """Waits in forward until another thread has asked for all that a model may not."""

    def forward(self, x: Tensor) -> Tensor:
        if BEGUN.locked():
            BEGUN.release()
        with ASKED:
            return super().forward(x)


def test_other_threads_ask_for_what_they_like_while_a_model_is_captured() -> None:
    """A loader that reads files, or takes the time, goes on beside the first call."""
    errors = list[Exception]()

    def ask() -> None:
        BEGUN.acquire(timeout=60)
        for source in ("time", "perf_counter", "date", "uuid", "urandom", "open", "path", "initial seed", "threads"):
            try:
                SOURCES[source][0](None)
            except Exception as e:  # a thread's errors are seen nowhere else
                errors.append(e)
        ASKED.release()

    BEGUN.acquire()
    ASKED.acquire()
    thread = threading.Thread(target=ask)
    thread.start()
    autopar.parallelize(Waiting().double(), None)(X).backward()
    thread.join()
    assert not errors


def test_optimizers_of_other_threads_step_while_a_model_is_captured_as_ever() -> None:
    """An owner of stale gradients, say: as eager mode, not as compiled optimizers, whose count of steps is a tensor."""

    def trained(begins: Callable[[], object]) -> list[Tensor]:
        weights = [torch.nn.Parameter(torch.ones(3) * k) for k in range(1, 4)]
        optimizers = [torch.optim.AdamW(weights[:2], foreach=True), torch.optim.Adam(weights[2:], foreach=False)]
        begins()
        for step in range(5):
            for k, weight in enumerate(weights):
                weight.grad = torch.sin(weight.detach() * k + step)
            for optimizer in optimizers:
                optimizer.step()
        return weights

    expected, found, errors = trained(lambda: None), list[Tensor](), list[Exception]()

    def work() -> None:
        try:
            found.extend(trained(lambda: BEGUN.acquire(timeout=60)))
        except Exception as e:  # a thread's errors are seen nowhere else
            errors.append(e)
        finally:
            BEGUN.release()
            ASKED.release()

    BEGUN.acquire()
    ASKED.acquire()
    thread = threading.Thread(target=work)
    thread.start()
    autopar.parallelize(Waiting().double(), None)(X).backward()
    thread.join()
    assert not errors and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Counts:
    """What a thread counts, and what a model does."""

    def __init__(self) -> None:
        self.theirs = self.ours = 0


class Watched(Scaled):
    """Goes on in forward when another thread has done its part."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.ticks, self.ready, self.batches = Counts(), 0, threading.Event(), queue.Queue[int]()
        self.turn, self.done = threading.Lock(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.counts.ours += 1
        if self.turn.locked():
            self.turn.release()
        with self.done:
            return super().forward(x)


def test_what_other_threads_write_while_a_model_is_captured_stays() -> None:
    """Numbers in objects and modules, events and queues; what forward counts is counted once a call."""
    model = Watched().double()
    model.turn.acquire()
    model.done.acquire()

    def work() -> None:
        model.turn.acquire(timeout=60)
        for i in range(3):
            model.counts.theirs += 1
            model.ticks += 1
            model.batches.put(i)
        model.ready.set()
        model.done.release()

    thread = threading.Thread(target=work)
    thread.start()
    parallel = autopar.parallelize(model, None)
    parallel(X).backward()
    thread.join()
    parallel(X).backward()
    assert (model.counts.theirs, model.ticks, model.counts.ours) == (3, 3, 2)
    assert model.ready.wait(0) and model.batches.qsize() == 3


def test_numbers_that_forward_and_another_thread_write_are_named() -> None:
    class Both(Watched):
        def forward(self, x: Tensor) -> Tensor:
            self.counts.theirs += 1
            return super().forward(x)

    model = Both().double()
    model.turn.acquire()
    model.done.acquire()

    def work() -> None:
        model.turn.acquire(timeout=60)
        model.counts.theirs += 1
        model.done.release()

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(CaptureError, match=r"sets .*counts.theirs.*, and so does another thread"):
        autopar.parallelize(model, None)(X)
    thread.join()


@pytest.mark.parametrize("does", [lambda m: m.ready.set(), lambda m: m.batches.put(1), lambda m: m.batches.empty()])
def test_messages_to_other_threads_in_forward(does: Callable[[Any], Any]) -> None:
    class Tells(Watched):
        def forward(self, x: Tensor) -> Tensor:
            does(self)
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"deals with other threads in forward \(\w+.\w+ at .*test_outside_refused"):
        autopar.parallelize(Tells().double(), None)(X)


@pytest.mark.parametrize(
    "made", [queue.SimpleQueue, SPAWN.Queue, SPAWN.SimpleQueue, SPAWN.JoinableQueue, lambda: SPAWN.Pipe()[0]]
)
def test_messages_by_other_queues_in_forward(made: Callable[[], Any]) -> None:
    class Tells(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)
            self.kept = {"messages": made()}

        def forward(self, x: Tensor) -> Tensor:
            messages = self.kept["messages"]
            messages.send(1) if hasattr(messages, "send") else messages.put(1)
            return self.lin(x).sum()

    model = Tells()
    own = model.kept["messages"]
    with pytest.raises(CaptureError, match=r"deals with other threads in forward \(.*(put|send)"):
        autopar.parallelize(model, None)(torch.ones(2, 4))
    assert model.kept["messages"] is own


def test_a_simple_queue_is_there_for_other_threads_meanwhile() -> None:
    model = Watched().double()
    simple: Any = queue.SimpleQueue()
    model.batches = simple
    model.turn.acquire()
    model.done.acquire()

    def work() -> None:
        model.turn.acquire(timeout=60)
        model.batches.put(3)
        model.done.release()

    thread = threading.Thread(target=work)
    thread.start()
    autopar.parallelize(model, None)(X)
    thread.join()
    assert model.batches is simple and simple.get() == 3 and simple.empty()
