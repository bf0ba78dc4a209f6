"""`flex_attention` is attention under its mask's function, or its formula; what cannot be either is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from autopar.compiler import program_of
from autopar.errors import CaptureError
from autopar.ir.ops.attention import attention
from autopar.ir.ops.sequence.masked_attention import attention_masked, attention_masked_backward
from autopar.verify.verify import verify

ROWS, TOKENS = 2, 16


class Flexible(nn.Module):
    """Attention whose functions are made of the model and the documents' numbers."""

    def __init__(self, functions: Callable[..., tuple[Any, Any]], function: Any = flex_attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.functions, self.function = functions, function
        self.q, self.kv, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, 5))
        self.table = nn.Parameter(torch.randn(4, 9))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return self.q(x).unflatten(-1, (4, 4)).transpose(1, 2), k, v

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask, score = self.functions(self, ids)
        n = x.shape[1]
        block = None if mask is None else create_block_mask(mask, ROWS, None, n, n, device="cpu")
        seen = self.function(*self.heads(x), score_mod=score, block_mask=block, enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    x = torch.randn(ROWS, TOKENS, 8, generator=torch.Generator().manual_seed(1)).double()
    return {"x": x, "ids": torch.tensor([[0] * 6 + [1] * 10, [0] * 13 + [1] * 3])}


def documents(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]), None


def window(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return lambda b, h, i, j: (i >= j) & (i - j < 5), None


def slopes(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return documents(m, ids)[0], lambda s, b, h, i, j: s + m.slopes[h] * (j - i)


def capped(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return documents(m, ids)[0], lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)


def relative(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return None, lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))


def learned(m: Any, ids: Tensor) -> tuple[Any, Any]:
    """What is learned by distance, behind a cap."""
    return window(m, ids)[0], lambda s, b, h, i, j: 3.0 * torch.tanh(0.5 * s) + m.table[h, (i - j).clamp(-4, 4) + 4]


FUNCTIONS = [documents, window, slopes, capped, relative, learned]


def expected(m: Flexible, x: Tensor, ids: Tensor, name: Any) -> Tensor:
    """By hand, with all scores."""
    q, k, v = m.heads(x)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    shown = (i >= j) & (i - j < 5) if name in (window, learned) else i >= j
    if name in (documents, slopes, capped):
        shown = shown & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2.0
    scores = scores + m.slopes[:, None, None] * (j - i) if name is slopes else scores
    scores = 2.0 * torch.tanh(scores / 2.0) if name is capped else scores
    scores = 3.0 * torch.tanh(scores / 2.0) + m.table[:, (i - j).clamp(-4, 4) + 4] if name is learned else scores
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    loss: Tensor = m.out((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)).square().mean()
    return loss


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [documents, window, learned, *(pytest.param(f, marks=pytest.mark.deep) for f in (slopes, capped, relative))],
)
def test_equal_values(name: Any) -> None:
    """Of a random plan with the formula by hand: loss and gradients."""
    model, given = Flexible(name).double(), batch()
    report = verify(model, given, {"a": 2, "b": 2}, plan="random", seed=1)
    assert max(report.max_error, report.capture_error) < 1e-10
    loss = expected(model, **given, name=name)
    torch.testing.assert_close(report.loss, loss.detach())
    loss.backward()
    for parameter, gradient in model.named_parameters():
        expected_ = torch.zeros_like(gradient) if gradient.grad is None else gradient.grad
        torch.testing.assert_close(report.gradients.get(parameter, torch.zeros_like(gradient)), expected_)
    found = [n for n in report.program.graph.graph.nodes if "autopar.attention" in str(n.target)]
    assert found
    assert all(n.target in (attention_masked, attention_masked_backward) for n in found) == (name is not relative)


def target_of(functions: Any, function: Any = flex_attention, given: Any = None) -> Any:
    given = batch() if given is None else given
    program = program_of(Flexible(functions, function), {"x": given["x"].float(), "ids": given["ids"]})
    return next((n for n in program.graph.graph.nodes if "autopar.attention" in str(n.target)), None)


@pytest.mark.slow
def test_masks_are_functions() -> None:
    """Also of a function that a model has compiled, as transformers does."""
    assert target_of(documents).args[4:8] == ('[["aten.eq.Tensor", "%0", "%1"]]', False, TOKENS, 0)
    found = target_of(window, torch.compile(flex_attention))
    assert found.target is attention_masked and found.args[3:8] == ([], "", False, 4, 0)
    found = target_of(relative)
    assert found.target is attention and found.args[6]
    assert target_of(lambda m, ids: (None, lambda s, b, h, i, j: s * torch.sigmoid(s))) is None


