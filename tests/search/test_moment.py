"""The row of one moment: no plan's graph needs less than its row says, whatever the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.compiler import peak_of, program_of
from autopar.dims import analyze
from autopar.plan import Certificate, Plan
from autopar.program import Program
from autopar.redistribute import Machine, Tables
from autopar.search.build import Built, Memory, build, heaviest
from autopar.search.find import plan_of, state_bytes
from autopar.search.frontier import Mix
from autopar.search.graph import build as graph_of
from autopar.search.minimise import Limits, minimise
from autopar.search.moment import Moment
from autopar.search.problem import Ints, Node, Problem, evaluate
from autopar.search.quotient import quotient
from autopar.search.restrict import Restrictions
from autopar.search.variable import AGAIN
from tests import models as zoo

CLUSTER = Cluster.preset("cpu")
CERTIFICATE = Certificate(0.0, 0.0, "drawn", "drawn")


class Unet(nn.Module):
    """Wide rows at both ends, and a skip over the middle: most is held before the last operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.down, self.up = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(8, 64)
        self.out = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.into(x))
        middle = torch.sin(self.up(torch.tanh(self.down(first))))
        return torch.softmax(self.out(torch.cat([first, middle], -1)), -1).square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "unet": lambda: (Unet(), {"x": torch.randn(16, 16)}),
    "gpt2": lambda: zoo.gpt2(),
    "llama": lambda: zoo.llama(),
    "vit": lambda: zoo.vit(),
}


class Rows:
    """The rows of a model on a mesh, by the moment."""

    def __init__(self, program: Program, axes: dict[str, int], again: str) -> None:
        self.program, self.axes, self.dims = program, axes, analyze(program)
        self.classes = quotient(program, self.dims)
        machine = Machine(tuple(axes), tuple(axes.values()), CLUSTER.link_for(axes), CLUSTER.device)
        self.tables = Tables(machine)
        self.memory = Memory(state_bytes(program, "adamw", gradients=False), True, again)

    def built(self, moment: Moment | None) -> Built:
        memory = replace(self.memory, moment=moment)
        return build(self.program, self.dims, self.classes, self.tables, memory, Restrictions())

    def heaviest(self, labels: Ints) -> Moment:
        return heaviest(self.program, self.dims, self.classes, self.tables, self.memory, Restrictions(), labels)

    def plan(self, built: Built, labels: Ints) -> Plan:
        mix = Mix(labels, labels, 0.0, 0.0, 0.0)
        return plan_of(
            self.program, self.dims, self.classes, built, mix, CERTIFICATE, self.axes, CLUSTER, "adamw", self.tables
        )


def drawn(built: Built, seed: int) -> Ints:
    """Any layouts; what the backward pass takes is kept or made again by chance, and nothing is kept in vain."""
    random = np.random.default_rng(seed)
    nodes = []
    for node, variable in zip(built.problem.nodes, built.variables, strict=True):
        cost = random.random(int(variable.candidate.max()) + 1)[variable.candidate]
        if variable.state is not None:
            worth = 10 * random.random() * (random.random() < 0.5)
            cost = cost + np.where(variable.state == AGAIN, worth, 1e-3 * variable.state)
        nodes.append(Node(node.name, np.where(np.isfinite(node.cost), cost, np.inf), node.memory))
    problem = Problem(tuple(nodes), built.problem.edges)
    found = minimise(
        graph_of(problem, False),
        lambda labels: evaluate(problem, labels)[0],
        Limits(0.5, time.monotonic() + 5),
    )
    assert found.labels is not None
    return found.labels


CASES = [("unet", {"a": 2}, "search"), ("gpt2", {"a": 2, "b": 2}, "search"), ("llama", {"a": 4}, "none")]
MORE = [(m, a, g) for m in MODELS for a in ({"a": 4}, {"a": 2, "b": 2}) for g in ("search", "gathers", "none")]


@pytest.mark.parametrize(
    ("name", "axes", "again"), [*CASES, *(pytest.param(*c, marks=pytest.mark.deep) for c in MORE)], ids=str
)
def test_no_graph_needs_less_than_the_row_of_its_moment(name: str, axes: dict[str, int], again: str) -> None:
    rows = Rows(program_of(*MODELS[name]()), axes, again)
    before = rows.built(None)
    for seed in range(3):
        labels = drawn(before, seed)
        moment = rows.heaviest(labels)
        built = rows.built(moment)
        row = evaluate(built.problem, labels)[1]
        needed = sum(peak_of(rows.program, rows.plan(built, labels), rows.classes).values())
        assert row <= needed * (1 + 1e-9), (moment.node, row, needed)
        assert row >= 0.5 * needed  # and it says much
