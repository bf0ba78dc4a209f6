"""Backward passes of one's own and hooks: the gradients of eager, or an error that names the hook."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from autopar import parallelize, verify
from autopar.errors import AutoparError, CaptureError
from tests.crossed import crossed

D = torch.float64


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.strength * gradient, None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-0.1, 0.1) * (x.abs() < 1)


class Swapped(torch.autograd.Function):
    """Two inputs and outputs, whose gradients are exchanged."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a * 1, b * 1

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return b, a


class Network(nn.Module):
    """Two layers and what lies between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x).tanh())).square().mean()


def hooked(h: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    h.register_hook(hook)
    return h


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reversal": lambda h: Reversed.apply(h, 3.0),
    "straight-through": lambda h: Rounded.apply(h),
    "several": lambda h: sum(Swapped.apply(h, h * 2)),  # type: ignore[arg-type]
    "hook": lambda h: hooked(h, lambda g: g * 5),
    "hooks": lambda h: hooked(hooked(h * 2, lambda g: g.clamp(-1e-3, 1e-3)), lambda g: g + 1),
    "detached": lambda h: h + (h.round() - h).detach(),
}

x = torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_backward_passes_of_ones_own(name: str) -> None:
    plain = Network(BETWEEN[name])
    torch.testing.assert_close(gradients(parallelize(copy.deepcopy(plain), None)), gradients(plain))
    assert verify(plain, (x,), {"a": 2}, plan="random", seed=3).max_error < 1e-12


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.first.register_forward_hook(lambda module, args, output: output * 3),
    "forward in place": lambda m: m.first.register_forward_hook(lambda module, args, output: output.mul_(3) and None),
    "pre": lambda m: m.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "kwargs": lambda m: m.first.register_forward_hook(lambda module, args, kwargs, out: out - 1, with_kwargs=True),
    "backward": lambda m: m.second.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,)),
    "backward pre": lambda m: m.first.register_full_backward_pre_hook(lambda module, go: (go[0] * 7,)),
    "of the model": lambda m: m.register_forward_hook(lambda module, args, output: output * 3),
    "parametrized": lambda m: nn.utils.parametrizations.spectral_norm(m.first),
    "spectral norm": lambda m: nn.utils.spectral_norm(m.second),
}
HOOKS["forward in place"] = lambda m: m.first.register_forward_hook(in_place)


def in_place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(3)


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "late"), crossed(HOOKS, [False, True]))
def test_hooks_of_modules(name: str, late: bool) -> None:
    """Registered before or after the first call, on the model or on the returned module."""
    plain = Network()
    if not late:
        HOOKS[name](plain)
    model = parallelize(copy.deepcopy(plain), None)
    if late:
        if name in ("parametrized", "spectral norm"):
            pytest.skip("changes parameters, which comes before parallelize()")
        gradients(model)
        HOOKS[name](plain)
        HOOKS[name](model)
    for _ in range(2):
        torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_removed_hook_is_gone() -> None:
    plain = Network()
    model = parallelize(copy.deepcopy(plain), None)
    handle = model.first.register_forward_hook(lambda module, args, output: output * 3)
    gradients(model)
    handle.remove()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_recording_hooks_see_values() -> None:
    """Once for every call, whether they look at values or keep tensors."""
    seen: dict[str, list[Any]] = {"plain": [], "parallel": []}
    plain = Network()
    model = parallelize(copy.deepcopy(plain), None)
    for m, kind in ((plain, "plain"), (model, "parallel")):
        record = seen[kind]
        m.first.register_forward_hook(lambda module, args, output, r=record: r.append(output.detach().clone()))
        m.second.register_forward_hook(lambda module, args, output, r=record: r.append(output.norm().item()))
        m.register_forward_hook(lambda module, args, output, r=record: r.append(float(output)))
        m.register_full_backward_hook(lambda module, gi, go, r=record: r.append(float(go[0])))
    for _ in range(2):
        for m in (plain, model):
            gradients(m)
    assert len(seen["plain"]) == 8
    torch.testing.assert_close(seen["parallel"], seen["plain"])


def test_hooks_that_record_gradients_are_named() -> None:
    found: list[torch.Tensor] = []
    model = parallelize(Network(), None)
    model.second.register_full_backward_hook(lambda module, gi, go: found.append(go[0]))
    with pytest.raises(CaptureError, match=r"backward hook .*test_backward\.py:\d+\) of second records gradients"):
        gradients(model)
    assert not found
    plain = Network(lambda h: hooked(h, lambda g: found.append(g)))
    with pytest.raises(CaptureError, match=r"backward hook .*of a tensor records gradients"):
        gradients(parallelize(plain, None))


def test_kept_gradients_are_an_error() -> None:
    def kept(h: torch.Tensor) -> torch.Tensor:
        h.retain_grad()
        return h

    with pytest.raises(CaptureError, match="retain_grad"):
        gradients(parallelize(Network(kept), None))


@pytest.mark.parametrize("of", ["parameter", "batch"])
def test_gradients_of_gradients_outside_are_an_error(of: str) -> None:
    """A penalty on gradients would lose its own, silently: its value is right."""
    x = torch.ones(2, 4, dtype=D, requires_grad=of == "batch")
    model = parallelize(
        nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Tanh()), None, loss_fn=lambda y, b: y.square().mean()
    )
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x if of == "batch" else model[0].weight, create_graph=True)
    assert gradient.requires_grad
    penalized = loss + gradient.square().sum()
    asked: list[Callable[[], Any]] = [
        lambda: penalized.backward(retain_graph=True),
        # Of some tensors alone, to which no other function of these gradients leads.
        lambda: torch.autograd.grad(penalized, [model[0].weight], retain_graph=True),
        lambda: penalized.backward(inputs=[model[0].bias], retain_graph=True),
        lambda: torch.autograd.grad(gradient.sum(), x if of == "batch" else model[0].bias, allow_unused=True),
    ]
    for ask in asked:
        with pytest.raises(AutoparError, match="a gradient of a gradient"):
            ask()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=D)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.linear(x)
        return {"loss": h.square().mean(), "logits": h}


@pytest.mark.parametrize("of", ["parameter", "batch"])
def test_gradients_of_some_tensors_through_an_output_beside_the_loss_are_an_error(of: str) -> None:
    x = torch.ones(2, 4, dtype=D, requires_grad=of == "batch")
    model: Any = parallelize(TwoOutputs(), None)
    out, wanted = model(x), x if of == "batch" else model.linear.weight
    with pytest.raises(AutoparError, match="a gradient was asked through output 'logits'"):
        torch.autograd.grad(out["loss"] + out["logits"].sum(), wanted)
    with pytest.raises(AutoparError, match="a gradient was asked through output 'logits'"):
        (out["loss"] + out["logits"].sum()).backward(inputs=[wanted])


def test_transforms_and_tracers_around_the_model_are_an_error() -> None:
    model: Any = parallelize(nn.Linear(4, 4, dtype=D), None, loss_fn=lambda y, b: y.square().mean())
    x = torch.ones(2, 4, dtype=D)
    model(x)
    for trace in (torch.jit.trace, torch.export.export):
        with pytest.raises(AutoparError, match="cannot be traced"):
            trace(model, (x,))
    with pytest.raises(AutoparError, match="cannot be traced"):
        torch.jit.script(model)
    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises(AutoparError, match="within a transform of torch"):
            transform(lambda x: model(x[None]))(torch.ones(2, 4, dtype=D))
