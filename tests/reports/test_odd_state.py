"""Python state in unusual places and ways: numbers that move, orders that change, generators, texts of tensors."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.errors import CaptureError

D = torch.float64


class Model(nn.Module):
    """A linear layer, state, and a function of both that gives the output."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(4, 4, dtype=D)
        self.function = function
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.f(x).square().mean())


def after(*_: Any, value: Any) -> Any:
    """The last of some expressions."""
    return value


def text_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor({value.item():.12e}, {value.requires_grad})"
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value)


def run(model: nn.Module, plain: nn.Module, names: tuple[str, ...]) -> None:
    """Three calls of both, which must leave and return the same."""
    for step in range(3):
        x = torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(step))
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for name in names:
            # Tensors as numbers, to twelve digits: so texts show every order and type.
            assert text_of(getattr(model, name)) == text_of(getattr(plain, name))


MOVED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "to another name": (lambda m: (setattr(m, "p", m.n), setattr(m, "n", m.n + 1)), {"n": 0, "p": 0}),
    "exchanged": (lambda m: m.__dict__.update(n=m.p, p=m.n), {"n": 1.0, "p": 2.0}),
    "into a new list": (lambda m: (setattr(m, "n", m.n + 1), setattr(m, "p", [m.n])), {"n": 0, "p": []}),
    "appended": (lambda m: (setattr(m, "n", m.n + 1), m.p.append(m.n)), {"n": 0, "p": []}),
    "under a key": (lambda m: (setattr(m, "n", m.n + 1), m.p.update(k=m.n)), {"n": 0, "p": {}}),
    "as a key": (lambda m: (setattr(m, "n", m.n + 1), m.p.update({m.n: 1})), {"n": 0, "p": {}}),
    "within a list": (lambda m: m.p.reverse(), {"n": 0, "p": [1.0, 2.0, 3.0]}),
    "up in a list": (lambda m: m.p.pop(0), {"n": 0, "p": [1, 2, 3, 4]}),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MOVED)
def test_a_number_moves(name: str) -> None:
    """It is not counted on at the place where it comes to be."""
    write, state = MOVED[name]
    model, plain = (Model(lambda m, y: after(write(m), value=y), **state) for _ in range(2))
    run(parallelize(model, None), plain, ("n", "p"))


def test_a_counter_is_returned() -> None:
    def function(m: Any, y: torch.Tensor) -> Any:
        m.n += 1
        return y, m.n * 2, {m.n: [m.n]}

    model, plain = Model(function, n=0), Model(function, n=0)
    run(parallelize(model, None), plain, ("n",))


