"""Language models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo.parts import SEQUENCE, VOCABULARY, Tensors, text, tokens

HIDDEN = 32
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 2 * HIDDEN, "max_position_embeddings": 16,
}  # fmt: skip
GROUPED = PLAIN | {"num_key_value_heads": 2, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

Family = Callable[[], tuple[nn.Module, Tensors]]


def build(name: str, kind: str, settings: dict[str, Any]) -> tuple[nn.Module, Tensors]:
    """The model ``name + kind`` of transformers from its configuration, with token ids as their own labels."""
    torch.manual_seed(0)
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**settings)), text()


def causal(name: str, settings: dict[str, Any]) -> Family:
    """A causal language model."""
    return partial(build, name, "ForCausalLM", settings)


def masked(name: str, settings: dict[str, Any]) -> Family:
    """A masked language model."""
    return partial(build, name, "ForMaskedLM", settings)


GPT2 = {
    "vocab_size": VOCABULARY, "n_positions": 16, "n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
OPT = PLAIN | {
    "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0, "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
BLOOM = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 1, "n_head": 4, "use_cache": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
FALCON = PLAIN | {"use_cache": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
MAMBA = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 1, "state_size": 8, "time_step_rank": 4,
    "use_cache": False,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 2 * HIDDEN, "num_layers": 1, "num_heads": 4,
    "num_decoder_layers": 1, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
DEEPSEEK = GROUPED | EXPERTS | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def t5() -> tuple[nn.Module, Tensors]:
    """An encoder and a decoder with relative positions."""
    model, batch = build("T5", "ForConditionalGeneration", T5)
    return model, batch | {"labels": tokens(length=SEQUENCE // 2, seed=1)}


FAMILIES: dict[str, Family] = {
    "llama": causal("Llama", GROUPED),
    "mistral": causal("Mistral", GROUPED | {"sliding_window": 4}),
    "qwen3": causal("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma2": causal("Gemma2", GROUPED | {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 2}),
    "gpt-neox": causal("GPTNeoX", PLAIN | {"use_cache": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi": causal("Phi", PLAIN | {"use_cache": False}),
    "bert": masked("Bert", PLAIN | NO_DROPOUT),
    "roberta": masked("Roberta", PLAIN | NO_DROPOUT),
    "opt": causal("OPT", OPT),
    "bloom": causal("Bloom", BLOOM),
    "falcon": causal("Falcon", FALCON),
    "mamba": causal("Mamba", MAMBA),
    "gpt2": partial(build, "GPT2", "LMHeadModel", GPT2),
    "t5": t5,
    "mixtral": causal("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": causal("Qwen3Moe", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "deepseek-v3": causal("DeepseekV3", DEEPSEEK),
}
