"""Kernels get the strides that they ask for, and copies are made and counted where they are needed."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.ir.node_info import info
from autopar.ir.program import Program
from autopar.memory.liveness import liveness
from autopar.passes import DETERMINISTIC_PASSES, with_any_strides
from autopar.rules.shapes.known_strides import known_strides
from autopar.rules.strides import with_strides
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.simulate.graph_tasks import node_seconds
from autopar.verify import emulate as emulation
from autopar.verify.verify import compare, global_values
from tests import models as zoo

aten = torch.ops.aten
AXES = {"a": 2}


class Norm(nn.Module):
    """A group norm of what a linear layer gives, turned or not."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.f, self.g, self.turned = nn.Linear(4, 4), nn.GroupNorm(2, 4), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.f(x)
        return self.g(h.transpose(1, 2) if self.turned else h.unflatten(1, (4, -1)).transpose(1, 1)).square().mean()


def rewritten(program: Program, seed: int = 0, passes=DETERMINISTIC_PASSES):
    plan = random_plan(program, analyze(program), AXES, Cluster.preset("cpu"), seed)
    plan = replace(plan, fingerprint=program.fingerprint)
    return rewrite(program, plan, passes=passes), plan


def copies(program: Program) -> list[str]:
    """Operators in front of which something is brought into strides."""
    found = [n for n in program.graph.graph.nodes if n.target in (aten.contiguous.default, with_strides)]
    return [
        str(u.target) for n in found if info(n).moved_value is None for u in n.users if "backward" not in str(u.target)
    ]


@pytest.mark.parametrize("turned", [True, False])
def test_a_permutation_is_copied_and_the_copy_counts(turned: bool) -> None:
    program = program_of(Norm(turned), (torch.randn(2, 8, 4),))
    (norm,) = (n for n in program.graph.graph.nodes if n.target is aten.native_group_norm.default)
    assert analyze(program).operators[norm].copied == ((0,) if turned else ())
    one = replace(random_plan(program, analyze(program), {}, Cluster.preset("cpu"), 0), fingerprint=program.fingerprint)
    local = rewrite(program, one)
    made = next(n for n in local.graph.graph.nodes if n.target is aten.native_group_norm.default)
    copied = made.args[0].target is aten.contiguous.default
    assert copied == turned
    assert made.args[1].target is aten.contiguous.default  # a parameter may lie in any way
    if not turned:
        return
    seconds = node_seconds(local, one)
    assert seconds[made.args[0].name] > 0 and made.args[1].name not in seconds
    taken = {c.node: c.size for c in liveness(local, one) if c.starts and c.node is not None}
    assert taken[made.args[0]] == 2 * 8 * 4 * 4 and made.args[1] not in taken


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gpt2", "encoder"])
def test_transformers_need_none(name: str) -> None:
    assert copies(rewritten(zoo.captured(name)[0], seed=2)[0]) == []


class Complex(nn.Module):
    """What asks for strides of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.f(x).transpose(1, 2).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(h).exp()).square().mean()


class Attention(nn.Module):
    """Heads whose elements are not together."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(8, 24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(2, 3, 2, 4, 4).transpose(-1, -2).unbind(1)
        return F.scaled_dot_product_attention(q, k, v).square().mean()


MODELS = {
    "norm": (lambda: Norm(True), (2, 8, 4)),
    "complex": (Complex, (2, 8, 4)),
    "attention": (Attention, (2, 8, 4)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*MODELS, "cnn", "gpt2"])
def test_what_is_known_of_strides_is_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that is said to be known lies in memory as propagation thinks, on every device."""
    if name in MODELS:
        build, shape = MODELS[name]
        model, batch = build().double(), (torch.randn(shape, dtype=torch.float64),)
        program = program_of(model, batch)
        values = global_values(program, model, batch)
    else:
        program, _, values = zoo.captured(name)
    local, plan = rewritten(program)
    known = {n.name: n.meta["val"] for n in known_strides(local.graph)}
    step, checked = emulation._run_node, []

    def watched(node, environment, *rest):
        results = step(node, environment, *rest)
        value = known.get(node.name)
        emulated = len(results) == AXES["a"]  # and not the reference, of which nodes have the same names
        if emulated and isinstance(value, torch.Tensor) and node.target is not operator.getitem:
            for result in results:
                pairs = zip(result.shape, result.stride(), value.stride(), strict=True)
                assert all(a == b for n, a, b in pairs if n > 1), (node.name, result.stride(), value.stride())
            checked.append(node)
        return results

    monkeypatch.setattr(emulation, "_run_node", watched)
    report = compare(program, local, plan, values, torch.float64)
    assert report.max_error < 1e-10
    assert len(checked) > 10


def test_everywhere_means_everywhere() -> None:
    program = zoo.captured("gpt2")[0]
    passes = with_any_strides(DETERMINISTIC_PASSES)
    found = copies(rewritten(program, seed=2, passes=passes)[0])
    assert found.count("autopar.attention.default") == 3
