"""Graphs run whatever strides their kernels make: those that a trace has seen are not those of every run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar._torch_compat import suggest_memory_format
from autopar.verify.reference import EAGER
from tests.crossed import crossed


class FusedProjection(nn.Module):
    """Queries, keys and values of one projection, as in vision transformers; what attention makes is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        made = functional.scaled_dot_product_attention(q, k, v)
        return self.out(made.transpose(1, 2).reshape(rows, tokens, width)).square().mean()


def test_the_captured_graph_of_fused_attention_runs() -> None:
    torch.manual_seed(0)
    model = FusedProjection().double()
    report = autopar.verify(model, (torch.randn(4, 6, 16, dtype=torch.float64),), {"a": 2}, plan="random")
    assert report.max_error < 1e-12


class Drawn(nn.Module):
    """Numbers drawn behind a function whose kernel lays its result out otherwise than fake tensors do."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.function == "batch norm of sequences":
            h = self.dropout(self.norm(h.transpose(1, 2)).transpose(1, 2))
        elif self.function == "batch norm of images":
            image = h.reshape(4, 2, 3, 8).permute(0, 3, 2, 1)
            h = self.norm2(image)
            h = h + torch.empty_like(h).normal_()
        elif self.function == "unfold":
            h = self.dropout(functional.unfold(h.unsqueeze(1), (1, 8)).transpose(1, 2))
        elif self.function == "normal":
            h = torch.normal(h.transpose(0, 1), torch.full_like(h.transpose(0, 1), 0.5)).square() + h.transpose(0, 1)
        else:
            image = h.reshape(4, 2, 3, 8).permute(0, 3, 1, 2)  # channels last
            h = torch.roll(image, 1, 2)
            h = h + torch.bernoulli(torch.full_like(h, 0.5))
        return h.square().mean()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("function", "plan"),
    crossed(["batch norm of sequences", "batch norm of images", "roll", "unfold", "normal"], ["random", None]),
)
def test_numbers_are_drawn_in_the_order_of_the_kernels_strides(function: str, plan: str | None) -> None:
    torch.manual_seed(0)
    model, x = Drawn(function).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    plain, parallel = copy.deepcopy(model), autopar.parallelize(copy.deepcopy(model), None)
    losses = []
    for one in (plain, parallel):
        torch.manual_seed(1)
        losses.append(one(x))
        losses[-1].backward()
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-12)
    for name, gradient in parallel.full_gradients().items():
        assert torch.allclose(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12), name
    report = autopar.verify(model, (x,), {"a": 2}, plan=plan)
    assert report.reference == EAGER
    assert report.max_error < 1e-9, report.worst  # the bias has no gradient but rounding


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        lambda x: torch.roll(x, 1, 2),
        lambda x: x.roll(1, 2),
    ],
)
@pytest.mark.parametrize("order", [(0, 3, 1, 2), (0, 3, 2, 1), (0, 1, 2, 3)])
def test_kernels_give_the_format_that_an_argument_suggests(
    call: Callable[[torch.Tensor], torch.Tensor], order: tuple[int, ...]
) -> None:
    """What the trace relies on, of the kernels themselves."""
    x = torch.randn(4, 5, 6, 8).permute(order)
    assert call(x).is_contiguous(memory_format=suggest_memory_format(x))
