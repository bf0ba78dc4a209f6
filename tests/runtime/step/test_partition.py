"""The joint graph in two, and without its gradient collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.step.bind import bind
from autopar.runtime.step.no_sync import split_reductions
from autopar.runtime.step.partition import cut, saved_bytes
from autopar.search.options import Search
from tests.distributed.models import slow_devices


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).square().mean()


def program(training: bool = True) -> Program:
    return program_of(Tower(), (torch.empty(8, 8, device="meta"),), training=training)


def on_axis(whole: Program, pins: dict[str, Any]) -> tuple[Plan, Program]:
    plan = solve(whole, {"a": 2}, slow_devices(), search=Search(pins=pins))
    local = rewrite(whole, plan)
    return plan, replace(local, graph=bind(local.graph, {"a": "0"}, {"a": 0}))


def test_the_two_graphs_compute_what_the_model_does() -> None:
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(8, 8)
    whole = program()
    plan = solve(whole, {"a": 1}, "cpu")
    step = cut(rewrite(whole, plan))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "0": x}
    with torch.no_grad():
        values = list(step.forward(*(tensors[i.name].clone() for i in step.inputs)))
    outputs, saved = values[: len(step.outputs)], values[len(step.outputs) :]
    model(x).backward()
    found = dict(zip(step.outputs, outputs, strict=True))
    for output, value in found.items():
        if output.kind == "buffer":
            torch.testing.assert_close(value, dict(model.named_buffers())[output.name])
    arguments = [*saved, *(torch.ones(()) for _ in step.tangents)]
    assert step.backward is not None
    gradients = step.backward(arguments)
    assert arguments == [], "the backward graph frees what it has used"
    for output, gradient in zip(step.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, dict(model.named_parameters())[output.name].grad)
    assert saved_bytes(step) == sum(t.numel() * t.element_size() for t in saved)


def test_inference_has_no_backward_graph() -> None:
    step = cut(program(training=False))
    assert step.backward is None
    assert step.saved == ()


def test_postponed_graphs_split_off_every_gradient_collective() -> None:
    _, local = on_axis(program(), {"batch.0": ("S(0)",), "*.weight": ("R",), "*.bias": ("R",)})
    step = cut(local)
    assert step.backward is not None

    def reductions(graph: torch.fx.GraphModule) -> int:
        return sum(bool(getattr(info(n).collective, "gradient", False)) for n in graph.graph.nodes)

    compute, reduce = split_reductions(step.backward)
    assert reductions(step.backward) > 0
    assert (reductions(compute), reductions(reduce)) == (0, reductions(step.backward))
