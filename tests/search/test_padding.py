"""Which dims a search may pad, and what it makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import program_of, solve
from autopar.errors import InfeasibleError
from autopar.ir.layout import Factor, Replicate, Split
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search import padding as padded
from autopar.search.budget.cutoff import Cutoff
from autopar.search.find import Begun, begin
from autopar.search.options import Job, Search
from autopar.search.padding import padded_size, paddings
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import LayerClasses
from tests.passes.test_pad_dims import BATCH, Heads, Masked, OwnWeights, Sloped, Tokens
from tests.sharding.test_layer_classes import FAST


def captured() -> Program:
    return program_of(Tokens(27, 30), BATCH)


@pytest.mark.parametrize(
    ("size", "sizes", "expected"),
    [
        (50257, (4,), 50260),
        (50257, (32, 8), 50264),  # for the last axis: the first cannot have parts of the dim then
        (50258, (2, 4), 50260),  # what divides goes on dividing
        (6, (3, 4), 6),  # 12 would be twice as much
        (50304, (4,), 50304),
        (12, (2, 8), 12),
        (3, (4,), 3),  # less than one element for each device
        (5, (4,), 5),
        (7, (1, 4), 8),
    ],
)
def test_padded_size(size: int, sizes: tuple[int, ...], expected: int) -> None:
    assert padded_size(Factor("d", size), sizes) == expected


def test_what_may_be_padded() -> None:
    program = captured()
    dims = analyze(program)
    padded = {"embed.weight": (28, 8), "up.weight": (32, 8), "up.bias": (32,), "down.weight": (8, 32)}
    padded |= {"head.weight": (28, 8), "head.bias": (28,)}
    assert paddings(program, dims, {"a": 4}, {}) == ({}, padded)
    assert paddings(program, dims, {"a": 4}, {}, search=False) == ({},)
    assert paddings(program, dims, {"a": 1}, {}) == ({},)
    whole, split = (Replicate(), Replicate()), (Replicate(), Split(0))
    layouts = {("parameter", "up.weight"): whole, ("parameter", "head.weight"): split}
    needed = {"head.weight": (28, 8), "head.bias": (28,)}  # nothing says that tokens and classes are the same
    assert paddings(program, dims, {"a": 4, "b": 2}, layouts)[0] == needed


def slow_plan(program: Program, memory: str | None = None, **search: object) -> Plan:
    return solve(program, {"a": 4}, FAST, memory=memory, search=Search(**search))  # type: ignore[arg-type]


class Wide(nn.Module):
    """More classes than rows, in a number that four does not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(16, 15), nn.Linear(15, 1021)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.inner(x)), labels)


def test_the_cheaper_one_is_chosen() -> None:
    """Two rows and 1021 classes on four devices; the certificate covers both choices."""
    batch = (torch.randn(2, 16), torch.tensor([1020, 3]))
    program = program_of(Wide(), batch)
    best, without = slow_plan(program), slow_plan(program, padding=False)
    assert best.padding["head.weight"] == (1024, 16)
    assert not without.padding
    assert best.certificate.objective < 0.6 * without.certificate.objective
    assert best.certificate.lower_bound <= best.certificate.objective
    assert "padded" in best.certificate.space
    assert "padded" not in without.certificate.space
    assert best.fingerprint == without.fingerprint == program.fingerprint
    assert Plan.from_dict(best.to_dict()) == best
    assert "head.weight to 1024x16" in best.summary()
    assert autopar.verify(Wide(), batch, {"a": 4}, plan=best).max_error < 1e-12


