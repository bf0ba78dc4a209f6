"""merge_views: fewer calls, the same numbers to the last bit, and no output that shares memory it did not share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.kernels.merge_views import merge_views
from autopar.runtime.step.bind import bind
from autopar.runtime.step.partition import cut
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from autopar.verify.verify import compare
from tests import models
from tests.plans import follow_plan, show

aten = torch.ops.aten
AT = PASSES.index(merge_views)
VIEWS = (aten.reshape.default, aten.view.default, aten.permute.default, aten.contiguous.default)


def count(program: Program, *targets: object) -> int:
    return sum(n.target in targets for n in program.graph.graph.nodes)


class Views(nn.Module):
    """A function of ``x`` and a parameter ``w``, both 4 by 6."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.w)


def rewritten(function: Callable[..., torch.Tensor]) -> list[str]:
    """The operators of a rewritten forward graph on one device."""
    with torch.no_grad():
        program = program_of(Views(function), (torch.ones(4, 6),), training=False)
    local = rewrite(program, follow_plan(program, {}))
    return [str(n.target).split(".")[1] for n in local.graph.graph.nodes if n.op == "call_function"]


def test_before_and_after() -> None:
    """A parameter split along dim 0 is gathered and taken as it comes: nothing turns, shapes or copies it."""
    program, _, _ = models.captured("mlp")
    names = [i.name for i in program.inputs if i.kind == "parameter"]
    plan = follow_plan(program, {"a": 4}, batch={"0": "S(0)", "1": "S(0)"}, parameters=dict.fromkeys(names, "S(0)"))
    text = show(rewrite(program, plan))
    gathered, _, taken = text[text.index("(down.weight)") :].partition("wait_tensor.5 = ")
    assert [line.split("(")[0].split(" ")[-1] for line in gathered.splitlines()] == ["", "all_gather_into_tensor"]
    assert taken.splitlines()[1].startswith("mm.2 = mm(mul.Tensor.1, wait_tensor.5)")
    assert "contiguous(wait_tensor" not in text
    # One view, and none before it, of what is gathered along the last dim; and none of what is scattered.
    assert "contiguous(reshape" not in text
    assert "reduce_scatter_tensor(mm.3" in text
    assert text.endswith("return [wait_tensor.4, wait_tensor.8, wait_tensor.9, wait_tensor.6, wait_tensor.7]")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: (x + w).view(24).view(2, 12).view(3, 8).sin(), ["add", "reshape", "sin"]),
        (lambda x, w: (x + w).view(1, 4, 6).transpose(0, 1).reshape(24).sin(), ["add", "reshape", "sin"]),
        (lambda x, w: (x + w).contiguous().t().t().sin(), ["add", "sin"]),
        (lambda x, w: (x + w).view(24).view(4, 6).sin(), ["add", "sin"]),
        (lambda x, w: (x + w).t().reshape(24).view(4, 6).sin(), ["add", "permute", "reshape", "sin"]),
    ],
)
def test_chains(function: Callable[..., torch.Tensor], expected: list[str]) -> None:
    found = rewritten(function)
    assert found == expected


def test_what_is_returned_shares_what_it_did() -> None:
    """A view that is returned stays, where the output would be the parameter or the batch itself."""
    for function in (lambda x, w: w.view(4, 6), lambda x, w: x.view(24).view(4, 6)):
        with torch.no_grad():
            program = program_of(Views(function), (torch.ones(4, 6),), training=False)
        local = rewrite(program, follow_plan(program, {}))
        values = [v for _, v in local.results]
        before = [v for _, v in rewrite(program, follow_plan(program, {}), passes=PASSES[:AT]).results]
        assert [v.op for v in values] == [v.op for v in before]


def test_what_is_copied_is_saved_and_not_copied_again() -> None:
    """The backward pass takes the row-major form that the forward pass has made, and not what that was made from."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = (x * w).t().reshape(24)
        return (rows.view(4, 6).exp() * rows.view(6, 4).sum()).sum()

    program = program_of(Views(function), (torch.ones(4, 6),))
    local = rewrite(program, follow_plan(program, {}))
    copies = [n for n in local.graph.graph.nodes if n.target is aten.reshape.default and _copies(n)]
    assert len(copies) == 1


def _copies(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.target is aten.permute.default


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("mlp", 0),
        ("gpt2", 1),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (("mlp", 1), ("mlp", 2), ("llama", 0), ("llama", 1), ("llama", 2), ("gpt2", 0), ("gpt2", 2))
        ),
    ],
)
def test_values_stay_to_the_last_bit(name: str, seed: int) -> None:
    program, dims, values = models.captured(name)
    plan = random_plan(program, dims, {"a": 2, "b": 2}, follow_plan(program, {}).cluster, seed, recompute=True)
    check_bits(program, replace(plan, fingerprint=program.fingerprint), values)


def check_bits(program: Program, plan: Plan, values: list[torch.Tensor]) -> None:
    locals_ = [rewrite(program, plan, passes=passes) for passes in (PASSES[:AT], PASSES[: AT + 1], PASSES)]
    before, *others = [compare(program, local, plan, values, torch.float64) for local in locals_]
    for after in others:
        assert torch.equal(after.loss, before.loss)
        assert before.gradients
        assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())
    assert count(locals_[1], *VIEWS) <= count(locals_[0], *VIEWS)


@pytest.mark.slow
def test_sharded_parameters_cost_no_views() -> None:
    """Fully sharded, a model's graphs have as few views as the graph of one device, but for the packing of buckets."""
    program, _, _ = models.captured("llama")
    counts = {}
    for recipe, axes in (("ddp", {"a": 1}), ("fsdp", {"a": 4})):
        plan = solve(program, axes, "a100-80gb", search=Search(recipe=recipe))
        local = rewrite(program, plan)
        step = cut(replace(local, graph=bind(local.graph, {"a": "a"}, {"a": 0})))
        nodes = [n for g in (step.forward, step.backward) if g is not None for n in g.graph.nodes]
        counts[recipe] = sum(n.target in VIEWS[:3] for n in nodes)
    # An embedding that is looked up in parts, and what a loss is computed from, may take a few of their own.
    assert counts["fsdp"] <= counts["ddp"] + 8