HOOKS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "appends": lambda m, o: m.seen.append(o.detach().mean()),
    "appends with its history": lambda m, o: m.seen.append(o.square().mean()),
    "counts": lambda m, o: setattr(m, "n", m.n + 1),
    "sees a counter": lambda m, o: m.seen.append(m.n),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_records_in_the_model(name: str) -> None:
    """Once a call, and in order."""

    def function(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.n += 1
        m.seen.append("end")
        return y

    def make() -> Model:
        model = Model(function, n=0, seen=[])
        model.f.register_forward_hook(lambda _, i, o: HOOKS[name](model, o))
        return model

    run(parallelize(make(), None), make(), ("n", "seen"))


def takes(y: torch.Tensor, *, seen: list[int] = []) -> torch.Tensor:  # noqa: B006  what is tested
    seen.append(1)
    return y * len(seen)


def counted(y: torch.Tensor) -> torch.Tensor:
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return y * counted.calls  # type: ignore[attr-defined]


def counting(y: torch.Tensor) -> torch.Tensor:
    global calls
    try:
        calls += 1
    except NameError:
        calls = 1
    return y * calls


class Kind:
    def count(self, y: torch.Tensor) -> torch.Tensor:
        type(self).calls = getattr(type(self), "calls", 0) + 1  # type: ignore[attr-defined]
        return y * self.calls  # type: ignore[attr-defined]


def forgotten() -> None:
    """Nothing has been called yet."""
    globals().pop("calls", None)
    vars(counted).clear()
    if hasattr(Kind, "calls"):
        del Kind.calls
    takes.__kwdefaults__["seen"].clear()


@pytest.mark.some(2)
@pytest.mark.parametrize("function", [takes, counted, counting, Kind().count], ids=lambda f: f.__name__)
def test_state_that_is_not_there_before_the_first_call(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = []
    for parallel in (True, False):
        forgotten()
        model: Any = Model(lambda m, y: function(y))
        model = parallelize(model, None) if parallel else model
        found.append([model(torch.ones(2, 4, dtype=D)).item() for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def first(values: dict[Any, Any]) -> Any:
    return next(iter(values.values()))


ORDERS: dict[str, Callable[[Any], Any]] = {
    "moved to the end": lambda m: m.a.move_to_end(next(iter(m.a))),
    "put in again": lambda m: m.b.update({next(iter(m.b)): m.b.pop(next(iter(m.b)))}),
    "least recently used": lambda m: (m.a.update({len(m.a) % 3: 5.0}), m.a.popitem(last=False)),
    "list that moves": lambda m: (first(m.c).append(4.0), m.__dict__.update(c={"z": [1.0], "y": first(m.c)})),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_dict(name: str) -> None:
    state = {"a": OrderedDict(a=1.0, b=2.0, c=3.0), "b": dict(a=1.0, b=2.0, c=3.0), "c": {"y": [2.0]}}

    def function(m: Any, y: torch.Tensor) -> torch.Tensor:
        ORDERS[name](m)
        return y * first(m.a) * first(m.b) * first(m.c)[0]

    run(parallelize(Model(function, **state), None), Model(function, **state), ("a", "b", "c"))


def test_a_hook_that_records_in_two_places() -> None:
    seen: list[int] = []
    model = Model(lambda m, y: y, n=0)
    model.f.register_forward_hook(lambda _, i, o: seen.append(setattr(model, "n", model.n + 1)))
    with pytest.raises(CaptureError, match="writes to the model's state and to what is no part of the model"):
        parallelize(model, None)(torch.ones(2, 4, dtype=D))


scale = 1.0


def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * scale


class Scaler:
    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return y * scale

    def method(self, y: torch.Tensor) -> torch.Tensor:
        return y * scale


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * scale


REGISTRY = {"scaled": scaled}


def hooked(model: Model) -> Model:
    model.f.register_forward_hook(lambda m, i, o: o * scale)
    return model


CODE: dict[str, Callable[[], Model]] = {
    "function": lambda: Model(lambda m, y: m.g(y), g=scaled),
    "itself": lambda: Model(lambda m, y: y * scale),
    "in a dict": lambda: Model(lambda m, y: m.g["a"](y), g={"a": scaled}),
    "partial": lambda: Model(lambda m, y: m.g(y), g=functools.partial(scaled)),
    "object that is called": lambda: Model(lambda m, y: m.g(y), g=Scaler()),
    "method of an object": lambda: Model(lambda m, y: m.g.method(y), g=Scaler()),
    "registry": lambda: Model(lambda m, y: REGISTRY["scaled"](y)),
    "backward pass": lambda: Model(lambda m, y: Backwards.apply(y)),
    "hook": lambda: hooked(Model(lambda m, y: y)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CODE)
def test_a_global_that_code_in_attributes_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = parallelize(CODE[name](), None), CODE[name]()
    x = torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(1))
    for value in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "scale", value)
        for m in (model, plain):
            m.zero_grad()
            m(x).backward()
        torch.testing.assert_close(model.f.weight.grad, plain.f.weight.grad, rtol=1e-12, atol=1e-12)


GENERATORS: dict[str, Any] = {
    "python's": random.Random(1),
    "numpy's": np.random.default_rng(1),
    "numpy's old one": np.random.RandomState(1),
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("place", ["attribute", "closure"])
def test_a_generator_of_its_own(name: str, place: str) -> None:
    own = GENERATORS[name]

    def function(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * (m.r if place == "attribute" else own).uniform(0, 1)

    model = parallelize(Model(function, r=own if place == "attribute" else None), None)
    with pytest.raises(CaptureError, match="draws from the random generator"):
        model(torch.ones(2, 4, dtype=D))


@pytest.mark.parametrize("text", [str, repr, lambda y: f"{y}", lambda y: [repr(y.detach())]])
def test_the_text_of_a_tensor(text: Callable[[torch.Tensor], Any]) -> None:
    model = parallelize(Model(lambda m, y: after(setattr(m, "log", text(y)), value=y), log=""), None)
    with pytest.raises(CaptureError, match=r"sets log.* to the text of a tensor"):
        model(torch.ones(2, 4, dtype=D))


class Doubles(Model):
    """Makes something else of what is assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name == "n" else value)

    @property
    def kept(self) -> float:
        return float(vars(self)["kept"])

    @kept.setter
    def kept(self, value: float) -> None:
        vars(self)["kept"] = value / 2


def test_assignments_that_make_something_else_of_a_value() -> None:
    def function(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.n, m.kept = m.n + 1, m.kept + 8
        return y * m.n * m.kept

    run(parallelize(Doubles(function, n=1, kept=1.0), None), Doubles(function, n=1, kept=1.0), ("n",))
