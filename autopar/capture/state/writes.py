"""What a call of the model writes to its Python state, done to the live model after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.state.containers import delete, find, put
from autopar.capture.state.skeleton import NewObject, Skeleton, build, holds
from autopar.capture.state.slots import name_of
from autopar.capture.state.tracked import Operation, replayed
from autopar.capture.state.values import Path
from autopar.ir.signature.pytree import Leaf

DELETED = object()
"""In place of a value: the attribute or item is deleted."""


@dataclass(frozen=True)
class Replay:
    """Arithmetic on the number that the live model has by then, such as a counter's ``+ 1``."""

    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Write:
    """One attribute or item that a call changes.

    Attributes:
        module: path of the module.
        path: of the attribute or item in it.
        value: a skeleton of the value, a `Replay`, or `DELETED`.
    """

    module: str
    path: Path
    value: Skeleton

    @property
    def name(self) -> str:
        """As Python would write it."""
        return name_of(self.module, self.path)


def apply(model: nn.Module, writes: Sequence[Write], results: Any) -> None:
    """Write to a model what a call of it would have written.

    Args:
        model: the live one.
        writes: of the call.
        results: for the leaves.
    """
    # All values and containers before the first is written: they may be in what others overwrite.
    values = [_value(model, w, results) for w in writes]
    containers = [find(model, w.module, w.path[:-1]) for w in writes]
    for write, value, container in zip(writes, values, containers, strict=True):
        step = write.path[-1]
        if value is DELETED:
            delete(container, step)
        # A call that appends: the step is an index past the end.
        elif isinstance(container, list | deque) and step[1] >= len(container):
            container.append(value)
        elif step[0] in ("buffer", "transient buffer"):
            container._buffers.setdefault(step[1], None)  # register_buffer refuses names of other attributes
            container.register_buffer(step[1], value, persistent=step[0] == "buffer")
        elif isinstance(container, nn.Module) and not write.path[:-1]:
            _set_on_module(container, step[1], value)
        else:
            put(container, step, value)


def _set_on_module(module: nn.Module, name: str, value: Any) -> None:
    """Set what the module's own ``__setattr__``, or a property's setter, has made of a value already."""
    if hasattr(getattr(type(module), name, None), "__set__"):
        vars(module)[name] = value
    else:
        nn.Module.__setattr__(module, name, value)  # which registers modules and parameters


def _value(model: nn.Module, write: Write, results: Any) -> Any:
    if isinstance(write.value, Replay):
        return replayed(find(model, write.module, write.path), write.value.operations)
    return build(model, write.value, results)


def names_of_result(writes: Sequence[Write], index: int) -> list[str]:
    """The attributes, as Python would write them, that are set to a result of the graph or to what has it in it."""
    return [w.name for w in writes if holds(w.value, index)]


def written_tensors(model: nn.Module, writes: Sequence[Write]) -> dict[int, torch.Tensor]:
    """The tensors that a call of the model itself has written, by the index of the result that they are."""
    found: dict[int, torch.Tensor] = {}

    def visit(skeleton: Skeleton, module: str, path: Path) -> None:
        if isinstance(skeleton, Leaf):
            found[skeleton.index] = find(model, module, path)
        elif isinstance(skeleton, NewObject):
            for step, inner in skeleton.items:
                visit(inner, module, (*path, step))

    for write in writes:
        visit(write.value, write.module, write.path)
    return found
