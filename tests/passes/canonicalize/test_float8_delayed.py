"""Delayed scaling: steps in a row are those of plain layers with histories, on an emulated mesh and on one device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Float8, Precision, Search
from autopar.compiler import program_of, rewrite, solve
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.ops import float8
from autopar.ir.program import RECORDED, Program
from autopar.verify.compare import compare
from autopar.verify.verify import global_values
from tests import models as zoo
from tests.distributed.models import slow_devices
from tests.float8_layers import delayed, end_step, past
from tests.passes.canonicalize.test_float8 import tied

F64 = torch.float64
STEPS = 2
ASKED = Search(inexact=("fp8",))

Batch = dict[str, torch.Tensor]


class Checkpointed(nn.Module):
    """Of which the backward pass recomputes a layer and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda t: torch.relu(self.up(t)), x, use_reentrant=False)
        return (self.down(hidden) - y).square().mean()


def checkpointed() -> tuple[nn.Module, Batch]:
    _, batch = zoo.mlp()
    return Checkpointed(), batch


def policy(dtype: torch.dtype = F64, **options: Any) -> Precision:
    return Precision(dtype, dtype, dtype, Float8("delayed", history=STEPS, **options))


def wide(made: tuple[nn.Module, Batch]) -> tuple[nn.Module, Batch]:
    model, batch = made
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def batches(batch: Batch, count: int = 4) -> list[Batch]:
    """Of other sizes in each step, larger and smaller than what the history knows."""
    factors = [1.0, 3.0, 0.5, 0.3, 0.2, 2.0][:count]
    return [{k: v * f if v.is_floating_point() else v.roll(i) for k, v in batch.items()} for i, f in enumerate(factors)]


def step_of(plain: nn.Module, batch: Batch, parts: int = 1) -> dict[str, torch.Tensor]:
    """Loss and gradients of plain layers, of microbatches one after the other, as gradients are accumulated."""
    plain.zero_grad()
    total = torch.zeros((), dtype=F64)
    for rows in zip(*(v.chunk(parts) for v in batch.values()), strict=True):
        loss = plain(**dict(zip(batch, rows, strict=True))) / parts
        loss.backward()
        total += loss.detach()
    end_step(plain)
    return {"loss": total, **{n: p.grad for n, p in plain.named_parameters() if p.grad is not None}}


def errors(
    program: Program, local: Program, plan: Any, model: nn.Module, steps: list[Batch], parts: int = 1
) -> list[float]:
    """The largest error in each of some steps of gradient descent, whose histories go on from step to step."""
    plain, model, found = delayed(copy.deepcopy(model), STEPS), copy.deepcopy(model), []
    for batch in steps:
        histories = past(plain)
        values = [
            histories[spec.name] if spec.name in histories else value
            for spec, value in zip(program.inputs, global_values(program, model, batch), strict=True)
        ]
        expected = step_of(plain, batch, parts)
        report = compare(program, local, plan, values, F64)
        made = {"loss": report.loss, **report.gradients}
        # The bias of keys has no gradient: a softmax does not see it.
        own = [distance(made[n], v) for n, v in expected.items() if n != "keys.bias"]
        # As one device does it, and what is recorded among it.
        found.append(max(*own, report.max_error))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * expected[name]
            for name, parameter in plain.named_parameters():
                parameter -= 0.5 * expected[name]
    return found


def distance(made: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert made is not None
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("make", "parts", "seed"), [(zoo.mlp, 1, 0), (zoo.mlp, 2, 1), (checkpointed, 1, 2), (tied, 1, 3)]
)
def test_same_steps_as_plain_layers_with_histories(make: Any, parts: int, seed: int) -> None:
    """Under random plans on an emulated mesh: all microbatches of a step have its scales, and it is recorded once."""
    model, batch = wide(make())
    program = program_of(model, batch, precision=policy())
    search = Search(recipe="random", seed=seed, pins={"microbatches": parts})
    plan = solve(program, {"a": 2, "b": 2}, "cpu", search=search, deterministic=True)
    local = rewrite(program, plan)
    assert plan.microbatches == parts
    assert max(errors(program, local, plan, model, batches(batch), parts)) <= 1e-10
    again = [n for n in local.graph.graph.nodes if info(n).recompute_of]
    # By the scale of the forward pass.
    assert (float8.quantize in {n.target for n in again}) == (make is checkpointed)


