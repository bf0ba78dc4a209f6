"""`Record`: the Python state of a model before a call; what differs afterwards becomes `Write`s, and is undone.

A call is traced, not run: what it writes to attributes must not stay. `Record.writes` reads it off, with tensors as
further results of the graph, `Record.restore` gives the model its state as it was, and `autopar.capture.state.writes`
applies the writes after every step.
"""

from __future__ import annotations

import copy
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MappingView
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from autopar._torch_compat import is_traced
from autopar.capture.settings import SETTINGS
from autopar.capture.state.code.search import Search, search
from autopar.capture.state.containers import Threads, contents, differs, is_reordered, put, restore
from autopar.capture.state.driven import Driven, is_driven
from autopar.capture.state.skeleton import Existing, NewObject, Skeleton, has_leaf, kind_of
from autopar.capture.state.slots import HOOK_TABLES, SCOPES, code_of, hooks_of, name_of, own_attributes
from autopar.capture.state.tracked import Tracked, computed_from, is_tracked, operations_of, plain, value_of
from autopar.capture.state.values import (
    BUFFERS,
    DEEPEST,
    GENERATORS,
    ITEMS,
    SIMPLE,
    Path,
    Step,
    children,
    globals_of,
    set_generator_state,
    slots_of,
    state_of_generator,
)
from autopar.capture.state.writes import DELETED, Replay, Write
from autopar.errors import CaptureError
from autopar.ir.signature.pytree import Leaf

LARGEST_ARRAY = 2**26
"""Bytes of an array whose elements are copied; one that is larger is data, and not looked at."""

Array: TypeAlias = "np.ndarray[Any, Any] | bytearray | memoryview | array[Any]"


_FIXED = (tuple, set, frozenset, weakref.ref, weakref.WeakSet, MappingView, types.MappingProxyType)
"""Containers whose items cannot be replaced one by one."""


