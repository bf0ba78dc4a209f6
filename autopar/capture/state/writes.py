"""What a call of the model writes to its Python state: found while it is traced, undone, and done after every call.

`Record` remembers the state before the call. What differs afterwards becomes `Write`s: the values as a skeleton whose
tensors are further results of the graph. `put_back` gives the model its state as it was; `apply` gives it, after a
step, what the call would have written.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar._torch_compat import is_traced
from autopar.capture.state.arrays import Arrays
from autopar.capture.state.driven import Driven, is_driven
from autopar.capture.state.scope import Scope, scopes_of
from autopar.capture.state.slots import (
    BUFFERS,
    HOOK_TABLES,
    OWN,
    SCOPES,
    SIMPLE,
    Path,
    Step,
    attributes_of,
    children,
    name_of,
    own_attributes,
    set_attribute,
    slots_of,
)
from autopar.capture.state.tracked import Operation, Tracked, is_tracked, operations_of, replayed, value_of
from autopar.errors import CaptureError
from autopar.ir.signature.pytree import Leaf


@dataclass(frozen=True)
class Live:
    """An object that was there before the call, by the place where it is found."""

    module: str
    path: Path


@dataclass(frozen=True)
class NewObject:
    """An object that the call made: its class and what is in it."""

    kind: Any
    items: tuple[tuple[Step, Any], ...]


@dataclass(frozen=True)
class Own:
    """A parameter or buffer of the model, or a weak reference to it, as ``nn.LSTM`` keeps them in lists."""

    name: str
    weak: bool = False


@dataclass(frozen=True)
class Replay:
    """Arithmetic on the number that is there."""

    operations: tuple[Operation, ...]


GONE = types.SimpleNamespace()
"""In place of a value: the attribute or item is deleted."""


@dataclass(frozen=True)
class Write:
    """One attribute or item that a call changes.

    Attributes:
        module: path of the module.
        path: of the attribute or item in it.
        value: a skeleton: `Leaf` for tensor results of the graph, `Live`, `NewObject`, `Replay` or a plain value.
    """

    module: str
    path: Path
    value: Any

    @property
    def name(self) -> str:
        """As Python would write it."""
        return name_of(self.module, self.path)


class Record:
    """The state of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        """Taken now."""
        self._containers: list[tuple[str, Path, Any, dict[Step, Any]]] = []
        self._live: dict[int, tuple[Live, Any]] = {}
        self._arrays = Arrays()
        for scope in scopes_of(model):
            self._visit(SCOPES, (("scope", scope.owner),), scope, 0)
        for name, module in model.named_modules():
            own = {("attr", n): v for n, v in own_attributes(module).items()}
            self._containers.append((name, (), module, own))
            for step, value in own.items():
                self._visit(name, (step,), value, 0)
            for table in HOOK_TABLES:  # some models register hooks in forward
                self._containers.append(
                    (name, (("attr", table),), getattr(module, table), _now(getattr(module, table)))
                )

    @classmethod
    def of(cls, value: Any) -> Record:
        """The state that a function, or any other value, refers to; modules and what is in them are left out."""
        made = cls.__new__(cls)
        made._containers, made._live, made._arrays = [], {}, Arrays()
        made._visit("", (), value, 0)
        if isinstance(value, types.FunctionType):
            for name in value.__code__.co_names:
                found = value.__globals__.get(name)
                if isinstance(found, list | dict | set | deque):
                    made._visit("", (("global", name),), found, 0)
        return made

    def _owned(self, value: Any) -> Own | None:
        """What stands for a parameter or buffer, or for a weak reference to one."""
        weak = isinstance(value, weakref.ref)
        target = value() if weak else value
        for module, _, container, _ in self._containers if isinstance(target, torch.Tensor) else ():
            if not isinstance(container, nn.Module):
                continue
            for table in (container._parameters, container._buffers):
                name = next((n for n, t in table.items() if t is target), None)
                if name is not None:
                    return Own(f"{module}.{name}" if module else name, weak)
        return None

    def has_changed(self) -> bool:
        """Whether anything differs."""
        return any(_changed(before, _now(container)) for _, _, container, before in self._containers)

    def _visit(self, module: str, path: Path, value: Any, depth: int) -> None:
        if id(value) in self._live or isinstance(value, SIMPLE):
            return
        self._live[id(value)] = (Live(module, path), value)
        if isinstance(value, (np.ndarray, *BUFFERS)):
            self._arrays.add(name_of(module, path), value)
        inner = children(value) if depth < 12 and not isinstance(value, nn.Module) else None
        if inner is None:
            return
        self._containers.append((module, path, value, dict(inner)))
        for step, v in inner:
            self._visit(module, (*path, step), v, depth + 1)

    def put_back(self) -> None:
        """Give every container what it held."""
        for _, _, container, before in self._containers:
            if _changed(before, _now(container)):
                _fill(container, before)
        self._arrays.put_back()

    def guard(self) -> None:
        """Put a `Driven` in place of iterators: how far a call takes them cannot be undone."""
        for module, path, container, before in self._containers:
            for step, value in (
                before.items() if not isinstance(container, tuple | set | frozenset | weakref.ref) else ()
            ):
                if is_driven(value):
                    _put(container, step, Driven(name_of(module, (*path, step))))

    def numbers(self) -> list[tuple[str, Path]]:
        """Places of plain numbers that have changed since, to plain numbers."""
        found = []
        for module, path, container, before in self._containers:
            now = _now(container)
            for step, old in before.items():
                if _is_number(old) and _is_number(now.get(step)) and now[step] != old:
                    found.append((module, (*path, step)))
        return found

    def track(self, places: Sequence[tuple[str, Path]]) -> None:
        """Put a `Tracked` number in some places."""
        wanted = set(places)
        for module, path, container, before in self._containers:
            for step, old in before.items():
                if (module, (*path, step)) in wanted:
                    _put(container, step, Tracked(old))

    def writes(self, leaf: Callable[[torch.Tensor], Leaf], lines: Mapping[tuple[str, str], str]) -> list[Write]:
        """What has changed since.

        Args:
            leaf: makes a tensor that the call computed a result of the graph.
            lines: where in the user's code an attribute of a module was assigned last.

        Raises:
            CaptureError: something has changed that cannot be written after a call.
        """
        found: list[Write] = []
        self._arrays.require_unchanged()
        for module, path, container, before in self._containers:
            now = _now(container)
            if not _changed(before, now):
                continue
            for step in [*before, *(s for s in now if s not in before)]:
                if step in now and step in before and (now[step] is before[step] or type(now[step]) is Driven):
                    continue
                at = (*path, step)
                attribute = str(at[0][1])
                line = lines.get((module, attribute), "")
                where = f"{name_of(module, at)}{f', assigned at {line}' if line else ''}"
                if module == SCOPES and isinstance(container, set | frozenset):
                    continue  # which warnings have been given, say: the next call has a graph of its own
                if isinstance(container, set | frozenset | types.FunctionType | tuple | weakref.ref):
                    raise CaptureError(
                        f"a call of the model changes {where}, in a {type(container).__name__}, which cannot be done "
                        "again after a step; keep it in an attribute, a list or a dict of a module"
                    )
                value = GONE if step not in now else self.skeleton(now[step], leaf, where, ())
                if step in before and is_same_value(value, before[step]):
                    continue
                found.append(Write(module, at, value))
        return [w for w in found if not self._is_as_before(w)]

    def _is_as_before(self, write: Write) -> bool:
        """Whether a new list holds the very parameters that the old one held."""
        before = next(b for m, p, _, b in self._containers if (m, p) == (write.module, write.path[:-1]))
        old = before.get(write.path[-1])
        if not isinstance(write.value, NewObject) or not isinstance(old, list) or write.value.kind is not list:
            return False
        owned = [v for _, v in write.value.items]
        return len(owned) == len(old) and all(isinstance(o, Own) for o in owned)

    def skeleton(
        self, value: Any, leaf: Callable[[torch.Tensor], Leaf], where: str, above: tuple[int, ...] = ()
    ) -> Any:
        """A value in which tensors of the call are leaves.

        Raises:
            CaptureError: it holds something that cannot be rebuilt; ``where`` says what it is.
        """
        if is_tracked(value):
            operations = operations_of(value)
            return value_of(value) if operations is None else Replay(operations)
        own = self._owned(value)
        if own is not None:
            return own
        if isinstance(value, torch.Tensor):
            if is_traced(value):
                return leaf(value)
            return self._live[id(value)][0] if id(value) in self._live else value
        if id(value) in self._live and self._live[id(value)][1] is value:
            return self._live[id(value)][0]
        if isinstance(value, (*SIMPLE, type, types.ModuleType)):
            return value
        inner = children(value)
        if inner is None or isinstance(value, nn.Module | types.MethodType) or id(value) in above or len(above) > 12:
            if isinstance(value, np.ndarray | np.generic):
                return copy.deepcopy(value)
            if callable(value) and not isinstance(value, nn.Module) and inner is None:
                return value
            raise CaptureError(
                f"a call of the model sets {where} to a {type(value).__name__}, which cannot be done again after a "
                "step; keep tensors, numbers, strings, lists, tuples, dicts or plain objects of these"
            )
        items = tuple((step, self.skeleton(v, leaf, where, (*above, id(value)))) for step, v in inner)
        if isinstance(value, types.FunctionType):
            if any(_has_leaf(v) for _, v in items):
                raise CaptureError(
                    f"a call of the model sets {where} to a function that refers to a tensor of the call; keep the "
                    "tensor in an attribute instead"
                )
            return value
        return NewObject(_kind(value), items)


