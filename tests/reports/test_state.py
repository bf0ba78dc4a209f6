"""What a model keeps and changes by itself: buffers, parameters, Python attributes, over several calls, as in eager."""

from __future__ import annotations

import copy
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar import parallelize, verify
from autopar.errors import CaptureError

D = torch.float64
BOUND = 1e-12


class Inner(nn.Module):
    """Buffers that are assigned and written through ``.data``, a plain tensor, numbers and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4, dtype=D)
        self.register_buffer("center", torch.zeros(4, dtype=D))
        self.register_buffer("scale", torch.ones(4, dtype=D))
        self.ema = torch.zeros(4, dtype=D)
        self.calls, self.average, self.seen = 0, 0.0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.f(x)
        self.center = 0.9 * self.center + h.detach().mean(0)
        self.scale.data.mul_(0.5).add_(h.detach().abs().mean(0))
        self.ema.mul_(0.9).add_(h.detach().mean(0))
        self.calls += 1
        self.average = 0.5 * self.average + 1
        self.seen.append(h.detach().mean())
        return (h - self.center) / (1 + self.scale) + self.ema


class Stateful(nn.Module):
    """Also a momentum encoder, an auxiliary loss, and settings that are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.inner = nn.Linear(4, 4, dtype=D), Inner()
        self.slow = nn.Linear(4, 4, dtype=D).requires_grad_(False)
        self.beta, self.options, self.auxiliary = 1.0, {"double": True}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.f.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            self.slow.bias.data = self.slow.bias.data * 0.5
        h = self.inner(self.f(x)) + self.slow(x)
        self.auxiliary = h.square().mean() * self.beta
        return (h * 2 if self.options["double"] else h).square().mean()


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(seed))


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for table in ("named_parameters", "named_buffers"):
        for (name, a), (_, b) in zip(getattr(model, table)(), getattr(plain, table)(), strict=True):
            torch.testing.assert_close(a, b, rtol=BOUND, atol=BOUND, msg=name)
            assert (a.grad is None) == (b.grad is None), name
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=BOUND, atol=BOUND, msg=name)


