"""Small models of many kinds, with their dropout: what kernels of a device draw and compute, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.gpu_parts.setting import Batch, Row, Setting, compared

TOLERANCE = 1e-3
"""Of float32; a GPU adds some gradients in another order each time."""

TOKENS, ROWS, LENGTH = 64, 4, 16


def families(setting: Setting) -> list[Row]:
    """Loss and gradients of each family in training, from the same seed."""
    rows: list[Row] = []
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        model, batch = make()
        moved = {k: v.to(setting.device) for k, v in batch.items()}
        try:
            rows.append(compared(name, model.to(setting.device).train(), moved, TOLERANCE))
        except Exception as error:  # the others may work
            rows.append({"check": name, "passed": False, "note": f"{type(error).__name__}: {str(error)[:300]}"})
    return rows


def _tokens() -> Tensor:
    return torch.randint(2, TOKENS, (ROWS, LENGTH))


def _hugging_face(config: str, model: str, batch: Callable[[], Batch], **sizes: Any) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Batch]:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes)), batch()

    return make


def _language() -> Batch:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _masked() -> Batch:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {**_language(), "attention_mask": mask}


def _images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(10, (ROWS,))}


class Recurrent(nn.Module):
    """Two recurrent layers over embedded tokens; no dropout between them, of which cuDNN draws other numbers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        """Of a kind."""
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 32), nn.Linear(64, TOKENS)
        self.layers = kind(32, 32, 2, batch_first=True, bidirectional=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        found, _ = self.layers(self.embed(input_ids))
        return F.cross_entropy(self.head(found).flatten(0, 1), labels.flatten())


class Pictures(nn.Module):
    """Convolutions, norms, pooling and resizing of every kind in a row."""

    def __init__(self) -> None:
        """Of few channels."""
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout2d(0.2),
            nn.AvgPool2d(2),
        )  # fmt: skip
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 2, 2), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(), nn.PixelShuffle(2),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.AlphaDropout(0.1),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.head(self.up(self.down(pixel_values))), labels, label_smoothing=0.1)


class Attending(nn.Module):
    """Torch's own attention, whose weights are asked for, with a mask and dropout."""

    def __init__(self) -> None:
        """Of four heads."""
        super().__init__()
        self.embed, self.bags = nn.Embedding(TOKENS, 32), nn.EmbeddingBag(TOKENS, 32)
        self.attention, self.norm = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True), nn.RMSNorm(32)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        """The loss, and the mean of weights of attention."""
        x = self.embed(input_ids)
        found, weights = self.attention(x, x, x, key_padding_mask=attention_mask == 0)
        x = F.dropout(self.norm(x + found), 0.1, self.training) + self.bags(input_ids)[:, None]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + weights.square().mean() + torch.rand_like(x).mul(x).mean()


def _t5(dropout: float) -> Callable[[], tuple[nn.Module, Batch]]:
    """With a bias of attention that is learned."""
    return _hugging_face(
        "T5Config", "T5ForConditionalGeneration", _masked, vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2,
        num_heads=4, dropout_rate=dropout, use_cache=False, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT-2": _hugging_face("GPT2Config", "GPT2LMHeadModel", _language, vocab_size=TOKENS, n_positions=LENGTH, n_embd=32,
                           n_layer=2, n_head=4, use_cache=False),
    "BERT": _hugging_face("BertConfig", "BertForMaskedLM", _masked, vocab_size=TOKENS, **_SIZES),
    "T5": _t5(0.1),
    "T5, no dropout": _t5(0.0),
    "Qwen3": _hugging_face("Qwen3Config", "Qwen3ForCausalLM", _masked, vocab_size=TOKENS, **_SIZES, head_dim=8,
                           num_key_value_heads=2, attention_dropout=0.1, use_cache=False),
    "ViT": _hugging_face("ViTConfig", "ViTForImageClassification", _images, image_size=32, patch_size=8, num_labels=10,
                         hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **_SIZES),
    "ConvNeXt": _hugging_face("ConvNextConfig", "ConvNextForImageClassification", _images, num_labels=10,
                              depths=[1] * 4, hidden_sizes=[8, 16, 16, 32]),
    "LSTM": lambda: (Recurrent(nn.LSTM), _language()),
    "GRU": lambda: (Recurrent(nn.GRU), _language()),
    "convolutions": lambda: (Pictures(), _images()),
    "attention's weights": lambda: (Attending(), _masked()),
}  # fmt: skip
