"""What a plan does not save is recomputed in the backward pass: the same numbers, and only what is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.ops.random import seeded, step_seed
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES, PASSES
from autopar.passes.rng import replay as replay_random
from autopar.runtime.step.bind import bind
from autopar.runtime.step.partition import cut
from autopar.search.emitted.peak import saved_for_backward
from autopar.search.options import Search
from autopar.search.predict import predict
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.verify.emulate import census, emulate
from autopar.verify.verify import compare, global_values
from tests.plans import hand_plan

AXES = {"a": 2}


class Dropped(nn.Module):
    """Two linears with a dropout between them, and what is large in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.up(x)), 0.5, training=True)
        return self.down(hidden).square().sum()


def captured() -> tuple[Program, list[Tensor]]:
    model, batch = Dropped(), (torch.randn(24, 8),)
    program = program_of(model, batch)
    return program, global_values(program, model, batch)


def with_again(program: Program, plan: Plan, *parts: str) -> Plan:
    """The plan that makes the operators again whose class has one of these texts in its name."""
    keys = layer_classes(program, analyze(program)).members
    asked = {k for k, nodes in keys.items() if any(p in k for p in parts) and nodes[0] in program.sources}
    chosen = {k: EVERY for k in asked if not is_backward(keys[k][0])}
    moved = {f"consumer {name}": EVERY for name in plan.consumer_layouts if name.rpartition(" ")[0] in chosen}
    return replace(plan, recompute={**chosen, **moved})


MIDDLE = ("up", "relu", "draw", "native_dropout", "mul")


def test_the_middle_is_made_again_and_not_saved() -> None:
    program, values = captured()
    plan = solve(program, AXES, "cpu")
    again = with_again(program, plan, *MIDDLE)
    assert again.recompute
    saved = []
    for each in (plan, again):
        local = rewrite(program, each)
        bound = bind(local.graph, {"a": "a"}, {"a": 0})
        step = cut(replace(local, graph=bound))
        saved.append([n.meta["val"].shape for n in step.forward.graph.output_node().args[0][1:]])  # type: ignore[union-attr,index]
    wide = [[shape for shape in shapes if len(shape) == 2 and shape[1] == 64 and shape[0] != 8] for shapes in saved]
    assert wide[0]  # activations of the middle
    assert not wide[1]
    report = compare(program, rewrite(program, again, passes=DETERMINISTIC_PASSES), again, values, torch.float64)
    assert report.max_error < 1e-12


def test_copies_stand_in_the_backward_pass_in_front_of_their_user() -> None:
    program, _ = captured()
    local = rewrite(program, with_again(program, solve(program, AXES, "cpu"), *MIDDLE))
    nodes = list(local.graph.graph.nodes)
    copies = [n for n in nodes if info(n).recompute_of is not None]
    first = next(i for i, n in enumerate(nodes) if is_backward(n))
    assert copies
    assert all(is_backward(n) and nodes.index(n) >= first for n in copies)


def test_nothing_is_copied_that_the_backward_pass_does_not_need() -> None:
    program, _ = captured()
    plan = solve(program, AXES, "cpu")
    # The loss's own sum has no user in the backward pass: asking for it changes nothing.
    asked = with_again(program, plan, "sum")
    assert asked.recompute
    targets = [[n.target for n in rewrite(program, p).graph.graph.nodes] for p in (plan, asked)]
    assert targets[0] == targets[1]


def test_draws_from_seeds_are_the_same_numbers() -> None:
    """The devices' own numbers: a plan that makes the mask again computes what the plan that keeps it does."""
    program, values = captured()
    plan = solve(program, {"a": 1}, "cpu")
    results = []
    for each in (plan, with_again(program, plan, *MIDDLE)):
        local = rewrite(program, each, passes=PASSES)
        assert sum(n.target is seeded for n in local.graph.graph.nodes) == 1 + bool(each.recompute)
        with step_seed(5):
            results.append(emulate(local, ("a",), (1,), [[v] for v in values]))
    for kept, made in zip(*results, strict=True):
        assert kept[0] is not None
        assert made[0] is not None
        assert torch.equal(kept[0], made[0])


