"""Skeletons: values of a model's Python state in which the tensors of a call are results of its graph.

`Record.skeleton` makes one while the model is traced; `build` makes the value after a step. A skeleton is a `Leaf` (a
tensor result of the graph), an `Existing` (an object that was there before the call), a `NewObject`, or a plain value.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture.state.containers import find
from autopar.capture.state.values import Path, Step, set_attribute
from autopar.ir.signature.pytree import Leaf

Skeleton = Any


@dataclass(frozen=True)
class Existing:
    """An object that was there before the call, by where the model has it.

    Attributes:
        module: path of the module.
        path: in the module.
        tensor: it is a parameter or buffer of the model.
        weak: a weak reference to it is meant, as ``nn.LSTM`` keeps them in lists.
    """

    module: str
    path: Path
    tensor: bool = False
    weak: bool = False


@dataclass(frozen=True)
class NewObject:
    """An object that the call made: its class and what is in it."""

    kind: Any
    items: tuple[tuple[Step, Skeleton], ...]


def kind_of(value: Any) -> Any:
    """The class of a container, for `NewObject`; of a defaultdict with its factory, of a deque with its longest."""
    if isinstance(value, deque):
        return type(value), value.maxlen
    factory = getattr(value, "default_factory", None)
    return (type(value), factory) if factory is not None else type(value)


def has_leaf(skeleton: Skeleton) -> bool:
    """Whether a tensor of the call is in it."""
    if isinstance(skeleton, NewObject):
        return any(has_leaf(v) for _, v in skeleton.items)
    return isinstance(skeleton, Leaf)


def holds(skeleton: Skeleton, index: int) -> bool:
    """Whether result number ``index`` of the graph is in it."""
    if isinstance(skeleton, NewObject):
        return any(holds(v, index) for _, v in skeleton.items)
    return isinstance(skeleton, Leaf) and skeleton.index == index


def build(model: nn.Module, skeleton: Skeleton, results: Any) -> Any:
    """The value of a skeleton, given the graph's results."""
    if isinstance(skeleton, Leaf):
        return results[skeleton.index]
    if isinstance(skeleton, Existing):
        found = find(model, skeleton.module, skeleton.path)
        return weakref.ref(found) if skeleton.weak else found
    if not isinstance(skeleton, NewObject):
        return skeleton
    return _new_object(skeleton.kind, [(step, build(model, v, results)) for step, v in skeleton.items])


def _new_object(kind: Any, items: list[tuple[Step, Any]]) -> Any:
    entries = {key: v for (how, key), v in items if how == "item"}
    if isinstance(kind, tuple):
        own, given = kind
        return own(entries.values(), given) if issubclass(own, deque) else own(given, entries)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*entries.values())
    if issubclass(kind, list | tuple | set | frozenset):
        made = kind(entries.values())
        for (how, key), v in items:
            if how == "attr":
                set_attribute(made, key, v)
        return made
    # In the order in which they were inserted.
    if kind is dict:
        return entries
    # Without __init__: the call may have changed what that set, and its arguments are not known.
    made = kind.__new__(kind)
    if issubclass(kind, Mapping):
        dict.update(made, entries)
    for (how, key), v in items:
        if how == "attr":
            set_attribute(made, key, v)
    return made
