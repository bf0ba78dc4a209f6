"""Code that the model's code leads to, and state that this reads: a change is seen, whatever stands between."""

from __future__ import annotations

import collections
import functools
import logging
import math
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError
from tests.reports.test_outside_state import Scaled, X, assert_equal

BOX, TEXTS = {"scale": 1.0}, {"scale": 1.0}
LATER: Any = None
ACTIVATION: Any = math.floor
KIND: Any = dict
NESTED: Any = {"a": [("first", lambda: BOX["scale"])]}
SPACE = types.SimpleNamespace(function=lambda: BOX["scale"])
READ_ONLY, LAYERS, VALUES = types.MappingProxyType(BOX), collections.ChainMap(BOX), BOX.values()
LOGGER = logging.getLogger("a user's model")


class Key:
    pass


KEYS: weakref.WeakSet[Key] = weakref.WeakSet()
KEPT: list[Key] = []
MODULE = types.ModuleType("a_module_that_makes_names")
exec(
    """
values = {'scale': 1.0}

def __getattr__(name):
    if name not in values:
        raise AttributeError(name)
    return values[name]
""",
    vars(MODULE),
)


class Decorated:
    """A function in an object that is called."""

    def __init__(self, function: Callable[[], float]) -> None:
        self.function = function

    def __call__(self) -> float:
        return self.function()


DECORATED = Decorated(lambda: BOX["scale"])


class Part(nn.Module):
    """What Python calls without a name."""

    def __getattr__(self, name: str) -> Any:
        return BOX["scale"] if name == "made" else super().__getattr__(name)

    def __getitem__(self, key: int) -> float:
        return key * BOX["scale"]

    @functools.cached_property
    def kept(self) -> float:
        return BOX["scale"]


class List(list):  # type: ignore[type-arg]
    ratio = 1.0


class Number(int):
    ratio = 1.0


def replaced(model: Any, i: int) -> None:
    """First another function, then what that one reads."""
    global LATER
    if i < 2:
        LATER = (lambda: 2.0) if i else (lambda: 1.0)
    elif i == 2:
        LATER = lambda: TEXTS["scale"]  # noqa: E731
    TEXTS["scale"] = float(i)


def named(model: Any, i: int) -> None:
    """A name that was not there, in the place of a builtin function."""
    globals().update({"len": lambda values: i, "ADDED": float(i)} if i > 1 else {})
    for name in ("len", "ADDED") if i < 2 else ():
        globals().pop(name, None)


def fill(model: Any, i: int) -> None:
    BOX["scale"] = float(i + 1)


def setting(name: str, *values: Any) -> Callable[[Any, int], None]:
    return lambda model, i: globals().update({name: values[i % len(values)]})


def keep(model: Any, i: int) -> None:
    if i < 2:
        KEPT.clear()
    KEPT.append(Key())
    KEYS.add(KEPT[-1])


def keyed(model: Any, i: int) -> None:
    model.values = collections.defaultdict(lambda: 1.0 + i)


def flagged(model: Any, i: int) -> None:
    vars(torch).update(a_users_flag=1) if i > 1 else vars(torch).pop("a_users_flag", None)


def with_attributes(model: Any) -> None:
    model.values, model.number, model.plain = List([1.0]), Number(1), torch.ones(1)
    model.linear.weight.note = types.SimpleNamespace(ratio=1.0)