def test_two_searches_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def recorded(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Begun:
        limits.append(job.search.time_limit)
        return begin(program, dims, job, classes)

    monkeypatch.setattr(padded, "begin", recorded)
    program = captured()
    slow_plan(program, time_limit=40.0)
    slow_plan(program, time_limit=40.0, padding=False)
    assert limits == [20.0, 20.0, 40.0]


def test_of_two_searches_the_slower_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding the first plan is slower and the bound higher: there is one search, and its bound counts."""
    program = program_of(Wide(), (torch.randn(2, 16), torch.tensor([1020, 3])))
    whole = slow_plan(program)
    began: list[Begun] = []
    cutoffs: list[Cutoff | None] = []

    def recorded(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Begun:
        found = begin(program, dims, job, classes)
        began.append(found)

        def rest(cutoff: Cutoff | None) -> Plan:
            cutoffs.append(cutoff)
            return found.rest(cutoff)

        return replace(found, rest=rest)

    monkeypatch.setattr(padded, "begin", recorded)
    best = slow_plan(program, check=True)
    assert [cutoff is None for cutoff in cutoffs] == [False, True]
    assert best.padding and best.certificate.objective == whole.certificate.objective
    assert best.certificate.lower_bound <= min(each.plan.certificate.lower_bound for each in began)
    assert best.certificate.checked is not None  # of both
    assert not began[0].is_beaten(None)
    assert not began[1].is_beaten(began[0].plan)  # slower, though its bound is higher


class Odd(nn.Module):
    """Nothing in it divides by four."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1021, 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w.t()).square().mean()


@pytest.mark.slow
def test_memory_falls_where_nothing_divides() -> None:
    program = program_of(Odd(), (torch.randn(8, 15),))
    need = 1021 * 15 * 4 * 4  # parameter, gradient and two moments
    found = solve(program, {"a": 4}, "cpu", memory=0.55 * need)
    assert found.padding == {"w": (1024, 16)} or found.padding == {"w": (1024, 15)}
    assert sum(found.predicted.memory_bytes.values()) <= 0.3 * need
    assert sum(found.predicted.peak_bytes.values()) <= 0.55 * need
    with pytest.raises(InfeasibleError, match="missing"):
        solve(program, {"a": 4}, "cpu", memory=0.55 * need, search=Search(padding=False))


@pytest.mark.slow
def test_a_pin_splits_unevenly() -> None:
    program = captured()
    pinned = slow_plan(program, pins={"up.weight": "S(0)"}, padding=False)
    assert pinned.parameters["up.weight"] == (Split(0),)
    assert set(pinned.padding) == {"up.weight", "up.bias", "down.weight"}
    model = Tokens(27, 30)
    assert autopar.verify(model, BATCH, {"a": 4}, plan=pinned).max_error < 1e-12
    with pytest.raises(ValueError, match="cannot be laid out"):  # one axis a dim
        solve(program, {"a": 2, "b": 2}, FAST, search=Search(pins={"head.weight": ("S(0)", "S(0)")}))
    with pytest.raises(ValueError, match="cannot be laid out"):  # results are not padded by hand
        slow_plan(program, pins={"result.1": "S(2)"})


def test_random_plans_are_padded_by_turns() -> None:
    program = captured()
    drawn = [slow_plan(program, recipe="random", seed=seed) for seed in range(2)]
    assert [bool(p.padding) for p in drawn] == [False, True]
    assert replace(drawn[1], padding={}) != drawn[1]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "model",
    [Heads(False), OwnWeights(True), Sloped(False), pytest.param(Masked(True), marks=pytest.mark.deep)],
    ids=["of one weight", "grouped", "slopes", "documents"],
)
def test_heads_under_a_tensor_role(model: nn.Module) -> None:
    """Three heads on four devices: one is padding, and the weights are kept as they are."""
    batch = (torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)),)
    plan = autopar.plan(model, batch, cluster=FAST, axes={"a": 4}, memory="1GiB", search=Search(roles={"a": "tensor"}))
    assert plan.padding["out.weight"] == (8, 4 * model.out.in_features // 3)
    attended = [names for key, names in plan.choices.items() if "autopar.attention" in key]
    assert len(attended) == 2 and all(names[0][0] == "h" for names in attended)
    report = autopar.verify(model, batch, {"a": 4}, plan=plan)
    assert report.max_error < 1e-11  # the gradient of the keys' bias is nothing but rounding
    with pytest.raises(InfeasibleError, match="nothing is tensor-parallel along axis a=4"):
        alone = Search(roles={"a": "tensor"}, padding=False)
        autopar.plan(model, batch, cluster=FAST, axes={"a": 4}, memory="1GiB", search=alone)
    assert Plan.from_dict(plan.to_dict()) == plan