@pytest.mark.slow
def test_the_largest_entries_of_all_shards_are_one_maximum_for_each_axis() -> None:
    """At the end of the step; without it a device records what is largest of its own part, and that is noticed."""
    model, batch = wide(zoo.mlp())
    program = program_of(model, batch, precision=policy())
    pins = {"batch.*": ("S(0)", "R"), "up.weight": ("R", "S(0)"), "down.weight": ("R", "S(1)"), "*.bias": ("R", "R")}
    for parts in (1, 2):
        search = Search(pins={**pins, "microbatches": parts})
        plan = solve(program, {"data": 2, "tensor": 2}, slow_devices(), search=search)
        local = rewrite(program, plan)
        maxima = [n for n in local.graph.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]
        maxima = [n for n in maxima if n.args[1] == "max"]
        assert sorted(str(n.args[2]) for n in maxima) == ["data", "tensor"]
        # No product waits for them: nothing but what is recorded comes of them.
        reached = set(maxima)
        for node in local.graph.graph.nodes:
            reached |= {node} if node.op != "output" and any(a in reached for a in node.all_input_nodes) else set()
        described = list(zip(local.outputs, local.output_values, strict=True))
        assert not any(n.target is float8.product for n in reached)
        assert all((o.kind == RECORDED) == (v in reached) for o, v in described if v is not None)
        assert max(errors(program, local, plan, model, batches(batch, 3), parts)) <= 1e-10
        for node in maxima:
            node.replace_all_uses_with(node.args[0])
        local.graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        assert max(errors(program, replace(local), plan, model, batches(batch, 1), parts)) > 1e-3


def test_what_is_recorded_and_when() -> None:
    """A history for each weight; of values that two layers take one serves both. Without gradients there is none."""
    model, batch = tied()
    program = program_of(model, batch, precision=policy())
    histories = {i.name for i in program.inputs if i.kind == "buffer"}
    assert histories == {f"{n}.weight_amax_history" for n in ("words", "queries", "keys")}
    recorded = [v for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == RECORDED]
    # Of the values of queries and keys, recorded for both, and of the head's; of 3 weights and 3 gradients.
    assert len(recorded) == 9 and len(set(recorded)) == 8
    nodes = program.graph.graph.nodes
    assert len([n for n in nodes if n.target is float8.quantize]) == 8
    # Before the backward pass, which then needs not the values, but for gradients.
    assert sum(is_backward(v) for v in set(recorded)) == 3
    assert float8.scale not in {n.target for n in nodes}
    for changed in (program_of(model, batch, precision=policy(), training=False), _frozen(model, batch)):
        assert not any(o.kind == RECORDED for o in changed.outputs)
        assert float8.delayed_scale in {n.target for n in changed.graph.graph.nodes}


def _frozen(model: nn.Module, batch: Batch) -> Program:
    model = copy.deepcopy(model).requires_grad_(False)
    return program_of(model, batch, precision=policy())


def test_verify_in_pipelines() -> None:
    """Two calls, of which the second goes on from the histories of the first; on stages that each have some."""
    model, batch = zoo.mlp()
    report = autopar.verify(
        model, batch, {"a": 2, "b": 2}, plan="random", seed=1, precision="fp8-delayed",
        pins={"stages": 2, "microbatches": 2},
    )  # fmt: skip
    assert len(report.plan.stages) == 2 and report.max_error <= 1e-10, report.worst
    assert "recorded up.weight_amax_history:2:0" in report.errors
    assert "fp8, delayed scaling by the last 16 steps" in report.note


def test_calls_in_any_order_on_one_device() -> None:
    """Scales are those of the call; a backward pass records, within `no_sync`, too, and nothing else does."""
    model, batch = wide(zoo.mlp())
    plain = delayed(copy.deepcopy(model), STEPS)
    module = autopar.parallelize(model, None, precision=policy(), search=ASKED)
    one, two, three = batches(batch, 3)
    step_of(plain, one)
    module(**one).backward()
    with torch.no_grad():
        module(**two)
    with module.no_sync():
        module(**two)
    assert recorded(module) == pytest.approx(recorded_by(plain))
    module.zero_grad(), plain.zero_grad()
    # Both scale by the first step, though the second records before the third does.
    losses = [module(**two), module(**three)]
    expected = [plain(**two), plain(**three)]
    with module.no_sync():
        losses[0].backward()
    losses[1].backward()
    for loss, right in zip(losses, expected, strict=True):
        assert distance(loss.detach(), right.detach()) < 1e-12
    state = module.full_state_dict()
    rows = [[float(v.abs().max()) for v in (b["x"], state["up.weight"])] for b in (three, two)]
    assert state["up.weight_amax_history"][:2].T.tolist() == [pytest.approx(r) for r in rows]


