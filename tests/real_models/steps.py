"""Training steps beside eager PyTorch, and how far apart they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.real_models.zoo import Example

RELATIVE = 1e-5
"""A tensor's error is relative to its largest entry, or to this share of the largest gradient entry."""


def train_beside(parallel: Any, example: Example, steps: int) -> dict[str, float]:
    """Largest error of losses, gradients, and parameters and buffers after AdamW, over some steps.

    Args:
        parallel: made from a copy of the example's model.
        example: its model is trained on one device, eagerly.
        steps: each with a batch of its own.
    """
    worst = {"loss": 0.0, "gradients": 0.0, "state": 0.0}
    plain = example.model
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in (parallel, plain)]
    for step in range(steps):
        found, expected = loss_of(parallel, example, step), loss_of(plain, example, step)
        (found.backward(), expected.backward())
        worst["loss"] = max(worst["loss"], error_of({"": found}, {"": expected}))
        gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        made = parallel.full_gradients()
        assert set(made) == set(gradients), sorted(set(made) ^ set(gradients))
        worst["gradients"] = max(worst["gradients"], error_of(made, gradients))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state, wanted = parallel.full_state_dict(), plain.state_dict()
        assert list(state) == list(wanted)
        worst["state"] = max(worst["state"], error_of(state, wanted))
    return worst


def loss_of(model: nn.Module, example: Example, step: int) -> torch.Tensor:
    """The loss of a step, of a model that was made with the example's ``loss_fn`` or of the plain one."""
    batch = example.batch(step)
    output = model(**batch)
    if example.loss_fn is None:
        return output
    return example.loss_fn(output, batch) if model is example.model else output


def error_of(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest error of any tensor."""
    scale = max((float(e.detach().abs().max()) for e in expected.values() if e.numel()), default=0.0)
    errors = [0.0]
    for name, e in expected.items():
        f = found[name].detach().double()
        e = e.detach().double()
        assert f.shape == e.shape, name
        if e.numel():
            errors.append(float((f - e).abs().max()) / max(float(e.abs().max()), RELATIVE * scale, 1e-300))
    return float(torch.tensor(errors).max())  # NaN where one of them is


def parallel_of(example: Example, mesh: Any, **options: Any) -> Any:
    """The example's model, copied and parallelized."""
    from autopar.parallelize import parallelize

    return parallelize(copy.deepcopy(example.model), mesh, loss_fn=example.loss_fn, **options)
