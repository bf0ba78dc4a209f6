"""Vision models: of transformers, and a U-Net of diffusion models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import nn

from benchmarks.zoo.language import NO_DROPOUT, PLAIN
from benchmarks.zoo.parts import BATCH, CLASSES, VOCABULARY, Tensors, generator, labels, random, tokens

IMAGE = {"image_size": 16, "num_channels": 4}


def build(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Tensors]:
    """An image classifier of transformers from its configuration, with a batch of images 16 x 16."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings, num_labels=CLASSES)
    batch = {"pixel_values": random(BATCH, 4, 16, 16), "labels": labels()}
    return getattr(transformers, f"{name}ForImageClassification")(config), batch


def clip() -> tuple[nn.Module, Tensors]:
    """Text and image encoders with a contrastive loss."""
    torch.manual_seed(0)
    text = {k: v for k, v in PLAIN.items() if k != "vocab_size"} | {"vocab_size": VOCABULARY, "eos_token_id": 3}
    image = {k: v for k, v in PLAIN.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=image | IMAGE | {"patch_size": 8}, projection_dim=16
    )
    ids = tokens()
    ids[:, -1] = 3  # the end of each text, where its embedding is read
    batch = {"input_ids": ids, "pixel_values": random(BATCH, 4, 16, 16)}
    return _ClipLoss(transformers.CLIPModel(config)), batch


class _ClipLoss(nn.Module):
    """CLIP with its contrastive loss, which the model leaves out by default."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Texts and images to loss."""
        loss: torch.Tensor = self.model(**batch, return_loss=True).loss
        return loss


class Residual(nn.Module):
    """Group norm, convolution, the time's embedding, and the same again, around a shortcut."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.time = nn.Linear(time, outside)
        self.second = nn.Sequential(nn.GroupNorm(4, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Image to image."""
        y = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        out: torch.Tensor = self.second(y) + self.shortcut(x)
        return out


class Attention(nn.Module):
    """Self-attention between places."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, channels), heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Image to image."""
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3 * self.heads, c // self.heads, h * w).transpose(2, 3).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(n, c, h, w)
        out: torch.Tensor = x + self.out(y)
        return out


class UNet(nn.Module):
    """One level down and up again; predicts the noise in an image, given its time."""

    def __init__(self, channels: int, time: int) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, -4, time // 2)))
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, channels, 3, padding=1)
        self.down = Residual(channels, channels, time)
        self.shrink = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle, self.attention = Residual(2 * channels, 2 * channels, time), Attention(2 * channels, 4)
        self.grow = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.up = Residual(2 * channels, channels, time)
        self.leave = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, 4, 3, padding=1))

    def forward(self, image: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the predicted noise."""
        level = torch.sigmoid(time)[:, None, None, None]
        angles = time[:, None] * self.frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.down(self.enter(level.sqrt() * image + (1 - level).sqrt() * noise), t)
        y = self.attention(self.middle(self.shrink(x), t))
        y = self.grow(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(self.up(torch.cat([x, y], 1), t)), noise)


def unet() -> tuple[nn.Module, Tensors]:
    """A U-Net of a diffusion model: convolutions, group norms, attention, upsampling."""
    torch.manual_seed(0)
    batch = {"image": random(BATCH, 4, 8, 8), "noise": random(BATCH, 4, 8, 8, seed=1)}
    return UNet(16, 16), batch | {"time": torch.rand(BATCH, generator=generator())}


RESNET = {"num_channels": 4, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
CONVNEXT = {"num_channels": 4, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
SWIN = IMAGE | NO_DROPOUT | {
    "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    "vit": partial(build, "ViT", PLAIN | NO_DROPOUT | IMAGE | {"patch_size": 8}),
    "resnet": partial(build, "ResNet", RESNET),
    "convnext": partial(build, "ConvNext", CONVNEXT),
    "swin": partial(build, "Swin", SWIN),
    "clip": clip,
    "unet": unet,
}
