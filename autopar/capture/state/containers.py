"""Containers of Python state (modules, scopes, lists, dicts, objects, closures): read, compared, restored, written.

A `Path` leads from a module to a value through containers, a `Step` from a container to one of its items.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any

from torch import nn

from autopar.capture.state.code.owner import STANDS_FOR, Scope
from autopar.capture.state.slots import SCOPES
from autopar.capture.state.values import OWN, Path, Step, attributes_of, children, set_attribute, slots_of


def contents(container: Any) -> dict[Step, Any]:
    """What a container holds now; of a module the user's attributes only."""
    if isinstance(container, nn.Module):
        return {("attr", n): v for n, v in vars(container).items() if n not in OWN}
    return dict(children(container) or ())


def differs(before: Mapping[Step, Any], now: Mapping[Step, Any]) -> bool:
    """Whether a container holds other objects than before; equal ones count as others."""
    return len(before) != len(now) or any(s not in now or now[s] is not v for s, v in before.items())


def is_reordered(container: Any, before: Mapping[Step, Any], now: Mapping[Step, Any]) -> bool:
    """Whether items of a dict have changed their order: it is none in which assignments would put new ones."""
    if not isinstance(container, dict):
        return False
    items = [s for s in now if s[0] == "item"]  # behind which attributes come
    kept = [s for s in before if s in now and s[0] == "item"]
    return list(map(hash, items)) != list(map(hash, [*kept, *(s for s in items if s not in before)]))


def restore(container: Any, before: Mapping[Step, Any], others: Collection[Step] = ()) -> None:
    """Make a container hold just what it held, but for what belongs to others."""
    # In place: others may refer to the same list.
    if isinstance(container, list | deque | set):
        items = [v for (kind, _), v in before.items() if kind == "item"]
        container.clear()
        container.update(items) if isinstance(container, set) else container.extend(items)
    now = contents(container)
    # What a dict does not have any more would come to be its last item.
    anew = isinstance(container, dict) and list(map(hash, now)) != list(map(hash, before))
    for step in now:
        if (step not in before and step not in others) or (anew and step[0] == "item"):
            delete(container, step)
    now = contents(container)
    # Only what has changed: an assignment may run the user's __setitem__.
    for step, value in before.items():
        if step not in others and (step not in now or now[step] is not value):
            put(container, step, value)


def put(container: Any, step: Step, value: Any) -> None:
    """Set an item of a container."""
    kind, key = step
    if isinstance(container, Scope):
        container.owner[key] = value
    elif kind == "item":
        container[key] = value
    elif kind == "kwdefault":
        container.__kwdefaults__[key] = value
    elif kind == "value":
        container.set(value)  # a ContextVar
    elif kind == "code":
        container.__code__ = value
    elif kind == "cell":
        cells = dict(zip(container.__code__.co_freevars, container.__closure__, strict=True))
        cells[key].cell_contents = value
    else:
        set_attribute(container, key, value)


def delete(container: Any, step: Step) -> None:
    """Delete an item of a container."""
    kind, key = step
    if isinstance(container, Scope):
        del container.owner[key]
    elif kind == "item":
        del container[key]
    elif key in slots_of(type(container)):
        object.__delattr__(container, key)
    else:
        vars(container).pop(key, None)


def find(model: nn.Module, module: str, path: Path) -> Any:
    """The value at a path in a module of the model."""
    value: Any = model.get_submodule(module) if module and module != SCOPES else model
    for kind, key in path:
        if kind == "scope":
            value = key  # an `Owner`, which the path itself holds
        elif kind == "item":
            value = value[key]
        elif kind == "cell":
            value = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))[key].cell_contents
        elif kind == "default":
            value = value.__defaults__[key]
        elif kind == "kwdefault":
            value = value.__kwdefaults__[key]
        elif kind == "value":
            value = value.get(None)
        elif kind == "code":
            value = value.__code__
        elif kind == "target":
            value = value()  # a weak reference
        elif isinstance(value, nn.Module | types.MethodType):
            value = getattr(value, key)
        else:
            # Not getattr: a property or __getattr__ of the user's class would run.
            value = dict(attributes_of(value))[kind, key]
    return value


class Threads:
    """Attributes of a model's objects that are assigned while it is captured: what other threads assign is theirs.

    Assignments are seen, and no writes to items of dicts and lists: these classes cannot be replaced.
    """

    def __init__(self) -> None:
        """Of the thread that captures."""
        self._own = get_ident()
        # With the object: while it is alive, no other one can have its id.
        self._theirs: dict[tuple[int, str], Any] = {}
        self._ours: set[tuple[int, str]] = set()

    def wrote(self) -> bool:
        """Whether another thread has assigned anything."""
        return bool(self._theirs)

    def steps_of(self, container: Any) -> frozenset[Step]:
        """What other threads have assigned in an object."""
        return frozenset(("attr", name) for i, name in list(self._theirs) if i == id(container))

    def both(self, container: Any, name: Any) -> bool:
        """Whether the thread that captures has assigned it, too."""
        return (id(container), name) in self._theirs and (id(container), name) in self._ours

    @property
    def mixed(self) -> bool:
        """Whether anything has been assigned by both: what it was before cannot be told."""
        return not self._ours.isdisjoint(self._theirs)

    @contextlib.contextmanager
    def noted(self, containers: Iterable[Any]) -> Iterator[None]:
        """While it lasts, assignments to attributes of these objects, and of others of their classes, are noted."""
        kinds = {type(c) for c in containers if hasattr(c, "__dict__")} if len(sys._current_frames()) > 1 else set()
        before: list[tuple[type, Any]] = []
        try:
            for kind in kinds:
                own = vars(kind).get("__setattr__")
                with contextlib.suppress(TypeError):  # a class of C cannot be changed, nor can its attributes
                    kind.__setattr__ = self._noting(kind, own)
                    before.append((kind, own))
            yield
        finally:
            for kind, own in before:
                if own is None:
                    del kind.__setattr__
                else:
                    kind.__setattr__ = own

    def _noting(self, kind: Any, own: Any) -> Any:
        def noting(value: Any, name: str, new: Any) -> None:
            if get_ident() == self._own:
                self._ours.add((id(value), name))
            else:
                self._theirs[id(value), name] = value
            # Looked up at each call: `Origins` puts another one on `nn.Module` meanwhile.
            if own is None:
                super(kind, value).__setattr__(name, new)
            else:
                own(value, name, new)

        setattr(noting, STANDS_FOR, own)
        return noting
