"""Steps of AdamW on the ranks and on one device beside each other, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

TOLERANCE = 1e-9
"""Of float64, where nothing is computed in another dtype."""


def follow(parallel: Any, plain: nn.Module, batches: Iterable[dict[str, torch.Tensor]], clip: float = 0.0) -> float:
    """The largest difference of losses, gradients or parameters, a step a batch."""
    optimizers = [adamw(m) for m in (parallel, plain)]
    return largest([step_apart(parallel, plain, optimizers, batch, clip) for batch in batches])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_apart(
    parallel: Any,
    plain: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    batch: dict[str, torch.Tensor],
    clip: float = 0.0,
) -> float:
    """The largest difference of losses, gradients or parameters in a step.

    Args:
        parallel: the model on the ranks.
        plain: the same on one device.
        optimizers: of both.
        batch: of the step.
        clip: the norm that gradients are clipped to; 0: they are not.
    """
    found, expected = (o["loss"] if isinstance(o, dict) else o for o in (parallel(**batch), plain(**batch)))
    found.backward(), expected.backward()
    if clip:
        for model in (parallel, plain):
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradients = parallel.full_gradients()
    pairs = [(gradients[n], p.grad) for n, p in plain.named_parameters()]
    if found.dtype == torch.float64:
        pairs.append((found, expected))
    else:  # transformers computes it in float32, in which it is rounded, of parameters in float64, too
        torch.testing.assert_close(found, expected)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    state, wanted = parallel.full_state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    pairs += [(state[n], value) for n, value in wanted.items()]
    return largest([float((a - b).detach().abs().max()) for a, b in pairs])


def largest(differences: list[float]) -> float:
    """Which is not a number where one of them is not, as `max` would not be."""
    return float(torch.tensor(differences, dtype=torch.float64).max())
