"""canonicalize: one spelling for each operation, the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler import program_of
from autopar.ir.graph import is_operator
from autopar.passes.canonicalize.operators import canonicalize
from autopar.search.options import Search
from autopar.verify.emulate import run_whole
from tests import models
from tests.models import X, raw
from tests.plans import show


def test_before_and_after() -> None:
    before = raw(lambda x, w: (x.t() @ w).view(2, 4, 2, -1).contiguous().mean((1, -1)) * 1)
    assert (
        show(before)
        == """\
w
batch0
t = t(batch0)
mm = mm(t, w)
view = view(mm, [2, 4, 2, -1])
mean.dim = mean.dim(view, [1, -1])
mul.Tensor = mul.Tensor(mean.dim, 1)
return [mul.Tensor]"""
    )
    assert (
        show(canonicalize(before))
        == """\
w
batch0
permute = permute(batch0, [1, 0])
mm = mm(permute, w)
reshape = reshape(mm, [2, 4, 2, 2])
sum.dim_IntList = sum.dim_IntList(reshape, [1, 3], False)
div.Scalar = div.Scalar(sum.dim_IntList, 8)
return [div.Scalar]"""
    )


FORMS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "transpose": (lambda x, w: x.transpose(0, -1) + 1, ["permute", "add"]),
    "permutations compose": (lambda x, w: x[None].permute(2, 0, 1).permute(1, 2, 0) + 1, ["reshape", "add"]),
    "permutation and back": (lambda x, w: x.t().t() + 1, ["add"]),
    "views compose": (lambda x, w: x.view(4, 16).view(64).unsqueeze(0).squeeze(0) + 1, ["reshape", "add"]),
    "view and back": (lambda x, w: x.view(64).view(8, 8) + 1, ["add"]),
    "clone, detach": (lambda x, w: x.clone().detach() + 1, ["add"]),
    "neutral": (lambda x, w: (x * 1 + 0) / 1 - 0 + 1, ["add"]),
    "cast to the same": (lambda x, w: x.float().to(torch.float32) + 1, ["add"]),
    "cast to another": (lambda x, w: x.double() + 1, ["_to_copy", "add"]),
    "expand to the same": (lambda x, w: x.expand(8, 8) + 1, ["add"]),
    "whole slice": (lambda x, w: x[:, 0:100] + 1, ["add"]),
    "slice": (lambda x, w: x[:, -3:] + 1, ["slice", "add"]),
    "slice_scatter": (lambda x, w: torch.slice_scatter(x, w, -1, 4) + 1, ["slice_scatter", "add"]),
    "whole slice_scatter": (lambda x, w: torch.slice_scatter(x, x * 2, 1) + 1, ["mul", "add"]),
    "sum of all": (lambda x, w: x.sum(), ["sum"]),
    "mean of all": (lambda x, w: x.mean(), ["sum", "div"]),
    "constants": (lambda x, w: x + torch.zeros_like(x) + x.new_ones(8, 8), ["full", "add", "full", "add"]),
    "equal views": (lambda x, w: x.view(64).sum() + x.view(64).exp().sum(), ["reshape", "sum", "exp", "sum", "add"]),
    "equal constants": (lambda x, w: x + torch.arange(8) + torch.arange(8), ["arange", "add", "add"]),
    "repeat": (lambda x, w: x.repeat(2, 1, 3) + 1, ["reshape", "expand", "reshape", "add"]),
    "repeat once": (lambda x, w: x.repeat(1, 1) + 1, ["add"]),
    "copy": (lambda x, w: torch.empty_like(x).copy_(x) + 1, ["add"]),
    "empty piece": (lambda x, w: torch.cat([x[:0], x]) + 1, ["add"]),
    "dead code": (lambda x, w: (x.exp(), x + 1)[1], ["add"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    function, expected = FORMS[name]
    program = raw(function)
    after = canonicalize(program)
    found = [str(n.target).split(".")[1] for n in after.graph.graph.nodes if is_operator(n)]
    assert found == expected
    values = [torch.ones(8, 4), X]
    one, other = (run_whole(p, values)[0] for p in (program, after))
    assert one is not None and other is not None
    assert torch.equal(one, other)
    assert one.dtype == other.dtype


def test_dims_count_from_the_front() -> None:
    after = canonicalize(raw(lambda x, w: torch.softmax(x, -1) + x.cumsum(-2)))
    calls = {str(n.target): n.args for n in after.graph.graph.nodes if is_operator(n)}
    assert calls["aten._softmax.default"][1] == 1
    assert calls["aten.cumsum.default"][1] == 0


def test_slices_have_bounds() -> None:
    """Bounds within the dim can be divided where the dim is split; "up to the end" cannot."""
    after = canonicalize(raw(lambda x, w: torch.slice_scatter(x, w, -1, 4) + x[:, -4:].repeat(1, 2)))
    calls = {str(n.target): n.args for n in after.graph.graph.nodes if is_operator(n)}
    assert calls["aten.slice_scatter.default"][2:] == (1, 4, 8, 1)
    assert calls["aten.slice.Tensor"][1:] == (1, 4, 8, 1)


def test_forward_and_backward_stay_apart() -> None:
    """What the backward pass computes again is its own business."""
    program = canonicalize(capture(*models.mlp()))
    kinds = [n.meta.get("partitioner_tag") for n in program.graph.graph.nodes if "permute" in str(n.target)]
    assert kinds
    assert set(kinds) <= {"is_forward", "is_backward", None}


def test_the_captured_program_is_not_changed() -> None:
    program = raw(lambda x, w: x.t().t() * 1)
    before = str(program.graph.graph)
    canonicalize(program)
    assert str(program.graph.graph) == before


def test_idempotent() -> None:
    once = canonicalize(capture(*models.encoder(seq=4)))
    assert show(canonicalize(once)) == show(once)


class Biased(nn.Module):
    """A bias of positions that all samples share, hidden by a mask, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.first = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(4, 4, dtype=torch.bool).tril()
        scores = self.first(x) + torch.where(hidden, self.bias, -1e4)[None]
        return scores.softmax(-1).square().mean()


@pytest.mark.slow
def test_the_gradient_of_a_choice_is_linear() -> None:
    """So the sum over samples may come after it, from microbatch to microbatch."""
    torch.manual_seed(0)
    model, batch = Biased().double(), (torch.randn(8, 4, 4, dtype=torch.float64),)
    targets = [n.target for n in program_of(model, batch).graph.graph.nodes]
    assert targets.count(torch.ops.aten.where.self) == 1
    assert torch.ops.aten.masked_fill.Scalar in targets
    for kind in (None, "random"):
        search = Search(recipe=kind, pins={"microbatches": 4})
        plan = autopar.plan(model, batch, cluster="cpu", axes={"a": 2}, search=search)
        report = autopar.verify(model, batch, {"a": 2}, plan=plan)
        assert (plan.microbatches, report.max_error < 1e-10) == (4, True)