def _kind(value: Any) -> Any:
    factory = getattr(value, "default_factory", None)
    return (type(value), factory) if factory is not None else type(value)


def _has_leaf(value: Any) -> bool:
    return isinstance(value, Leaf) or (isinstance(value, NewObject) and any(_has_leaf(v) for _, v in value.items))


def is_same_value(value: Any, before: Any) -> bool:
    """Whether a skeleton is a plain value that equals what was there."""
    if not isinstance(value, SIMPLE) or type(value) is not type(before):
        return False
    return bool(value == before) or (value != value and before != before)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _now(container: Any) -> dict[Step, Any]:
    if isinstance(container, nn.Module):
        return {("attr", n): v for n, v in vars(container).items() if n not in OWN}
    return dict(children(container) or ())


def _changed(before: Mapping[Step, Any], now: Mapping[Step, Any]) -> bool:
    return len(before) != len(now) or any(s not in now or now[s] is not v for s, v in before.items())


def _fill(container: Any, content: Mapping[Step, Any]) -> None:
    """Make a container hold just what it held."""
    if isinstance(container, list | deque):
        container.clear()
        container.extend(content.values())
    elif isinstance(container, set):
        container.clear()
        container.update(content.values())
    else:
        now = _now(container)
        for step in now:
            if step not in content:
                _delete(container, step)
        for step, value in content.items():
            if step not in now or now[step] is not value:
                _put(container, step, value)


