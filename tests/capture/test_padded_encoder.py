"""`nn.TransformerEncoder` in evaluation has zeros where sequences are padded, as in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar import parallelize, verify

D = torch.float64


class Encoder(nn.Module):
    def __init__(self, masks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, dtype=D)
        self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8, dtype=D))
        self.masks = masks

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        padded = torch.arange(4) >= lengths[:, None]
        if self.masks == "within":  # sequences are not packed then
            padded = padded.roll(-1, 1)
        if self.masks == "added":
            y = self.encoder(x, None, torch.zeros(4, 4, dtype=D).masked_fill(padded, -torch.inf))
        else:
            y = self.encoder(x, src_key_padding_mask=padded)
        return y.exp().mean((1, 2))  # of the norm's own numbers the mean is zero


@pytest.mark.some(1)
@pytest.mark.parametrize("masks", ["at the end", "within", "added"])
def test_evaluation_and_training_are_eagers(masks: str) -> None:
    model, x, lengths = Encoder(masks), torch.randn(4, 4, 8, dtype=D), torch.tensor([4, 2, 3, 1])
    parallel = parallelize(copy.deepcopy(model), None)
    for training in (False, True):
        model.train(training), parallel.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(parallel(x, lengths), model(x, lengths))


def test_plan() -> None:
    model, x = Encoder("at the end").eval(), torch.randn(4, 4, 8, dtype=D)
    with torch.no_grad():
        report = verify(model, (x, torch.tensor([4, 2, 3, 1])), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < 1e-10
