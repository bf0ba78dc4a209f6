"""Batch norm: statistics, gradients and running statistics are those of the whole batch, however it is split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, rewrite
from autopar.ir.node_info import info
from autopar.ir.program import Program
from autopar.verify.verify import compare, global_values
from tests.plans import follow_plan
from tests.verify.test_verify import after_adamw

AXES = {"a": 2, "b": 2}


class Normal(nn.Module):
    """A convolution, batch norm, and a loss."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, **settings)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.norm(self.first(x))).mean((2, 3))), target)


def batch_of(step: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 2, 4, 4, generator=g), "target": torch.randint(0, 4, (8,), generator=g)}


def lowered(program: Program) -> int:
    """How many all-reduces the code of split batch norms makes."""
    nodes = [n for n in program.graph.graph.nodes if info(n).collective is not None]
    return sum(info(n).collective.kind == "all_reduce" and info(n).collective.bytes == 16 for n in nodes)


def test_one_value_a_channel_on_each_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = (torch.randn(4, 6, dtype=torch.float64),)
    report = autopar.verify(model, batch, AXES, loss_fn=lambda y, _: y.square().mean(), plan="random", seed=2)
    forward = next(names for key, names in report.plan.choices.items() if "batch_norm_legit" in key)
    assert forward == ("a.0", "a.0")
    assert report.max_error < 1e-9, report.worst


@pytest.mark.parametrize(
    ("settings", "seeds"),
    [({}, 1), ({"affine": False}, 1), pytest.param({"track_running_stats": False}, 2, marks=pytest.mark.deep)],
    ids=str,
)
def test_random_plans(settings: dict[str, bool], seeds: int) -> None:
    model = Normal(**settings)
    for seed in range(seeds):
        report = autopar.verify(model, batch_of(), AXES, plan="random", seed=seed)
        assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"
        assert ("buffer norm.running_var" in report.errors) == (settings != {"track_running_stats": False})
        expected = after_adamw(dict(model.named_parameters()), report.reference_gradients)
        for name, value in after_adamw(dict(model.named_parameters()), report.gradients).items():
            assert float((value - expected[name]).abs().max()) <= 1e-9, name


@pytest.mark.parametrize(
    "layout", ["S(0) R", "S(3) S(2)", *(pytest.param(n, marks=pytest.mark.deep) for n in ("S(0) S(0)", "S(0) S(2)"))]
)
def test_samples_and_space_are_split(layout: str) -> None:
    model, batch = nn.BatchNorm2d(4), (batch_of()["x"].repeat(1, 2, 1, 1),)
    nn.init.uniform_(model.weight)
    program = program_of(model, batch)
    plan = follow_plan(program, AXES, batch={"0": layout}, results={"0": layout})
    local = rewrite(program, plan)
    # Two sums forward and two backward, over each axis; the gradients of weight and bias are sums already.
    assert lowered(local) == 4 * (2 - layout.count("R"))
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"
    assert {"buffer running_mean", "buffer running_var", "buffer num_batches_tracked"} <= set(report.errors)


def test_channels_are_split_without_communication() -> None:
    model, batch = nn.BatchNorm2d(4), (batch_of()["x"].repeat(1, 2, 1, 1),)
    program = program_of(model, batch)
    everything = {
        "batch": {"0": "S(1) R"},
        "results": {"0": "S(1) R"},
        "parameters": {"weight": "S(0) R", "bias": "S(0) R"},
    }
    plan = follow_plan(program, AXES, **everything)
    local = rewrite(program, plan)
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10
    kinds = {info(n).collective.kind for n in local.graph.graph.nodes if info(n).collective}
    assert kinds <= {"all_gather"}  # of the running statistics only, which every device holds whole


def test_evaluation() -> None:
    """Gradients in evaluation: the saved statistics are empty on some devices, and not used."""
    model = Normal().eval()
    report = autopar.verify(model, batch_of(), AXES, plan="random", seed=3)
    assert report.max_error <= 1e-10
    assert not any("buffer" in name for name in report.errors)
