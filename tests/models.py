"""Small models and batches that the tests share: seeded weights, no dropout, every dim a multiple of 8 where it counts.

Each function returns ``(model, batch)``; sizes are chosen so that batch, sequence, heads and hidden divide by 8 (or by
four where `heads` is 4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import autopar.strategies  # noqa: F401  registers every rule
from autopar.capture import capture
from autopar.compiler import program_of
from autopar.ir.program import Program
from autopar.sharding.dims import Dims, analyze
from autopar.verify.verify import global_values

Tensors = dict[str, torch.Tensor]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(batch: int = 8, seq: int = 8, vocab: int = 64, seed: int = 0) -> Tensors:
    """Token ids that are their own labels."""
    ids = torch.randint(0, vocab, (batch, seq), generator=_generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


class Function(nn.Module):
    """``f(x, w)`` with a parameter of 8 x 4."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.w)


X = torch.arange(64.0).reshape(8, 8)
"""What `raw` gives a function."""


def raw(function: Callable[..., Any]) -> Program:
    """``function(x, w)`` as captured, before any pass."""
    return capture(Function(function), (X,), training=False)


class Mlp(nn.Module):
    """Two linear layers and a mean squared error."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


def mlp(hidden: int = 16, ffn: int = 32, batch: int = 8) -> tuple[nn.Module, Tensors]:
    """The smallest model that has everything."""
    torch.manual_seed(0)
    model = Mlp(hidden, ffn)
    g = _generator(0)
    return model, {k: torch.randn(batch, hidden, generator=g) for k in ("x", "y")}


class Residual(nn.Module):
    """``x + relu(Linear(x))``: both dims of the weight are the same factor."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x + torch.relu(self.inner(x))), target)


def residual(hidden: int = 16, batch: int = 8) -> tuple[nn.Module, Tensors]:
    """A residual block around a square weight."""
    torch.manual_seed(0)
    model = Residual(hidden)
    g = _generator(0)
    x, target = torch.randn(batch, hidden, generator=g), torch.randint(0, 8, (batch,), generator=g)
    return model, {"x": x, "target": target}


class Encoder(nn.Module):
    """A classifier on `nn.TransformerEncoder`: its attention has one fused projection."""

    def __init__(self, hidden: int, layers: int, heads: int, vocab: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, input_ids: torch.Tensor, target: torch.Tensor) -> Tensors:
        logits = self.head(self.encoder(self.embed(input_ids)).mean(1))
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def encoder(
    hidden: int = 32, layers: int = 1, heads: int = 4, batch: int = 8, seq: int = 8
) -> tuple[nn.Module, Tensors]:
    """`nn.TransformerEncoder` as a classifier of eight classes."""
    torch.manual_seed(0)
    model = Encoder(hidden, layers, heads, 64, 8)
    target = torch.randint(0, 8, (batch,), generator=_generator(1))
    return model, {"input_ids": tokens(batch, seq)["input_ids"], "target": target}


class Cnn(nn.Module):
    """Convolution, group norm, pooling, classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x)).mean((2, 3))
        return F.cross_entropy(self.head(x), target)


def cnn(channels: int = 16, batch: int = 8) -> tuple[nn.Module, Tensors]:
    """A small convolutional classifier with group norm."""
    torch.manual_seed(0)
    model = Cnn(channels, 8)
    g = _generator(0)
    x, target = torch.randn(batch, 4, 8, 8, generator=g), torch.randint(0, 8, (batch,), generator=g)
    return model, {"x": x, "target": target}


def gpt2(
    hidden: int = 32, layers: int = 1, heads: int = 4, batch: int = 8, seq: int = 8, **config: Any
) -> tuple[nn.Module, Tensors]:
    """transformers' GPT-2: fused qkv, tied embedding, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "n_positions": 16, "n_embd": hidden, "n_layer": layers, "n_head": heads, "use_cache": False,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**(settings | config))), tokens(batch, seq)


def llama(
    hidden: int = 32, layers: int = 1, heads: int = 8, kv_heads: int = 4, batch: int = 8, seq: int = 8, **config: Any
) -> tuple[nn.Module, Tensors]:
    """transformers' Llama: rotary positions, grouped queries, gated ffn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 16,
        "use_cache": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | config))), tokens(batch, seq)


def bert(
    hidden: int = 32, layers: int = 1, heads: int = 4, batch: int = 8, seq: int = 8, **config: Any
) -> tuple[nn.Module, Tensors]:
    """transformers' BERT with its masked language head: a square transform, a tied decoder."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 2 * hidden, "max_position_embeddings": 16, "type_vocab_size": 2,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    batch_ = tokens(batch, seq)
    return BertForMaskedLM(BertConfig(**(settings | config))), batch_ | {"token_type_ids": batch_["input_ids"] % 2}


def vit(hidden: int = 32, layers: int = 1, heads: int = 4, batch: int = 8, **config: Any) -> tuple[nn.Module, Tensors]:
    """transformers' ViT classifier: a convolution into patches, a class token (so a sequence of 5)."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    settings = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 2 * hidden, "image_size": 8, "patch_size": 4, "num_channels": 4, "num_labels": 8,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    g = _generator(0)
    pixels, labels = torch.randn(batch, 4, 8, 8, generator=g), torch.randint(0, 8, (batch,), generator=g)
    return ViTForImageClassification(ViTConfig(**(settings | config))), {"pixel_values": pixels, "labels": labels}


MODELS = {
    "mlp": mlp, "residual": residual, "encoder": encoder, "cnn": cnn,
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit,
}  # fmt: skip


@cache
def captured(name: str, **arguments: Any) -> tuple[Program, Dims, list[torch.Tensor]]:
    """Canonical program, dims and global values of a model, once for a whole file of tests; nobody may change them."""
    model, batch = MODELS[name](**arguments)
    program = program_of(model, batch)
    return program, analyze(program), global_values(program, model, batch)
