"""Operators that take other samples along the batch: in microbatches and pipelines of the whole batch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, solve
from autopar.errors import InfeasibleError
from autopar.parallelize import parallelize
from autopar.search.options import Search
from autopar.verify.verify import verify

ROWS = torch.tensor([5, 3, 1, 7, 0, 2, 4, 6])

SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: h * h.max(0).values,
    "amax": lambda h: h / (1 + h.amax(0).abs()),
    "sort": lambda h: h.sort(0).values * h,
    "topk": lambda h: h * h.topk(3, 0).values.sum(0),
    "median": lambda h: h - h.median(0).values,
    "mode": lambda h: h - h.round().mode(0).values,
    "kthvalue": lambda h: h * h.kthvalue(3, 0).values,
    "quantile": lambda h: h - h.quantile(0.3, dim=0),
    "roll": lambda h: h * h.roll(1, 0),
    "flip": lambda h: h * h.flip(0),
    "cumsum": lambda h: h.cumsum(0),
    "argmax": lambda h: h.gather(0, h.argmax(0, keepdim=True)) * h,
    "index_select": lambda h: h.index_select(0, ROWS) * h,
    "index": lambda h: h[ROWS] * h,
    "index_add": lambda h: torch.zeros_like(h).index_add(0, ROWS, h).square(),
    "slice": lambda h: h[1:] - h[:-1],
    "cat": lambda h: torch.cat([h, h.flip(0)]) * torch.arange(16.0, dtype=h.dtype)[:, None],
    "similarities": lambda h: (h @ h.t()).softmax(1),
}
DEEP = ("amax", "mode", "kthvalue", "quantile", "cumsum", "index_select", "index_add", "slice")
CASES = [pytest.param(n, marks=pytest.mark.deep) if n in DEEP else n for n in SELECTIONS]


class OfActivations(nn.Module):
    """What is selected depends on parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.name = nn.Linear(6, 6), nn.Linear(6, 6), name

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        return SELECTIONS[self.name](hidden).square().mean() + self.b(hidden).square().mean()


class OfBatch(OfActivations):
    """What is selected is of the batch alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x).tanh())
        return (hidden * (1 + SELECTIONS[self.name](x).sum())).square().mean()


def rows() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_pins(name: str) -> Any:
    marks = pytest.mark.deep if name in (*DEEP, "sort", "index", "cat", "similarities") else ()
    return pytest.param(name, {"microbatches": 2}, marks=marks)


IN_STAGES = pytest.param("roll", {"microbatches": 2, "stages": 2})


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "pins"), [*(with_pins(n) for n in SELECTIONS), IN_STAGES])
def test_what_takes_other_samples_is_named(name: str, pins: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError, match=rf"microbatches: aten\.\S+ \(\w+, {__file__}:\d+\) takes something"):
        verify(OfActivations(name).double(), (rows(),), {"a": 2}, pins=pins)


def test_the_operator_that_is_named_is_the_one() -> None:
    with pytest.raises(InfeasibleError, match=r"aten\.topk\."):
        verify(OfActivations("topk").double(), (rows(),), {"a": 2}, microbatches=2)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CASES)
def test_what_is_of_the_batch_alone_is_computed_of_the_whole(name: str) -> None:
    plain = OfBatch(name).double()
    model: Any = parallelize(OfBatch(name).double(), None, search=Search(pins={"microbatches": 2}))
    losses = [m(rows()) for m in (plain, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.deep
@pytest.mark.parametrize("name", SELECTIONS)
def test_random_plans_of_the_whole_batch(name: str) -> None:
    model = OfActivations(name).double()
    report = verify(model, (rows(),), {"a": 2}, plan="random", seed=2)
    loss = model(rows())
    loss.backward()
    torch.testing.assert_close(report.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(report.gradients[key], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.deep
def test_mixtral_plans_where_memory_binds() -> None:
    """Less memory by computing again; and its experts' tokens, which are sorted, may be those of microbatches."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixtral() -> Any:
        torch.manual_seed(0)
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
                use_cache=False,
            )
        )  # fmt: skip

    ids = torch.randint(0, 32, (8, 32), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    program = program_of(mixtral(), batch)
    budget = 0.7 * sum(solve(program, {"a": 2}, "h100", memory="1GiB").predicted.peak_bytes.values())
    plan = solve(program, {"a": 2}, "h100", memory=budget)
    assert sum(plan.predicted.peak_bytes.values()) <= budget
    report = verify(mixtral(), batch, {"a": 2}, plan=plan)
    plain = mixtral()
    plain(**batch).loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(report.gradients[name].float(), parameter.grad, rtol=1e-3, atol=1e-5)
    parts = solve(program, {"a": 2}, "h100", search=Search(pins={"microbatches": 2}))
    assert verify(mixtral(), batch, {"a": 2}, plan=parts).max_error < 1e-10
