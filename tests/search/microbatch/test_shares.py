"""Shares of the batch: devices that run other numbers of microbatches compute what one device does, and are fastest."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.costs.mixed.groups import Between, DeviceGroup
from autopar.costs.mixed.shares import Shares
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.ops.random import seeded
from autopar.ir.plan import Plan
from autopar.parallelize import parallelize
from autopar.search.microbatch.shares import fastest, last_device
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.recost import differences, recosted
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from tests import models
from tests.crossed import is_deep

AXES = {"node": 2, "gpu": 2}


class Net(nn.Module):
    """Whose rows count by other weights, with a number that all of the batch gives."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        error = (self.down(torch.relu(self.up(self.norm(x)))) - x).square().sum(-1)
        return (error * weights).sum() / weights.sum()


def batch_of(rows: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16), torch.rand(rows)


def mixed(speed: float) -> Cluster:
    """A node of two devices, and one whose kernels take ``1 / speed`` times as long."""
    h100 = Cluster.preset("h100")
    groups = tuple(
        DeviceGroup(name, h100.device, 1, 2, h100.links[:1], speed=s) for name, s in (("fast", 1.0), ("slow", speed))
    )
    return Cluster.of_groups("mixed", groups, (Between(h100.links[1]),))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_every_part_is_run_once(counts: list[int]) -> None:
    counts[0] += -sum(counts) % len(counts)
    shares = Shares("a", tuple(counts))
    assert [len(own) for own in shares.slots] == counts
    every = itertools.product(range(shares.microbatches), range(len(counts)))
    assert sorted(itertools.chain.from_iterable(shares.slots)) == sorted(every)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 9)), min_size=2, max_size=3), st.integers(1, 4))
def test_no_other_shares_are_faster(devices: list[tuple[float, float]], count: int) -> None:
    def last(counts: tuple[int, ...]) -> float:
        return max(at + n * slope for (at, slope), n in zip(devices, counts, strict=True))

    found = fastest(lambda i, n: devices[i][0] + n * devices[i][1], count, len(devices))
    every = itertools.product(range(1, count * len(devices) + 1), repeat=len(devices))
    assert sum(found) == count * len(devices)
    assert last(found) == min(last(counts) for counts in every if sum(counts) == count * len(devices))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("counts", "inner"),
    [
        ([3, 1], "shard"),
        pytest.param([1, 5], "tensor", marks=pytest.mark.deep),
        pytest.param([4, 2], "data", marks=pytest.mark.deep),
        ("search", "optimizer"),
    ],
)
def test_shares_compute_what_one_device_does(counts: Any, inner: str) -> None:
    torch.manual_seed(0)
    model, batch, cluster = Net(), batch_of(), mixed(0.34)
    program = program_of(model, batch)
    search = Search(roles={"node": "data", "gpu": inner}, pins={"shares": {"node": counts}}, cache=False)
    plan = solve(program, AXES, cluster, search=search)
    assert plan.shares is not None
    assert counts == "search" or plan.shares.counts == tuple(counts)
    assert counts != "search" or plan.shares.counts[0] > plan.shares.counts[1]
    report = autopar.verify(model, batch, AXES, plan=plan)
    assert report.max_error < 1e-12
    # As a file, and counted anew.
    assert type(plan).from_dict(plan.to_dict()).shares == plan.shares
    assert not [*differences(plan, recosted(program, plan))]
    if inner == "shard":
        checked = plan.check(model, batch, memory="1TiB", search=search).certificate
        assert checked.objective == pytest.approx(plan.certificate.objective) and checked.checked is not None
    assert plan.certificate.lower_bound <= plan.certificate.objective
    assert f"{plan.shares} of these along axis node" in str(plan)
    # The simulator's step is that of the devices that are done last.
    local = rewrite(program, plan)
    every = [
        simulate(emitted(replace(local, part=replace(local.part, count=n)), replace(plan, cluster=c))).step_seconds
        for n, c in zip(plan.shares.counts, (mixed(1.0), mixed(0.34)), strict=True)
    ]
    assert simulate(emitted(*last_device(local, plan))).step_seconds == pytest.approx(max(every), rel=0.05)


