"""Operators that a compiler puts into one kernel: what each of them moves, and that plans and graphs count it alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.ir.graph import is_backward
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.fused_kernels import Fused
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import operator_work
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from tests import models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)) * 2))
        return (x + y).softmax(-1).sum(0).square().mean()


def forward_of(program: Program) -> dict[str, Fused | None]:
    """Of each operator of the forward pass that is no view, by its target's name and number."""
    found: dict[str, Fused | None] = {}
    for node, operator in analyze(program).operators.items():
        if not operator.rule.view and not is_backward(node):
            name = str(node.target).split(".")[1]
            found[f"{name} {sum(k.startswith(name) for k in found)}"] = operator.fused
    return found


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(Block(), (torch.randn(4, 8),), fused=True)


def test_what_stays_in_registers_is_neither_written_nor_read(program: Program) -> None:
    found = forward_of(program)
    # up's bias, twice, gelu: reads the product and the bias; the backward pass reads gelu's argument, the product gelu.
    assert found["add 0"] == Fused(reads=(0, 1), writes=(), launches=True)
    assert found["mul 0"] == Fused(reads=(), writes=(0,), launches=False)
    assert found["gelu 0"] == Fused(reads=(), writes=(0,), launches=False)
    # down's bias, residual, softmax: the backward pass reads the softmax. Rows are summed in a kernel of their own.
    assert found["add 1"] == Fused(reads=(0, 1), writes=(), launches=True)
    assert found["add 2"] == Fused(reads=(0,), writes=(), launches=False)
    assert found["_softmax 0"] == Fused(reads=(), writes=(0,), launches=False)
    assert found["sum 0"] is None and found["mm 0"] is None and found["native_layer_norm 0"] is None


def test_traffic_and_launches_are_those_of_the_kernel(program: Program) -> None:
    dims = analyze(program)
    work = {}
    for node, operator in dims.operators.items():
        if operator.fused is not None and not is_backward(node):
            one = candidates(operator, (1,), allowed=[["R"]])
            made = operator_work(operator, one, (1,))
            work[node.name] = float(made.moved[0]), float(made.launches[0])
    # Bytes of float32: [4, 16] in and twice out, [4, 8] twice in and once out, with a bias each; and 8 elements to one.
    assert sum(moved for moved, _ in work.values()) == 4 * (64 + 16 + 64 + 64) + 4 * (32 + 8 + 32 + 32) + 4 * (8 + 1)
    assert sum(launches for _, launches in work.values()) == 3


def test_no_kernel_reads_what_is_computed_from_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            return (y.cos() + self.mix(y)).tanh().mean()

    found = forward_of(program_of(Twice(), (torch.randn(4, 8),), fused=True))
    assert found["sin 0"] == Fused((0,), (0,), launches=True)
    assert found["cos 0"] is not None and not found["cos 0"].launches
    assert found["add 0"] == Fused((0, 1), (), launches=True)  # it waits for the product of what sin makes


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("fsdp", marks=pytest.mark.deep), "megatron"])
def test_plans_and_emitted_graphs_count_it_alike(recipe: str) -> None:
    program = models.captured("llama", layers=2)[0]
    plain, fused = (
        solve(p, {"a": 4}, "h100", search=autopar.Search(recipe=recipe))
        for p in (program, replace(program, fused=True))
    )
    assert fused.fused and not plain.fused and fused.predicted.compute_seconds < plain.predicted.compute_seconds
    local = rewrite(replace(program, fused=True), fused)
    assert simulate(emitted(local, fused)).busy[0] == pytest.approx(fused.predicted.compute_seconds, rel=0.03)
    assert autopar.Plan.from_dict(fused.to_dict()).fused


def test_a_plan_says_so_and_is_checked_so() -> None:
    model, batch = models.mlp()
    made: Plan = autopar.plan(model, batch, cluster="h100", axes={"a": 2}, compile=True)
    assert made.fused and "fused between collectives" in made.summary() and "kernels fused" in made.certificate.space
    assert made.check(model, batch).fused
    with pytest.raises(autopar.PlanError, match="does not cost here what it says"):
        replace(made, fused=False).check(model, batch)
    with pytest.raises(ValueError, match="compile"):
        autopar.plan(model, batch, cluster="h100", axes={"a": 2}, compile="yes")  # type: ignore[arg-type]
