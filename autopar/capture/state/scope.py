"""`Scope`: names outside of the model's modules that its code reads: globals, attributes of classes and of functions.

A graph holds for their values as it does for attributes, and a call may write to them. Which names these are is read
off the bytecode of the methods of the model's classes, and of the functions and classes that they name.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

MOST = 1000
"""Functions that are searched; a model whose code reaches more has the state of the others overlooked."""

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "autopar", "builtins"))
"""Top-level packages whose functions and objects are not searched; their state is their own business."""

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, tuple)

NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
"""Classes of libraries whose objects hold what users put in them."""

CONTAINERS = (list, dict, set, deque, np.ndarray, torch.Tensor)


class Owner:
    """A module's globals, a class or a function; one object for each, so that paths through it are equal."""

    def __init__(self, space: Any, label: str) -> None:
        """``space``: a dict of globals, or what has attributes."""
        self.space, self.label = space, label

    def __repr__(self) -> str:
        """As messages call it."""
        return self.label

    def values(self) -> Mapping[str, Any]:
        """What it holds now, by name."""
        return self.space if isinstance(self.space, dict) else _own(self.space)

    def __getitem__(self, name: str) -> Any:
        """The value of a name."""
        return self.values()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Assign a name."""
        if isinstance(self.space, dict):
            self.space[name] = value
        else:
            setattr(self.space, name, value)

    def __delitem__(self, name: str) -> None:
        """Delete a name."""
        if isinstance(self.space, dict):
            del self.space[name]
        else:
            delattr(self.space, name)


# By id, for the life of the process: an `Owner` is part of paths, which are compared between calls.
_owners: dict[int, Owner] = {}


@dataclass(frozen=True)
class Scope:
    """Names of one owner that the code reads, in order."""

    owner: Owner
    names: tuple[str, ...]

    def items(self) -> list[tuple[str, Any]]:
        """Those that are there, with their values."""
        space = self.owner.values()
        return [(n, space[n]) for n in self.names if n in space]


def scopes_of(model: nn.Module) -> list[Scope]:
    """The scopes that the code of a model's modules reads."""
    kinds = tuple(dict.fromkeys(type(m) for m in model.modules()))
    # Searching bytecode takes long, and every model of these classes reads the same names.
    if kinds not in _known:
        _known[kinds] = [Scope(owner, tuple(sorted(names))) for owner, names in _Search(kinds).names.items()]
    return _known[kinds]


_known: dict[tuple[type, ...], list[Scope]] = {}


@contextlib.contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """While it lasts, functions under `functools.lru_cache` are called: caches must not hold what a trace makes."""
    kind = functools._lru_cache_wrapper
    found = [(s.owner, n, v) for s in scopes_of(model) for n, v in s.items() if isinstance(v, kind)]
    try:
        for owner, name, cache in found:
            owner[name] = cache.__wrapped__
        yield
    finally:
        for owner, name, cache in found:
            owner[name] = cache


