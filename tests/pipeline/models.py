"""Models that pipelines find hard: skip connections, an encoder and a decoder, tied weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Unet(nn.Module):
    """Two levels; each way up takes what the way down has left."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList([nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)])
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(2)])
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = torch.tanh(self.middle(x))
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return {"loss": F.mse_loss(self.head(x), y), "out": x}


def unet(batch: int = 8) -> tuple[nn.Module, Batch]:
    g = torch.Generator().manual_seed(0)
    return Unet(), {k: torch.randn(batch, 3, 8, 8, generator=g) for k in ("x", "y")}


def t5(batch: int = 8) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tokens = {k: torch.randint(1, 64, (batch, 8), generator=g) for k in ("input_ids", "labels")}
    tokens["labels"][: batch // 2, 5:] = -100
    return T5ForConditionalGeneration(config), tokens