@pytest.mark.slow
def test_state_over_several_calls() -> None:
    """Settings change between calls, on the model and on the returned module; the loop adds the auxiliary loss."""
    plain = Stateful()
    model = parallelize(copy.deepcopy(plain), None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(5):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            if step == 2:
                m.beta = 2.0
            if step == 3:
                m.options["double"] = False
            optimizer.zero_grad()
            loss = m(inputs(step)) + m.auxiliary
            loss.backward()
            optimizer.step()
        assert_same(model, plain)
        for name in ("calls", "average"):
            assert getattr(model.inner, name) == getattr(plain.inner, name)
        torch.testing.assert_close(torch.stack(model.inner.seen), torch.stack(plain.inner.seen))
        torch.testing.assert_close(model.inner.ema, plain.inner.ema)


def test_verify_compares_what_calls_leave() -> None:
    report = verify(Stateful(), (inputs(0),), {"a": 2}, plan="random", seed=1)
    assert report.max_error < BOUND
    assert {"attribute auxiliary", "attribute inner.calls", "buffer inner.center", "parameter slow.bias"} <= {
        *report.errors
    }


class Reading(nn.Module):
    """A function of the model and the input."""

    def __init__(self, function: Callable[..., torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(4, 4, dtype=D)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x).square().mean()


class Settings:
    """Plain data."""

    def __init__(self) -> None:
        self.power, self.names = 2, ["a"]


factor = 1.5

CHANGES: dict[str, tuple[nn.Module, Callable[[Any], object]]] = {
    "number": (Reading(lambda m, x: m.f(x) * m.beta, beta=1.0), lambda m: setattr(m, "beta", 3.0)),
    "flag": (Reading(lambda m, x: m.f(x) * (2 if m.flag else 3), flag=True), lambda m: setattr(m, "flag", False)),
    "object": (Reading(lambda m, x: m.f(x) ** m.s.power, s=Settings()), lambda m: setattr(m.s, "power", 3)),
    "list": (Reading(lambda m, x: m.f(x) * len(m.s.names), s=Settings()), lambda m: m.s.names.append("b")),
    "tensor": (Reading(lambda m, x: m.f(x) + m.t, t=torch.ones(4, dtype=D)), lambda m: m.t.mul_(3)),
    "new tensor": (
        Reading(lambda m, x: m.f(x) + m.t, t=torch.ones(4, dtype=D)),
        lambda m: setattr(m, "t", torch.zeros(4, dtype=D)),
    ),
    "module's setting": (
        Reading(lambda m, x: m.d(m.f(x)), d=nn.LeakyReLU(0.1)),
        lambda m: setattr(m.d, "negative_slope", 0.7),
    ),
    "momentum": (
        Reading(lambda m, x: m.b(m.f(x)), b=nn.BatchNorm1d(4, dtype=D)),
        lambda m: setattr(m.b, "momentum", 0.9),
    ),
    "method": (Reading(lambda m, x: m.f(x)), lambda m: setattr(m, "function", lambda m, x: m.f(x) * 2)),
    # The same objects under other names.
    "attribute's name": (
        Reading(lambda m, x: m.f(x) * getattr(m, "a", 10.0), a=2.0), lambda m: (setattr(m, "z", m.a), delattr(m, "a")),
    ),
    "key": (
        Reading(lambda m, x: m.f(x) * m.options.get("a", 10.0), options={"a": 2.0}),
        lambda m: m.options.update(z=m.options.pop("a")),
    ),
    "key of an ordered dict": (
        Reading(lambda m, x: m.f(x) * m.options.get("a", 10.0), options=OrderedDict(a=2.0)),
        lambda m: m.options.update(z=m.options.pop("a")),
    ),
    "name in a namespace": (
        Reading(lambda m, x: m.f(x) * getattr(m.config, "a", 10.0), config=SimpleNamespace(a=2.0)),
        lambda m: vars(m.config).update(z=vars(m.config).pop("a")),
    ),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    original, change = CHANGES[name]
    plain, model = copy.deepcopy(original), parallelize(copy.deepcopy(original), None)
    for step in range(4):
        if step == 2:
            change(plain)
            change(model)
        losses = []
        for m in (plain, model):
            m.zero_grad()
            losses.append(m(inputs(step)))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        assert_same(model, plain)


@pytest.mark.parametrize("change", [lambda m: m.t.zero_(), lambda m: setattr(m, "t", torch.zeros(4, dtype=D))])
def test_a_tensor_that_decides_chooses_the_graph(change: Callable[[Any], Any]) -> None:
    plain = Reading(lambda m, x: m.f(x) * (2 if m.t.sum() > 1 else 3), t=torch.ones(4, dtype=D))
    model = parallelize(copy.deepcopy(plain), None)
    for step in range(4):
        if step == 2:
            change(plain)
            change(model)
        torch.testing.assert_close(model(inputs(step)), plain(inputs(step)))


def test_a_counter_needs_one_graph() -> None:
    class Counting(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model = parallelize(Counting(lambda m, x: m.f(x), calls=0), None)
    for step in range(4):
        model(inputs(step))
    assert model.calls == 4
    model.calls = 0
    model(inputs(0))
    assert model.calls == 1
    assert len(model._autopar.cache) == 1


def test_a_counter_that_decides_has_a_graph_for_each_value() -> None:
    class Deciding(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (2 if self.calls % 2 else 3)

    plain = Deciding(lambda m, x: m.f(x), calls=0)
    model = parallelize(copy.deepcopy(plain), None)
    for step in range(4):
        torch.testing.assert_close(model(inputs(step)), plain(inputs(step)))


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_draws_of_python_are_an_error(draw: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"random generator at .*test_state\.py:\d+: a graph would repeat"):
        parallelize(Reading(lambda m, x: m.f(x) * draw()), None)(inputs(0))


def test_what_cannot_be_written_again() -> None:
    def store(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last = (h for h in [m.f(x)])
        return m.f(x)

    done = threading.Event()
    other = threading.Thread(target=done.wait)  # where there is one, assignments are looked at in another way, too
    for start in (lambda: None, other.start):
        start()
        with pytest.raises(CaptureError, match=r"sets last, assigned at .*test_state\.py:\d+ to a generator"):
            parallelize(Reading(store, last=None), None)(inputs(0))
    done.set()
    other.join()


def test_tensors_of_a_stranger() -> None:
    outside = nn.Linear(4, 4, dtype=D)
    with pytest.raises(CaptureError, match=r"requires a gradient and is no parameter of the model, at .*test_state"):
        parallelize(Reading(lambda m, x: m.f(outside(x))), None)(inputs(0))


def test_gradients_of_attributes_that_are_no_parameters() -> None:
    weight = torch.ones(4, dtype=D, requires_grad=True)
    with pytest.raises(CaptureError, match=r"'w' is no parameter, and requires a gradient.*nn\.Parameter"):
        parallelize(Reading(lambda m, x: m.f(x) * m.w, w=weight), None)(inputs(0))


@pytest.mark.some(1)
@pytest.mark.parametrize("registered", [True, False])
def test_a_zero_that_forward_makes_differentiable(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A loss to begin with, as vector quantizers have it: it needs no gradient of its own."""

    def quantizing(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss = m.zero
        if m.training:
            loss.requires_grad_()
        return loss + m.f(x).square().mean()

    plain = Reading(quantizing)
    if registered:
        plain.register_buffer("zero", torch.zeros((), dtype=D), persistent=False)
    else:
        plain.zero = torch.zeros((), dtype=D)
    for seed in range(2):
        report = verify(plain, (inputs(0),), {"a": 2, "b": 2}, plan="random", seed=seed)
        assert max(report.max_error, report.capture_error) < BOUND
    model = parallelize(copy.deepcopy(plain), None)
    for training in (True, True, False):
        for m in (model, plain):
            m.train(training)
            m.zero_grad()
            m(inputs(0)).sum().backward()
        assert torch.equal(model.full_gradients()["f.weight"], plain.f.weight.grad)
    assert "'zero' is no parameter and gets no gradient" in caplog.text


def test_a_tensor_kept_with_its_history() -> None:
    """It may be read without gradients; through it there are none, where eager refuses a second backward pass."""

    def looking(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.f(x) if m.last is None else m.f(x) + m.last.detach()
        m.last = y.mean()
        return y

    def going_back(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.f(x) if m.last is None else m.f(x) + m.last
        m.last = y.mean()
        return y

    plain = Reading(looking, last=None)
    model = parallelize(copy.deepcopy(plain), None)
    for step in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(inputs(step)).backward()
        assert_same(model, plain)
    model = parallelize(Reading(going_back, last=None), None)
    model(inputs(0)).backward()
    with pytest.raises(CaptureError, match="'last' is no parameter, and requires a gradient"):
        model(inputs(1))


class Methods(nn.Sequential):
    """Methods of its own, some of which torch calls."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4, dtype=D), nn.BatchNorm1d(4, dtype=D))
        self.frozen = True

    def train(self, mode: bool = True) -> Methods:
        super().train(mode)
        if self.frozen:
            self[1].eval()
        return self

    def get_extra_state(self) -> dict[str, bool]:
        return {"frozen": self.frozen}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        self.frozen = state["frozen"]

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def test_methods_are_the_models_own() -> None:
    plain = Methods()
    model = parallelize(copy.deepcopy(plain), None)
    assert isinstance(model, Methods)
    assert len(model) == 2
    assert model[1] is model._modules["1"]
    for m in (plain, model):
        m.train()
        m.loss_of(inputs(0)).backward()
    assert not model[1].training
    assert_same(model, plain)
    state = model.state_dict()
    assert state["_extra_state"] == {"frozen": True}
    model.frozen = False
    model.load_state_dict(state)
    assert model.frozen
    plain.frozen = False
    model.frozen = False
    for m in (plain, model):
        m.train()
        m.loss_of(inputs(1))
    assert_same(model, plain)


class Iterates(nn.Module):
    """Asks for its buffers, beside plain tensors: one of its own, and the weight that spectral norm computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(4))
        self.normed = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.plain = torch.full((4,), 7.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over buffers by three ways of asking."""
        named = sum(b.sum() for _, b in self.named_buffers())
        state = sum(v.sum() for v in self.state_dict().values()) * len(list(self.buffers()))
        return (self.normed(x) * self.plain).sum() + named + state


def test_plain_tensors_are_no_buffers_while_a_model_is_traced() -> None:
    torch.manual_seed(0)
    model = Iterates().double()
    parallel, x = parallelize(copy.deepcopy(model), None), torch.randn(3, 4, dtype=torch.float64)
    for _ in range(3):
        expected = model(x)
        torch.testing.assert_close(parallel(x), expected)
    torch.testing.assert_close(parallel.full_state_dict(), dict(model.state_dict()))
