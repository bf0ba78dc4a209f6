"""Delayed scaling: steps in a row, under random plans on an emulated mesh, are those of plain layers with histories."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Float8, Precision, Search
from autopar.compiler import program_of, rewrite, solve
from autopar.errors import PlanError
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.ops import float8
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import RECORDED, Program
from autopar.verify.compare import compare
from autopar.verify.verify import global_values
from tests import models as zoo
from tests.float8_layers import delayed, end_step
from tests.passes.canonicalize.test_float8 import gradients, tied

F64 = torch.float64
STEPS = 3


def policy(steps: int = STEPS, dtype: torch.dtype = F64, **options: Any) -> Precision:
    return Precision(dtype, dtype, dtype, Float8("delayed", history=steps, **options))


def doubled(made: tuple[nn.Module, dict[str, torch.Tensor]]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = made
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def batches(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Other values in each step, so that one has other largest entries than the next."""
    factors = [1.0, 3.0, 0.5, 0.3, 0.2, 2.0][:count]
    return [{k: v * f if v.is_floating_point() else v.roll(i) for k, v in batch.items()} for i, f in enumerate(factors)]


def in_parts(model: nn.Module, batch: dict[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step of plain layers, of some microbatches one after the other."""
    model.zero_grad()
    rows = len(next(iter(batch.values()))) // parts
    for i in range(parts):
        found = gradients(model, {k: v[i * rows : (i + 1) * rows] for k, v in batch.items()})
    end_step(model)
    return {k: v / parts for k, v in found.items() if k != "loss"} | ({"loss": found["loss"]} if parts == 1 else {})


def errors(
    program: Program, plan: Any, model: nn.Module, steps: list[dict[str, torch.Tensor]], parts: int = 1, pass_: Any = None
) -> list[float]:
    """The largest error of loss or a gradient in each of some steps of gradient descent."""
    plain, model = delayed(copy.deepcopy(model), STEPS), copy.deepcopy(model)
    past: dict[str, list[torch.Tensor]] = {}
    local, found = rewrite(program, plan), []
    local = local if pass_ is None else pass_(local)
    for batch in steps:
        expected = in_parts(plain, batch, parts)
        values = global_values(program, model, batch)
        for i, spec in enumerate(program.inputs):
            if spec.name.endswith("_amax_history"):
                rows = [torch.zeros(3, dtype=F64)] * STEPS + past.get(spec.name, [])
                values[i] = torch.stack(rows[: -STEPS - 1 : -1], -1)
        report = compare(program, local, plan, values, F64)
        assert report.loss is not None and report.max_error <= 1e-10, report.worst
        made = {"loss": report.loss, **report.gradients}
        found.append(max(float((made[n] - v).abs().max() / v.abs().max()) for n, v in expected.items() if n != "keys.bias"))
        for parameter, own in zip(model.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            own.data -= 0.5 * own.grad / parts
            parameter.data.copy_(own.data)
        for name, layer in plain.named_modules():
            if hasattr(layer, "past"):
                past[f"{name}.weight_amax_history"] = [torch.tensor(p, dtype=F64) for p in layer.past]
    return found


def test_x() -> None:
    for parts in (1, 2, 4):
        model, batch = doubled(zoo.mlp())
        program = program_of(model, batch, precision=policy())
        for seed in range(4):
            pins = {"microbatches": parts} if parts > 1 else {}
            plan = solve(program, {"a": 2, "b": 2}, "cpu", search=Search(recipe="random", seed=seed, pins=pins), deterministic=True)
            print(parts, seed, plan.microbatches, len(plan.recompute), errors(program, plan, model, batches(batch, 6), parts))
