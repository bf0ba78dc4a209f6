"""`KnownValues`: values that depend on no parameter and no batch, for code that looks at them while it is traced.

Values of constants (``torch.linspace(0, 1, 4)``) are the same in every call. Those of buffers are known when a call
begins (``if not self.initialized``): what the code asks about them becomes a `Reads`, and a graph serves the calls in
which they give the same answers. Such operators are computed a second time, with real numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar._torch_compat import (
    DynamicOutputShapeException,
    OpOverload,
    is_traced,
    storage_id,
    tensors_in,
    without_modes,
    written_by,
)

LARGEST = 2**16
"""Entries of a tensor whose values are computed."""

_UNKNOWN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operators whose results have any values, or another memory."""

_QUESTIONS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Of operators that a trace cannot have: their answers, or the shapes of these, depend on values."""

_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_NONZERO, _DYNAMIC = torch.ops.aten.nonzero.default, torch.Tag.dynamic_output_shape
_SELECTS = frozenset({_INDEX, _SELECT, _NONZERO})
"""Operators whose results are as many as a mask selects: see `autopar.capture.selected`."""

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Slot:
    """In place of a tensor among the arguments of a step: its number."""

    number: int


@dataclass(frozen=True, eq=False)
class _Step:
    """An operator that is computed with real numbers.

    Attributes:
        func: the operator.
        arguments: positional and named ones; tensors are slots.
        results: the numbers of tensors that it makes, in the order of its results.
        written: storages that it changes or makes.
        read: storages of its arguments.
        answer: what it said in the call that was traced, where the code asked; else None.
    """

    func: Any
    arguments: tuple[Any, Any]
    results: tuple[int, ...]
    written: frozenset[int]
    read: frozenset[int]
    answer: Any = None


@dataclass(frozen=True, eq=False)
class Reads:
    """What a call of the model asks about values of buffers.

    Attributes:
        buffers: by their numbers, the names of those that are asked about.
        constants: by their numbers, other tensors that have values of their own.
        steps: what is computed of these, in order.
        without_gradient: names of buffers that are asked for their gradient, and have none.
    """

    buffers: dict[int, str]
    constants: dict[int, torch.Tensor]
    steps: tuple[_Step, ...]
    without_gradient: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """For people."""
        names = sorted({*self.buffers.values(), *self.without_gradient})
        return f"values of buffer{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))} that it looks at"

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the buffers' values now give the same answers."""
        if any(name not in tensors or tensors[name].grad is not None for name in self.without_gradient):
            return False
        found = {i: t.clone() for i, t in self.constants.items()}
        for number, name in self.buffers.items():
            if name not in tensors:
                return False
            found[number] = tensors[name].detach().clone()  # steps may write to it

        def value(argument: Any) -> Any:
            return found[argument.number] if isinstance(argument, _Slot) else argument

        with torch.no_grad(), without_modes():
            for step in self.steps:
                args, kwargs = _map(value, step.arguments)
                result = step.func(*args, **kwargs)
                if step.answer is not None and not _same(result, step.answer):
                    return False
                found.update(zip(step.results, tensors_in(result), strict=True))
        return True


@dataclass(frozen=True)
class OfBuffers:
    """What is known of a model's buffers when a call begins.

    Attributes:
        values: of small ones, by name.
        without_gradient: names of those that have none.
    """

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()


def of_buffers(model: nn.Module) -> OfBuffers:
    """What is known of a model's buffers now; of fake ones, and of those on the meta device, there are no values."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    values = {
        name: buffer.detach().clone()
        for name, buffer in buffers.items()
        if type(buffer) is torch.Tensor and _is_small(buffer) and not buffer.is_meta and not is_traced(buffer)
    }
    return OfBuffers(values, frozenset(n for n, b in buffers.items() if not b.requires_grad and b.grad is None))


class _UnknownError(Exception):
    """Some argument's values are not known."""


