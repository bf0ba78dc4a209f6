"""add_bias_in_product: products and their biases are one kernel, where nothing has to come between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.kernels.add_bias_in_product import add_bias_in_product
from autopar.sharding.assignment import machine_of
from autopar.sharding.node_seconds import NodeSeconds
from tests.plans import follow_plan

aten = torch.ops.aten
AT = PASSES.index(add_bias_in_product)
BATCH = (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),)


class Biased(nn.Module):
    """Two linear layers; the first product with a vector that is read twice, a scaled one, and a matrix added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).tanh())
        own = x @ self.matrix
        return (h + torch.add(own, self.down.bias, alpha=2) + (x @ self.matrix.T + self.matrix) + own).square().mean()


def products(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.graph.nodes if n.target is aten.addmm.default]


def split(program: Program, **parameters: str) -> Plan:
    """Rows of the batch on four devices."""
    return replace(follow_plan(program, {"a": 4}, batch={"0": "S(0)"}, parameters=parameters), overlap=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_linear_layers(sharded: bool) -> None:
    """Sharded parameters are gathered first: those of a layer at the same time."""
    program = program_of(Biased(), BATCH)
    names = [i.name for i in program.inputs if i.kind == "parameter"]
    plan = split(program, **(dict.fromkeys(names, "S(0)") if sharded else {}))
    before, after = rewrite(program, plan, passes=PASSES[:AT]), rewrite(program, plan)
    assert len(products(after)) == 2
    assert len(list(after.graph.graph.nodes)) == len(list(before.graph.graph.nodes)) - 2
    assert autopar.verify(Biased(), BATCH, {"a": 4}, plan=plan).max_error < 1e-9


def test_a_sum_over_devices_comes_between() -> None:
    """Under Megatron's recipe the second product is a term of a sum, to which its bias is added."""
    program = program_of(Biased(), BATCH)
    plan = solve(program, {"a": 4}, "h100", search=autopar.Search(recipe="megatron"))
    assert len(products(rewrite(program, plan))) == 1


def test_seconds_are_those_of_both() -> None:
    program = program_of(Biased(), BATCH)
    plan = split(program)
    seconds = NodeSeconds(machine_of(plan))
    node = products(rewrite(program, plan))[0]
    added = info(node).added
    assert added is not None
    apart = [n for n in rewrite(program, plan, passes=PASSES[:AT]).graph.graph.nodes if n.name == node.name]
    product = apart[0].args[0]
    assert isinstance(product, fx.Node)
    assert seconds.kernel(node) == (seconds.kernel(product)[0] + seconds.kernel(apart[0])[0], 1.0)
