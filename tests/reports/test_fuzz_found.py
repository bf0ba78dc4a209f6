"""Models that random ones were shrunk to: each was silently wrong or ended in a raw error once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._utils import freeze_rng_state

import autopar


class Normed(nn.Module):
    """Batch norm between transposed views: the kernel's result has other strides than a fake tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(h).logsumexp(-1).mean()


def test_verify_runs_the_captured_graph_whatever_strides_kernels_give() -> None:
    torch.manual_seed(0)
    report = autopar.verify(Normed().double(), (torch.randn(2, 2, 2, dtype=torch.float64),), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < 1e-7  # the gradient of the bias is zero but for rounding


class Chain(nn.Module):
    """Two linear layers and what a test puts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 3)
        self.seen: dict[str, Tensor] = {}
        self.n = 0

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x))).square().mean()


def verified(model: nn.Module) -> autopar.EquivalenceReport:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 2, dtype=torch.float64)
    return autopar.verify(model.double(), (x,), {"a": 2}, plan="random", seed=1)


def test_verify_copies_hooks_that_refer_to_the_model() -> None:
    """The hook of the copy wrote to the original."""
    model = Chain()
    model.first.register_forward_hook(lambda m, i, o: model.seen.update(out=o.detach().mean()))
    assert verified(model).max_error < 1e-12
    assert not model.seen


def test_verify_copies_weak_references() -> None:
    """The copy computed with a layer of the original."""
    model = Chain()
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    model.__dict__["weak"] = weakref.ref(first)
    model.register_forward_pre_hook(lambda m, args: (args[0] * m.weak().weight.mean(),))
    assert verified(model).max_error < 1e-9


def test_verify_copies_a_forward_that_was_replaced() -> None:
    """The copy's ``forward`` computed with the original's weights."""
    model = Chain()
    model.first.forward = lambda x, old=model.first.forward: old(x) * 2  # type: ignore[method-assign]
    report = verified(model)
    assert max(report.max_error, report.capture_error) < 1e-12


class Parity(Chain):
    def between(self, h: Tensor) -> Tensor:
        for _ in range(2):
            self.n += 1
            h = torch.tanh(h) if self.n % 2 else h
        return h


def test_verify_counts_on_in_the_second_call() -> None:
    """The second call has the same graph, and writes another number."""
    report = verified(Parity())
    assert max(report.max_error, report.capture_error) < 1e-12
    assert "attribute n of the second call" in report.errors


class Windows(Chain):
    def between(self, h: Tensor) -> Tensor:
        return h.unfold(1, 2, 1).mean(-1)


@pytest.mark.parametrize("seed", range(4))
def test_windows_as_long_as_the_dim_are_not_split(seed: int) -> None:
    """The backward kernel does not look at how long windows are, and a discovered rule split them."""
    x = torch.randn(1, 2, 2, dtype=torch.float64)
    report = autopar.verify(Windows().double(), (x,), {"a": 2, "b": 2}, plan="random", seed=seed)
    assert report.max_error < 1e-12


def losses(model: nn.Module, calls: int = 3, change: Callable[[nn.Module], None] = lambda _: None) -> list[float]:
    """Of a few calls, between which the model is changed."""
    found = []
    for number in range(calls):
        x = torch.randn(2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        found.append(model(x).item())
        change(model)
    return found


def check_same(kind: type[Chain], change: Callable[[Any], None] = lambda _: None) -> None:
    """Eager and autopar give the same losses."""
    made = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = kind().double()
        made.append(losses(autopar.parallelize(model, None) if parallel else model, change=change))
    assert made[0] == pytest.approx(made[1], rel=1e-12)


def check_refused(kind: type[Chain], match: str) -> None:
    """It says why, and leaves the model as it was: eager goes on."""
    torch.manual_seed(0)
    model = kind().double()
    with pytest.raises(autopar.CaptureError, match=match):
        losses(autopar.parallelize(model, None), 1)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.5


class WithSlots(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.config = Slotted()

    def between(self, h: Tensor) -> Tensor:
        return h * self.config.scale


class WritesSlots(WithSlots):
    def between(self, h: Tensor) -> Tensor:
        self.config.scale += 1
        return h * self.config.scale


@pytest.mark.slow
def test_state_in_slots() -> None:
    """A graph went on with the first value."""
    check_same(WithSlots, lambda m: setattr(m.config, "scale", m.config.scale / 2))
    check_same(WritesSlots)


class WritesArray(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(1)

    def between(self, h: Tensor) -> Tensor:
        self.counts += 1
        return h * float(self.counts[0])


def test_elements_of_arrays_that_a_call_writes() -> None:
    """A trace counted twice, and the graph went on with what it had then."""
    check_refused(WritesArray, "writes to the elements of the numpy array counts")


class Iterates(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Iterator[int] = itertools.count(1)

    def between(self, h: Tensor) -> Tensor:
        return h * next(self.numbers)


class Generates(Iterates):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (n for n in range(1, 100))


@pytest.mark.parametrize("kind", [Iterates, Generates])
def test_iterators_that_a_call_drives(kind: type[Chain]) -> None:
    """A trace took two values, and the graph repeated the second."""
    check_refused(kind, "takes values from the iterator numbers")


class Seeds(Chain):
    def between(self, h: Tensor) -> Tensor:
        torch.manual_seed(3)
        return h + torch.rand(2, dtype=torch.float64)


def test_seeds_in_forward() -> None:
    """The graph drew from the generator as it was."""
    check_refused(Seeds, r"seeds torch's generator \(torch.manual_seed\) at .*test_fuzz_found.py:\d+")


class SeedsInALibrary(Chain):
    def between(self, h: Tensor) -> Tensor:
        with freeze_rng_state():  # as torch's tests do, and libraries
            noise = torch.rand(2, dtype=torch.float64)
        return h + noise


def test_a_library_that_sets_the_generator_back() -> None:
    """The graph drew from the generator as it was; without draws nothing is lost."""
    check_refused(SeedsInALibrary, r"torch.set_rng_state at .*_utils.py:\d+\), and the model draws numbers \(aten.rand")

    class Constant(Chain):
        def between(self, h: Tensor) -> Tensor:
            with freeze_rng_state():
                return h + 1

    assert verified(Constant()).max_error < 1e-7


class Gained(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.gain = 1.5  # type: ignore[assignment]

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.first.weight.gain)  # type: ignore[arg-type]


class Gains(Gained):
    def between(self, h: Tensor) -> Tensor:
        self.first.weight.gain += 1  # type: ignore[operator]
        return super().between(h)


def test_attributes_of_parameters() -> None:
    """A traced tensor in place of a parameter had none of them."""
    check_same(Gained, lambda m: setattr(m.first.weight, "gain", 0.5))
    check_refused(Gains, "sets the attribute 'gain' of 'first.weight'")


class PopsAndDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.first(batch.pop("x")).sum() * random.random()


def test_where_a_call_draws_although_it_changes_its_batch() -> None:
    """To find the line it was called again with what was left, a KeyError."""
    with pytest.raises(autopar.CaptureError, match=r"random generator at .*test_fuzz_found.py:\d+"):
        autopar.parallelize(PopsAndDraws(), None)({"x": torch.randn(2, 2)})


class Fills(nn.Module):
    """Leaves something in what it is given."""

    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.first, self.change = nn.Linear(2, 2), change

    def forward(self, x: Tensor, given: Any) -> Tensor:
        h: Tensor = self.first(x)
        self.change(given, h.detach())
        return h.sum()


@dataclasses.dataclass
class Noted:
    note: Any = None


@pytest.mark.parametrize(
    ("given", "change", "what"),
    [
        ({}, lambda g, h: g.setdefault("h", h), r"batch\['given'\]\['h'\]"),
        ({"n": 1}, lambda g, h: g.pop("n"), r"batch\['given'\]\['n'\]"),
        ([], lambda g, h: g.append(h), r"batch\['given'\]\[0\]"),
        ([3, 1], lambda g, h: g.sort(), r"batch\['given'\]\[0\]"),
        ({"a": [1]}, lambda g, h: g["a"].append(2), r"batch\['given'\]\['a'\]\[1\]"),
        (Noted(), lambda g, h: setattr(g, "note", h), r"batch\['given'\].note"),
        (SimpleNamespace(n=1), lambda g, h: setattr(g, "n", 2), r"batch\['given'\].n"),
        ({1}, lambda g, h: g.add(2), r"batch\['given'\]\[2\]"),
    ],
)
def test_what_the_caller_would_not_see(given: Any, change: Any, what: str) -> None:
    """What a call left in its arguments was lost in silence."""
    with pytest.raises(autopar.CaptureError, match=f"changes what it is given: {what} is"):
        autopar.parallelize(Fills(change), None)(torch.randn(2, 2), given)


class Lazy:
    """An object that computes something when it is first asked."""

    def __init__(self) -> None:
        self.n = 2

    @functools.cached_property
    def twice(self) -> int:
        return 2 * self.n


torch.utils._pytree.register_pytree_node(Lazy, lambda lazy: ([], None), lambda children, context: Lazy())


def test_what_is_computed_once_is_no_change() -> None:
    autopar.parallelize(Fills(lambda g, h: g.twice), None)(torch.randn(2, 2), Lazy()).backward()


def test_a_copy_may_change() -> None:
    model = Fills(lambda g, h: dict(g).pop("n"))
    autopar.parallelize(model, None)(torch.randn(2, 2), {"n": 1}).backward()


SCALE, COUNTS, CONFIG = 1.5, [1], SimpleNamespace(scale=1.5, steps=0)
TABLES: dict[int, Tensor] = {}


class Global:
    scale, n = 1.5, 0


def counted(seen: list[int] = COUNTS) -> int:
    """How often it has been called."""
    seen.append(1)
    return len(seen)


@functools.lru_cache
def ones(length: int) -> Tensor:
    """A tensor that is made once."""
    return torch.ones(length, 1, dtype=torch.float64)


class ReadsGlobals(Chain):
    def between(self, h: Tensor) -> Tensor:
        return h * SCALE * CONFIG.scale * Global.scale


class WritesGlobals(Chain):
    def between(self, h: Tensor) -> Tensor:
        Global.n += 1
        CONFIG.steps += 1
        return h * (Global.n + CONFIG.steps) * counted()


class KeepsTables(Chain):
    def between(self, h: Tensor) -> Tensor:
        if h.shape[1] not in TABLES:
            TABLES[h.shape[1]] = 2 * torch.ones(h.shape[1], 1, dtype=torch.float64)
        return h * TABLES[h.shape[1]] * ones(h.shape[1])


def change_globals(_: nn.Module) -> None:
    """As a script might between two steps."""
    global SCALE
    SCALE += 1
    CONFIG.scale, Global.scale = CONFIG.scale / 2, Global.scale + 1


@pytest.fixture
def fresh() -> Iterator[Callable[[], None]]:
    """Sets the globals as they were."""

    def reset() -> None:
        global SCALE
        SCALE, CONFIG.scale, Global.scale, Global.n, CONFIG.steps = 1.5, 1.5, 1.5, 0, 0
        COUNTS[:] = [1]
        TABLES.clear()
        ones.cache_clear()

    reset()
    yield reset
    reset()


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", [ReadsGlobals, WritesGlobals, KeepsTables])
def test_globals(kind: type[Chain], fresh: Callable[[], None]) -> None:
    """A graph went on with the first values, a trace counted twice, and caches held what a trace had made."""
    made = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = kind().double()
        fresh()
        made.append(losses(autopar.parallelize(model, None) if parallel else model, change=change_globals))
    assert made[0] == pytest.approx(made[1], rel=1e-12)
    assert not any(isinstance(t, FakeTensor) for t in (*TABLES.values(), ones(2)))


def test_verify_leaves_globals_alone(fresh: Callable[[], None]) -> None:
    """Two eager calls and two emulated ones counted."""
    report = verified(WritesGlobals())
    assert max(report.max_error, report.capture_error) < 1e-12
    assert (Global.n, CONFIG.steps, COUNTS) == (0, 0, [1])


def test_a_function_in_the_place_of_one_that_is_gone() -> None:
    """Python gives it the same id, by which the graph of the first was found."""

    class Acts(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.act: Callable[[Tensor], Tensor] = lambda h: h * 1.5

        def between(self, h: Tensor) -> Tensor:
            return self.act(h)

    def change(model: Any) -> None:
        model.act = None
        factor = 1 + model.first.bias[0].item()  # another function object each time
        model.n += 1
        model.act = eval(f"lambda h: h * {factor + model.n}")

    check_same(Acts, change)


def test_a_loops_variable_is_no_state(fresh: Callable[[], None]) -> None:
    """``self.n`` has nothing to do with a global ``n``: the model is captured once."""

    class Reads(Chain):
        def between(self, h: Tensor) -> Tensor:
            return h * (1 + self.n)

    parallel = autopar.parallelize(Reads().double(), None)
    for number in range(3):
        globals()["n"] = number
        parallel(torch.randn(2, 2, 2, dtype=torch.float64))
    assert len(parallel._autopar.cache) == 1
    del globals()["n"]