def attributes(model: Any, i: int) -> None:
    if not hasattr(model, "number"):
        with_attributes(model)
    model.values.ratio, model.plain.ratio = i + 1.0, i + 3.0
    model.number.ratio, model.linear.weight.note.ratio = i + 2.0, i + 4.0


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "a function, and what it reads": (lambda m: LATER(), replaced),
    "a builtin's name": (lambda m: len([1]), named),
    "a name that comes": (lambda m: globals().get("ADDED", 1.0), named),
    "a library's function": (lambda m: ACTIVATION(2.5), setting("ACTIVATION", math.floor, math.ceil, np.sqrt)),
    "a class": (lambda m: 1.0 + hasattr(KIND, "move_to_end"), setting("KIND", dict, collections.OrderedDict)),
    "in nested containers": (lambda m: NESTED["a"][0][1](), fill),
    "in a namespace": (lambda m: SPACE.function(), fill),
    "in an object": (lambda m: DECORATED(), fill),
    "attribute that is made": (lambda m: PART.made, fill),
    "item that is made": (lambda m: PART[2], fill),
    "a module's names": (lambda m: MODULE.scale, lambda m, i: MODULE.values.update(scale=i + 1.0)),
    "read-only": (lambda m: READ_ONLY["scale"] + LAYERS["scale"] + max(VALUES), fill),
    "weak set": (lambda m: 1.0 + sum(1 for _ in KEYS), keep),
    "factory": (lambda m: m.values["new"] if hasattr(m, "values") else 1.0, keyed),
    "logger": (lambda m: 1.0 + LOGGER.isEnabledFor(10), lambda m, i: LOGGER.setLevel(20 - 10 * (i % 2))),
    "arguments": (lambda m: sys.argv.count("--case"),
                  lambda m, i: sys.argv.__setitem__(slice(1, None), ["--case"] * i)),
    "asked by name": (lambda m: 1.0 + hasattr(torch, "a_users_flag"), flagged),
    "errors of numpy": (lambda m: 1.0 + (np.geterr()["over"] == "raise"),
                        lambda m, i: np.seterr(over=("warn", "raise")[i % 2])),
    "attributes": (lambda m: m.values.ratio + m.plain.ratio * m.number.ratio + m.linear.weight.note.ratio, attributes),
}  # fmt: skip
PART = Part()


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_a_change_behind_other_code_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    read, change = CASES[name]
    kind: Any = type("Case", (Scaled,), {"scale": read})
    with np.errstate():
        assert_equal(kind, change)
    named(None, 0)
    flagged(None, 0)


@functools.lru_cache
def drawn(n: int) -> torch.Tensor:
    return torch.rand(n, dtype=torch.float64).sum()


@functools.lru_cache
def weighed(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().sum()


COUNTED = [0]


@functools.lru_cache
def counted() -> float:
    COUNTED[0] += 1
    return float(COUNTED[0])


@functools.lru_cache
def stale() -> float:
    return BOX["scale"]


CACHED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numbers": (lambda m: drawn(2), "drawn, which functools.lru_cache keeps the results of, draws numbers"),
    "parameter": (lambda m: weighed(m.linear.weight), "weighed.*computes of a parameter"),
    "counter": (lambda m: counted(), "counted.*gives another value each time"),
    "info": (lambda m: 1.0 + counted.cache_info().hits, r"counted.cache_info\(\) in forward"),
    "slots": (lambda m: m.slot, "Case keeps 'slot' in __slots__"),
}


@pytest.mark.parametrize("name", CACHED)
def test_what_is_computed_once(name: str) -> None:
    """A graph would compute it anew."""
    read, text = CACHED[name]
    kind: Any = type("Case", (Scaled,), {"scale": read, "__slots__": ("slot",) if name == "slots" else ()})
    model = kind().double()
    model.slot = 1.0
    with pytest.raises(CaptureError, match=text):
        autopar.parallelize(model, None)(X)


def test_a_value_that_a_cache_keeps() -> None:
    """Of an earlier state, as eager mode has it."""
    BOX["scale"] = 3.0
    stale.cache_clear()
    kind: Any = type("Case", (Scaled,), {"scale": lambda m: stale() * BOX["scale"]})
    model = kind().double()
    parallel = autopar.parallelize(model, None)
    for scale in (3.0, 5.0):
        BOX["scale"] = scale
        torch.testing.assert_close(parallel(X), model.linear(X).square().mean() * 3 * scale)
