"""Graphs of a prompt and of a token with a static cache, on one device (tests/integrations has ranks)."""

from __future__ import annotations

import pytest
import torch

from autopar.module.generation.decode import Decoding, rounded
from autopar.parallelize import parallelize
from tests.distributed.models import gpt2, token_batch


@pytest.mark.slow
def test_logits_are_those_of_the_whole_sequence() -> None:
    """Of two prompts, one of them padded on the left, and of the tokens after them."""
    eager = gpt2().eval()
    model = parallelize(gpt2().eval(), None, token_batch(0), cluster="cpu")
    ids = torch.tensor([[3, 9, 27, 17, 51], [0, 0, 5, 25, 61]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    decoding = Decoding(model._autopar, 12)
    new, at = ids, positions
    for count in range(4):
        found = decoding.step(new, mask, at)
        with torch.no_grad():
            expected = eager(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1:]
        assert float((found - expected).abs().max()) < 1e-12, count
        new, at = torch.randint(0, 64, (2, 1)), positions[:, -1:] + 1
        ids, positions = torch.cat([ids, new], 1), torch.cat([positions, at], 1)
        mask = torch.cat([mask, torch.ones_like(new)], 1)
    assert decoding.written == 8
    assert len(decoding.session.cache) == 2


def test_lengths_are_rounded_up() -> None:
    assert [rounded(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]