def _put(container: Any, step: Step, value: Any) -> None:
    kind, key = step
    if isinstance(container, Scope):
        container.owner[key] = value
    elif kind == "item":
        container[key] = value
    elif kind == "value":
        container.set(value)
    elif kind == "cell":
        cells = dict(zip(container.__code__.co_freevars, container.__closure__, strict=True))
        cells[key].cell_contents = value
    else:
        set_attribute(container, key, value)


def _delete(container: Any, step: Step) -> None:
    kind, key = step
    if isinstance(container, Scope):
        del container.owner[key]
    elif kind == "item":
        del container[key]
    elif key in slots_of(type(container)):
        object.__delattr__(container, key)
    else:
        vars(container).pop(key, None)


def apply(model: nn.Module, writes: Sequence[Write], results: Any) -> None:
    """Write to a model what a call of it would have written.

    Args:
        model: the live one.
        writes: of the call.
        results: for the leaves.
    """
    values = [_built(model, w, results) for w in writes]  # all before the first is written: they may refer to each
    for write, value in zip(writes, values, strict=True):
        container = _find(model, write.module, write.path[:-1])
        step = write.path[-1]
        if value is GONE:
            _delete(container, step)
        elif isinstance(container, list | deque) and step[1] >= len(container):
            container.append(value)
        elif step[0] in ("buffer", "transient buffer"):
            container._buffers.setdefault(step[1], None)  # which register_buffer lets pass
            container.register_buffer(step[1], value, persistent=step[0] == "buffer")
        elif isinstance(container, nn.Module) and not write.path[:-1]:
            setattr(container, step[1], value)
        else:
            _put(container, step, value)