def recorded(module: nn.Module) -> list[float]:
    state = module.full_state_dict()  # type: ignore[operator]
    return [float(v) for name in sorted(state) if name.endswith("history") for v in state[name].flatten()]


def recorded_by(plain: nn.Module) -> list[float]:
    return [float(v) for _, history in sorted(past(plain).items()) for v in history.flatten()]


def test_what_is_no_number_is_seen_and_not_recorded() -> None:
    """The step has no finite gradient, so that `GradScaler` skips it; the next one is as if it had not been."""
    model, batch = wide(zoo.mlp())
    module = autopar.parallelize(model, None, precision=policy(), search=ASKED)
    module(**batch).backward()
    module.zero_grad()
    broken = {**batch, "x": batch["x"].clone()}
    broken["x"][0, 0] = torch.inf
    module(**broken).backward()
    assert not any(g.isfinite().all() for g in module.full_gradients().values())
    module.zero_grad()
    module(**batch).backward()
    assert all(g.isfinite().all() for g in module.full_gradients().values())


def test_saved_and_loaded_before_the_first_call() -> None:
    model, batch = wide(zoo.mlp())
    fresh = copy.deepcopy(model)
    module = autopar.parallelize(model, None, precision=policy(), search=ASKED)
    for values in batches(batch, 2):
        module(**values).backward()
    other = autopar.parallelize(fresh, None, precision=policy(exclude=("down.*",)), search=ASKED)
    assert not [n for n in other.full_state_dict() if n == "down.weight_amax_history"]
    again = autopar.parallelize(copy.deepcopy(fresh), None, precision=policy(), search=ASKED)
    again.load_full_state_dict(module.full_state_dict())
    assert torch.equal(again(**batch), module(**batch))
    with pytest.raises(ValueError, match=r"history=3.*has 2 steps"):
        autopar.parallelize(fresh, None, precision=Precision(linear=Float8("delayed", history=3)), search=ASKED)


class OtherWeights(nn.Module):
    """Weights that are one of several matrices, and a view of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.flat = nn.Parameter(torch.randn(2, 16, 16) / 4), nn.Parameter(torch.randn(256) / 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ self.experts[0]) @ self.experts[1]
        return (hidden @ self.flat.view(16, 16) - y).square().mean()


def test_weights_of_other_dims_have_histories() -> None:
    batch = wide(zoo.mlp())[1]
    module = autopar.parallelize(OtherWeights().double(), None, precision=policy(), search=ASKED)
    # Before the first call, for checkpoints.
    assert "experts_amax_history" in module.full_state_dict()
    for values in batches(batch, 2):
        module(**values).backward()
    state = module.full_state_dict()
    for name in ("experts", "flat"):
        assert torch.equal(state[f"{name}_amax_history"][1], state[name].abs().max().expand(2)), name


def test_a_layer_that_comes_later_begins_with_an_empty_history() -> None:
    """In place of one that has trained, which keeps its own."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.added = base, nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.added(torch.tanh(self.base(x)))

    model, batch = wide(zoo.mlp())
    plain = delayed(copy.deepcopy(model), STEPS)
    module = autopar.parallelize(model, None, precision=policy(), search=ASKED)
    for number, values in enumerate(batches(batch)):
        if number == 2:
            for changed in (model, plain):
                torch.manual_seed(0)
                changed.up = Adapter(changed.up).double()
            delayed(plain, STEPS)
        module.zero_grad()
        loss = module(**values)
        loss.backward()
        made = {"loss": loss.detach(), **{n: p.grad for n, p in module.named_parameters()}}
        expected = step_of(plain, values)
        assert max(distance(made[n], v) for n, v in expected.items()) <= 1e-10, number
    assert recorded(module) == pytest.approx(recorded_by(plain))


@pytest.mark.parametrize("options", [{"history": 0}, {"history": 2.0}, {"scaling": "rowwise", "history": 4}])
def test_a_history_that_is_none(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="history"):
        Float8(**{"scaling": "delayed", **options})