class KnownValues:
    """Of one call of a model that is traced."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], known: OfBuffers) -> None:
        """``buffers`` that are traced, and what is ``known`` of these."""
        # With the traced tensor: while it is alive, no other one can have its id.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._first: dict[int, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._lost: set[int] = set()
        self._changing: set[int] = set()
        self._steps: list[_Step] = []
        self._buffers = {id(t): (name, t) for name, t in buffers.items()}
        self._without_gradient, self._asked = known.without_gradient, set[str]()
        values = known.values
        for name, tensor in buffers.items():
            if name in values and id(tensor) not in self._known:
                real = self._begin(tensor, values[name])
                self._names[self._numbers[id(real)]] = name
                self._changing.add(storage_id(real))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operator of the call, on traced tensors, and on real ones where their values are known."""
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func in (_INDEX, _SELECT):
            func, args = self._by_places(func, args)
        real = self._real((args, kwargs)) if _is_repeatable(func) else None
        if real is not None and not func.is_view and not all(map(_is_small, tensors_in(real))):
            real = None  # a view may have many entries without taking memory
        if real is not None and _is_question(func, kwargs):
            computed = self._computed(func, real)
            if computed is not None:
                return self._answered(func, real, *computed)
        if _DYNAMIC in func.tags and func not in _SELECTS and kwargs.get("output_size") is None:
            raise DynamicOutputShapeException(func)
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if real is not None and (func.is_view or all(map(_is_small, made))):
            computed = self._computed(func, real)
            if computed is not None and len(computed[1]) == len(made):
                for traced, own in zip(made, computed[1], strict=True):
                    self._enter(traced, own)
                self._note(func, real, computed[1])
                return result
        self._lose(func, args, kwargs)
        return result

    def has_no_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the call has none: one that is computed without any, or a buffer, which is noted."""
        name, _ = self._buffers.get(id(tensor), ("", None))
        if tensor.requires_grad or (name and name not in self._without_gradient):
            return False
        self._asked |= {name} - {""}
        return True

    def reads(self) -> tuple[Reads, ...]:
        """What the call has asked about values of buffers; empty: nothing."""
        needed: set[int] = set()
        kept: list[_Step] = []
        for step in reversed(self._steps):
            asked = step.answer is not None and not step.read.isdisjoint(self._changing)
            if asked or not step.written.isdisjoint(needed):
                needed |= step.read | step.written
                kept.append(step)
        if not self._asked and not any(step.answer is not None for step in kept):
            return ()
        first = {i: t for i, t in self._first.items() if storage_id(self._kept[i]) in needed}
        names = {i: name for i, name in self._names.items() if i in first}
        constants = {i: t for i, t in first.items() if i not in names}
        return (Reads(names, constants, tuple(reversed(kept)), frozenset(self._asked)),)

    def _by_places(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A selection by masks whose values are known, by the places that they select."""
        indices = [args[1]] if func is _SELECT else list(args[1])
        known = [isinstance(i, torch.Tensor) and _is_mask(i) and self._real(i) is not None for i in indices]
        if not any(known) or (func is _SELECT and args[0].shape != args[1].shape):
            return func, args
        places: list[Any] = []
        for index, is_known in zip(indices, known, strict=True):
            if not is_known:
                places.append(index)
                continue
            found = self.run(_NONZERO, (index,), {})
            places += [self.run(torch.ops.aten.select.int, (found, 1, d), {}) for d in range(index.ndim)]
        return _INDEX, (args[0], places)

    def _begin(self, traced: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Know the values of a tensor that no step makes."""
        with without_modes():
            real, first = value.detach().clone(), value.detach().clone()  # steps may write to the one
        self._enter(traced, real)
        self._first[self._numbers[id(real)]] = first
        return real

    def _enter(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        if id(real) not in self._numbers:
            self._numbers[id(real)] = len(self._kept)
            self._kept.append(real)
        self._known[id(traced)] = traced, real

    def _real(self, arguments: Any) -> Any:
        """The arguments with values in place of traced tensors; None: some are not known."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Generator):
                raise _UnknownError
            if not isinstance(leaf, torch.Tensor):
                return leaf
            own = self._known.get(id(leaf))
            real = own[1] if own is not None else self._constant(leaf)
            if real is None or storage_id(real) in self._lost:
                raise _UnknownError
            return real

        try:
            return _map(value, arguments)
        except _UnknownError:
            return None

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that is no part of the trace."""
        plain = type(tensor) is torch.Tensor and not is_traced(tensor) and not tensor.is_meta
        if not plain or tensor.requires_grad or tensor.layout != torch.strided or not _is_small(tensor):
            return None
        return self._begin(tensor, tensor)

    def _computed(self, func: Any, real: Any) -> tuple[Any, list[torch.Tensor]] | None:
        """What an operator gives for values, and the tensors among it; None: it cannot be computed."""
        with torch.no_grad(), without_modes(), contextlib.suppress(Exception):
            result = func(*real[0], **real[1])
            made = tensors_in(result)
            return None if any(t.is_meta for t in made) else (result, made)
        return None

    def _answered(self, func: Any, real: Any, result: Any, made: list[torch.Tensor]) -> Any:
        """What code wants to know of values: numbers as they are, tensors as constants of the graph."""
        with torch.no_grad(), without_modes():
            answer = _map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, result)
        self._note(func, real, made, answer)

        def lifted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            traced = torch.ops.aten.lift_fresh_copy.default(value)
            self._enter(traced, value)
            return traced

        return _map(lifted, result)

    def _note(self, func: Any, real: Any, made: Sequence[torch.Tensor], answer: Any = None) -> None:
        """Keep what was computed, to do it again with other values of buffers."""
        given = tensors_in(real)
        for tensor in made:
            self._enter(tensor, tensor)
        read = frozenset(map(storage_id, given))
        written = frozenset(map(storage_id, (*_written(func, *real), *made)))
        if not read.isdisjoint(self._changing):
            self._changing |= written

        def slot(value: Any) -> Any:
            return _Slot(self._numbers[id(value)]) if isinstance(value, torch.Tensor) else value

        results = tuple(self._numbers[id(t)] for t in made)
        self._steps.append(_Step(func, _map(slot, real), results, written, read, answer))

    def _lose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Values that an operator writes, or has a view of, are known no longer."""
        for tensor in _written(func, args, kwargs):
            if own := self._known.get(id(tensor)):
                self._lost.add(storage_id(own[1]))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= LARGEST


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _is_repeatable(func: Any) -> bool:
    """Whether an operator of torch's own gives the same for the same values."""
    random = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "aten" and not random and func._schema.name.partition("::")[2] not in _UNKNOWN


def _is_question(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a trace cannot have an operator, since it looks at values."""
    # By places, the shape of an index does not depend on these, nor does that of repeats whose number is given.
    return func is not _INDEX and kwargs.get("output_size") is None and not _QUESTIONS.isdisjoint(func.tags)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """The same arguments, or results, of an operator with ``function`` of each."""
    if isinstance(value, tuple | list):
        return type(value)(_map(function, v) for v in value)
    return {k: _map(function, v) for k, v in value.items()} if isinstance(value, dict) else function(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes to, or has a view of."""
    return tensors_in([args, kwargs]) if func.is_view else written_by(func, args, kwargs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
