"""Cheap values are recomputed from what is saved besides, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.passes import DETERMINISTIC_PASSES
from autopar.runtime.compiled.recompute_cheap import recompute_cheap
from autopar.runtime.step.bind import bind
from autopar.runtime.step.partition import ForwardBackward, cut, saved_bytes


class Gated(nn.Module):
    """A gate whose activation follows from what it is of; the model writes a buffer that the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.tanh(self.up(x) * self.scale)
        self.scale = self.scale * 2
        return self.down(nn.functional.silu(self.gate(before)) * self.up(x)).square().sum()


def graphs() -> ForwardBackward:
    program = program_of(Gated(), (torch.randn(4, 8),))
    plan = solve(program, {"a": 1}, Cluster.preset("cpu"))
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    return cut(replace(local, graph=bind(local.graph, {"a": "a"}, {"a": 0})))


def run(graphs: ForwardBackward, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    assert graphs.backward is not None
    values = list(graphs.forward(*tensors))
    outputs, saved = values[: len(graphs.outputs)], values[len(graphs.outputs) :]
    tangents = [torch.ones(())] * len(graphs.tangents)
    return outputs, list(graphs.backward([*saved, *tangents]))


@pytest.fixture
def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(n.meta["val"].shape, generator=generator)
        for n in graphs().forward.graph.nodes
        if n.op == "placeholder"
    ]


def test_the_same_results_of_less_saved(tensors: list[Tensor]) -> None:
    before = graphs()
    after = recompute_cheap(before)
    for expected, found in zip(run(before, tensors), run(after, tensors), strict=True):
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
    silu = next(n.name for n in before.forward.graph.nodes if n.target is torch.ops.aten.silu.default)
    assert silu in before.saved
    assert silu not in after.saved
    assert saved_bytes(after) < saved_bytes(before)
    assert after.backward is not None
    assert torch.ops.aten.silu.default in {n.target for n in after.backward.graph.nodes}


def test_what_a_matrix_product_reads_stays_saved() -> None:
    """It is in memory anyhow, and the backward's product would have to write it again."""
    before = graphs()
    after = recompute_cheap(before)
    tanh = next(n for n in before.forward.graph.nodes if n.target is torch.ops.aten.tanh.default)
    assert tanh.name in before.saved
    assert tanh.name in after.saved


def test_buffers_that_are_written_are_found_again() -> None:
    before = graphs()
    after = recompute_cheap(before)
    assert before.overwritten
    assert {before.saved[i] for i in before.overwritten} == {after.saved[i] for i in after.overwritten}


def test_inference_has_no_second_graph() -> None:
    only = replace(graphs(), backward=None)
    assert recompute_cheap(only) is only
