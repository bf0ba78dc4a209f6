"""`Search`: names outside of the model's modules that its code reads: globals, attributes of classes and of functions.

A graph holds for their values as it does for attributes, and a call may write to them. Which names these are is read
off the bytecode of the methods of the model's classes, and of the functions and classes that they name.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autopar._torch_compat import traced_functions
from autopar.capture.state.code.names import Names
from autopar.capture.state.code.objects import (
    CONTAINERS,
    NAMESPACES,
    OF_FUNCTIONS,
    SIMPLE,
    function_in,
    is_foreign,
    is_installed,
    is_library,
    is_users_object,
    own_values,
    parts_of,
    table_of,
)
from autopar.capture.state.code.owner import Owner, Scope

MOST = 1000
"""Functions that are searched; a model whose code reaches more has the state of the others overlooked."""

LONGEST = 10_000
"""Items of a list in which functions are looked for; a longer one is data."""

ENVIRONMENT = frozenset(("environ", "getenv"))
"""Code that names one of these reads the environment's variables."""


NOT_BY_FORWARD = frozenset(
    "__init__ __new__ __del__ __repr__ __str__ __dir__ __setstate__ __getstate__ __reduce__ __reduce_ex__ __copy__ "
    "__deepcopy__ __init_subclass__ __sizeof__".split()
)
"""Special methods of modules that make, copy or show these: operators call the others without a name."""


# By id, for the life of the process: an `Owner` is part of paths, which are compared between calls.
_owners: dict[int, Owner] = {}


_BUILTINS = frozenset(vars(builtins))

_NOBODY = Owner({}, "")

Code = tuple[type | types.FunctionType, ...]
"""Classes of a model's modules and of objects that these hold, and functions that they hold."""


def search(code: Code, hooks: Sequence[types.FunctionType] = ()) -> Search:
    """What some code reads and reaches; hooks are looked at for plain values alone."""
    if hooks or any(isinstance(c, types.FunctionType) for c in code):
        # Not kept: a function may refer to the model, which would live for ever.
        return Search(code, hooks)
    known = _known.get(code)
    # Searching bytecode takes long, and every model of these classes reads the same names.
    if known is None or not known.is_current or not known.leads_alike():
        known = _known[code] = Search(code, ())
    return known


_known: dict[Code, Search] = {}


