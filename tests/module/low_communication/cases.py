"""Algorithms, as they are asked for and as `tests.module.low_communication.reference` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.module.low_communication.reference import Recurrence

WHOLE, PARTS = ("up", "down"), (("up",), ("down",))
PLAIN = {"lr": 1.0}

CASES: dict[str, tuple[dict[str, Any], Recurrence]] = {
    "local SGD": (
        {"every": 3, "outer_lr": 1.0, "outer_momentum": 0.0},
        Recurrence(3, {WHOLE: 3}, outer=PLAIN),
    ),
    "post-local": (
        {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "synchronous": 3},
        Recurrence(2, {WHOLE: 2}, outer=PLAIN, synchronous=3),
    ),
    "DiLoCo": ({"every": 3}, Recurrence(3, {WHOLE: 3})),
    "heavy ball": (
        {"every": 2, "outer_lr": 0.5, "outer_momentum": 0.8, "nesterov": False},
        Recurrence(2, {WHOLE: 2}, outer={"lr": 0.5, "momentum": 0.8}),
    ),
    "delayed": ({"every": 4, "delay": 2, "mix": 0.0}, Recurrence(4, {WHOLE: 4}, delay=2)),
    "streaming": (
        {"every": 4, "fragments": 2, "delay": 1},
        Recurrence(4, {PARTS[0]: 2, PARTS[1]: 4}, delay=1, mix=0.5),
    ),
    "streaming, long delay": (
        {"every": 3, "fragments": 2, "delay": 2, "mix": 0.25},
        Recurrence(3, {PARTS[0]: 1, PARTS[1]: 3}, delay=2, mix=0.25),
    ),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.5),
}
