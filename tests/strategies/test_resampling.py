"""Images that are made larger or smaller by whole numbers with ``F.interpolate``, along rows that are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, rewrite
from autopar.ir.node_info import info
from autopar.rules.oracle.call import rule_of
from autopar.verify.verify import compare, global_values
from tests.crossed import seeds
from tests.plans import follow_plan

AXES = {"a": 2, "b": 2}


def images(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Enlarged(nn.Module):
    """A decoder's step: an image is enlarged, and weighted by channel."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.settings = nn.Parameter(torch.randn(2, 1, 1)), settings

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x * self.weight, **self.settings).tanh()


@pytest.mark.parametrize("layout", ["S(2) R", "S(3) S(2)", "S(2) S(2)"])
@pytest.mark.parametrize("settings", [{"scale_factor": 2}, {"size": (24, 8), "mode": "nearest-exact"}], ids=str)
def test_rows_are_enlarged_where_they_are(settings: dict[str, Any], layout: str) -> None:
    model, batch = Enlarged(**settings).double(), (images(2, 2, 8, 4),)
    program = program_of(model, batch)
    plan = follow_plan(program, AXES, batch={"0": layout}, results={"0": layout})
    local = rewrite(program, plan)
    made = [c for n in local.graph.graph.nodes if (c := info(n).collective) is not None]
    assert {(c.kind, c.bytes) for c in made} == {("all_reduce", 16.0)}  # the weight's gradient alone
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"


BETWEEN: tuple[dict[str, Any], ...] = (
    {"scale_factor": 2, "mode": "bilinear"},
    {"scale_factor": (3, 0.5), "mode": "bicubic"},
    {"scale_factor": (0.25, 2), "mode": "bilinear"},
)


@pytest.mark.parametrize("layout", ["S(2) R", "S(2) S(2)"])
@pytest.mark.parametrize(("settings", "sends"), list(zip(BETWEEN, (True, True, False), strict=True)), ids=str)
def test_elements_between_rows_take_those_of_neighbors(settings: dict[str, Any], sends: bool, layout: str) -> None:
    """Of both, in the forward and in the backward pass; means of two rows that a device has take none."""
    model, batch = Enlarged(**settings).double(), (images(2, 2, 16, 4),)
    program = program_of(model, batch)
    plan = follow_plan(program, AXES, batch={"0": layout}, results={"0": layout})
    local = rewrite(program, plan)
    kinds = {c.kind for n in local.graph.graph.nodes if (c := info(n).collective) is not None}
    assert kinds == ({"send", "all_reduce"} if sends else {"all_reduce"})
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("height", "settings"),
    [(6, {"scale_factor": 2}), (5, {"size": (15, 6)}), *((8, settings) for settings in BETWEEN)],
    ids=str,
)
def test_random_plans(height: int, settings: dict[str, Any]) -> None:
    """Of heights that few axes divide, and a width that is no whole number of times as long."""
    model, batch = Enlarged(**settings).double(), (images(2, 2, height, 4),)
    for seed in seeds(3):
        loss = {"loss_fn": lambda y, _: y.square().mean()}
        report = autopar.verify(model, batch, AXES, plan="random", seed=seed, random_strides=True, **loss)
        assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"


def test_kernels_that_take_another_element_are_not_split() -> None:
    """Positions times 1/41, in float32, are below the whole number that they should be."""
    op = torch.ops.aten.upsample_nearest1d.default
    for times, whole in ((40, True), (41, False)):
        line = torch.arange(2, dtype=torch.float32).view(1, 1, 2)
        assert torch.equal(op(line, [2 * times], float(times))[0, 0], line[0, 0].repeat_interleave(times)) is whole
        rule = rule_of(op, (line, [2 * times], float(times)), {})
        assert ("c" in rule.blocked) is not whole