class _Search:
    """What ``forward`` reaches: by names of attributes, whoever has them, and by globals.

    A model's classes have far more code than that (``generate``, say), whose state is none of the graph's.
    """

    def __init__(self, kinds: Sequence[type]) -> None:
        self.names: dict[Owner, set[str]] = {}
        self._seen: set[int] = set()
        self._attributes = {"forward", "__call__"}
        self._classes: dict[type, None] = {}
        self._objects: dict[int, tuple[Any, str]] = {}
        for kind in kinds:
            self._add_class(kind)
        # To a fixed point: a name that one function mentions may make others of the classes reachable.
        before = -1
        while before != (before := len(self._attributes) + len(self._seen) + len(self._classes) + len(self._objects)):
            for c in list(self._classes):
                self._visit_class(c)
            for space, label in list(self._objects.values()):
                self._visit_object(space, label)

    def _add_class(self, kind: type) -> None:
        self._classes.update({c: None for c in kind.__mro__ if not _is_library(c.__module__)})

    def _visit_class(self, kind: type) -> None:
        if _is_installed(kind.__module__):
            self._visit_installed(kind)
            return
        special = not issubclass(kind, nn.Module)  # its operators are called without a name
        for name, value in list(vars(kind).items()):
            function = _function_in(value)
            # Only what some code names: `generate` of a transformer, say, is not called by forward.
            if name not in self._attributes and not (special and function is not None and name.startswith("__")):
                continue
            if function is not None:
                self._visit_function(function)
            if function is not None or isinstance(value, (*SIMPLE, *CONTAINERS)):
                self._note(kind, kind.__qualname__, name)

    def _visit_installed(self, kind: type) -> None:
        """Of a library's class plain values alone, which a user may set: its code is large, and keeps to attributes."""
        for name, value in list(vars(kind).items()):
            if isinstance(value, SIMPLE) and not name.startswith("__"):
                self._note(kind, kind.__qualname__, name)
            if (function := _function_in(value)) is None:
                continue
            space = function.__globals__
            for n in _names_in(function.__code__)[0]:
                if isinstance(space.get(n, len), SIMPLE) and not n.startswith("__"):
                    self._note(space, str(space.get("__name__", "")), n)

    def _visit_object(self, space: Any, label: str) -> None:
        """Of an object or a module what the code names: the rest (a tracker's times, say) may change at every step."""
        for name, value in (space if isinstance(space, dict) else _own(space)).items():
            if name in self._attributes and isinstance(value, (*SIMPLE, *CONTAINERS)):
                self._note(space, label, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or len(self._seen) > MOST or _is_foreign(function.__module__):
            return
        self._seen.add(id(function))
        global_names, attributes = _names_in(function.__code__)
        self._attributes.update(attributes)
        if vars(function):
            # Attributes of the function itself, such as a counter ``f.calls``.
            self._objects[id(function)] = function, function.__qualname__
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing has been assigned yet
                if (inner := _function_in(cell.cell_contents)) is not None:
                    self._visit_function(inner)
        for name in global_names:
            if name in function.__globals__:
                self._visit_global(function.__globals__, name)

    def _visit_global(self, space: dict[str, Any], name: str) -> None:
        value, function = space[name], _function_in(space[name])
        label = str(space.get("__name__", ""))
        if isinstance(value, types.ModuleType):
            if not _is_foreign(value.__name__):
                self._objects[id(vars(value))] = vars(value), value.__name__
        elif isinstance(value, type):
            if not _is_foreign(value.__module__):
                self._add_class(value)
        elif function is not None:
            if not _is_foreign(function.__module__):
                self._note(space, label, name)
            self._visit_function(function)
        elif isinstance(value, (*SIMPLE, *CONTAINERS)):
            self._note(space, label, name)
        # An object of the user's: a config, a tracker. Its class's code is searched, too.
        elif isinstance(value, NAMESPACES) or not (callable(value) or _is_foreign(type(value).__module__)):
            self._note(space, label, name)
            self._objects[id(value)] = value, f"{label}.{name}"
            if not isinstance(value, NAMESPACES):
                self._add_class(type(value))

    def _note(self, space: Any, label: str, name: str) -> None:
        owner = _owners.setdefault(id(space), Owner(space, label))
        self.names.setdefault(owner, set()).add(name)


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in LIBRARIES


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is of a package that is installed, and not the user's own code."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(part in ("site-packages", "dist-packages") for part in Path(file).parts)


def _is_foreign(module: str | None) -> bool:
    return _is_library(module) or _is_installed(str(module))


def _function_in(value: Any) -> types.FunctionType | None:
    """The Python function behind a method, a property or a cache; None: it is none."""
    # In this order: a property's getter, say, may be cached.
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Globals and attributes that code refers to by name, that of functions within included.

    Apart: ``self.step`` has nothing to do with a global or a loop's variable ``step``.
    """
    global_names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    pending = [code]
    while pending:
        part = pending.pop()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        for instruction in dis.get_instructions(part):
            # By suffix: the opcodes' full names differ between versions of Python.
            if instruction.opname.endswith(("_GLOBAL", "_NAME")):
                global_names[instruction.argval] = None
            elif instruction.opname.endswith(("_ATTR", "_METHOD")):
                attributes[instruction.argval] = None
    return tuple(global_names), tuple(attributes)


def _own(value: Any) -> dict[str, Any]:
    """Attributes of an object's own, those in slots included."""
    slots = [n for c in type(value).__mro__ for n in _listed(vars(c).get("__slots__", ()))]
    # Slots first: `vars` of an object with both has only the rest.
    found = {n: getattr(value, n) for n in slots if hasattr(value, n) and n != "__dict__"}
    return {**found, **vars(value)} if hasattr(value, "__dict__") else found


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
