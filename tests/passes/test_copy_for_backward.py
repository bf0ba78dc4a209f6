"""Copies of parameters that the backward pass gathers: the same numbers, sent along the inner axis alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory
from autopar.passes.copy_for_backward import with_copies

AXES = {"node": 2, "gpu": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y - x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


BATCH = (torch.randn(8, 16, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(net(), BATCH)


def planned(program: Program, **given: object) -> Plan:
    pins = {"secondary": "gpu", **given.pop("pins", {})}  # type: ignore[dict-item]
    search = autopar.Search(**{"recipe": "fsdp", **given}, pins=pins)  # type: ignore[arg-type]
    return Plan.from_dict(solve(program, AXES, "h100", search=search, deterministic=True).to_dict())


def gathers(program: Program, plan: Plan, backward: bool) -> set[str]:
    """Axes along which parameters are gathered in a pass."""
    local = rewrite(program, plan)
    made = [info(n).collective for n in local.graph.graph.nodes if is_backward(n) is backward]
    return {m.axis for m in made if m is not None and m.kind == "all_gather"}


@pytest.mark.parametrize("pins", [{}, {"overlap": "none"}, pytest.param({"microbatches": 2}, marks=pytest.mark.deep)])
def test_the_backward_pass_gathers_within(program: Program, pins: dict[str, object]) -> None:
    plan = planned(program, pins=pins)
    assert plan.secondary == ("gpu",) and "copies of parameters, along gpu alone" in " ".join(plan.summary().split())
    assert gathers(program, plan, backward=True) == {"gpu"}
    assert "node" in gathers(program, plan, backward=False) or pins.get("microbatches") == 2
    assert autopar.verify(net(), BATCH, AXES, plan=plan).max_error < 1e-9


def test_memory_is_that_of_the_copies(program: Program) -> None:
    pins = {"overlap": "none"}
    search = autopar.Search(recipe="fsdp", pins=pins)
    plans = planned(program, pins=pins), solve(program, AXES, "h100", search=search, deterministic=True)
    held = []
    for plan in plans:
        found = peak_memory(rewrite(program, plan), plan)
        held.append(found["communication"] + found["activations"])
    # Where the backward pass begins: halves of the matrices that it reads, and not all of them, gathered.
    assert held[0] < 0.7 * held[1]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep), pytest.param(2, marks=pytest.mark.deep)])
def test_random_plans(program: Program, seed: int) -> None:
    plan = planned(program, recipe="random", seed=seed)
    assert any("clone" in name for name in plan.choices)
    assert autopar.verify(net(), BATCH, AXES, plan=plan).max_error < 1e-9


def test_copies_are_made_once(program: Program) -> None:
    copied = with_copies(program)
    assert with_copies(copied) is copied and with_copies(program) is copied
    names = [n.name for n in copied.graph.graph.nodes if info(n).secondary]
    # The first layer's first matrix has no gradient of an input that would read it.
    assert len(names) == 5 and len(copied.calls) == len(program.calls) + 5


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"secondary": []}, "pin 'secondary' must be an axis or a list of axes, each once, got"),
        ({"secondary": ["gpu", "gpu"]}, "pin 'secondary' must be an axis or a list of axes, each once, got"),
        ({"secondary": 2}, "pin 'secondary' must be an axis or a list of axes, each once, got 2"),
        ({"secondary": "gpu", "stages": 2}, "pin 'secondary' is not for pipelines: leave it or 'stages' out"),
    ],
)
def test_what_is_no_pin(pins: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopar.Search(pins=pins)


def test_axes_of_the_pin() -> None:
    search = autopar.Search(recipe="fsdp", pins={"secondary": "dc"})
    with pytest.raises(ValueError, match="pin 'secondary' names axis 'dc'; the mesh has node, gpu"):
        search.require_axes(AXES)
    search = autopar.Search(recipe="fsdp", pins={"secondary": ["node", "gpu"]})
    with pytest.raises(ValueError, match="names all axes of the mesh"):
        search.require_axes(AXES)


@pytest.mark.parametrize(
    ("axes", "given"),
    [
        (AXES, {"recipe": "ddp"}),
        (AXES, {"roles": {"node": "data", "gpu": "shard"}}),
        ({"node": 1, "gpu": 4}, {"recipe": "fsdp"}),
    ],
)
def test_copies_that_would_save_no_gather(program: Program, axes: dict[str, int], given: dict[str, object]) -> None:
    search = autopar.Search(**given, pins={"secondary": "gpu"})  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="the plan gathers no parameter along another axis"):
        solve(program, axes, "h100", search=search)
