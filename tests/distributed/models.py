"""Small models in double precision, with seeded weights, and batches for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn


def slow_devices() -> Any:
    """A cluster on which it pays to split even the smallest computation."""
    from autopar.costs.cluster import Cluster

    cpu = Cluster.preset("cpu")
    device = replace(cpu.device, flops=dict.fromkeys(cpu.device.flops, 1e6), bandwidth=1e6, launch=1e-12)
    return replace(cpu, device=device, links=tuple(replace(link, latency=1e-9) for link in cpu.links))


def slow_links(bandwidth: float = 2e4) -> Any:
    """A cluster on which products take as long as what they hide, even the smallest, and messages have no latency."""
    from autopar.costs.cluster import Cluster

    gpus = Cluster.preset("h100")
    device = replace(
        gpus.device, flops=dict.fromkeys(gpus.device.flops, 1e6), launch=1e-12, units=1, ramp=0.0, host=0.0
    )
    links = tuple(replace(link, latency=1e-9, bandwidth=bandwidth) for link in gpus.links)
    return replace(gpus, device=device, links=links)


class Mlp(nn.Module):
    """Two linear layers with a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return {"loss": ((out - y) ** 2).mean(), "out": out}


class Residual(nn.Module):
    """A norm, two linear layers, and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Residuals(nn.Module):
    """Two of them, on sequences, with a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": ((x - y) ** 2).mean()}


def residuals() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, and a batch of eight sequences of eight."""
    torch.manual_seed(0)
    model = Residuals().double()
    g = torch.Generator().manual_seed(0)
    return model, {k: torch.randn(8, 8, 16, generator=g, dtype=torch.float64) for k in ("x", "y")}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def mlp_batch(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(rows, 16, generator=g, dtype=torch.float64) for k in ("x", "y")}


def llama(tie: bool = False, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=tie, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    model.loss_function = loss_in_float64  # transformers' rounds to float32, in another order where it is split
    return model


def loss_in_float64(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """The loss of predicting each next token."""
    following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def token_batch(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (rows, 16), generator=g)
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, Any] = {
    "mlp": (mlp, mlp_batch),
    "gpt2": (gpt2, token_batch),
    "llama": (llama, token_batch),
    "tied": (lambda: llama(tie=True, layers=1), token_batch),
}


def make(name: str) -> tuple[nn.Module, Any]:
    """A model and the function that gives its batch of a step."""
    build, batch = MODELS[name]
    return build(), batch
