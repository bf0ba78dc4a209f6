"""What the values are that code names: whose they are, and what they hold."""

from __future__ import annotations

import argparse
import array
import contextvars
import functools
import logging
import random
import sys
import threading
import types
import weakref
from collections import UserList, UserString, deque
from collections.abc import Mapping, MappingView
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "autopar", "builtins"))
"""Top-level packages whose functions and objects are not searched; their state is their own business."""

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, tuple)

NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local, contextvars.ContextVar, weakref.ref,
              random.Random, np.random.Generator, np.random.RandomState, logging.Logger)  # fmt: skip
"""Classes of libraries whose objects hold what users put in them."""

CONTAINERS = (list, Mapping, MappingView, set, weakref.WeakSet, deque, UserList, UserString, np.ndarray, torch.Tensor,
              bytearray, memoryview, array.array)  # fmt: skip


def is_users_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's that may have state; modules are looked at themselves."""
    kind = type(value)
    plain = isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | nn.Module)
    return not plain and kind not in SIMPLE and not is_foreign(kind.__module__)


OF_FUNCTIONS = (list, tuple, dict, functools.partial, types.MethodType)
"""Containers in which functions and classes are looked for."""


def table_of(space: Any) -> Mapping[str, Any]:
    """The names of a dict of globals, or of what has attributes."""
    return space if isinstance(space, dict) else vars(space)


def parts_of(value: Any) -> list[Any]:
    """What a container of functions and classes holds."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, type(value.__self__)]
    return list(value.values() if isinstance(value, dict) else value)


def is_library(module: str | None) -> bool:
    """Whether a module is of Python's, torch's, numpy's or autopar's."""
    # No text: a class of Cython's says it through a descriptor.
    return not isinstance(module, str) or module.partition(".")[0] in LIBRARIES


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module is of a package that is installed, and not the user's own code."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(part in ("site-packages", "dist-packages") for part in Path(file).parts)


def is_foreign(module: str | None) -> bool:
    """Whether a module is none of the user's own."""
    return is_library(module) or is_installed(str(module))


def function_in(value: Any) -> types.FunctionType | None:
    """The Python function behind a method, a property or a cache; None: it is none."""
    # In this order: a property's getter, say, may be cached.
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.cached_property | functools.partialmethod | functools.singledispatchmethod):
        value = value.func
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def own_values(value: Any) -> Mapping[str, Any]:
    """Attributes of an object's own, those in slots included."""
    slots = _all_slots(type(value))
    if not slots and hasattr(value, "__dict__"):
        own: Mapping[str, Any] = vars(value)
        return own
    # Slots first: `vars` of an object with both has only the rest.
    found = {n: getattr(value, n) for n in slots if hasattr(value, n) and n != "__dict__"}
    return {**found, **vars(value)} if hasattr(value, "__dict__") else found


_slots: dict[type, tuple[str, ...]] = {}


def _all_slots(kind: type) -> tuple[str, ...]:
    if kind not in _slots:
        _slots[kind] = tuple(n for c in kind.__mro__ for n in _listed(vars(c).get("__slots__", ())))
    return _slots[kind]


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
