"""Layers whose traced form is not what eager mode computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import parallelize, verify

D = torch.float64


class Recurrent(nn.Module):
    """Recurrent layers, in training."""

    def __init__(self, kind: str, bidirectional: bool, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = getattr(nn, kind)(
            4, 3, 2, dropout=0.4, bidirectional=bidirectional, batch_first=batch_first, dtype=D
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, last = self.layers(x)
        last = last[1] if isinstance(last, tuple) else last
        return output.square().mean() + last.sum()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "bidirectional", "batch_first"), [("LSTM", False, True), ("GRU", False, False), ("RNN", True, False)]
)
def test_dropout_between_recurrent_layers(kind: str, bidirectional: bool, batch_first: bool) -> None:
    plain = Recurrent(kind, bidirectional, batch_first)
    model = parallelize(Recurrent(kind, bidirectional, batch_first), None)
    x = torch.randn(2, 2, 4, dtype=D, generator=torch.Generator().manual_seed(1))
    losses = []
    for m in (model, plain):
        torch.manual_seed(2)
        losses.append(m(x))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.slow
def test_dropout_between_recurrent_layers_on_two_devices() -> None:
    x = torch.randn(2, 2, 4, dtype=D, generator=torch.Generator().manual_seed(1))
    assert verify(Recurrent("GRU", True, True), (x,), {"a": 2}, plan="random", seed=1).max_error < 1e-12


class Decodes(nn.Module):
    """A transformer's decoder under a mask of one's own."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=D)
        self.layers = nn.TransformerDecoder(layer, 1)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x, x, tgt_mask=self.mask).square().mean()


MASKS = {
    "causal": nn.Transformer.generate_square_subsequent_mask(3, dtype=D),
    "another": torch.tensor([[0.0, -1.0, 2.0]] * 3, dtype=D),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_transformers(name: str) -> None:
    """Torch looks at their values, for which kernel to take."""
    plain, model = Decodes(MASKS[name]), parallelize(Decodes(MASKS[name]), None)
    x = torch.randn(2, 3, 4, dtype=D, generator=torch.Generator().manual_seed(1))
    for m in (plain, model):
        m(x).backward()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