@pytest.mark.slow
def test_the_slower_a_node_the_less_it_gets_and_no_plan_is_below_the_bound() -> None:
    """Neither with one more nor with one less is a plan faster, or below the bound; in deep runs no other, either."""
    program = program_of(Net(256), (torch.empty(1 << 14, 256, device="meta"), torch.empty(1 << 14, device="meta")))
    for speed, of_fast in ((1.0, 4), (0.6, 5), (1 / 3, 6)):
        cluster = mixed(speed)

        def found(counts: Any, cluster: Cluster = cluster) -> Any:
            pins = {"shares": {"node": counts}, "microbatches": 4}
            search = Search(roles={"node": "data", "gpu": "shard"}, pins=pins, cache=False)
            return solve(program, AXES, cluster, search=search)

        best = found("search")
        assert best.shares.counts == (of_fast, 8 - of_fast)
        others = [
            found([n, 8 - n]).certificate.objective for n in ((3, 4, 5, 6) if is_deep() else (of_fast - 1, of_fast + 1))
        ]
        assert best.certificate.objective <= min(others) * (1 + 1e-9)
        assert best.certificate.lower_bound <= best.certificate.objective
        assert best.certificate.gap < 0.15


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.deep) for n in range(2, 13))])
def test_plans_for_random_devices(seed: int) -> None:
    """An axis without a role is split in many ways, as costs are drawn; all compute what one device does."""
    draw = random.Random(seed)
    model, batch = models.llama(batch=12)

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = output["loss"]
        return loss

    cluster = mixed(draw.uniform(0.3, 1.0))
    groups = tuple(
        replace(g, links=tuple(replace(k, bandwidth=10 ** draw.uniform(5, 11)) for k in g.links))
        for g in cluster.groups
    )
    cluster = Cluster.of_groups("drawn", groups, cluster.between)
    counts = draw.choice([(2, 4), (5, 1), (3, 3), (1, 3)])
    search = Search(roles={"node": "data"}, pins={"shares": {"node": counts}}, cache=False)
    plan = solve(program_of(model, batch, loss_fn=loss_fn), AXES, cluster, search=search)
    assert plan.shares is not None and plan.shares.counts == counts
    assert autopar.verify(model, batch, AXES, plan=plan, loss_fn=loss_fn).max_error < 1e-9
    if seed == 2:  # no search is said: that for these shares
        checked = plan.check(model, batch, loss_fn=loss_fn, memory="1TiB").certificate
        assert checked.objective == pytest.approx(plan.certificate.objective)


def test_each_rank_is_given_the_whole_batch_on_a_mesh_that_has_the_axis() -> None:
    search = Search(roles={"node": "data"}, pins={"shares": {"node": [3, 1]}})
    with pytest.raises(ValueError, match='pass the whole batch on each rank, inputs="global"'):
        parallelize(Net(), None, inputs="local", search=search)
    with pytest.raises(ValueError, match=r"'node'.*the mesh has a"):
        autopar.verify(Net(), batch_of(), {"a": 2}, pins=search.pins)


@pytest.mark.parametrize(
    ("roles", "shares", "said"),
    [
        ({"node": "shard"}, {"node": [3, 1]}, "whose role is shard"),
        ({}, {"gpu": "search"}, "whose role is open"),
        ({"node": "data"}, {"node": [3, 1, 2]}, "3 numbers for axis 'node'"),
        ({"node": "data"}, {"pod": [3, 1]}, "names axis 'pod'"),
    ],
)
def test_what_shares_are_not_for(roles: dict[str, str], shares: dict[str, Any], said: str) -> None:
    search = Search(roles=roles, pins={"shares": shares})
    with pytest.raises((InfeasibleError, ValueError), match=said):
        autopar.plan(Net(), batch_of(), cluster="cpu", axes=AXES, search=search)


class Rows(Net):
    """Returns rows of the batch."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> Any:
        return super().forward(x, weights), self.up(x)


class Drops(Net):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5), weights)


def with_shares_of(model: nn.Module, *, deterministic: bool, loss: Any = None) -> tuple[Any, Plan]:
    program = program_of(model, batch_of(), loss=loss)
    search = Search(roles={"node": "data", "gpu": "data"}, pins={"shares": {"node": [3, 1]}}, cache=False)
    return program, solve(program, AXES, Cluster.preset("cpu"), search=search, deterministic=deterministic)


def test_rows_of_the_batch_are_not_returned() -> None:
    with pytest.raises(InfeasibleError, match="return the loss alone"):
        rewrite(*with_shares_of(Rows(), deterministic=False, loss=0))


def test_masks_are_those_of_one_device_or_each_devices_own() -> None:
    torch.manual_seed(0)
    model, batch = Drops(), batch_of()
    program, plan = with_shares_of(model, deterministic=True)
    assert autopar.verify(model, batch, AXES, plan=plan).max_error < 1e-12
    program, plan = with_shares_of(model, deterministic=False)
    assert any(n.target is seeded for n in rewrite(program, plan).graph.graph.nodes)


def test_a_file_with_wrong_shares_is_refused() -> None:
    program = program_of(Net(), batch_of())
    search = Search(roles={"node": "data", "gpu": "data"}, pins={"shares": {"node": [3, 1]}}, cache=False)
    plan = solve(program, AXES, Cluster.preset("cpu"), search=search)
    assert microbatch_program(program, plan.microbatches).microbatches == 2
    for shares in (
        {"axis": "node", "counts": [3, 2]},
        {"axis": "node", "counts": [5, 1]},
        {"axis": "pod", "counts": [3, 1]},
    ):
        with pytest.raises(PlanError, match="shares"):
            type(plan).from_dict({**plan.to_dict(), "shares": shares})
