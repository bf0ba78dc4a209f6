"""Tiny models of every family, with a batch and labels: what the tests and `benchmarks/models.py` capture and verify.

Each function returns ``(model, batch)``; the model returns its training loss. Weights are random and seeded, nothing
is downloaded, dropout is 0, and batch, sequence, heads and hidden divide by 4 where the family allows it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.zoo import audio, language, layers, vision
from benchmarks.zoo.parts import Tensors

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    **language.FAMILIES,
    **vision.FAMILIES,
    **audio.FAMILIES,
    **layers.FAMILIES,
}
