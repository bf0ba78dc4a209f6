"""Models captured in several threads at once: one after the other, each as if it were alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture, export
from autopar.errors import CaptureError

WATCHED = ("load", "get_rng_state", "set_rng_state", "initial_seed", "is_anomaly_enabled", "get_num_threads")


class Layers(nn.Module):
    """As many layers as told, with random numbers that a capture sees."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.dropped = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropped(layer(x))
        return x.square().mean()


def nodes(layers: int) -> list[str]:
    program = capture(Layers(layers), (torch.zeros(2, 4),))
    return [str(n.target) for n in program.graph.graph.nodes]


def test_captures_wait_for_each_other() -> None:
    alone, before = {n: nodes(n) for n in (1, 3)}, [getattr(torch, name) for name in WATCHED]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(nodes, (1, 3, 1, 3), timeout=200)]
    assert found == [alone[n] for n in (1, 3, 1, 3)]
    # What a capture replaces is put back.
    assert [getattr(torch, name) for name in WATCHED] == before


def test_a_capture_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LONGEST_WAIT", 0.1)
    begun, over = threading.Event(), threading.Event()

    def slow() -> None:
        with export._alone():
            begun.set()
            over.wait(100)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(slow)
        assert begun.wait(100)
        with pytest.raises(CaptureError, match=r"another thread has been capturing a model for 0.1 s"):
            nodes(1)
        over.set()
        other.result(100)


class OwnAssignments(nn.Module):
    """Whose layers inherit it, as torchmetrics' do."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)


class Inner(OwnAssignments):
    pass


class Counting(OwnAssignments):
    """It assigns to its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer, self.calls = Inner(), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inner.calls = self.calls
        return self.layer(x).mean()


def test_classes_that_define_how_they_are_assigned_to() -> None:
    """Beside another thread, capturing them ended in an AttributeError."""
    model, over = Counting(), threading.Event()
    assign = OwnAssignments.__setattr__
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(over.wait, 100)
        try:
            capture(model, (torch.zeros(2, 4),))
        finally:
            over.set()
        assert other.result(100)
    assert OwnAssignments.__setattr__ is assign and "__setattr__" not in vars(Inner) | vars(Counting)
    assert model.calls == 0 and not hasattr(model.inner, "calls")


@pytest.mark.parametrize("trained", [True, False])
def test_first_calls_of_one_module(trained: bool) -> None:
    """Each thread has eager mode's results, of lengths for which nobody has a graph yet, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    batches = [torch.randn(2 + i % 2, 8, dtype=torch.float64) for i in range(4)]
    wanted = [model(x).detach() for x in batches]
    parallel = autopar.parallelize(model, None)

    def call(batch: Tensor) -> Tensor:
        with torch.set_grad_enabled(trained):
            results: list[Tensor] = [parallel(batch) for _ in range(10)]
        return results[-1]

    with ThreadPoolExecutor(len(batches)) as pool:
        found = [*pool.map(call, batches, timeout=200)]
    for result, expected in zip(found, wanted, strict=True):
        assert type(result) is Tensor and result.requires_grad == trained
        torch.testing.assert_close(result.detach(), expected)
