"""Where parts run and how large they are, models for them, and how a parallelized model is compared with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Any]
"""``check``: what was looked at; ``passed``: True, False, or None where nothing is right or wrong; figures."""

Batch = dict[str, Tensor]

NEEDS_GPU = "needs a GPU"
"""The ``note`` of a row that was skipped."""


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    Attributes:
        device: that the part runs on.
        small: sizes for a CPU, and for tests.
    """

    device: torch.device
    small: bool

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def example(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch]:
        """A model of `MODELS` and a batch, the same each time, on the device."""
        torch.manual_seed(0)
        model, batch = MODELS[name](self.small)
        # Copies: a tensor that is passed twice is one input of a graph.
        moved = {k: v.clone().to(self.device, dtype if v.is_floating_point() else None) for k, v in batch.items()}
        return model.to(self.device, dtype), moved


class Mlp(nn.Module):
    """Linears."""

    def __init__(self, width: int) -> None:
        """As wide."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.layers(x).square().mean()


class Cnn(nn.Module):
    """Convolutions and a batch norm."""

    def __init__(self, channels: int) -> None:
        """With so many channels."""
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.last(self.norm(self.first(x)).relu()).square().mean()


class Encoder(nn.Module):
    """Transformer layers of torch, with or without dropout."""

    def __init__(self, width: int, layers: int, dropout: float = 0.0) -> None:
        """As wide and deep."""
        super().__init__()
        one = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(layers))
        self.head = nn.Linear(width, width)  # the squares of what a norm returns have one mean, whatever it got

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _mlp(small: bool) -> tuple[nn.Module, Batch]:
    width = 32 if small else 4096
    return Mlp(width), {"x": torch.randn(8 if small else 4096, width)}


def _cnn(small: bool) -> tuple[nn.Module, Batch]:
    side = 8 if small else 128
    return Cnn(8 if small else 128), {"x": torch.randn(2 if small else 32, 3, side, side)}


def _encoder(small: bool) -> tuple[nn.Module, Batch]:
    width = 32 if small else 1024
    return Encoder(width, 1 if small else 4), {"x": torch.randn(4 if small else 16, 8 if small else 512, width)}


def _llama(small: bool) -> tuple[nn.Module, Batch]:
    from benchmarks.memory_models import llama

    return llama(32, 1, 2, 8) if small else llama(2048, 8, 8, 1024, 32000)


def _unet(small: bool) -> tuple[nn.Module, Batch]:
    from benchmarks.memory_models import unet

    return unet(8, 2, 8) if small else unet(256, 64, 32)


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Batch]]] = {
    "mlp": _mlp, "cnn": _cnn, "encoder": _encoder, "llama": _llama, "unet": _unet,
}  # fmt: skip


def step(model: nn.Module, batch: Batch, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    found = model(**batch)
    loss = getattr(found, "loss", found)
    loss.backward()
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def parallelized(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """The same model on one device, emitted."""
    from autopar.parallelize import parallelize

    return parallelize(copy.deepcopy(model), None, batch, **options)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor by its norm, or by a hundredth of the norm of all; infinite where others are.

    By more than its own norm, since a gradient may be zero but for rounding, such as a bias's before a batch norm.
    """
    if found.keys() != expected.keys():
        return float("inf")
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    least = max(0.01 * sum(n * n for n in norms.values()) ** 0.5, 1e-30)
    largest = 0.0
    for name, value in expected.items():
        error = float((found[name].double() - value.double()).norm()) / max(norms[name], least)
        # Infinities and NaN must not pass as small.
        largest = max(largest, error if error == error else float("inf"))
    return largest


def compared(check: str, model: nn.Module, batch: Batch, tolerance: float, seed: int = 0, **options: Any) -> Row:
    """Loss and gradients of a step of the emitted model against eager's, from the same seed."""
    loss, gradients = step(copy.deepcopy(model), batch, seed)
    own, emitted = step(parallelized(model, batch, **options), batch, seed)
    error = max(difference(emitted, gradients), difference({"loss": own}, {"loss": loss}))
    return {"check": check, "passed": error <= tolerance, "error": error, "tolerance": tolerance}
