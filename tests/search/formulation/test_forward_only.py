"""A value that is moved for the forward pass alone: the backward pass takes it as it was made, and that is held."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.compiler import program_of
from autopar.costs.cluster import Cluster
from autopar.ir.graph import is_backward
from autopar.ir.layout import Replicate
from autopar.ir.program import Program
from autopar.search.budget.budget_problem import BudgetProblem, peak_bytes
from autopar.search.budget.within_budget import plan_within
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.variables.variable import FORWARD_ONLY
from autopar.search.options import Job, Search
from autopar.search.predict import predict
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes

CLUSTER = Cluster.preset("cpu")
ROWS, BLOCKS = 4096, 8


class Block(nn.Module):
    """Three operators of the forward pass read one value, and as many of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        found: torch.Tensor = torch.sin(y) + torch.cos(y) + y.square()
        return found


class Chain(nn.Module):
    """More is saved for the backward pass than the forward pass ever holds besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


@pytest.fixture(scope="module")
def chain() -> tuple[Program, Dims, LayerClasses]:
    program = program_of(Chain(), {"x": torch.randn(ROWS, 64)})
    dims = analyze(program)
    return program, dims, layer_classes(program, dims)


def gathered_for_the_forward_pass(dims: Dims, classes: LayerClasses, axes: int) -> Restrictions:
    """Forward functions are replicated, and all else has its rows split on the first axis."""
    strategies = {}
    for key, (node, *_) in classes.members.items():
        operator = dims.operators.get(node)
        if operator is None:
            continue
        kind = str(node.target).split(".")[1]
        if not is_backward(node) and kind in ("sin", "cos", "pow", "add"):
            strategies[key] = "R"
        elif kind == "mm":  # the rows are what a weight's gradient sums over
            strategies[key] = "k.0" if operator.inputs[0].shape[1] == ROWS else "m.0"
        elif is_backward(node) and kind in ("sin", "cos"):
            strategies[key] = "a.0"
    rest = (frozenset({"R"}),) * (axes - 1)
    return Restrictions(strategies={key: (frozenset({name}), *rest) for key, name in strategies.items()})


@pytest.mark.parametrize(
    ("axes", "recompute"),
    [({"a": 4}, "regather"), ({"a": 4}, "search"), ({"a": 4, "b": 2}, "regather")],
    ids=str,
)
def test_no_more_counts_than_the_backward_pass_takes(
    chain: tuple[Program, Dims, LayerClasses], axes: dict[str, int], recompute: str
) -> None:
    """The plan without a budget holds parts; it is found within its own peak, and no bound is above it."""
    program, dims, classes = chain
    restrictions = gathered_for_the_forward_pass(dims, classes, len(axes))
    job = Job(axes, CLUSTER, math.inf, "sgd", Search(pins={"recompute": recompute}), restrictions, overlap=False)
    unlimited = BudgetProblem.of(program, dims, classes, job)
    free = unlimited.with_peak(plan_within(unlimited))
    (value,) = (key for key in classes.members if ": forward mm" in key)
    assert set(free.consumer_layouts[f"{value} 0"]) == {Replicate()}
    peak, counted = peak_bytes(free), free.certificate.objective
    within = BudgetProblem.of(program, dims, classes, replace(job, memory=peak))
    found = within.with_peak(plan_within(within))
    assert peak_bytes(found) <= peak
    assert found.certificate.lower_bound <= counted * (1 + 1e-9)
    assert found.certificate.objective <= counted * (1 + 1e-3)
    assert counted == pytest.approx(predict(program, dims, free, classes).predicted.step_seconds)
    built = within.formulation(restrictions, within.states_and_activations(offload=False))
    (moved,) = (v for v in built.variables if v.key == f"consumer {value} 0")
    assert moved.state is not None
    assert FORWARD_ONLY in moved.state
