"""Attention that a model computes by its formula is captured as attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.compiler import program_of
from autopar.ir.ops.attention import attention
from autopar.ir.ops.formula.attention_rows import attention_rows
from autopar.ir.ops.sequence.attention_sinks import attention_with_sinks
from autopar.ir.ops.sequence.send_block import send_block
from autopar.verify.compare import EquivalenceReport
from autopar.verify.verify import verify
from tests.crossed import is_deep

ROWS, TOKENS, HEADS, KEYS, HEAD = 2, 8, 4, 2, 4
BOUND = 1e-10
SOFTMAX = torch.ops.aten._softmax.default


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[:, None] >= at


def sinks(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As gpt-oss has it, with a mask of numbers and in a numerically safe form."""
    k, v = (t[:, :, None].expand(-1, -1, HEADS // KEYS, -1, -1).reshape(q.shape) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = scores + torch.where(causal(x), 0.0, torch.finfo(torch.float32).min)[None, None].to(x.dtype)
    own = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scores, own], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = functional.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(functional.dropout(weights, p=0.0, training=True), v)


def distances(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM has it: heads are rows of a batched product, to which what grows with the key's position is added."""
    k, v = (t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v))
    slopes = 2.0 ** -torch.arange(HEADS, dtype=x.dtype)
    alibi = (slopes[:, None, None] * torch.arange(TOKENS)).expand(ROWS, HEADS, 1, TOKENS).reshape(-1, 1, TOKENS)
    q, k, v = (t.reshape(ROWS * HEADS, TOKENS, HEAD) for t in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.5, alpha=0.7)
    scores = scores.view(ROWS, HEADS, TOKENS, TOKENS).masked_fill(~causal(x), torch.finfo(x.dtype).min)
    weights = nn.Softmax(-1)(scores).view(ROWS * HEADS, TOKENS, TOKENS)
    return torch.bmm(weights, v).view(ROWS, HEADS, TOKENS, HEAD)


def learned(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias that is learned, keys of one head for all, and operators of Python."""
    scores = (q @ k[:, :1].mT + m.bias) / math.sqrt(HEAD)
    return torch.where(causal(x), scores, -math.inf).softmax(-1) @ v[:, :1]


def dropped(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dropout of the weights, in the order in which models draw."""
    scores = functional.dropout(q, 0.25, training=True) @ k[:, :1].mT
    return functional.dropout(scores.softmax(-1).to(x.dtype), p=0.5) @ v[:, :1] + functional.dropout(q, 0.25)


def capped(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma 2 has it, and a multiple of that."""
    scores = torch.tanh(torch.matmul(q, k[:, :1].transpose(2, 3)) * 0.5 / 3.0) * 3.0
    return torch.where(causal(x), 2.0 * scores, torch.finfo(x.dtype).min).softmax(-1) @ v[:, :1]


def of_cogview(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As LayoutLM has it: scores less the largest, in a form that does not overflow."""
    scores = (q @ k[:, :1].mT + m.bias) / 32
    return ((scores - scores.amax(dim=-1).unsqueeze(-1)) * 32).softmax(-1) @ v[:, :1]


def capped_and_dropped(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k[:, :1].mT) + m.bias
    return functional.dropout(scores.softmax(-1), 0.5) @ v[:, :1]


def hidden_by_numbers(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(causal(x).flip(0, 1).roll(1, 0).logical_and(causal(x)), 0.0, torch.finfo(torch.float32).min)
    return (q @ k[:, :1].mT + mask).softmax(-1) @ v[:, :1]


def in_place(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MPNet has it."""
    scores = torch.matmul(q, k[:, :1].transpose(-1, -2))
    scores /= 2.0
    scores += m.bias
    scores.mul_(0.5).masked_fill_(~causal(x), torch.finfo(x.dtype).min)
    return scores.softmax(-1) @ v[:, :1]


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "sinks": sinks, "distances": distances, "learned": learned, "dropped": dropped, "capped": capped,
    "cogview": of_cogview, "capped and dropped": capped_and_dropped, "hidden by numbers": hidden_by_numbers,
    "in place": in_place,
}  # fmt: skip


class ByFormula(nn.Module):
    """Layers of attention, each by a formula of its own."""

    def __init__(self, *formulas: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.formulas = formulas
        wide = (HEADS + 2 * KEYS) * HEAD
        self.qkv = nn.ModuleList(nn.Linear(HEADS * HEAD, wide) for _ in formulas)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        for layer, formula in zip(self.qkv, self.formulas, strict=True):
            heads = layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            q, k, v = heads.split((HEADS, KEYS, KEYS), 1)
            x = x + formula(self, x, q, k, v).transpose(1, 2).flatten(2)
        return x.square().mean() + 0 * (self.sinks.sum() + self.bias.sum())


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, TOKENS, HEADS * HEAD, generator=torch.Generator().manual_seed(1))}


def targets(model: nn.Module) -> list[Any]:
    return [n.target for n in capture(model, batch()).graph.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(1, 6))])
def test_formulas_are_attention(seed: int) -> None:
    report = verify(ByFormula(*FORMULAS.values()), batch(), {"a": 2, "b": 2}, plan="random", seed=seed)
    assert max(report.max_error, report.capture_error) < BOUND
    found = [n.target for n in report.program.graph.graph.nodes]
    assert SOFTMAX not in found and sum("attention" in str(t) for t in found) >= 2 * len(FORMULAS)


@pytest.mark.slow
def test_arguments_by_name() -> None:
    """Of functions that are given them so, in any order; what is not known is a formula, and no error."""
    softmax, least = functional.softmax, torch.finfo(torch.float32).min

    def products(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(other=k[:, :1].mT, input=q).mul(other=0.5)
        return softmax(dim=-1, input=torch.div(scores, other=2.0).add(other=m.bias)) @ v[:, :1]

    def masks(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k[:, :1].transpose(dim0=-1, dim1=-2)).masked_fill(value=least, mask=~causal(x))
        return torch.where(causal(x), scores, other=least).softmax(dim=-1) @ v[:, :1]

    def joined(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        scores = torch.cat(tensors=[q @ k[:, :1].mT, own], dim=-1)
        scores = scores - torch.max(input=scores, dim=-1, keepdim=True).values
        return functional.dropout(input=scores.softmax(-1), p=0.0)[..., :-1] @ v[:, :1]

    def others(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.div(q @ k[:, :1].mT, 2.0, rounding_mode="floor").add(m.bias, alpha=2)
        return torch.matmul(input=scores.softmax(-1), other=v[:, :1])

    report = verify(ByFormula(products, masks, joined, others), batch(), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < BOUND
    forward = [n.target for n in capture(ByFormula(products, masks, joined, others), batch()).graph.graph.nodes]
    assert (forward.count(attention), forward.count(SOFTMAX)) == (3, 1)


def test_masks_are_read() -> None:
    """Keys that numbers hide, in the place of scores or added to them."""

    def filled(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k[:, :1].mT).masked_fill(~causal(x), torch.finfo(x.dtype).min).softmax(-1) @ v[:, :1]

    nodes = program_of(ByFormula(sinks, filled), batch()).graph.graph.nodes
    kernels = [n for n in nodes if n.target is attention]
    assert [n.args[3:7] for n in kernels] == [(None, None, 0.0, True)] * 2


def in_a_ring(formula: Callable[..., Tensor], count: int) -> EquivalenceReport:
    """Of random plans the first whose keys go round; in quick tests no other is drawn after it."""
    found = list[EquivalenceReport]()
    for seed in range(count):
        report = verify(ByFormula(formula), batch(), {"a": 4}, plan="random", seed=seed)
        assert report.max_error < BOUND
        if ("qk.0",) in report.plan.choices.values():
            found.append(report)
            if not is_deep():
                break
    return found[0]


def test_sinks_beside_keys_in_a_ring() -> None:
    """Keys, values and their gradients are sent, of the heads that they have."""
    ring = in_a_ring(sinks, 3)
    (kernel, *_) = [n for n in ring.program.graph.graph.nodes if n.target is attention]
    assert kernel.args[1].meta["val"].shape[1] == KEYS
    assert sum(n.target is send_block for n in ring.program.graph.graph.nodes) >= 3


def test_gradients_of_sinks() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = draw(1, 2, 3, 2), draw(1, 1, 3, 2), draw(1, 1, 3, 2), draw(1, 2, 3, 3), draw(1, 2, 3)

    def call(*given: Tensor) -> Tensor:
        return attention_with_sinks(*given, 0.7)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_gradients_of_rows() -> None:
    """Of a cap and a bias, and gradients of these."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (1, 2, 3, 3)
    tensors = tuple(torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)

    def call(*given: Tensor) -> Tensor:
        found: Tensor = attention_rows(*given, None, 0.0, 0.7, 1.5, False)[0]
        return found

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_a_cap_and_keys_in_a_ring() -> None:
    """Of scores that are capped no device has those of all keys."""
    ring = in_a_ring(capped, 4)
    shapes = [n.meta["val"].shape for n in ring.program.graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert all(TOKENS not in s[-2:-1] or s[-1] != TOKENS for s in shapes if len(s) == 4)


def written_to(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = k[:, :1].clone()
    weights = (q @ keys.mT).softmax(-1)
    keys.mul_(2.0)
    return weights @ v[:, :1] + keys


def view_written_to(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k[:, :1].mT
    same = scores.view(ROWS, HEADS, TOKENS, TOKENS)
    scores += m.bias
    return same.softmax(-1) @ v[:, :1]


def bias_written_to(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias, scores = m.bias * 2.0, q @ k[:, :1].mT
    scores += bias
    bias.mul_(3.0)
    return scores.softmax(-1) @ v[:, :1] + bias.mean()


def without_gradients(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = (q @ k[:, :1].mT).softmax(-1)
    return weights @ v[:, :1]


def rounded(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.softmax(q @ k[:, :1].mT, dim=-1, dtype=torch.bfloat16).to(x.dtype) @ v[:, :1]


def capped_twice(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(q @ k[:, :1].mT)).softmax(-1) @ v[:, :1]


def of_queries(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].mT).softmax(-2) @ v[:, :1]


def hidden(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The batch says which keys are hidden: in its first sample all of them."""
    seen = torch.tensor([False, True])[:, None, None, None] & (x[:, None, None, :, 0] > -1)
    scores = torch.where(seen, q @ k[:, :1].mT, torch.finfo(x.dtype).min)
    if m.sink:
        own = m.sinks.view(1, -1, 1, 1).expand(ROWS, -1, TOKENS, 1)
        return torch.cat([scores, own], -1).softmax(-1)[..., :-1] @ v[:, :1]
    return scores.softmax(-1) @ v[:, :1]


@pytest.mark.slow
def test_queries_that_see_no_key() -> None:
    """A mean of all keys, whose gradients no kernel has, some rows at a time; or with a sink nothing."""
    for sink in (False, True):
        model = ByFormula(hidden)
        model.sink = sink
        report = verify(model, batch(), {"a": 2}, plan="random", seed=1)
        assert max(report.max_error, report.capture_error) < BOUND
        found = [n.target for n in report.program.graph.graph.nodes]
        assert SOFTMAX not in found and any("attention" in str(t) for t in found)


OTHERS = (
    written_to, view_written_to, bias_written_to, without_gradients, rounded, of_queries, capped_twice,
)  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("formula", OTHERS)
def test_other_formulas_stay(formula: Callable[..., Tensor]) -> None:
    found = targets(ByFormula(formula))
    assert SOFTMAX in found and attention not in found


@pytest.mark.slow
def test_other_formulas_are_what_they_are() -> None:
    formulas = [f for f in OTHERS if f is not rounded]
    assert verify(ByFormula(*formulas), batch(), {"a": 2}, plan="random").max_error < BOUND


def test_weights_that_others_read_stay_beside_it() -> None:
    def read(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k[:, :1].mT).softmax(-1)
        return weights @ v[:, :1] + weights.square().mean()

    report = verify(ByFormula(read), batch(), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < BOUND
    found = [n.target for n in report.program.graph.graph.nodes]
    assert SOFTMAX in found and attention in found