IDS = torch.zeros(ROWS, TOKENS, dtype=torch.int64)


def shorter(ids: Tensor) -> Any:
    return lambda b, h, i, j: ids[b, i] == 0


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            lambda m, ids: (lambda b, h, i, j: IDS[b, i] == IDS[b, j], None),
            "closes over a tensor of shape [2, 16] that is no",
        ),
        (
            lambda m, ids: (shorter(ids[:, :12]), None),
            "looks up 16 elements in dim 1 of a tensor",
        ),
        (lambda m, ids: (None, lambda s, b, h, i, j: s + m.slopes.sum()), "calls sum, which does not compute each"),
        (lambda m, ids: (None, lambda s, b, h, i, j: s + ids[b][i]), "takes a part of a tensor of 2 dims by 1 indices"),
    ],
)
def test_functions_that_are_refused(functions: Any, message: str) -> None:
    with pytest.raises(CaptureError) as found:
        target_of(functions)
    assert message in str(found.value) and "_mod" in str(found.value) and __file__ in str(found.value)


def sinks(m: Flexible, out: Tensor, log: Tensor) -> Tensor:
    """A sum of exponentials that has one more term, as of gpt-oss; and the logarithms by themselves."""
    total = torch.logaddexp(log, m.slopes.view(1, -1, 1))
    seen = m.out((out * torch.exp(log - total).unsqueeze(-1)).transpose(1, 2).flatten(2))
    loss: Tensor = seen.square().mean() + log.masked_fill(log == -torch.inf, 0.0).tanh().mean()
    return loss


class WithLogarithms(Flexible):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask, score = self.functions(self, ids)
        n = x.shape[1]
        block = None if mask is None else create_block_mask(mask, ROWS, None, n, n, device="cpu")
        asked = AuxRequest(lse=True, max_scores=True)
        out, aux = flex_attention(*self.heads(x), score, block, enable_gqa=True, return_aux=asked)
        return sinks(self, out, aux.lse) + aux.max_scores.clamp_min(-9.0).mean()


def some_see_nothing(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]) & (i > 2), None


def odd(m: Any, ids: Tensor) -> tuple[Any, Any]:
    return window(m, ids)[0], lambda s, b, h, i, j: s * torch.sigmoid(s)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [some_see_nothing, learned, odd, *(pytest.param(f, marks=pytest.mark.deep) for f in (documents, slopes, capped))],
)
def test_logarithms(name: Any) -> None:
    """Of a random plan with torch's formula: loss and gradients, which torch has on no CPU."""
    model, given = WithLogarithms(name).double(), batch()
    model.slopes = nn.Parameter(model.slopes)
    report = verify(model, given, {"a": 2, "b": 2}, plan="random", seed=1)
    assert max(report.max_error, report.capture_error) < 1e-10
    (q, k, v), at = model.heads(given["x"]), [torch.arange(n) for n in (ROWS, 4, TOKENS, TOKENS)]
    indices = [t.reshape([-1 if d == i else 1 for i in range(4)]) for d, t in enumerate(at)]
    scores, (mask, score) = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2.0, name(model, given["ids"])
    scores = scores if score is None else score(scores, *indices)
    scores = scores.masked_fill(~mask(*indices), -torch.inf)
    log = scores.logsumexp(-1)
    weights = (scores - log.masked_fill(log == -torch.inf, 0.0).unsqueeze(-1)).exp()
    loss = sinks(model, weights @ v.repeat_interleave(2, 1), log) + scores.amax(-1).detach().clamp_min(-9.0).mean()
    torch.testing.assert_close(report.loss, loss.detach())
    loss.backward()
    for parameter, gradient in model.named_parameters():
        if gradient.grad is not None:
            torch.testing.assert_close(report.gradients[parameter], gradient.grad)


def test_logarithms_that_nobody_reads_cost_nothing() -> None:
    """As transformers asks for them on GPUs, of all models."""
    found = target_of(window, lambda *args, **kwargs: flex_attention(*args, **kwargs, return_lse=True)[0])
    assert found.target is attention_masked and found.args[3:8] == ([], "", False, 4, 0)
    with pytest.raises(CaptureError, match="return_lse and return_aux are two ways"):
        target_of(window, lambda *a, **k: flex_attention(*a, **k, return_lse=True, return_aux=AuxRequest(lse=True))[0])
