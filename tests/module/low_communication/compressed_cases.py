"""Methods of compressing gradients, as they are asked for, and optimizers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CASES: dict[str, dict[str, Any]] = {
    "powersgd": {"method": "powersgd", "rank": 2},
    "powersgd, late": {"method": "powersgd", "rank": 1, "start": 3},
    "topk": {"method": "topk", "share": 0.05},
    "topk, late": {"method": "topk", "share": 0.3, "start": 2},
    "onebit": {"method": "onebit", "freeze": 4},
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "powersgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.5),
    "topk": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "onebit": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2),
}
