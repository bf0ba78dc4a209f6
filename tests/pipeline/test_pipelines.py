"""Pipelines on an emulated mesh: every stage, schedule and cut computes what one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward, module_path
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.host import to_host
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.pipeline.executor import StageRun
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraphs
from autopar.search.options import Search
from autopar.verify.verify import EquivalenceReport, compare, global_values
from tests import models as zoo
from tests.pipeline import models as hard

BOUND = 1e-10

SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "looped-bfs": 2, "zbv": 2, "dualpipe-v": 2,
}  # fmt: skip
"""Stages on each device."""


def example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = getattr(hard if hasattr(hard, name) else zoo, name)()
    for row, labels in enumerate(batch["labels"] if name in ("gpt2", "llama") else ()):
        labels[: row // 2] = -100
    return model, batch


def staged(
    name: str,
    axes: dict[str, int],
    pins: dict[str, Any],
    change: Callable[[Program], Program] = lambda p: p,
    factored: bool = False,
    **search: Any,
) -> EquivalenceReport:
    """A model under a plan with stages against the plain one."""
    model, batch = example(name)
    program = program_of(model, batch)
    plan = solve(program, axes, "cpu", search=Search(pins=pins, **search), deterministic=True, factored=factored)
    local = change(rewrite(program, plan, passes=DETERMINISTIC_PASSES))
    return compare(program, local, plan, global_values(program, model, batch), torch.float64)


EVERY = [(name, schedule) for schedule in SCHEDULES for name in ("cnn", "gpt2", "llama", "vit")]
FAST = [("cnn", schedule) for schedule in SCHEDULES]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "schedule"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.deep) for case in EVERY]
)
def test_every_schedule(name: str, schedule: str) -> None:
    pins = {"stages": 2, "microbatches": 4, "schedule": schedule, "virtual": SCHEDULES[schedule]}
    report = staged(name, {"stage": 2, "other": 2}, pins)
    assert report.max_error < BOUND, report.worst
    assert len(report.plan.stages) == 2 * SCHEDULES[schedule]


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.deep), "unet", "cnn"])
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_skips_encoders_and_tied_weights(name: str, stages: int) -> None:
    report = staged(name, {"stage": stages}, {"stages": stages, "microbatches": 4})
    assert report.max_error < BOUND, report.worst


@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(n, marks=pytest.mark.deep) for n in (0, *range(2, 24)))],
)
def test_random_cuts_and_layouts(seed: int) -> None:
    name = ("llama", "unet", "encoder", "t5", "gpt2", "cnn")[seed % 6]
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    pins = {"stages": 2, "microbatches": (4, 8)[seed % 2], "schedule": schedule, "virtual": SCHEDULES[schedule]}
    axes = ({"stage": 2, "other": 2}, {"stage": 2}, {"other": 2, "stage": 2})[seed % 3]
    report = staged(name, axes, {**pins, "stage_axis": "stage", "recompute": "search"}, recipe="random", seed=seed)
    assert report.max_error < BOUND, report.worst


@pytest.mark.parametrize(
    "seed",
    [5, *(pytest.param(n, marks=pytest.mark.deep) for n in (0, 1, 2, 3, 4, 6, 7, 8, 9))],
)
def test_random_cuts_and_layouts_on_a_factor_of_an_axis(seed: int) -> None:
    name = ("llama", "unet", "encoder", "vit", "gpt2", "cnn")[seed % 6]
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    pins = {"stages": 2, "microbatches": 4, "schedule": schedule, "virtual": SCHEDULES[schedule], "recompute": "search"}
    report = staged(name, {"line": 4}, pins, recipe="random", seed=seed, factored=True)
    assert report.max_error < BOUND, report.worst
    assert dict(report.plan.axes) == {"line_stages": 2, "line": 2}


@pytest.mark.parametrize("seed", [11, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 4, 7, 8, 10, 14))])
def test_random_plans_with_values_on_the_host(seed: int) -> None:
    """Each stage sends what its own backward pass takes."""
    name, schedule = (
        ("llama", "unet", "encoder", "mlp", "gpt2", "cnn")[seed % 6],
        list(SCHEDULES)[seed % len(SCHEDULES)],
    )
    pins = {"stages": 2, "microbatches": (4, 8)[seed % 2], "schedule": schedule, "virtual": SCHEDULES[schedule]}
    pins |= {"stage_axis": "stage", "recompute": "search", "offload": "search"}
    program = program_of(*example(name))
    device = replace(Cluster.preset("cpu").device, host_bandwidth=1e9)
    machine, axes = replace(Cluster.preset("cpu"), device=device), {"stage": 2, "other": 2}
    plan = solve(program, axes, machine, search=Search(pins=pins, recipe="random", seed=seed), deterministic=True)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    assert any(n.target is to_host for n in local.graph.graph.nodes)
    report = compare(program, local, plan, global_values(program, *example(name)), torch.float64)
    assert report.max_error < BOUND, report.worst


def test_what_the_backward_pass_moves_stays_in_its_stage() -> None:
    """A forward value that only a later stage's backward pass wants, in a layout that is smaller."""
    pins = {"stages": 2, "stage_axis": "node", "virtual": 2, "microbatches": 4, "schedule": "zbv"}
    report = staged("cnn", {"node": 2, "gpu": 2}, {**pins, "recompute": "search"}, recipe="random", seed=8)
    assert report.max_error < BOUND, report.worst