def test_a_mask_that_is_drawn_anew_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program, values = captured()
    again = with_again(program, solve(program, AXES, "cpu"), *MIDDLE)

    def careless(target: Any, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    monkeypatch.setattr(replay_random, "replayed", careless)
    report = compare(program, rewrite(program, again, passes=DETERMINISTIC_PASSES), again, values, torch.float64)
    assert report.max_error > 1e-3


def test_prediction_counts_what_runs_again() -> None:
    """Kernels and collectives of the emitted graph are those that are predicted, gathers of parameters included."""
    program, _ = captured()
    dims = analyze(program)
    pins = {"up.weight": "S(0)", "down.weight": "S(0)", "batch.0": "S(0)"}
    plan = solve(program, AXES, Cluster.preset("h100"), search=Search(pins=pins))
    moved = {f"consumer {k}": EVERY for k in plan.consumer_layouts}
    again = with_again(program, plan, *MIDDLE)
    again = replace(again, recompute={**moved, **again.recompute})
    seconds = []
    for each in (plan, again):
        found = predict(program, dims, each).predicted
        emitted = census(rewrite(program, each))
        for axis, kinds in found.collectives.items():
            assert kinds == {k: count for k, (count, _) in sorted(emitted.get(axis, {}).items())}
        seconds.append(found.compute_seconds)
    assert seconds[1] > seconds[0]


def test_what_is_moved_for_each_user_does_not_wait() -> None:
    """A gathered weight that the backward pass takes twice: predicted as often as emitted, and the same result."""
    program, values = captured()
    dims = analyze(program)
    pins = {"up.weight": "S(0)", "down.weight": "S(0)", "batch.0": "S(0)", "overlap": "none"}
    plan = solve(program, AXES, Cluster.preset("h100"), search=Search(pins=pins))
    moved = {f"consumer {k}": EVERY for k in plan.consumer_layouts}
    once = with_again(program, plan, *MIDDLE, "mm", "permute", "addmm", "transpose", "t.")
    once = replace(once, recompute={**once.recompute, **moved})
    each = replace(once, recompute={**once.recompute, **{f"per use {name}": EVERY for name in moved}})
    gathers = []
    for chosen in (once, each):
        found = predict(program, dims, chosen).predicted
        emitted = census(rewrite(program, chosen))
        for axis, kinds in found.collectives.items():
            assert kinds == {k: count for k, (count, _) in sorted(emitted.get(axis, {}).items())}
        gathers.append(found.collectives["a"]["all_gather"])
    assert gathers[1] > gathers[0]
    report = compare(program, rewrite(program, each, passes=DETERMINISTIC_PASSES), each, values, torch.float64)
    assert report.max_error < 1e-12


class Gathered(nn.Module):
    """What ``up`` makes has one reader, which may take it as a whole while it is made in parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


def test_what_a_recomputed_operator_reads_is_moved_again_and_saved_as_it_was_made() -> None:
    """A gather for the first time only would be saved, which the search neither prices nor counts."""
    model, batch = Gathered(), (torch.randn(4, 8),)
    program = program_of(model, batch)
    dims, values = analyze(program), global_values(program, model, batch)
    nodes = {str(n.target).split(".")[1]: n.name for n in reversed(program.sources)}
    plan = hand_plan(program, AXES, {nodes["mm"]: "m.0"})
    again = with_again(program, plan, "tanh")
    saved, gathers = [], []
    for each in (plan, again):
        local = rewrite(program, each)
        found = predict(program, dims, each).predicted.collectives["a"]
        assert found == {kind: count for kind, (count, _) in sorted(census(local)["a"].items())}
        gathers.append(found["all_gather"])
        saved.append(saved_for_backward(local, each))
        report = compare(program, rewrite(program, each, passes=DETERMINISTIC_PASSES), each, values, torch.float64)
        assert report.max_error < 1e-12
    assert gathers[1] == gathers[0] + 1
    assert saved[0] - saved[1] == 4 * (4 * 16 - 4 * 16 // 2)  # instead of tanh's result, half of its argument