class Record:
    """The state of a model at one point in time."""

    def __init__(self, model: nn.Module, reached: Search | None = None, threads: Threads | None = None) -> None:
        """The state now.

        Args:
            model: whose.
            reached: what the model's code reads, where that is known.
            threads: what other threads assign meanwhile.
        """
        self.threads = threads or Threads()
        self._containers: list[tuple[str, Path, Any, dict[Step, Any]]] = []
        # With the object itself: while it is alive, no other one can have its id.
        self._existing: dict[int, tuple[Existing, Any]] = {}
        self._arrays: list[tuple[str, Array, Any]] = []
        self._generators: list[tuple[str, Any, Any]] = []
        self._tracked: dict[tuple[str, Path], Tracked] = {}
        # Those that a call registers are not there yet when its writes are made.
        self._tensors = {(n, t) for n, m in model.named_modules() for t in (*m._parameters, *m._buffers)}
        self.reached = reached or search(code_of(model), hooks_of(model))
        self._visit(SCOPES, (("scope", SETTINGS),), SETTINGS, 0)
        for scope in self.reached.scopes:
            self._visit(SCOPES, (("scope", scope.owner),), scope, 0)
        for name, module in model.named_modules():
            _require_no_slots(module)
            own = {("attr", n): v for n, v in own_attributes(module).items()}
            self._containers.append((name, (), module, own))
            for step, value in own.items():
                self._visit(name, (step,), value, 0)
            for table in HOOK_TABLES:  # some models register hooks in forward
                hooks = getattr(module, table)
                if id(hooks) in self._existing:  # by a handle, which can remove a hook
                    continue
                self._containers.append((name, (("attr", table),), hooks, contents(hooks)))

    @classmethod
    def of(cls, value: Any, threads: Threads | None = None) -> Record:
        """The state that a function, or any other value, refers to; modules and what is in them are left out."""
        record = cls.__new__(cls)
        record.threads = threads or Threads()
        record._containers, record._existing, record._arrays, record._generators = [], {}, [], []
        record._tracked, record._tensors = {}, set()
        record._visit("", (), value, 0)
        if isinstance(value, types.FunctionType):
            # A hook often records into a global list, which is neither in its closure nor among its defaults.
            for step, found in globals_of(value):
                record._visit("", (step,), found, 0)
        return record

    def _visit(self, module: str, path: Path, value: Any, depth: int) -> None:
        if id(value) in self._existing or isinstance(value, SIMPLE):
            return
        self._existing[id(value)] = (Existing(module, path), value)
        if isinstance(value, (np.ndarray, *BUFFERS)) and _bytes(value) <= LARGEST_ARRAY:
            self._arrays.append((name_of(module, path), value, _elements(value)))
        if isinstance(value, GENERATORS):
            self._generators.append((name_of(module, path), value, state_of_generator(value)))
        inner = children(value) if depth < DEEPEST and not isinstance(value, nn.Module) else None
        if inner is None:
            return
        self._containers.append((module, path, value, dict(inner)))
        for step, v in inner:
            self._visit(module, (*path, step), v, depth + 1)

    def has_changed(self, outside: Record | None = None) -> bool:
        """Whether any container differs that is none of another record's."""
        self._leave_to_threads()
        others = {id(container) for _, _, container, _ in outside._containers} if outside is not None else set()
        # Most are tables of hooks, and empty.
        full = (c for c in self._containers if c[3] or not isinstance(c[2], dict) or c[2])
        found = (c for c in full if id(c[2]) not in others)
        now = ((c, before, contents(c)) for _, _, c, before in found)
        return any(differs(before, new) or is_reordered(c, before, new) for c, before, new in now)

    def grown(self) -> str:
        """What one more call would change again: a number that is counted, a list that grows; empty: nothing."""
        for module, path, container, before in self._containers:
            now = contents(container)
            if isinstance(container, list | deque) and len(now) > len(before):
                return name_of(module, path)
            for step, old in before.items():
                if is_tracked(old) and is_tracked(now.get(step)) and now[step] is not old:
                    return name_of(module, (*path, step))
        return ""

    def restore(self) -> None:
        """Give every container what it held, and every array the elements that it had."""
        self._leave_to_threads()
        for _, _, container, before in self._containers:
            now = contents(container)
            if differs(before, now) or is_reordered(container, before, now):
                restore(container, before, self.threads.steps_of(container))
        for _, values, elements in self._arrays:
            if not _same_elements(values, elements):
                values[:] = elements
        for _, generator, state in self._generators:
            set_generator_state(generator, state)

    def noted(self) -> AbstractContextManager[None]:
        """While it lasts, what other threads assign to attributes is noted, and stays."""
        return self.threads.noted([c for _, _, c, _ in self._containers])

    def _leave_to_threads(self) -> None:
        """What other threads have assigned since counts as if it had been there before."""
        for module, path, container, before in self._containers if self.threads.wrote() else ():
            for step in self.threads.steps_of(container):
                now = contents(container)
                if step not in now:
                    before.pop(step, None)
                    continue
                if is_tracked(now[step]):
                    put(container, step, value_of(now[step]))
                before[step] = value_of(now[step])
                self._tracked.pop((module, (*path, step)), None)

    def guard_iterators(self) -> None:
        """Put a `Driven` in place of iterators and simple queues: how far a call takes them cannot be undone."""
        for module, path, container, before in self._containers:
            for step, value in before.items() if not isinstance(container, _FIXED) else ():
                if is_driven(value):
                    put(container, step, Driven(name_of(module, (*path, step)), value))

    def changed_numbers(self) -> list[tuple[str, Path]]:
        """Paths of plain numbers that have changed since, to plain numbers."""
        self._leave_to_threads()
        found = []
        for module, path, container, before in self._containers:
            now = contents(container)
            for step, old in before.items():
                if _is_number(old) and _is_number(now.get(step)) and now[step] != old:
                    found.append((module, (*path, step)))
        return found

    def not_read(self) -> frozenset[Path]:
        """Paths of what has changed since without being read: numbers that are counted, and what is put somewhere.

        A list that grows is there as a whole, and a dict or an object that gets a new entry.
        """
        found: set[Path] = set()
        for module, path, container, before in self._containers:
            now = contents(container)
            if isinstance(container, list | deque | set) and len(now) != len(before):
                found.add(path)
            if now.keys() != before.keys():
                found.add((*path, ITEMS))
            for step in (s for s in now if s not in before or now[s] is not before[s]):
                at = (*path, step)
                counted = self._is_counted(module, at, now[step]) and operations_of(now[step]) is not None
                if counted or not (step in before and isinstance(plain(now[step]), SIMPLE)):
                    found.add(at)
        return frozenset(found)

    def track(self, paths: Collection[tuple[str, Path]]) -> None:
        """Put a `Tracked` number at some paths."""
        wanted = set(paths)
        for module, path, container, before in self._containers:
            for step, old in before.items():
                if (module, (*path, step)) in wanted:
                    number = self._tracked[module, (*path, step)] = Tracked(old)
                    put(container, step, number)

    def writes(self, leaf: Callable[[torch.Tensor], Leaf], lines: Mapping[tuple[str, str], str]) -> list[Write]:
        """What has changed since.

        Args:
            leaf: makes a tensor that the call computed a result of the graph.
            lines: where in the user's code an attribute of a module was assigned last.

        Raises:
            CaptureError: something has changed that cannot be written after a call.
        """
        self._require_apart()
        self._leave_to_threads()
        self._require_arrays_unchanged()
        self._require_no_draws()
        self._read_moved_numbers()
        found: list[Write] = []
        for module, path, container, step, before, now in self._changes():
            at = (*path, step)
            # Only assignments to attributes are seen; of an item it is where its attribute was assigned.
            line = lines.get((module, str(at[0][1])), "")
            where = f"{name_of(module, at)}{f', assigned at {line}' if line else ''}"
            if isinstance(container, set | frozenset):
                # Of a scope it is which warnings have been given, say: the next call has a graph of its own.
                if module == SCOPES:
                    continue
                raise _cannot_change(where, container)
            if isinstance(container, (*_FIXED, types.FunctionType)) or type(container) in weakref.ProxyTypes:
                raise _cannot_change(where, container)
            operations = operations_of(now[step]) if self._is_counted(module, at, now.get(step)) else None
            if step not in now:
                value = DELETED
            else:
                value = self.skeleton(now[step], leaf, where) if operations is None else Replay(operations)
            if step in before and is_same_value(value, before[step]):
                continue
            found.append(Write(module, (*path, _plain_step(step)), value))
        return [w for w in found if not self._holds_same_parameters(w)]

    def _changes(self) -> Iterator[tuple[str, Path, Any, Step, Mapping[Step, Any], Mapping[Step, Any]]]:
        """Every item that is another object now: module, path, container, step, and what the container held and holds.

        An item of a dict whose order has changed is one that is gone, and one that is new.
        """
        for module, path, container, before in self._containers:
            now = contents(container)
            if is_reordered(container, before, now):
                # Taken out, and put in again in the new order.
                for step in before:
                    yield module, path, container, step, before, {}
                for step in now:
                    yield module, path, container, step, {}, now
            if not differs(before, now) or is_reordered(container, before, now):
                continue
            # Asked after what is there now: other threads go on.
            theirs = self.threads.steps_of(container)
            for step in [s for s in (*before, *(s for s in now if s not in before)) if s not in theirs]:
                both = step in now and step in before
                # What `guard_iterators` put there is no write of the call.
                if not both or not (now[step] is before[step] or type(now[step]) is Driven):
                    yield module, path, container, step, before, now

    def _require_apart(self) -> None:
        for module, path, container, before in self._containers:
            for step in [s for s in before if self.threads.both(container, s[1])]:
                raise CaptureError(
                    f"a call of the model sets {name_of(module, (*path, step))}, and so does another thread while the "
                    "model is captured: which of them it was cannot be told; let each have an attribute of its own, or "
                    "call the model once before the thread starts"
                )

    def _require_arrays_unchanged(self) -> None:
        for name, values, elements in self._arrays:
            if not _same_elements(values, elements):
                kind = "numpy array" if isinstance(values, np.ndarray) else type(values).__name__
                raise CaptureError(
                    f"a call of the model writes to the elements of the {kind} {name}, which a graph cannot do again; "
                    "keep a tensor (register_buffer), or set the attribute to a new array"
                )

    def _is_counted(self, module: str, path: Path, value: Any) -> bool:
        """Whether a value is what the call has computed of the number that was at this very path."""
        return is_tracked(value) and computed_from(value, self._tracked.get((module, path)))

    def _require_no_draws(self) -> None:
        for name, generator, state in self._generators:
            if repr(state_of_generator(generator)) != repr(state):
                raise CaptureError(
                    f"the model draws from the random generator {name}: a graph would repeat the first draw for ever; "
                    "draw with torch (torch.rand, torch.where), or outside and pass what was drawn as an argument"
                )

    def _read_moved_numbers(self) -> None:
        """Tracked numbers count as read wherever the call has put them but to their own place."""
        # All of them before the first write is made: one more reader makes a number a constant.
        for module, path, _, step, _, now in self._changes():
            value = now.get(step)
            if not self._is_counted(module, (*path, step), value):
                _read_numbers(value)

    def _holds_same_parameters(self, write: Write) -> bool:
        """Whether a new list holds the very parameters that the old one held, as `nn.LSTM` makes it at every call."""
        before = next(b for m, p, _, b in self._containers if (m, p) == (write.module, write.path[:-1]))
        old = before.get(write.path[-1])
        if not isinstance(write.value, NewObject) or not isinstance(old, list) or write.value.kind is not list:
            return False
        items = [v for _, v in write.value.items]
        return len(items) == len(old) and all(isinstance(item, Existing) and item.tensor for item in items)

    def skeleton(
        self, value: Any, leaf: Callable[[torch.Tensor], Leaf], where: str, above: tuple[int, ...] = ()
    ) -> Skeleton:
        """A value in which tensors of the call are leaves.

        Args:
            value: of the model's state after the call.
            leaf: makes a tensor that the call computed a result of the graph.
            where: what the value is, for errors.
            above: ids of the containers that it is in.

        Raises:
            CaptureError: it holds something that cannot be rebuilt.
        """
        if is_tracked(value):
            return plain(value)
        # Before `is_traced`: while a model is traced, its parameters are traced tensors, too.
        tensor = self._own_tensor(value)
        if tensor is not None:
            return tensor
        if isinstance(value, torch.Tensor) and is_traced(value):
            return leaf(value)
        if id(value) in self._existing and self._existing[id(value)][1] is value:
            return self._existing[id(value)][0]
        if isinstance(value, str) and "FakeTensor(" in value:
            raise CaptureError(
                f"a call of the model sets {where} to the text of a tensor, whose values are not known while it is "
                "traced; keep the tensor itself (detach() it), and make the text outside of the model"
            )
        if isinstance(value, (*SIMPLE, type, types.ModuleType, types.CodeType, torch.Tensor)):
            return value
        inner = children(value)
        endless = id(value) in above or len(above) > DEEPEST
        if inner is None or isinstance(value, nn.Module | types.MethodType) or endless:
            return _opaque(value, inner is None, where)
        items = tuple((_plain_step(step), self.skeleton(v, leaf, where, (*above, id(value)))) for step, v in inner)
        if not isinstance(value, types.FunctionType):
            return NewObject(kind_of(value), items)
        if any(has_leaf(v) for _, v in items):
            raise CaptureError(
                f"a call of the model sets {where} to a function that refers to a tensor of the call; keep the "
                "tensor in an attribute instead"
            )
        return value

    def _own_tensor(self, value: Any) -> Existing | None:
        """What stands for a parameter or buffer, or for a weak reference to one."""
        weak = isinstance(value, weakref.ref)
        target = value() if weak else value
        if not isinstance(target, torch.Tensor):
            return None
        for module, _, container, _ in self._containers:
            if not isinstance(container, nn.Module):
                continue
            for table in (container._parameters, container._buffers):
                name = next((n for n, t in table.items() if t is target), None)
                if name is not None and (module, name) in self._tensors:
                    # From the model on: a module may be called as `SCOPES` is.
                    parts = (*module.split("."), name) if module else (name,)
                    return Existing("", tuple(("attr", part) for part in parts), tensor=True, weak=weak)
        return None


