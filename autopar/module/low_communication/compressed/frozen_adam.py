"""1-bit Adam's update once variances are frozen: momenta are exchanged, and the step is made from their mean.

For a parameter x with the gradient g of one worker, at step t, T being the last with plain Adam::

    u = beta1 * m + (1 - beta1) * (g + weight_decay * x)
    m = what comes of exchanging u, see `autopar.module.low_communication.compressed.signs`: the same on all workers
    x = x - lr * (m / (1 - beta1^t)) / (sqrt(v_T / (1 - beta2^T)) + eps)

That is `torch.optim.Adam` with v_T in place of v_t: state is in the optimizer, as Adam has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.dtensor import to_local


def require_plain_adam(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is not Adam as it is.

    Raises:
        ValueError: names the class or the option.
    """
    if type(optimizer) is not torch.optim.Adam:
        raise ValueError(
            f"method='onebit' is 1-bit Adam, and makes Adam's update itself: optimizer= is {type(optimizer).__name__}; "
            "give it torch.optim.Adam, or use method='powersgd' or 'topk'"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "decoupled_weight_decay", "differentiable"):
            if group.get(option):
                raise ValueError(f"method='onebit' is plain Adam: optimizer= has {option}=True; leave that out")


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
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * to_local(parameter).detach().to(gradient)
        found[name] = torch.lerp(to_local(state["exp_avg"]).to(gradient), gradient, 1 - float(group["betas"][0]))
    return found


@torch.no_grad()
def update(
    parameter: torch.Tensor, momentum: torch.Tensor | None, state: dict[str, Any], group: Mapping[str, Any], frozen: int
) -> None:
    """A parameter's step.

    Args:
        parameter: of the optimizer.
        momentum: m, of this rank's shard; None: the shard is empty.
        state: of the parameter.
        group: of the parameter.
        frozen: T.
    """
    state["step"] += 1
    if momentum is None:
        return
    (beta1, beta2), step = map(float, group["betas"]), float(state["step"])
    to_local(state["exp_avg"]).copy_(momentum)
    variance = to_local(state["exp_avg_sq"]).to(momentum)
    scale = (variance.sqrt() / (1 - beta2**frozen) ** 0.5).add_(float(group["eps"]))
    own = to_local(parameter)
    own.copy_(own.to(momentum) - float(group["lr"]) / (1 - beta1**step) * momentum / scale)


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by id."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}