class Search:
    """What ``forward`` reaches: by names of attributes, whoever has them, and by globals.

    A model's classes have far more code than that (``generate``, say), whose state is none of the graph's.
    """

    def __init__(self, code: Code, hooks: Sequence[types.FunctionType]) -> None:
        """Search until nothing new is named.

        Attributes:
            scopes: the names, by owner.
            not_imported: modules that the code imports when it runs, and that are not there yet.
            globals: of the user's functions.
            libraries: names of libraries' modules that the code reads.
        """
        self.not_imported: set[str] = set()
        self._codes: list[tuple[types.FunctionType, types.CodeType]] = []
        self._names: dict[Owner, set[str]] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._seen: set[int] = set()
        self._attributes = {"forward", "__call__"}
        self._classes: dict[type, None] = {}
        self._of_some_class: list[Names] = []
        self._objects: dict[int, tuple[Any, str]] = {}
        self._libraries: dict[int, tuple[Mapping[str, Any], str, set[str]]] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._links: list[tuple[Any, str, Any]] = []
        self._held: dict[int, tuple[Any, list[Any]]] = {}
        self._strings: set[str] = set()
        for part in code:
            if isinstance(part, type) and issubclass(part, nn.Module):
                self._add_module(part)
            else:
                self._follow(part, part.__qualname__)
        # To a fixed point: a name that one function mentions may make others of the classes reachable.
        before = -1
        while before != (before := len(self._attributes) + len(self._seen) + len(self._classes) + len(self._objects)):
            for c in list(self._classes):
                self._visit_class(c)
            for space, label in list(self._objects.values()):
                self._visit_object(space, label)
        for names in self._of_some_class:
            for c in self._classes:
                self._note_assigned(c, names)
        for c in self._classes:
            self._note_inherited(c)
        for hook in hooks:
            self._visit_hook(hook)
        self.scopes = [Scope(owner, tuple(sorted(names))) for owner, names in self._names.items()]
        self.globals = list(self._globals.values())
        for module in list(self._modules.values()):
            self._visit_library(module)
        self.libraries = [(space, label, tuple(sorted(names))) for space, label, names in self._libraries.values()]

    @property
    def is_current(self) -> bool:
        """Whether functions have the code that was searched, and none of the modules that it imports has come since."""
        come = any(name in sys.modules for name in self.not_imported)
        return not come and all(f.__code__ is code for f, code in self._codes)

    def leads_alike(self) -> bool:
        """Whether the names, and containers of functions, lead to the code to which they led."""
        links = all(table_of(space).get(name) is value for space, name, value in self._links)
        return links and all(list(map(id, parts)) == list(map(id, parts_of(v))) for v, parts in self._held.values())

    def _visit_hook(self, hook: types.FunctionType) -> None:
        """Of a hook plain values alone: what it records in must not make the graph another one."""
        if is_foreign(hook.__module__):
            return
        space = hook.__globals__
        for name in Names.of(hook.__code__).globals:
            if isinstance(space.get(name, len), SIMPLE):
                self._note(space, str(space.get("__name__", "")), name)

    def _add_class(self, kind: type) -> None:
        own = [c for c in kind.__mro__ if not is_library(c.__module__)]
        # Attributes of a class may be those of its metaclass.
        own += [c for k in own for c in type.mro(type(k)) if not is_foreign(c.__module__)]
        self._classes.update({c: None for c in own})

    def _add_module(self, kind: type) -> None:
        """A class of modules: of a library's, too, `forward` may be replaced by another between calls."""
        self._add_class(kind)
        for c in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if "forward" in vars(c) and is_foreign(c.__module__):
                self._note(c, c.__qualname__, "forward")

    def _visit_class(self, kind: type) -> None:
        if is_installed(kind.__module__):
            self._visit_installed(kind)
            return
        # Operators are called without a name, and so are the methods of a differentiable function.
        unnamed, differentiates = not issubclass(kind, nn.Module), issubclass(kind, torch.autograd.Function)
        for name, value in list(vars(kind).items()):
            function = function_in(value)
            # Only what some code names: `generate` of a transformer, say, is not called by forward.
            special = name.startswith("__") and (unnamed or name not in NOT_BY_FORWARD)
            called = function is not None and (special or differentiates)
            if name in self._attributes or called:
                self._visit_value(kind, kind.__qualname__, name, value)

    def _note_inherited(self, kind: type) -> None:
        """What a class has from its bases, and may get itself between calls."""
        noted = [names for c in kind.__mro__[1:] if (names := self._names.get(_owners.get(id(c), _NOBODY)))]
        for name in () if is_installed(kind.__module__) else sorted(self._attributes & set().union(*noted)):
            self._note(kind, kind.__qualname__, name)

    def _visit_installed(self, kind: type) -> None:
        """Of a library's class plain values alone, which a user may set: its code is large, and keeps to attributes."""
        for name, value in list(vars(kind).items()):
            if isinstance(value, SIMPLE) and not name.startswith("__"):
                self._note(kind, kind.__qualname__, name)
            if (function := function_in(value)) is None:
                continue
            space = function.__globals__
            names = Names.of(function.__code__)
            for n in names.globals:
                if isinstance(space.get(n, len), SIMPLE) and not n.startswith("__"):
                    self._note(space, str(space.get("__name__", "")), n)
            self._visit_installed_names(function)
            self._visit_environment(names)

    def _visit_installed_names(self, function: types.FunctionType) -> None:
        """Functions and modules that a library's function names, and those that these name in the same module."""
        if id(function.__code__) in self._seen or len(self._seen) > MOST:
            return
        self._seen.add(id(function.__code__))
        space = function.__globals__
        label = str(space.get("__name__", ""))
        for n in Names.of(function.__code__).globals:
            value = space.get(n)
            if isinstance(value, types.FunctionType | types.ModuleType):
                self._note_library(space, label, n)
            if isinstance(value, types.FunctionType) and value.__module__ == label:
                self._visit_installed_names(value)

    def _visit_library(self, module: types.ModuleType) -> None:
        """Functions and plain values of a library's module that the code names, and those of modules in it."""
        for name in self._strings - vars(module).keys():  # hasattr(torch, "compile"), which a script may set later
            self._note_identity(vars(module), module.__name__, name)
        for name in self._attributes & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                if value.__name__ not in self._modules and is_foreign(value.__name__):
                    self._modules[value.__name__] = value
                    self._visit_library(value)
            else:
                self._note_library(vars(module), module.__name__, name)

    def _note_library(self, space: dict[str, Any], label: str, name: str) -> None:
        value = space.get(name)
        is_noted = callable(value) or isinstance(value, (*SIMPLE, types.ModuleType, list))
        if is_noted and name not in _BUILTINS:
            self._note_identity(space, label, name)

    def _note_identity(self, space: Any, label: str, name: str) -> None:
        """Note which object a name leads to, and not what that is."""
        # All of `torch.nn.functional` is compared in any case.
        if space is not vars(functional) and label.partition(".")[0] != "autopar":
            self._libraries.setdefault(id(space), (table_of(space), label, set()))[2].add(name)

    def _visit_object(self, space: Any, label: str) -> None:
        """Of an object or a module what the code names: the rest (a tracker's times, say) may change at every step."""
        is_module = isinstance(space, dict)
        for name, value in list((space if is_module else own_values(space)).items()):
            if name == "__getattr__" and is_module:  # makes names as they are asked for
                self._follow(value, label)
            elif name in self._attributes and (is_module or isinstance(value, (*SIMPLE, *CONTAINERS))):
                self._visit_value(space, label, name, value)
            elif name in self._attributes:
                self._follow(value, f"{label}.{name}")
                if callable(value) and isinstance(space, types.FunctionType):
                    self._note(space, label, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or len(self._seen) > MOST or is_foreign(function.__module__):
            return
        self._seen.add(id(function))
        self._codes.append((function, function.__code__))
        names = Names.of(function.__code__)
        self._attributes.update(names.attributes)
        self._strings.update(names.strings)
        self._visit_environment(names)
        if {"type", "__class__"} & {*names.globals, *names.attributes}:
            self._of_some_class.append(names)
        if vars(function):
            # Attributes of the function itself, such as a counter ``f.calls``.
            self._objects[id(function)] = function, function.__qualname__
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing has been assigned yet
                self._follow(cell.cell_contents, function.__qualname__)
        space = self._globals[id(function.__globals__)] = function.__globals__
        label = str(space.get("__name__", ""))
        for name in names.globals:
            if name in space:
                self._visit_value(space, label, name, space[name])
                if isinstance(space[name], type | types.FunctionType):
                    self._note_assigned(space[name], names)
            else:  # it may be there later, in the place of a builtin function, too
                self._note(space, label, name)
        for module in names.modules:
            if module in sys.modules:
                self._visit_import(module, (), "")
        for module, imported in names.imports:
            self._visit_import(module, imported, str(space.get("__package__") or ""))

    def _note_assigned(self, owner: Any, names: Names) -> None:
        """Attributes of a function or class, such as a counter ``f.calls``, that may not be there yet."""
        for attribute in names.assigned if not is_foreign(owner.__module__) else ():
            self._note(owner, owner.__qualname__, attribute)

    def _visit_environment(self, names: Names) -> None:
        """The environment's variables, all of them: which ones the code asks for is not known."""
        if ENVIRONMENT & {*names.globals, *names.attributes} and hasattr(os.environ, "_data"):
            self._note(os.environ, "os.environ", "_data")

    def _visit_import(self, module: str, imported: Sequence[str], package: str) -> None:
        """What a function imports when it runs."""
        with contextlib.suppress(ImportError):  # a relative one outside of a package: the code will say so itself
            module = importlib.util.resolve_name(module, package)
        if is_library(module):
            return
        if module not in sys.modules:  # before asking where it is installed, which is known from then on only
            self.not_imported.add(module)
            return
        if is_installed(module):
            return
        for name in {module, module.partition(".")[0]}:
            self._follow(sys.modules[name], name)
        space = vars(sys.modules[module])
        for name in imported:
            if name in space:
                self._visit_value(space, module, name, space[name])

    def _visit_value(self, space: Any, label: str, name: str, value: Any) -> None:
        """What a name leads to: noted where it is state, and followed."""
        function = function_in(value)
        if function is not None:
            is_state = isinstance(space, type) or not is_foreign(function.__module__)
        else:
            is_state = isinstance(value, (*SIMPLE, *CONTAINERS, *NAMESPACES)) or is_users_object(value)
        if is_state and value is not os.environ:
            self._note(space, label, name)
        elif isinstance(space, dict | type):
            self._note_identity(space, label, name)
        if isinstance(space, dict | type) and not isinstance(value, SIMPLE):
            self._links.append((space, name, value))
        self._follow(value, f"{label}.{name}")

    def _follow(self, value: Any, label: str) -> None:
        """Look into what the code names: a module, a class, a function or an object of the user's."""
        function = function_in(value)
        if isinstance(value, types.ModuleType):
            if is_foreign(value.__name__):
                self._modules[value.__name__] = value
            else:
                self._objects[id(vars(value))] = vars(value), value.__name__
        elif isinstance(value, type):
            if not is_foreign(value.__module__):
                self._add_class(value)
        # A registry of functions, say.
        elif isinstance(value, OF_FUNCTIONS):
            self._follow_parts(value, label)
        elif function is not None:
            self._visit_function(function)
        elif functions := traced_functions(value):
            for part in functions:
                self._follow(part, label)
        elif isinstance(value, nn.Module):  # one that is no submodule
            self._add_module(type(value))
        elif isinstance(value, types.SimpleNamespace | argparse.Namespace | threading.local):
            self._objects[id(value)] = value, label
        # A config, a tracker: its class's code is searched, too.
        elif is_users_object(value):
            self._objects[id(value)] = value, label
            self._add_class(type(value))

    def _follow_parts(self, value: Any, label: str) -> None:
        if id(value) in self._held or len(parts := parts_of(value)) > LONGEST:
            return
        self._held[id(value)] = value, parts
        for part in parts:
            if isinstance(part, (type, types.FunctionType, *OF_FUNCTIONS)) or is_users_object(part):
                self._follow(part, label)

    def _note(self, space: Any, label: str, name: str) -> None:
        owner = _owners.setdefault(id(space), Owner(space, label))
        self._names.setdefault(owner, set()).add(name)
