"""scatter_sends: parts are sent where the link between stages is slow, and the step computes what it did."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import axis_index
from autopar.ir.plan import Plan, Scatter
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.pipeline.schedules import SCHEDULES, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, StageGraphs
from autopar.search.options import Search
from autopar.search.pipeline.stage_plan import sending_stages
from autopar.search.pipeline.stage_times import plan_tasks, times_of_stages
from autopar.simulate import simulate
from autopar.verify.verify import compare, global_values
from tests.pipeline.test_pipelines import example
from tests.search.pipeline.test_branch_and_bound import AXES, machine
from tests.search.pipeline.test_deep_models import Block

SLOW, FAST = 1e7, 1e10
BOUND = 1e-10


class Residual(nn.Module):
    """What goes from block to block is the same on all devices that split the blocks' linears."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.blocks(x).square().mean()}


def residual() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Residual(), {"x": torch.randn(32, 16, generator=torch.Generator().manual_seed(0))}


@cache
def planned(link: float, virtual: int = 1, schedule: str = "1f1b", **more: str) -> tuple[Program, Plan]:
    """Megatron's layouts inside a stage, and a link of so many bytes per second between stages."""
    program = program_of(*residual())
    cuts = [f"blocks.{i}" for i in range(1, 4) if i % (3 - virtual) == 0]
    pins = {"stages": cuts, "stage_axis": "node", "virtual": virtual, "microbatches": 4, "schedule": schedule}
    pins |= more
    search = Search(pins=pins, recipe="megatron", cache=False)
    return program, solve(program, AXES, machine(link), search=search)


def error(program: Program, plan: Plan, local: Program, made: Any = residual) -> float:
    return compare(program, local, plan, global_values(program, *made()), torch.float64).max_error


def gathers(cutting: StageGraphs, stage: int, kind: str) -> list[str]:
    """Names of the gathers in a piece."""
    nodes = cutting.microbatch_graph(stage, kind).graph.graph.nodes
    return [n.name for n in nodes if info(n).collective is not None and info(n).collective.kind == "all_gather"]


@pytest.mark.slow
def test_parts_are_sent_where_the_link_is_slow() -> None:
    program, plan = planned(SLOW)
    assert plan.scatter == Scatter("node", (0,))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "equal outputs are sent in parts" in plan.summary()
    local, whole = rewrite(program, plan), rewrite(program, replace(plan, scatter=None))
    parts, all_of_it = StageGraphs(local, 2), StageGraphs(whole, 2)
    for names, others in ((parts.received(1), all_of_it.received(1)), (parts.returned(0), all_of_it.returned(0))):
        shapes = [
            [tuple(c.node(n).meta["val"].shape) for n in sent] for c, sent in ((parts, names), (all_of_it, others))
        ]
        assert shapes == [[(4, 16)], [(8, 16)]]
    for stage, kind in ((1, FORWARD), (0, BACKWARD)):
        assert len(gathers(parts, stage, kind)) == 1 + len(gathers(all_of_it, stage, kind))
    assert error(program, plan, local) < BOUND


@pytest.mark.slow
def test_all_is_sent_where_links_are_alike() -> None:
    program, plan = planned(FAST)
    assert plan.scatter is None
    forced = replace(plan, scatter=Scatter("node", (0,)))  # nor would anything be cut
    nodes = [len(rewrite(program, p).graph.graph.nodes) for p in (plan, forced)]
    assert nodes[0] == nodes[1]


