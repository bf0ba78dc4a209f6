"""Pipelines of deep models of which three blocks are captured: the figures are those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, solve
from autopar.costs.cluster import Between, Cluster, DeviceGroup, Link
from autopar.errors import InfeasibleError
from autopar.ir.node_info import info
from autopar.ir.program import Program
from autopar.search.budget.budget_problem import peak_bytes
from autopar.search.emitted.rewritten import unverified, unverified_in_stages
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.pipeline.cuts import forward_order, named_cuts
from autopar.search.pipeline.search_tree import SearchTree
from autopar.sharding.dims import analyze

BLOCKS, WIDTH = 7, 16
AXES = {"pp": 2, "inner": 2}
MIXED = Cluster.of_groups(
    "a node of each kind",
    [
        DeviceGroup("slow", Cluster.preset("cpu").device, 1, 2, (Link("fast", 1e9, 1e-6),)),
        DeviceGroup("fast", Cluster.preset("cpu").device, 1, 2, (Link("faster", 2e9, 1e-6),), speed=2.5),
    ],
    [Between(Link("slow", 1e6, 1e-6))],
)
MACHINE = Cluster("pairs", Cluster.preset("cpu").device, (Link("fast", 1e9, 1e-6), Link("slow", 1e6, 1e-6)), (2,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def example() -> tuple[nn.Module, tuple[Tensor]]:
    return Deep(), (torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "virtual", "recompute", "recipe", "machine"),
    [
        pytest.param("zb-h1", 1, "none", None, MACHINE, marks=pytest.mark.deep),
        ("1f1b", 1, "none", "megatron", MIXED),
        pytest.param("1f1b", 1, "none", "megatron", MACHINE, marks=pytest.mark.deep),
        pytest.param("interleaved", 2, "none", None, MACHINE, marks=pytest.mark.deep),
        pytest.param("interleaved", 2, "none", None, MIXED, marks=pytest.mark.deep),
        pytest.param("1f1b", 1, "search", None, MACHINE, marks=pytest.mark.deep),
        pytest.param("1f1b", 1, "search", None, MIXED, marks=pytest.mark.deep),
    ],
)
def test_figures_are_those_of_the_whole_model(
    schedule: str, virtual: int, recompute: str, recipe: str | None, machine: Cluster
) -> None:
    model, batch = example()
    pins = {"virtual": virtual, "microbatches": 4, "schedule": schedule, "stage_axis": "pp", "recompute": recompute}
    memory = None
    if recompute == "search":  # so little that some blocks keep less than others
        ample = autopar.plan(model, batch, cluster=machine, axes=AXES, search=Search(pins={"stages": 2, **pins}))
        memory = (0.93 if machine is MACHINE else 0.8) * peak_bytes(ample)
    short = autopar.plan(
        model,
        batch,
        cluster=machine,
        axes=AXES,
        memory=memory,
        search=Search(pins={"stages": 2, **pins}, recipe=recipe),
    )
    assert short.scatter or recipe != "megatron"  # whose devices have the same
    assert bool(short.recompute) == (recompute == "search")
    report = autopar.verify(model, batch, AXES, plan=short)
    assert report.max_error < 1e-10, report.worst
    if memory is not None:
        assert peak_bytes(short) <= memory
        return
    cuts = [s.modules[0] for s in short.stages[1:]]
    if short.pipeline is not None and machine is MIXED:
        assert sum(len(s.modules) for s in short.stages if s.group == "fast") > (BLOCKS + 2) // 2
        pins["stage_order"] = list(short.pipeline.places)
    whole = solve(program_of(model, batch), AXES, machine, search=Search(pins={"stages": cuts, **pins}, recipe=recipe))
    # What is beside the kernels of one more block is not quite what is beside those of the second.
    assert short.predicted.step_seconds == pytest.approx(whole.predicted.step_seconds, rel=2e-2)
    needed = (sum(p.predicted.peak_bytes.values()) for p in (short, whole))
    assert next(needed) == pytest.approx(next(needed), rel=0.03)
    if recipe is not None:  # searched, layouts of equally fast plans may differ
        assert short.parameters == whole.parameters
    assert short.scatter == whole.scatter
    assert sum(len(s.modules) for s in short.stages) == BLOCKS + 2


def test_each_stage_has_a_block() -> None:
    model, batch = example()
    search = Search(pins={"stages": 8, "microbatches": 8})
    with pytest.raises(InfeasibleError, match="blocks has 7 blocks; ask for fewer stages"):
        autopar.plan(model, batch, cluster=MACHINE, axes={"pp": 8}, search=search)


@pytest.mark.slow
def test_a_plan_without_stages_is_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the best, and rules out many pipelines; a search of all of them takes longer than there may be."""
    found = list[autopar.Plan]()
    add = SearchTree.add

    def add_and_stop(tree: SearchTree, plan: autopar.Plan) -> None:
        add(tree, plan)
        found.append(plan)
        tree.deadline = 0.0 if plan.pipeline is None else tree.deadline

    monkeypatch.setattr(SearchTree, "add", add_and_stop)
    model, batch = example()
    near = replace(MACHINE, links=MACHINE.links[:1], group_sizes=())
    free = autopar.plan(model, batch, cluster=near, axes=AXES)
    memory = 0.9 * peak_bytes(free)
    search = Search(pins={"stages": "search"})
    best = autopar.plan(model, batch, cluster=near, axes=AXES, memory=memory, search=search)
    assert best.pipeline is None
    assert peak_bytes(best) <= memory
    assert [plan.pipeline for plan in found] == [None]  # pipelines that fit as they are, are not added so
    assert best.certificate.lower_bound <= free.predicted.step_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_graphs_of_plans_that_differ_in_stages_are_rewritten_together() -> None:
    """They are those that each plan gives alone."""
    program = program_of(*example())
    pins = {"stages": ["blocks.3"], "stage_axis": "pp", "microbatches": 4, "schedule": "1f1b"}
    plan = solve(program, AXES, MACHINE, search=Search(pins=pins)).inner
    part = microbatch_program(program, 4)
    order = forward_order(part, analyze(part), plan)
    cuts = (["blocks.3"], ["blocks.1", "blocks.5"], ["last"])
    plans = [replace(plan, stages=order.stages(named_cuts(order, modules))) for modules in cuts]

    def seen(program: Program) -> list[tuple[str, object]]:
        return [(n.format_node(), info(n).stage) for n in program.graph.graph.nodes if n.op == "call_function"]

    together = [seen(local) for local in unverified_in_stages(part, plans)]
    assert together == [seen(unverified(part, own)) for own in plans]
    assert len({tuple(found) for found in together}) == len(cuts)


@pytest.mark.deep
@pytest.mark.parametrize("whole", [False, True])
def test_mixed_precision_is_cut_like_the_rest(whole: bool) -> None:
    """The casts of all parameters come first in the graph, and each belongs where its parameter is used."""
    model, batch = example()
    pins = {"stages": 2, "stage_axis": "pp", "microbatches": 4, "schedule": "1f1b"}
    search = Search(pins=pins, tie_layers=not whole)  # layers that are not tied are all captured
    plans = [
        autopar.plan(model, batch, cluster=MACHINE, axes=AXES, search=search, precision=precision)
        for precision in (None, "bf16")
    ]
    assert plans[0].stages == plans[1].stages
    report = autopar.verify(model, batch, AXES, plan=plans[1], precision="bf16")
    assert report.max_error < 1e-10, report.worst
