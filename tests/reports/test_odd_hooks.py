"""Hooks, autograd functions and checkpoints in unusual places: they do what they do in eager mode, or are refused."""

from __future__ import annotations

import copy
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autopar import parallelize, verify
from autopar.errors import AutoparError, CaptureError

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


def test_operations_of_a_first_call_are_counted_as_in_eager_mode() -> None:
    """Torch's counter registers hooks on all modules and tensors; planning runs operators, of shapes not yet seen."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(11, 13)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.f(x).tanh().square().mean()

    made, x = Odd(), torch.ones(7, 11)
    counts = []
    for model in (made, parallelize(copy.deepcopy(made), None)):
        with FlopCounterMode(display=False) as counter:
            model(x).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


CHECKPOINTED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "batch norm": (lambda m, x: m.norm(x), "norm.num_batches_tracked"),
    "counter": (lambda m, x: (setattr(m, "n", m.n + 1), x)[1], "n"),
    "list": (lambda m, x: (m.seen.append(1), x)[1], "seen"),
    "number that is assigned": (lambda m, x: (setattr(m, "rows", x.shape[0]), x)[1], ""),
}


@pytest.mark.some(3)
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


class Steering:
    """A hook with state of its own: a strength, which a script changes, and what it counts and keeps."""

    def __init__(self) -> None:
        self.strength, self.calls, self.seen = 1.0, 0, []

    def __call__(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(output.detach().sum())
        return output * self.strength

    def backward(self, module: nn.Module, inner: Any, outer: Any) -> Any:
        return tuple(g * self.strength for g in inner)


OPTIONS = [1.0]


def by_global(module: nn.Module, given: Any) -> Any:
    return (given[0] * OPTIONS[0],)


HOOKED: dict[str, Callable[[Any, Steering], Any]] = {
    "object": lambda m, state: m.f.register_forward_hook(state),
    "method": lambda m, state: m.g.register_full_backward_hook(state.backward),
    "closure": lambda m, state: m.f.register_forward_hook(lambda *given: given[2] * state.strength),
    "global": lambda m, state: m.f.register_forward_pre_hook(by_global),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", HOOKED)
def test_state_of_a_hooks_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a hook only counts and keeps needs no new graph; what it computes with does."""
    models = [Model(lambda m, x: m.g(m.f(x))) for _ in range(2)]
    states = [Steering(), Steering()]
    for model, state in zip(models, states, strict=True):
        HOOKED[name](model, state)
    if name == "object":
        assert verify(models[0], (batch(0),), {"a": 2}, plan="random").max_error < 1e-12
        assert not states[0].calls
    parallel, losses = parallelize(models[0], None), []
    with caplog.at_level("INFO", "autopar"):
        for step in range(4):
            for state in states:
                state.strength = OPTIONS[0] = 3.0 if step > 1 else 1.0
            losses.append([float(m(batch(step))) for m in (parallel, models[1])])
            same(parallel, models[1], 1)
    assert all(a == pytest.approx(b, rel=1e-12) for a, b in losses)
    torch.testing.assert_close(states[0].seen, states[1].seen)
    assert states[0].calls == states[1].calls
    assert sum("recapturing" in r.message for r in caplog.records) == 1


def test_the_order_of_hooks() -> None:
    models = [Model(lambda m, x: m.g(m.f(x))) for _ in range(2)]
    for model in models:
        for function in (lambda *given: given[2] * 2, lambda *given: given[2] + 1):
            model.f.register_forward_hook(function)
    parallel = parallelize(models[0], None)
    same(parallel, models[1], 1)
    for model in models:
        model.f._forward_hooks.move_to_end(next(iter(model.f._forward_hooks)))
    same(parallel, models[1], 1)


def looks(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


LOOKING: dict[str, Callable[[Any], Any]] = {
    "the output": lambda m: m.f.register_forward_hook(lambda f, i, o: (m.seen.append(looks(o)), o)[1]),
    "the arguments": lambda m: m.f.register_forward_pre_hook(lambda f, i: (m.seen.append(looks(i[0])), i)[1]),
    "an argument": lambda m: m.f.register_forward_pre_hook(lambda f, i: (m.seen.append(looks(i[0])), i[0])[1]),
    "keywords": lambda m: m.f.register_forward_pre_hook(
        lambda f, i, k: (m.seen.append(looks(i[0])), (i, k))[1], with_kwargs=True
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", LOOKING)
def test_a_hook_that_looks_at_values_and_returns_them(name: str) -> None:
    models = [Model(lambda m, x: m.g(m.f(x))) for _ in range(2)]
    for model in models:
        LOOKING[name](model)
    same(parallelize(models[0], None), models[1])
    assert len(models[0].seen) == 3


class Scaled(nn.Linear):
    """Has a number that its forward reads."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def doubles(tensor: torch.Tensor, seen: torch.Tensor) -> None:
    if looks(seen) > 0:
        tensor.data.mul_(2)


WRITING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "output": (lambda f: f.register_forward_hook(lambda f, i, o: doubles(o.detach(), o)), "what it is called with"),
    "weight": (lambda f: f.register_forward_pre_hook(lambda f, i: doubles(f.weight, i[0])), "'f.weight'"),
    "number": (lambda f: f.register_forward_pre_hook(lambda f, i: setattr(f, "scale", looks(i[0]))), "'f.scale'"),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_hook_that_looks_at_values_and_writes(name: str) -> None:
    """The rest of the call would have to see it."""
    register, written = WRITING[name]
    model = Model(lambda m, x: m.f(x))
    model.f = Scaled(4, 4, dtype=D)
    register(model.f)
    with pytest.raises(AutoparError, match=f"looks at values and writes to {written}"):
        parallelize(model, None)(batch(0))


def test_a_hook_that_computes_with_what_it_counts() -> None:
    def add(model: Any) -> Any:
        calls = [0]

        def hook(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return output * calls[0]

        model.f.register_forward_hook(hook)
        return model

    same(parallelize(add(Model(lambda m, x: m.f(x))), None), add(Model(lambda m, x: m.f(x))))


class Tanh(TorchFunctionMode):
    """Has another function in the place of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.tanh(*args) if func is torch.relu else func(*args, **(kwargs or {}))


class Sine(TorchDispatchMode):
    """The same of operators, which torch differentiates as what they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.sin.default if func is torch.ops.aten.relu.default else func
        return func(*args, **(kwargs or {}))


def test_modes_around_a_call() -> None:
    model, plain = (Model(lambda m, x: m.g(torch.relu(m.f(x)))) for _ in range(2))
    parallel: Any = parallelize(model, None)
    for _ in range(2):
        with Tanh(), pytest.raises(AutoparError, match=r"under a TorchFunctionMode \(Tanh\)"):
            parallel(batch(0))
        with Sine():  # the first call, too
            losses = [m(batch(0)) for m in (parallel, plain)]
        for m, loss in zip((parallel, plain), losses, strict=True):
            m.zero_grad()
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parallel.f.weight.grad, plain.f.weight.grad, rtol=1e-12, atol=1e-12)
        with torch.device("cpu"):
            same(parallel, plain, 1)
