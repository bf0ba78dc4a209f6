"""``model.generate`` on four ranks, by graphs that leave parameters sharded, beside the same on one device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, llama, token_batch

pytestmark = [pytest.mark.distributed, pytest.mark.deep]


def qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double()


MODELS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "llama": (llama, (4,), {"recipe": "fsdp"}),
    "gpt2": (gpt2, (2, 2), {"recipe": "random", "seed": 2}),
    "qwen": (qwen, (2, 2), {"recipe": "random", "seed": 5}),
}

# Two prompts of other lengths, padded on the left, as tokenizers pad them for generation.
PROMPTS = torch.tensor([[3, 9, 27, 17, 51], [0, 0, 5, 25, 61]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])

CALLS: list[dict[str, Any]] = [
    {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": 7},
    {"inputs": PROMPTS, "max_new_tokens": 9, "do_sample": True, "top_k": 12, "repetition_penalty": 1.1},
    {"inputs": PROMPTS[:, :3], "max_new_tokens": 3, "min_new_tokens": 2, "eos_token_id": 7},
]  # fmt: skip
BEAMS: dict[str, Any] = {"inputs": PROMPTS, "max_new_tokens": 4, "num_beams": 2}


def lively(model: nn.Module) -> nn.Module:
    """Other weights, with which tokens do not just repeat."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6 if p.ndim > 1 else 1)
    return model.eval()


def generated(model: Any, call: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(11)
    config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "do_sample": False}
    found: torch.Tensor = model.generate(**{**config, **call})
    return torch.cat([found.flatten(), torch.rand(1)])  # and what is drawn next


def on_ranks(rank: int, name: str) -> tuple[list[torch.Tensor], list[str], float, int]:
    """Tokens, warnings, the part of the model that this rank has at most while it generates, and graphs made."""
    from autopar.module.generation import decode, generate
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    build, sizes, search = MODELS[name]
    model = lively(build())
    whole = sum(p.nbytes for p in model.parameters())
    parallel = parallelize(model, mesh_of(*sizes), token_batch(0), search=Search(**search), timeout=WAIT)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    generate.logger.addHandler(handler)
    try:
        found = [generated(parallel, call) for call in CALLS]
        graphs = len(decode._sessions[parallel._autopar].cache)
        beams = generated(parallel, BEAMS)
    finally:
        generate.logger.removeHandler(handler)
    part = sum(p._local_tensor.nbytes for p in parallel.parameters()) / whole
    return [*found, beams], said, part, graphs


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_device(four: Ranks, name: str) -> None:
    model = lively(MODELS[name][0]())
    expected = [generated(model, call) for call in (*CALLS, BEAMS)]
    assert len(expected[0].unique()) > 10
    for found, said, part, graphs in four.run(on_ranks, name):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert graphs == 2  # of a prompt and of a token, for all calls
        assert len(said) == 1 and "beam_search is neither greedy nor plain sampling" in said[0]
        assert part < 1