def _built(model: nn.Module, write: Write, results: Any) -> Any:
    if isinstance(write.value, Replay):
        return replayed(_find(model, write.module, write.path), write.value.operations)
    return build(model, write.value, results)


def build(model: nn.Module, skeleton: Any, results: Any) -> Any:
    """The value of a skeleton."""
    if isinstance(skeleton, Leaf):
        return results[skeleton.index]
    if isinstance(skeleton, Live):
        return _find(model, skeleton.module, skeleton.path)
    if isinstance(skeleton, Own):
        path, _, name = skeleton.name.rpartition(".")
        found = getattr(model.get_submodule(path), name)
        return weakref.ref(found) if skeleton.weak else found
    if not isinstance(skeleton, NewObject):
        return skeleton
    items = [(step, build(model, v, results)) for step, v in skeleton.items]
    kind = skeleton.kind
    entries = {key: v for (how, key), v in items if how == "item"}
    if isinstance(kind, tuple):  # a defaultdict
        return kind[0](kind[1], entries)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*entries.values())
    if issubclass(kind, list | tuple | deque | set | frozenset):
        return kind(entries.values())
    if kind is dict:
        return entries
    made = kind.__new__(kind)
    if issubclass(kind, Mapping):
        dict.update(made, entries)
    for (how, key), v in items:
        if how == "attr":
            set_attribute(made, key, v)
    return made


def written_tensors(model: nn.Module, writes: Sequence[Write]) -> dict[int, torch.Tensor]:
    """The tensors that a call of the model itself has written, by the index of the result that they are."""
    found: dict[int, torch.Tensor] = {}

    def visit(skeleton: Any, module: str, path: Path) -> None:
        if isinstance(skeleton, Leaf):
            found[skeleton.index] = _find(model, module, path)
        elif isinstance(skeleton, NewObject):
            for step, inner in skeleton.items:
                visit(inner, module, (*path, step))

    for write in writes:
        visit(write.value, write.module, write.path)
    return found


def _is_plain(value: Any) -> bool:
    return not isinstance(value, nn.Module | types.MethodType)


def _find(model: nn.Module, module: str, path: Path) -> Any:
    value: Any = model.get_submodule(module) if module and module != SCOPES else model
    for kind, key in path:
        if kind == "scope":
            value = key
        elif kind == "item":
            value = value[key]
        elif kind == "cell":
            value = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))[key].cell_contents
        elif kind == "default":
            value = value.__defaults__[key]
        elif kind == "value":
            value = value.get(None)
        elif kind == "target":
            value = value()
        else:
            value = dict(attributes_of(value))[kind, key] if _is_plain(value) else getattr(value, key)
    return value
