"""Gradients that wait in `no_sync` belong to their window, and none is lost or used too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.parallelize import parallelize
from autopar.search.options import Search
from tests.distributed.models import mlp, mlp_batch

NAN = float("nan")


class _OwnZeroGrad(torch.optim.SGD):
    """An optimizer that gives gradients up by itself."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def by_module(model: nn.Module) -> None:
    model.zero_grad()


def by_module_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def by_optimizer(model: nn.Module) -> None:
    torch.optim.AdamW(model.parameters()).zero_grad()


def by_own_optimizer(model: nn.Module) -> None:
    _OwnZeroGrad(model.parameters(), lr=0.1).zero_grad(set_to_none=False)


def by_submodules(model: nn.Module) -> None:
    model.up.zero_grad()
    model.down.zero_grad()


def of_half(model: nn.Module) -> None:
    torch.optim.SGD(model.up.parameters(), lr=0.1).zero_grad()


GIVE_UP = (by_module, by_module_in_place, by_optimizer, by_own_optimizer, by_submodules, of_half)


def backward(model: Any, step: int, sync: bool = True, scale: float = 1.0) -> None:
    """A backward pass, unreduced if ``sync`` is false."""
    loss = model(**mlp_batch(step))["loss"] * scale
    if sync or not hasattr(model, "no_sync"):
        loss.backward()
        return
    with model.no_sync():
        loss.backward()


def apart(model: Any, plain: nn.Module) -> float:
    """The largest difference of a gradient; infinite where only one has it."""
    found, expected = model.full_gradients(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[n] - g).abs().nan_to_num(nan=1e9).max()) for n, g in expected.items())


def given_up(model: Any, plain: nn.Module, give_up: Callable[[Any], None]) -> float:
    """A window that is given up, and one behind it."""
    for m in (model, plain):
        backward(m, 0, sync=False, scale=1.0 if give_up is of_half else NAN)
        backward(m, 1, sync=False)
        give_up(m)
        backward(m, 2, sync=False)
        backward(m, 3)
    return apart(model, plain)


def frozen(model: Any, plain: nn.Module, all_shapes: bool = True) -> float:
    """Some parameters are frozen, and thawed again, while gradients wait."""
    for m in (model, plain):
        backward(m, 0, sync=False)
        m.up.weight.requires_grad_(False)
        backward(m, 1, sync=False)
        backward(m, 2)
        m.up.weight.requires_grad_(True)
    worst = apart(model, plain)
    for m in (model, plain):
        backward(m, 3, sync=False)
        m.down.requires_grad_(False)
        m(**mlp_batch(4, rows=4))["loss"].backward()
        m.down.requires_grad_(True)
    return max(worst, apart(model, plain))


def incomplete(model: Any, plain: nn.Module) -> float:
    """The last backward pass of a window is within `no_sync`."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for m in (model, plain):
        backward(m, 0)
        backward(m, 1, sync=False)
    with pytest.raises(AutoparError, match=r"SGD.step\(\): gradients of 4 parameters .*no_sync.*reduce_gradients"):
        optimizers[0].step()
    with pytest.raises(AutoparError, match=r"full_gradients\(\)"):
        model.full_gradients()
    model.reduce_gradients()
    worst = apart(model, plain)
    for optimizer in optimizers:
        optimizer.step()
    state = model.full_state_dict()
    return max(worst, *(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items()))


CASES: dict[str, Callable[[Any, nn.Module], float]] = {
    **{f.__name__: (lambda m, p, f=f: given_up(m, p, f)) for f in GIVE_UP},
    "frozen": frozen,
    "incomplete": incomplete,
}


@pytest.mark.some(3)
@pytest.mark.parametrize("case", CASES)
def test_on_one_device(case: str) -> None:
    assert CASES[case](parallelize(mlp(), None), mlp()) < 1e-12


@pytest.mark.parametrize("case", ["by_optimizer", "of_half", "incomplete"])
def test_in_microbatches(case: str) -> None:
    search = Search(pins={"microbatches": 2})
    assert CASES[case](parallelize(mlp(), None, mlp_batch(0), search=search), mlp()) < 1e-12


def test_an_optimizer_of_other_parameters_may_step() -> None:
    model, other = parallelize(mlp(), None), nn.Linear(2, 2)
    backward(model, 0, sync=False)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.optim.SGD(other.parameters(), lr=0.1).zero_grad()
    with pytest.raises(AutoparError, match="no_sync"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


class _Around(torch.optim.Optimizer):
    """As accelerate's: within a window it does nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.ends = optimizer, False
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.ends:
            self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_around_another_that_does_nothing_gives_nothing_up() -> None:
    model, plain = parallelize(mlp(), None), mlp()
    around = _Around(torch.optim.SGD(model.parameters(), lr=0.1))
    for m in (model, plain):
        backward(m, 0, sync=False)
        around.zero_grad()
        backward(m, 1)
    assert apart(model, plain) < 1e-12
    backward(model, 2, sync=False)
    around.ends = True
    around.zero_grad()
    around.optimizer.step()  # an error while gradients wait


def test_the_last_backward_pass_may_be_the_closures() -> None:
    model, plain = parallelize(mlp(), None), mlp()
    for m in (model, plain):
        backward(m, 0, sync=False)
        torch.optim.SGD(m.parameters(), lr=0.1).step(lambda m=m: backward(m, 1))
    state = model.full_state_dict()
    assert max(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items()) < 1e-12
    backward(model, 2, sync=False)
    with pytest.raises(AutoparError, match=r"SGD.step\(\): gradients of 4 parameters"):
        torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: backward(model, 3, sync=False))