def test_the_seconds_are_those_of_the_graph() -> None:
    program, plan = planned(SLOW, overlap="none")
    link = plan.cluster.axis_links["node"]
    own = {"parts": plan, "whole": replace(plan, scatter=None)}
    taken = {k: times_of_stages(StageGraphs(rewrite(program, p), 2), p.inner, link, False) for k, p in own.items()}
    first, second = ({k: found[stage] for k, found in taken.items()} for stage in range(2))
    saved = first["whole"].send - first["parts"].send
    assert saved == pytest.approx(8 * 16 * 4 / 2 / SLOW)
    more = second["parts"].forward - second["whole"].forward  # the gather, on the fast axis
    assert 0 < more < saved
    assert first["parts"].to_next == first["whole"].to_next / 2
    step = {k: simulate(plan_tasks(rewrite(program, p), p)).step_seconds for k, p in own.items()}
    assert step["parts"] == plan.certificate.objective < step["whole"]
    assert plan.predicted.step_seconds <= plan.certificate.objective  # with overlap
    sent = {k: sum(s.collectives.get(("gpu", "all_gather"), 0) for s in found) for k, found in taken.items()}
    assert sent["parts"] == sent["whole"] + 2 * plan.microbatches
    assert plan.predicted.communication_bytes["node"] == plan.microbatches * first["parts"].to_next


@pytest.mark.some(1)
@pytest.mark.parametrize(("schedule", "behind"), [("interleaved", (0, 1, 2)), ("zbv", (0, 2))])
def test_stages_of_one_device_hand_on_the_whole(schedule: str, behind: tuple[int, ...]) -> None:
    program, plan = planned(SLOW, 2, schedule)
    assert plan.scatter == Scatter("node", behind)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    cutting = StageGraphs(local, 4)
    rows = [cutting.node(cutting.received(s)[-1]).meta["val"].shape[0] for s in (1, 2, 3)]
    assert rows == [4 if s in behind else 8 for s in range(3)]
    assert error(program, plan, local) < BOUND


CASES = {
    "unet": "1f1b", "cnn": "zbv", "llama": "zb-h1", "t5": "interleaved", "gpt2": "gpipe", "llama ": "dualpipe-v",
    "encoder": "looped-bfs",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20, *(pytest.param(n, marks=pytest.mark.deep) for n in (3, 11, 21, 12, 17, 27, 29))])
def test_random_plans_that_send_parts(seed: int) -> None:
    """Skips, tied weights and what an encoder gives to all stages: whatever is replicated is cut."""
    name, schedule = list(CASES.items())[seed % len(CASES)]
    virtual = 2 if SCHEDULES[schedule].interleaved else 1
    pins = {"stages": 2, "stage_axis": "node", "virtual": virtual, "microbatches": 4, "schedule": schedule}
    search = Search(pins={**pins, "recompute": "search"}, recipe="random", seed=seed)
    program = program_of(*example(name.strip()))
    plan = solve(program, AXES, machine(1e4), search=search, deterministic=True)
    own = [replace(plan, scatter=s) for s in (None, Scatter("node", sending_stages(order_of(plan))))]
    whole, parts = (rewrite(program, p, passes=DETERMINISTIC_PASSES) for p in own)
    assert len(parts.graph.graph.nodes) > len(whole.graph.graph.nodes)
    assert error(program, own[1], parts, lambda: example(name.strip())) < BOUND


def same_part(local: Program) -> Program:
    """Every device sends the first part."""
    for node in local.graph.graph.nodes:
        if node.target is torch.ops.aten.select.int and isinstance(node.args[2], fx.Node):
            assert node.args[2].target is axis_index
            node.args = (*node.args[:2], 0)
    return local


def from_another_stage(local: Program) -> Program:
    """The gradient's parts are put together with those of the forward value."""
    cut = [n for n in local.graph.graph.nodes if info(n).collective and info(n).collective.kind == "all_gather"]
    assert len(cut) == 2
    cut[1].replace_input_with(cut[1].all_input_nodes[0], cut[0].all_input_nodes[0])
    return local


@pytest.mark.parametrize("mistake", [same_part, from_another_stage])
def test_wrong_parts_are_noticed(mistake: Any) -> None:
    program, plan = planned(SLOW)
    assert error(program, plan, mistake(rewrite(program, plan))) > 1e-3
