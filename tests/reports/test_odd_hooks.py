"""Hooks, autograd functions and checkpoints in unusual places: they do what they do in eager mode, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autopar import parallelize
from autopar.errors import CaptureError

D = torch.float64


class Model(nn.Module):
    """Two linear layers with batch norm between them, a counter, and a function of these."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g = nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.norm = nn.BatchNorm1d(4, dtype=D)
        self.function = function
        self.n, self.seen, self.rows = 0, [], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(step))


def refused(function: Callable[[Any, torch.Tensor], torch.Tensor], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        parallelize(Model(function), None)(batch(0))


def same(model: Any, plain: Any, steps: int = 3) -> None:
    for step in range(steps):
        for m in (model, plain):
            m.zero_grad()
            m(batch(step)).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)
        assert (model.n, model.seen, model.rows) == (plain.n, plain.seen, plain.rows)


def hooks_a_parameter(m: Any, x: torch.Tensor, remove: bool) -> torch.Tensor:
    handle = m.f.weight.register_hook(lambda g: g * 2)
    y: torch.Tensor = m.f(x)
    if remove:
        handle.remove()
    return y


def test_a_hook_that_forward_leaves_on_a_parameter() -> None:
    """Every call would add one more."""
    refused(lambda m, x: hooks_a_parameter(m, x, False), r"registers the hook .* on parameter 'f.weight' and leaves it")
    models = [Model(lambda m, x: hooks_a_parameter(m, x, True)) for _ in range(2)]
    same(parallelize(models[0], None), models[1])


def test_a_hook_after_accumulation() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.f.weight.register_post_accumulate_grad_hook(lambda p: None)
        return m.f(x)

    refused(function, "register_post_accumulate_grad_hook in forward")


def test_a_tensors_hook_that_counts_on_the_model() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.f(x)
        y.register_hook(lambda g: (setattr(m, "n", m.n + 1), g * 2)[1])
        return y

    refused(function, "records gradients")


class Counts(torch.autograd.Function):
    """Counts its backward passes."""

    calls: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        if ctx.module is None:
            Counts.calls.append(1)
        else:
            ctx.module.n += 1
        return g * 2, None


@pytest.mark.parametrize("place", ["class", "model"])
def test_a_backward_pass_that_counts(place: str) -> None:
    refused(
        lambda m, x: Counts.apply(m.f(x), m if place == "model" else None),
        "the backward pass of Counts changes Python state",
    )


def removes_itself(plain: bool) -> Any:
    model = Model(lambda m, x: m.g(m.f(x)))

    def hook(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        model.handle.remove()
        return output * 2

    model.handle = model.f.register_forward_hook(hook)
    return model if plain else parallelize(model, None)


def test_a_hook_that_removes_itself() -> None:
    same(removes_itself(False), removes_itself(True))


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for handle in found:
        handle.remove()


@pytest.mark.parametrize(
    "register",
    [register_module_forward_hook, register_module_forward_pre_hook, register_module_full_backward_hook],
    ids=lambda f: f.__name__,
)
def test_a_hook_on_all_modules(register: Callable[..., Any], handles: list[Any]) -> None:
    """Also one that comes after the first call."""
    model = parallelize(Model(lambda m, x: m.f(x)), None)
    model(batch(0))
    handles.append(register(lambda *_: None))
    with pytest.raises(CaptureError, match="is registered on all modules"):
        model(batch(0))
    handles.pop().remove()
    with FlopCounterMode(display=False):  # which has its own
        model(batch(0))


CHECKPOINTED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "batch norm": (lambda m, x: m.norm(x), "norm.num_batches_tracked"),
    "counter": (lambda m, x: (setattr(m, "n", m.n + 1), x)[1], "n"),
    "list": (lambda m, x: (m.seen.append(1), x)[1], "seen"),
    "number that is assigned": (lambda m, x: (setattr(m, "rows", x.shape[0]), x)[1], ""),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("reentrant", [True, False])
def test_state_that_a_checkpoint_writes(name: str, reentrant: bool) -> None:
    """Torch writes to it twice: when it runs the function, and when it recomputes it."""
    write, found = CHECKPOINTED[name]

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: m.g(write(m, h)).tanh(), m.f(x), use_reentrant=reentrant)

    if found:
        refused(function, f"under torch.utils.checkpoint writes to '{found}'")
    else:
        same(parallelize(Model(function), None), Model(function))
