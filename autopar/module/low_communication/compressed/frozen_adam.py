"""1-bit Adam's update once variances are frozen: momenta are exchanged, and the step is made from their mean.

For a parameter x with the gradient g of one worker, at step t, T being the last with plain Adam::

    u = beta1 * m + (1 - beta1) * (g + weight_decay * x)
    m = what comes of exchanging u, see `autopar.module.low_communication.compressed.signs`: the same on all workers
    x = x - lr * (m / (1 - beta1^t)) / (sqrt(v_T / (1 - beta2^T)) + eps)

That is `torch.optim.Adam` with v_T in place of v_t: state is in the optimizer, as Adam has it. Of a `torch.optim.AdamW`
g has no weight decay, and x is multiplied by ``1 - lr * weight_decay`` first. A sign is worth about the largest root of
v_T in its tensor, which over a root that is a thousand times smaller is a step of a thousand learning rates: numbers
without a gradient so far (rows of an embedding), or with one of roundings alone (biases of keys, beside those of
values), would be thrown far away. They stay, and are in no scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.settings import ONEBIT
from autopar.runtime.dtensor import to_local

FARTHEST = 1000
"""How much smaller than the largest root of a variance in its tensor one may be: so many learning rates are a sign."""


def require_plain_adam(optimizer: torch.optim.Optimizer, method: str = ONEBIT) -> None:
    """Refuse what is not Adam or AdamW as it is.

    Raises:
        ValueError: names the class or the option.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"method={method!r} makes Adam's update itself: optimizer= is {type(optimizer).__name__}; give it "
            "torch.optim.Adam or AdamW, or use method='powersgd' or 'topk'"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(f"method={method!r} is plain Adam: optimizer= has {option}=True; leave that out")


def decay_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[float, float]:
    """The weight decay that is added to gradients, as Adam's is, and the one that is not, as AdamW's."""
    decay = float(group["weight_decay"])
    apart = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    return (0.0, decay) if apart else (decay, 0.0)


def momenta(
    parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """U of each, in the dtype of the gradients that are given.

    Raises:
        AutoparError: a parameter has no state: it had no gradient before variances were frozen.
    """
    groups = groups_of(optimizer)
    found = {}
    for name, gradient in gradients.items():
        parameter, group = parameters[name], groups[id(parameters[name])]
        state = optimizer.state.get(parameter)
        if not state:
            raise AutoparError(
                f"parameter {name!r} had no gradient in the first steps, and has no variance that could be frozen: "
                "raise freeze=, or freeze the parameter"
            )
        if decay := decay_of(optimizer, group)[0]:
            gradient = gradient + decay * to_local(parameter).detach().to(gradient)
        found[name] = torch.lerp(to_local(state["exp_avg"]).to(gradient), gradient, 1 - float(group["betas"][0]))
    return found


@torch.no_grad()
def update(
    parameter: torch.Tensor,
    momentum: torch.Tensor | None,
    state: dict[str, Any],
    group: Mapping[str, Any],
    frozen: int,
    decay: float,
) -> None:
    """A parameter's step.

    Args:
        parameter: of the optimizer.
        momentum: m, of this rank's shard; None: the shard is empty.
        state: of the parameter.
        group: of the parameter.
        frozen: T.
        decay: AdamW's.
    """
    state["step"] += 1
    if momentum is None:
        return
    (beta1, beta2), step = map(float, group["betas"]), float(state["step"])
    to_local(state["exp_avg"]).copy_(momentum)
    own, lr = to_local(parameter), float(group["lr"])
    before = own.to(momentum) * (1 - lr * decay) if decay else own.to(momentum)
    own.copy_(before - lr / (1 - beta1**step) * momentum / denominator(state, momentum, beta2, frozen, group))


def denominator(
    state: Mapping[str, Any], like: torch.Tensor, beta2: float, count: int, group: Mapping[str, Any]
) -> torch.Tensor:
    """``sqrt(v / (1 - beta2^count)) + eps``, v being of so many updates, in the dtype of ``like``."""
    variance: torch.Tensor = to_local(state["exp_avg_sq"]).to(like)
    found: torch.Tensor = variance.sqrt() / (1 - beta2 ** max(1, count)) ** 0.5
    return found.add_(float(group["eps"]))


def without_variance(state: Mapping[str, Any]) -> torch.Tensor:
    """Which numbers of this rank's shard stay as they are: those without a gradient that counts beside the others'."""
    variance = to_local(state["exp_avg_sq"])
    if not variance.numel():
        return variance.eq(0)
    return variance.le(variance.max() / FARTHEST**2)


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by id."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}