def forget_a_share(program: Program) -> Program:
    """Drop what the last stage adds to the gradient of the weight that it shares with the first."""
    for node in program.graph.graph.nodes:
        terms = [a for a in node.all_input_nodes if a.target is accumulate]
        if len({info(t).stage for t in terms}) == 2:
            node.replace_all_uses_with(terms[1])
    return program


@pytest.mark.slow
def test_a_forgotten_share_of_a_tied_weight_is_noticed() -> None:
    report = staged("gpt2", {"stage": 2}, {"stages": 2, "microbatches": 4}, forget_a_share)
    assert report.max_error > 1e-3


def test_mixed_up_microbatches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that goes back through what another microbatch has saved."""
    backward = StageRun.backward

    def mixed(self: StageRun, microbatch: int, returned: Any, kind: str = BACKWARD) -> None:
        swapped = self.stage == 0
        backward(self, microbatch ^ swapped, returned, kind)
        self._sent[BACKWARD][microbatch] = self._sent[BACKWARD].pop(microbatch ^ swapped)

    monkeypatch.setattr(StageRun, "backward", mixed)
    pins = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    assert staged("mlp", {"stage": 2}, pins).max_error > 1e-3


@pytest.mark.slow
def test_every_operator_of_the_backward_runs_once() -> None:
    model, batch = example("gpt2")
    program = program_of(model, batch)
    plan = solve(program, {"stage": 2}, "cpu", search=Search(pins={"stages": 2, "microbatches": 4}))
    cutting = StageGraphs(rewrite(program, plan), 2)
    for stage in range(2):
        names = {k: [n.name for n in cutting.microbatch_graph(stage, k).graph.graph.nodes if n.op == "call_function"]
                 for k in (FORWARD, BACKWARD, INPUT, WEIGHT)}  # fmt: skip
        assert sorted(names[INPUT] + names[WEIGHT]) == sorted(names[BACKWARD])
        assert not {*names[FORWARD]} & {*names[BACKWARD]}
        assert names[WEIGHT]
    # The last stage returns one gradient and no term of it: the sum is made where its terms are.
    assert len(cutting.returned(0)) == len(cutting.received(1))


@pytest.mark.deep
def test_a_stage_makes_again_what_it_takes() -> None:
    """Masks and rotary embeddings, recomputed for all layers, must not draw the backward pass to the first stage."""
    model, batch = zoo.llama(layers=2, batch=16)
    program = program_of(model, batch)
    pins = {"stages": ["model.layers.1"], "microbatches": 2, "schedule": "1f1b", "recompute": "search"}
    ample = solve(program, {"stage": 2}, "cpu", search=Search(pins={**pins, "recompute": "none"}))
    budget = 0.8 * sum(ample.predicted.peak_bytes.values())
    plan = solve(program, {"stage": 2}, "cpu", memory=budget, search=Search(pins=pins))
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    again = [n for n in local.graph.graph.nodes if info(n).recompute_of]
    assert again
    late = [n for n in local.graph.graph.nodes if is_backward(n) and module_path(n).startswith("model.layers.1.")]
    assert {info(n).stage for n in late} == {1}
    cutting = StageGraphs(local, 2)
    assert len(cutting.returned(0)) == 1
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error < BOUND, report.worst


@pytest.mark.slow
def test_what_passes_make_keeps_its_place() -> None:
    """Operators of the backward pass are matched with the forward pass by number."""
    program = program_of(*example("llama"))
    plan = solve(program, {"tensor": 2, "data": 2}, Cluster.preset("cpu"), search=Search(recipe="random", seed=3))
    nodes = rewrite(program, plan).graph.graph.nodes
    made = [n for n in nodes if info(n).internal and n.meta.get("partitioner_tag")]
    assert len(made) > 100
    assert all("seq_nr" in n.meta for n in made if n.meta.get("fwd_nn_module_stack") or n.meta.get("nn_module_stack"))


@pytest.mark.slow
def test_by_hand() -> None:
    model, batch = example("llama")
    program = program_of(model, batch)
    pins = {"stages": ["model.layers.0.mlp"], "microbatches": 2}
    plan = solve(program, {"stage": 2}, "cpu", search=Search(pins=pins))
    assert plan.stages[1].modules[0] == "model.layers.0.mlp"
    assert str(plan.parameters["model.layers.0.mlp.up_proj.weight"][0]) == "@1"
    assert str(plan.parameters["model.embed_tokens.weight"][0]) == "@0"
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("axes", "pins", "says"),
    [
        ({"a": 2}, {"stages": 3, "microbatches": 4}, "no axis of the mesh .* has 3 devices"),
        ({"a": 2}, {"stages": 2, "microbatches": 1}, "all stages but one wait"),
        ({"a": 2}, {"stages": 2, "schedule": "zbv", "virtual": 2, "microbatches": 2}, "at least 4 microbatches"),
        ({"a": 2}, {"stages": 2, "schedule": "fast"}, "unknown schedule 'fast'"),
        ({"a": 2}, {"stages": 2, "stage_axis": "b"}, "no axis 'b'"),
        ({"a": 2}, {"stages": ["nowhere"], "microbatches": 2}, "no stage can begin at 'nowhere'"),
        ({"a": 16}, {"stages": 16, "microbatches": 2}, "16 stages need 15 modules"),
    ],
)
def test_errors_say_what_to_do(axes: dict[str, int], pins: dict[str, Any], says: str) -> None:
    program = program_of(*example("mlp"))
    with pytest.raises((InfeasibleError, ValueError), match=says):
        solve(program, axes, "cpu", search=Search(pins=pins))


@pytest.mark.parametrize("pins", [{"microbatches": 4}, {"microbatches": 1, "schedule": "breadth-first"}])
def test_what_needs_backward_first_is_refused(pins: dict[str, Any]) -> None:
    search = Search(pins={"stages": 2, **pins})
    half = program_of(*example("mlp"), precision=Precision.resolve("fp16"))
    with pytest.raises(InfeasibleError, match="which float16 needs: compute in bfloat16"):
        solve(half, {"a": 2}, "cpu", search=search)
    plain = program_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (torch.randn(8, 8),))
    with pytest.raises(InfeasibleError, match="pass loss_fn"):
        solve(plain, {"a": 2}, "cpu", search=search)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"stages": 0}, "'stages' must be a positive whole number"),
        ({"schedule": "1f1b"}, "are for pipelines: pin 'stages'"),
        ({"stages": 2, "virtual": 1.5}, "'virtual' must be"),
    ],
)
def test_pins_are_checked(pins: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Search(pins=pins)
