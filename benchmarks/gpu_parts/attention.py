"""Attention's kernels as torch chooses them on the device, and what dropout keeps."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_parts.setting import NEEDS_GPU, Encoder, Row, Setting, compared, difference, parallelized, step

KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
ON_CPU = KERNELS[:2]
VARIANTS = ("plain", "causal", "mask", "bias", "dropout", "bias and dropout", "grouped", "uneven")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Attend(nn.Module):
    """Attention of one projection: causal, under a mask, with a learned bias or dropout, of grouped heads, uneven."""

    def __init__(self, variant: str, width: int, heads: int = 4) -> None:
        """With so many heads."""
        super().__init__()
        self.variant, self.heads = variant, heads
        self.kv_heads = heads // 2 if variant == "grouped" else heads
        self.size = width // heads
        self.project = nn.Linear(width, (heads + 2 * self.kv_heads) * self.size)
        self.bias = nn.Parameter(torch.randn(1, heads, 1, 1)) if "bias" in variant else None

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        parts = self.project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        rows = x.shape[1]
        mask = torch.ones(rows, rows, dtype=torch.bool, device=x.device).tril(2) if self.variant == "mask" else None
        if self.bias is not None:
            far = torch.arange(rows, device=x.device)
            mask = self.bias * (far[:, None] - far).abs().to(x.dtype) / rows
        grouped, causal = self.variant == "grouped", self.variant == "causal"
        drop = 0.1 if "dropout" in self.variant else 0.0
        found = F.scaled_dot_product_attention(query, key, value, mask, drop, is_causal=causal, enable_gqa=grouped)
        return found.float().square().mean()


def attention(setting: Setting) -> list[Row]:
    """Capture and run attention under each kernel, against eager under the same one."""
    rows: list[Row] = []
    width, length = (32, 8) if setting.small else (512, 256)
    for kernel, variant, dtype in itertools.product(KERNELS, VARIANTS, TOLERANCE):
        torch.manual_seed(0)
        model = Attend(variant, width).to(setting.device, dtype)
        x = torch.randn(2, length + 5 * (variant == "uneven"), width, device=setting.device, dtype=dtype)
        check = f"{kernel.name.lower()}, {variant}, {str(dtype).removeprefix('torch.')}"
        if kernel not in ON_CPU and not setting.cuda:
            rows.append({"check": check, "passed": None, "note": NEEDS_GPU})
            continue
        with sdpa_kernel(kernel):
            try:
                step(copy.deepcopy(model), {"x": x})
            except RuntimeError as error:  # torch has no such kernel: nothing to compare with
                rows.append(
                    {"check": check, "passed": None, "note": f"not in torch: {str(error).splitlines()[0][:60]}"}
                )
                continue
            rows.append(compared(check, model, {"x": x}, TOLERANCE[dtype]))
    return rows


class Drop(nn.Module):
    """A dropout of a scaled input; the loss is the share that is kept."""

    def __init__(self, share: float) -> None:
        """Of which it drops a share."""
        super().__init__()
        self.share, self.weight = share, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what is kept, not scaled."""
        return F.dropout(x * self.weight, self.share).mean() * (1 - self.share)


class Checkpointed(nn.Module):
    """A model whose layers run once more in the backward pass, with the masks of the first time."""

    def __init__(self, model: Encoder) -> None:
        """Of an encoder."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.model.head(x).square().mean()


def dropout(setting: Setting) -> list[Row]:
    """How much masks keep, whether a seed gives them again, and whether recomputation draws the same."""
    device, share = setting.device, 0.25
    x = torch.ones(1 << (12 if setting.small else 24), device=device)
    model = parallelized(Drop(share).to(device), {"x": x})
    (first, _), (again, _), (other, _) = (step(model, {"x": x}, seed) for seed in (1, 1, 2))
    error = abs(float(first) - (1 - share))
    five_sigma = 5 * (share * (1 - share) / x.numel()) ** 0.5
    rows: list[Row] = [
        {"check": "share kept", "passed": error <= five_sigma, "error": error, "tolerance": five_sigma},
        {"check": "the same seed, the same mask", "passed": bool(first == again)},
        {"check": "another seed, another mask", "passed": bool(first != other)},
    ]
    width = 32 if setting.small else 256
    torch.manual_seed(0)
    encoder = Encoder(width, 2, dropout=0.2).to(device)
    batch = {"x": torch.randn(2, 16, width, device=device)}
    compare = partial(compared, model=encoder, batch=batch, tolerance=1e-4)
    rows.append(compare("masks of eager from the same seed"))
    _, kept = step(parallelized(encoder, batch), batch)
    _, recomputed = step(parallelized(Checkpointed(encoder), batch), batch)
    error = difference({n.removeprefix("model."): g for n, g in recomputed.items()}, kept)
    rows.append({"check": "recomputed masks", "passed": error <= 1e-4, "error": error, "tolerance": 1e-4})
    return rows