def _require_no_slots(module: nn.Module) -> None:
    """Refuse a module that keeps attributes elsewhere than torch's modules do."""
    if names := slots_of(type(module)):
        raise CaptureError(
            f"{type(module).__name__} keeps {names[0]!r} in __slots__, where its changes are not seen; leave __slots__ "
            "out, as torch.nn.Module does"
        )


def _opaque(value: Any, is_leaf: bool, where: str) -> Any:
    """A value that stands for itself in a skeleton, if it can."""
    if isinstance(value, np.ndarray | np.generic):
        return copy.deepcopy(value)
    if callable(value) and not isinstance(value, nn.Module) and is_leaf:
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            f"a call of the model sets {where} to a number of rows that a mask selects, another in each batch; "
            "keep it in a tensor (mask.sum())"
        )
    raise CaptureError(
        f"a call of the model sets {where} to a {type(value).__name__}, which cannot be done again after a "
        "step; keep tensors, numbers, strings, lists, tuples, dicts or plain objects of these"
    )


def _cannot_change(where: str, container: Any) -> CaptureError:
    return CaptureError(
        f"a call of the model changes {where}, in a {type(container).__name__}, which cannot be done "
        "again after a step; keep it in an attribute, a list or a dict of a module"
    )


def is_same_value(value: Skeleton, before: Any) -> bool:
    """Whether a skeleton is a plain value that equals what was there; NaN equals itself."""
    if not isinstance(value, SIMPLE) or type(value) is not type(before):
        return False
    return bool(value == before) or (value != value and before != before)


def _plain_step(step: Step) -> Step:
    """A step whose key may be a tracked number."""
    return step[0], plain(step[1])


def _read_numbers(value: Any, depth: int = 0) -> None:
    """Let the tracked numbers in a value count as read."""
    plain(value)
    inner = None if is_tracked(value) or isinstance(value, nn.Module) or depth > DEEPEST else children(value)
    for _, v in inner or ():
        _read_numbers(v, depth + 1)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # no bool, whose arithmetic is another; nor a tracked number


def _bytes(values: Array) -> int:
    return values.nbytes if isinstance(values, np.ndarray | memoryview) else len(values) * memoryview(values).itemsize


def _elements(values: Array) -> Any:
    if isinstance(values, np.ndarray):
        return values.copy()
    return bytes(values) if isinstance(values, memoryview) else values[:]


def _same_elements(a: Array, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape) and bool(a.tobytes() == b.tobytes())
    return bytes(a) == bytes(b)
