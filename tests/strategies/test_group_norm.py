"""Group norm whose channels' groups, or positions, are on several devices: statistics are those of whole groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, rewrite
from autopar.ir.node_info import info
from autopar.rules.oracle.sharding import check_rule
from autopar.verify.verify import compare, global_values
from tests.crossed import seeds
from tests.plans import follow_plan
from tests.strategies.samples_layers import aten

AXES = {"a": 2, "b": 2}
deep = pytest.mark.deep


def images(*sizes: int) -> Tensor:
    """Whose mean is far from zero."""
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5


def norm(groups: int = 2, affine: bool = True) -> nn.GroupNorm:
    torch.manual_seed(0)
    made = nn.GroupNorm(groups, 4, affine=affine)
    for p in made.parameters():
        nn.init.normal_(p)
    return made.double()


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("S(2) R", 2),
        ("S(3) S(2)", 1),
        ("S(0) S(3)", 2),
        *(pytest.param(n, 2, marks=deep) for n in ("S(2) S(2)", "S(1) S(2)")),
    ],
)
def test_positions_are_split(layout: str, groups: int) -> None:
    model, batch = norm(groups), (images(2, 4, 8, 4),)
    program = program_of(model, batch)
    plan = follow_plan(program, AXES, batch={"0": layout}, results={"0": layout})
    local = rewrite(program, plan)
    made = [c for n in local.graph.graph.nodes if (c := info(n).collective) is not None]
    # Statistics and gradients of a few numbers, never the images.
    assert sum(c.kind == "all_reduce" for c in made) >= 3 and max(c.bytes for c in made) <= 8 * 8
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"


class Block(nn.Module):
    """What a U-Net is made of; positions of a height that few axes divide."""

    def __init__(self, groups: int, affine: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), norm(groups, affine)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(nn.functional.silu(self.norm(self.first(x))))).square().mean()


@pytest.mark.parametrize(
    ("groups", "height", "affine"), [(1, 8, True), (4, 6, False), pytest.param(2, 5, True, marks=deep)]
)
def test_random_plans(groups: int, height: int, affine: bool) -> None:
    model, batch = Block(groups, affine).double(), (images(2, 2, height, 4),)
    for seed in seeds(3):
        report = autopar.verify(model, batch, AXES, plan="random", seed=seed, random_strides=True)
        assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True])
def test_few_bits(dtype: torch.dtype, mixed: bool) -> None:
    """Sums are in float32; results have the kernel's dtypes."""
    x, grad = images(2, 4, 4, 4).to(dtype), (images(2, 4, 4, 4) - 5).to(dtype)
    weight, bias = (images(4).to(torch.float32 if mixed else dtype) for _ in range(2))
    sizes = (2, 4, 16, 2)
    check_rule(aten.native_group_norm.default, (x, weight, bias, *sizes, 1e-5), {}, rtol=0.01)
    _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-5)
    arguments = (grad, x, mean, rstd, weight, *sizes, [True, True, True])
    check_rule(aten.native_group_norm_backward.default, arguments, {}, rtol=0.05)


def test_images_without_positions_are_not_split_within_groups() -> None:
    proven = check_rule(
        aten.native_group_norm.default, (images(2, 4, 0), None, None, 2, 4, 0, 2, 1e-5), {}, pairs=False
    )
    assert [name.partition(":")[0] for name in proven] == ["n", "g"]
