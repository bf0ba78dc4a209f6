"""Models that are large enough for memory to matter and small enough for four processes of one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, dict[str, torch.Tensor]]


def llama(hidden: int = 256, layers: int = 3, batch: int = 16, sequence: int = 128, vocabulary: int = 256) -> Example:
    """A Llama of few layers over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=sequence, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, sequence))
    model: Any = LlamaForCausalLM(config)
    return model, {"input_ids": tokens, "labels": tokens}


def mixtral(hidden: int = 128, vocabulary: int = 256, batch: int = 32, sequence: int = 128) -> Example:
    """A Mixtral of 2 layers of 8 experts, of which a token has 2."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=max(sequence, 512), use_cache=False, tie_word_embeddings=False,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, sequence))
    model: Any = MixtralForCausalLM(config)
    return model, {"input_ids": tokens, "labels": tokens}


def unet(channels: int = 64, batch: int = 32, side: int = 16) -> Example:
    """A U-Net of one level, with attention in the middle."""
    from benchmarks.zoo.vision import UNet

    torch.manual_seed(0)
    shape = (batch, 4, side, side)
    return UNet(channels, 64), {"image": torch.randn(shape), "noise": torch.randn(shape), "time": torch.rand(batch)}


MODELS: dict[str, Callable[[], Example]] = {"llama": llama, "unet": unet}
