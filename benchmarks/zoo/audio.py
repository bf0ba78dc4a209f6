"""Audio models: Whisper, a spectrogram front end."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

from benchmarks.zoo.parts import BATCH, CLASSES, VOCABULARY, Tensors, classifier, random, tokens


def whisper() -> tuple[nn.Module, Tensors]:
    """Convolutions over a spectrogram, an encoder and a decoder."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=8, max_target_positions=8, use_cache=False, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    batch = {"input_features": random(BATCH, 8, 16), "labels": tokens()}
    return transformers.WhisperForConditionalGeneration(config), batch


class Spectrogram(nn.Module):
    """Short-time Fourier transform, magnitude, learned mel-like filters, convolution over time."""

    def __init__(self, window: int, filters: int) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(window))
        self.filters = nn.Linear(window // 2 + 1, filters)
        self.convolution = nn.Conv1d(filters, 16, 3, padding=1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Waves ``[batch, time]`` to scores."""
        size = len(self.window)
        spectrum = torch.stft(x, size, size // 2, window=self.window, center=True, return_complex=True)
        power = torch.log1p(spectrum.abs())
        y = torch.relu(self.convolution(self.filters(power.transpose(1, 2)).transpose(1, 2)))
        scores: torch.Tensor = self.head(y.mean(2))
        return scores


def spectrogram() -> tuple[nn.Module, Tensors]:
    """A classifier of waves by their spectrogram."""
    torch.manual_seed(0)
    return classifier(Spectrogram(16, 8), 56)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {"whisper": whisper, "spectrogram": spectrogram}
