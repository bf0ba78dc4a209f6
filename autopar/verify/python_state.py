"""Python state of modules that a call writes: what it is before and after, in a form that can be compared."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from autopar.capture.state.slots import own_attributes
from autopar.capture.state.values import attributes_of, slots_of
from autopar.ir.shards import largest_difference

DEPTH = 6
"""How deep values are looked into."""


@dataclasses.dataclass(frozen=True)
class FrozenObject:
    """A mapping, or an object with attributes.

    Attributes:
        kind: name of its class.
        items: its entries or attributes, frozen; None: it is not looked into, and equal to all others of its class.
    """

    kind: str
    items: Mapping[Any, Any] | None = None


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module that is no parameter, buffer or module, by qualified name, frozen."""
    found = {}
    for path, module in model.named_modules():
        for name, value in own_attributes(module).items():
            found[f"{path}.{name}" if path else name] = frozen(value)
    return found


# `autopar.capture.state.slots` describes the same attributes by identity and version, as it decides whether a graph
# still holds for this very object. Here two copies of a model are compared, whose objects are never the same: values
# have to be copied, and what has no value (a function, a class) counts by its type.
def frozen(value: Any, depth: int = DEPTH) -> Any:
    """A copy that later writes do not change; of what is no plain data, its class."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return value
    if not depth or isinstance(value, nn.Module | nn.Parameter | type | types.FunctionType | types.ModuleType):
        return FrozenObject(type(value).__qualname__)
    if isinstance(value, Mapping):
        return FrozenObject(type(value).__qualname__, {_key(k): frozen(v, depth - 1) for k, v in value.items()})
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return tuple(frozen(v, depth - 1) for v in value)
    if isinstance(value, AbstractSet):
        return frozenset(_key(v) for v in value)
    if hasattr(value, "__dict__") or slots_of(type(value)):
        own = {name: frozen(v, depth - 1) for (_, name), v in attributes_of(value)}
        return FrozenObject(type(value).__qualname__, own)
    return FrozenObject(type(value).__qualname__)


def _key(value: Any) -> Any:
    # Keys need not be plain: objects as keys are equal in two copies of a model if they are printed alike.
    return value if isinstance(value, str | int | float | bool | tuple) else f"{type(value).__qualname__} {value}"


def is_same(one: Any, other: Any) -> bool:
    """Whether two frozen values are equal, tensors bit by bit."""
    return distance(one, other) == 0.0


def distance(found: Any, expected: Any) -> float:
    """How far a frozen value is from another: of numbers and tensors the largest difference, else 0 or infinity."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return largest_difference(found, expected) if found.shape == expected.shape else float("inf")
    if isinstance(found, FrozenObject) and isinstance(expected, FrozenObject):
        return _distance_of_objects(found, expected)
    if isinstance(found, tuple) and isinstance(expected, tuple):
        if len(found) != len(expected):
            return float("inf")
        return max(map(distance, found, expected), default=0.0)
    if type(found) is not type(expected):
        return float("inf")
    if isinstance(found, float | complex) and found != expected:
        return float(abs(found - expected)) if found == found and expected == expected else _unequal(found, expected)
    return 0.0 if found == expected else float("inf")


def _distance_of_objects(found: FrozenObject, expected: FrozenObject) -> float:
    if found.items is None or expected.items is None:
        return 0.0 if found == expected else float("inf")
    if found.kind != expected.kind or found.items.keys() != expected.items.keys():
        return float("inf")
    return max((distance(v, expected.items[k]) for k, v in found.items.items()), default=0.0)


def _unequal(found: Any, expected: Any) -> float:
    """Two numbers of which at least one is NaN: equal if both are."""
    return 0.0 if found != found and expected != expected else float("inf")
