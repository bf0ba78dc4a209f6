"""Inventories and holdings: whatever is replaced, added or removed is seen, and nothing else."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.state.inventory import Holdings, Inventory
from autopar.capture.state.slots import Slots, differences


class Config:
    """Attributes."""

    def __init__(self) -> None:
        self.rate, self.deep = 0.1, [1.0]


def scorer(power: float, shift: float) -> Any:
    """A function with cells and defaults of both kinds; ``shift`` is a cell that may be emptied."""

    def score(x: Any, by: float = 1.0, *, base: float = 2.0) -> Any:
        nonlocal shift
        return base * x**power * by + shift

    def forget() -> None:
        nonlocal shift
        del shift

    score.forget = forget  # type: ignore[attr-defined]
    return score


class Net(nn.Module):
    """With something of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.sizes, self.table = 2.0, [1, 2], {"x": 1}
        self.names, self.config = {"a"}, Config()
        self.mask = torch.ones(4)
        self.score = scorer(2.0, 1.0)


def taken(model: nn.Module) -> Inventory:
    return Inventory(model, lambda t: [n for n in vars(t) if n == "no_decay"])


def register(model: Any) -> None:
    model.a.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: setattr(m.a, "weight", nn.Parameter(torch.ones(4, 4))),
    "a parameter in the table": lambda m: m.a._parameters.update(weight=nn.Parameter(torch.ones(4, 4))),
    "a parameter gone": lambda m: setattr(m.a, "bias", None),
    "a buffer": lambda m: setattr(m.b, "running_mean", torch.ones(4)),
    "a new buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "a module": lambda m: setattr(m, "a", nn.Linear(4, 4)),
    "a module deleted": lambda m: delattr(m, "a"),
    "another name": lambda m: m.a._parameters.update(other=m.a._parameters.pop("bias")),
    "the mode": lambda m: m.b.eval(),
    "the class": lambda m: setattr(m.b, "__class__", nn.SyncBatchNorm),
    "a number": lambda m: setattr(m, "scale", 3.0),
    "True for 1": lambda m: setattr(m.b, "eps", True),
    "an attribute behind torch's back": lambda m: vars(m.a).update(in_features=7),
    "a new attribute": lambda m: setattr(m.a, "extra", 1),
    "a hook": register,
    "a table": lambda m: vars(m.a).update(_forward_hooks=dict(m.a._forward_hooks)),
    "a mark on a parameter": lambda m: setattr(m.a.weight, "no_decay", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = Net()
    if change == "True for 1":
        model.b.eps = 1  # type: ignore[assignment]
    known, slots = taken(model), Slots(model)
    before, own = slots.signature(), slots.inventory()
    assert known.holds()
    assert slots.signature() is before
    assert slots.inventory() is own
    CHANGES[change](model)
    assert not known.holds()
    assert slots.inventory() is not own
    now = Inventory(model, lambda t: [])
    assert (now.parameters, [n for n, _ in now.modules]) == (
        dict(model.named_parameters()), [n for n, _ in model.named_modules()]
    )  # fmt: skip


def test_training_is_no_change() -> None:
    model = Net()
    known, slots = taken(model), Slots(model)
    before = slots.signature()
    optimizer = torch.optim.AdamW(model.parameters())
    model.b(model.a(torch.randn(3, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert known.holds()
    assert slots.signature() is before


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "a list": lambda m: m.sizes.append(3),
    "an item": lambda m: m.sizes.__setitem__(0, 5),
    "a dict": lambda m: m.table.update(x=2),
    "a key": lambda m: m.table.update(y=m.table.pop("x") + 1),
    "a set": lambda m: m.names.add("b"),
    "an object": lambda m: setattr(m.config, "rate", 0.2),
    "deep inside": lambda m: m.config.deep.append(2.0),
    "an object's attributes as a whole": lambda m: setattr(m.config, "__dict__", {"rate": 0.3, "deep": m.config.deep}),
    "a cell of a function": lambda m: setattr(m.score.__closure__[0], "cell_contents", 3.0),
    "an emptied cell of a function": lambda m: m.score.forget(),
    "defaults of a function": lambda m: setattr(m.score, "__defaults__", (4.0,)),
    "a named default of a function": lambda m: m.score.__kwdefaults__.update(base=5.0),
    "another named default": lambda m: setattr(m.score, "__kwdefaults__", {"by": 2.0}),
    "the code of a function": lambda m: setattr(
        m.score, "__code__", scorer(0, 0).forget.__code__.replace(co_freevars=m.score.__code__.co_freevars)
    ),
    "the shape of a buffer": lambda m: setattr(m.b.running_mean, "data", torch.ones(5)),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_is_changed_in_place_is_described(change: str) -> None:
    model = Net()
    slots = Slots(model)
    before = slots.signature()
    assert slots.signature() is before
    IN_PLACE[change](model)
    assert differences(before, slots.signature())


def test_facts_may_change_in_place() -> None:
    model = Net()
    known = taken(model)
    facts = known.facts()
    model.a.weight.requires_grad_(False)
    assert known.holds()
    assert known.facts() != facts


class Slotted:
    """Attributes that are in no dict."""

    __slots__ = ("rate",)


def test_containers_of_other_kinds_are_asked_for_what_they_hold() -> None:
    """What an object holds besides its attributes is not to be found in these."""
    for container in ({1, 2}, UserDict(), Slotted(), type("Table", (dict,), {})()):
        held = Holdings([(container, ())])
        assert held.hold(lambda _: ())
        assert not held.hold(lambda _: (1,))
    plain = SimpleNamespace()
    held = Holdings([(plain, ())])
    plain.new = 1
    assert not held.hold(lambda _: ())


class Irrep(tuple[int, ...]):
    """A tuple that has no length of its own, as those of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length() -> None:
    net = Net()
    net.order = Irrep((1, 2))
    slots = Slots(net)
    before = slots.signature()
    assert not differences(before, slots.signature())
    net.order = Irrep((1, 3))
    assert differences(before, slots.signature())
