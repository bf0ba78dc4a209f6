"""Values of a model's Python state: what is in a container, by steps, and what describes a leaf."""

from __future__ import annotations

import array
import contextvars
import enum
import functools
import hashlib
import logging
import multiprocessing.queues
import queue
import random
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, MappingView, ValuesView
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar._torch_compat import is_traced
from autopar.capture.state.code.objects import is_library, is_users_object
from autopar.capture.state.code.owner import Scope

OWN = frozenset(vars(nn.Module()))
"""Attributes that torch's modules have of their own."""

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice,
          range, type(Ellipsis))  # fmt: skip

BUFFERS = (bytearray, memoryview, array.array)
"""Numbers in memory that can be written one by one."""

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Generators of random numbers that are no tensors."""

_BETWEEN_THREADS: tuple[type, ...] = (threading.Condition, queue.Queue, multiprocessing.queues.Queue)
"""What threads pass one another: forward may not ask for it, and who waits there is no state of the model."""

_VIEWS = (MappingView, weakref.WeakSet)

DEEPEST = 12
"""Levels of containers in one another that are described."""

Step = tuple[str, Any]
"""``("attr", name)`` or ``("item", key)``."""

Path = tuple[Step, ...]

ITEMS: Step = ("items", "")
"""Which items there are in a container, apart from what they are."""


def children(value: Any) -> list[tuple[Step, Any]] | None:
    """What a container holds, by the step that leads there; None: it is no container."""
    if isinstance(value, Scope):
        return [(("item", n), v) for n, v in value.items()]
    if type(value) in weakref.ProxyTypes:  # before it is asked for its class, which is that of what it stands for
        return _behind(_target(value))
    if isinstance(value, Mapping):
        # A list of them at once, here and below: another thread may add some meanwhile.
        inner = [(("item", k), v) for k, v in list(value.items())]
        return inner + attributes_of(value) if type(value) is not dict else inner
    if isinstance(value, list | tuple | deque | KeysView | ValuesView | ItemsView):
        # A tuple one by one, since `list` asks for the length, which a class of its own may not have.
        inner = [(("item", i), v) for i, v in enumerate(value if isinstance(value, tuple) else list(value))]
        return inner if type(value) in (list, tuple) else inner + attributes_of(value)
    if isinstance(value, set | frozenset | weakref.WeakSet):
        # Sorted by text: the order of a set differs from process to process.
        inner = [(("item", repr(v)), v) for v in sorted(list(value), key=repr)]
        return inner if type(value) in (set, frozenset, weakref.WeakSet) else inner + attributes_of(value)
    if isinstance(value, nn.Module):  # one that is no submodule
        tables = [(("attr", n), t) for table in (value._parameters, value._buffers, value._modules)
                  for n, t in table.items()]  # fmt: skip
        return tables + [(("attr", n), v) for n, v in vars(value).items() if n not in OWN or n == "training"]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(("cell", n), c.cell_contents) for n, c in cells if _is_filled(c)]
        inner += [(("default", i), d) for i, d in enumerate(value.__defaults__ or ())]
        # Notebooks that reload a module put new code into the functions that there are.
        inner.append((("code", ""), value.__code__))
        return inner + [(("kwdefault", n), d) for n, d in (value.__kwdefaults__ or {}).items()]
    # A bound method is its object's state, which of a module is described with the module, and its function's.
    if isinstance(value, types.MethodType):
        inner = [(("attr", "__func__"), value.__func__)]
        return inner if isinstance(value.__self__, nn.Module) else [*inner, (("attr", "__self__"), value.__self__)]
    if isinstance(value, functools.partial):
        return [(("attr", "func"), value.func), (("attr", "args"), value.args), (("attr", "keywords"), value.keywords)]
    if isinstance(value, SIMPLE) and has_attributes(value):
        return attributes_of(value)
    others = torch.Tensor | type | types.ModuleType | np.ndarray | logging.Logger
    if isinstance(value, SIMPLE) or isinstance(value, others) or isinstance(value, _BETWEEN_THREADS):
        return None
    if isinstance(value, weakref.ref):
        return _behind(value())
    if isinstance(value, contextvars.ContextVar):
        return [(("value", ""), value.get(None))]
    if type(value).__module__.partition(".")[0] == "autopar":
        return None  # what a parallel module has, to which a closure may refer: plans and graphs, and no state
    # Other callables, torch's own for example, are leaves, told apart by identity.
    is_object = hasattr(value, "__dict__") or bool(slots_of(type(value)))
    return attributes_of(value) if is_object and (not callable(value) or _is_users(type(value))) else None


def has_attributes(value: Any) -> bool:
    """Whether a plain value is of a class of the user's, on whose objects attributes can be set."""
    return type(value) not in SIMPLE and not isinstance(value, enum.Enum) and hasattr(value, "__dict__")


def _behind(target: Any) -> list[tuple[Step, Any]]:
    """What a weak reference holds."""
    return [] if isinstance(target, torch.Tensor | nn.Module) else [(("target", ""), target)]


def _target(proxy: Any) -> Any:
    """What a weak proxy stands for; None: it is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def holds_attributes_alone(value: Any) -> bool:
    """Whether the `children` of an object are what is in its ``__dict__``, and nothing else."""
    others = (Scope, Mapping, list, tuple, deque, set, frozenset, nn.Module, types.FunctionType, types.MethodType,
              functools.partial, weakref.ref, contextvars.ContextVar, *_VIEWS, *SIMPLE)  # fmt: skip
    if (
        type(value) in weakref.ProxyTypes
        or isinstance(value, others)
        or slots_of(type(value))
        or not hasattr(value, "__dict__")
    ):
        return False
    # Of a `threading.local`, or a proxy of another object, the class makes what is found under this name.
    return type(vars(value)) is dict and dict_of(value) is vars(value) and children(value) is not None


def dict_of(value: Any) -> Any:
    """What an object itself has as its ``__dict__``; None: nothing."""
    # Not vars(), which asks the class: configurations of transformers answer in Python.
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


_called: dict[type, bool] = {}


def _is_users(kind: type) -> bool:
    """Whether the objects of a class that are called have state of the user's: torch's own keep caches there."""
    if kind not in _called:
        is_python = any(isinstance(vars(c).get("__call__"), types.FunctionType) for c in kind.__mro__)
        _called[kind] = is_python and not is_library(kind.__module__)
    return _called[kind]


def attributes_of(value: Any) -> list[tuple[Step, Any]]:
    """Attributes of an object: those in its ``__dict__``, and those in slots."""
    found = [(("attr", n), v) for n, v in list(vars(value).items())] if hasattr(value, "__dict__") else []
    if isinstance(value, defaultdict):
        found.append((("attr", "default_factory"), value.default_factory))
    return found + [(("attr", n), getattr(value, n)) for n in slots_of(type(value)) if hasattr(value, n)]


_slots: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    """Names of a class's slots; none of Python's own classes, which keep caches there."""
    if kind not in _slots:
        _slots[kind] = _find_slots(kind)
    return _slots[kind]


def _find_slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for c in kind.__mro__:
        names = vars(c).get("__slots__", ())
        if c.__module__.partition(".")[0] in sys.stdlib_module_names:
            continue
        # Private names are stored mangled, as Python does it.
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{c.__name__.lstrip('_')}{name}" if private else name)
    return tuple(n for n in found if n not in ("__dict__", "__weakref__"))


def set_attribute(value: Any, name: str, new: Any) -> None:
    """Give an object an attribute, whatever its class does about that."""
    if isinstance(value, defaultdict) and name == "default_factory":
        value.default_factory = new
    elif name in slots_of(type(value)):
        object.__setattr__(value, name, new)
    else:
        vars(value)[name] = new


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises where nothing has been assigned yet
    except ValueError:
        return False
    return True


def held_by_function(function: types.FunctionType) -> tuple[Any, ...]:
    """The objects of `children` and the names of defaults, in a tenth of the time: most state is functions."""
    cells, named = function.__closure__ or (), function.__kwdefaults__ or {}
    held = [c.cell_contents if _is_filled(c) else _is_filled for c in cells]
    return function.__code__, function.__defaults__, *held, *named, *named.values()


def describe(value: Any) -> Any:
    """A leaf in a form that is equal for equal state."""
    if isinstance(value, SIMPLE):
        # By text: NaN does not equal itself, and 0.0 equals -0.0.
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, torch.Tensor):
        return "tensor", Same(value), tuple(value.shape), value.dtype, _version(value), value.requires_grad
    if isinstance(value, BUFFERS):
        return type(value), bytes(value)
    if isinstance(value, np.ndarray):
        # No version counts writes to an array, so its elements are hashed at every call.
        return "array", value.shape, str(value.dtype), hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
    if isinstance(value, GENERATORS):
        return "random", repr(state_of_generator(value))
    if isinstance(value, logging.Logger):
        return "logger", value.name, value.getEffectiveLevel(), value.disabled
    return type(value), Same(value)


def state_of_generator(value: Any) -> Any:
    """What the next numbers of a generator depend on."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value.get_state()


def set_generator_state(value: Any, state: Any) -> None:
    """Wind a generator back to a state that it had."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.set_state(state)


def globals_of(function: types.FunctionType) -> list[tuple[Step, Any]]:
    """Containers and objects of the user's among the globals that a hook names, which its closure has not."""
    found = [(n, function.__globals__.get(n)) for n in function.__code__.co_names]
    return [(("global", n), v) for n, v in found if isinstance(v, list | dict | set | deque) or is_users_object(v)]


def state_of_hook(hook: Any, path: Path, ignored: Collection[Path]) -> Iterator[tuple[Path, Any, Any]]:
    """What a hook refers to, as `walk` gives it, but for modules, which are no state of its own.

    Args:
        hook: a function, a method, or an object that is called.
        path: where it is.
        ignored: paths in it of what does not count, and of what is in that.
    """
    seen: set[int] = set()

    def visit(value: Any, at: Path, depth: int) -> Iterator[tuple[Path, Any, Any]]:
        if at in ignored or isinstance(value, nn.Module):
            return
        inner = children(value) if depth < DEEPEST and id(value) not in seen else None
        if inner is None:
            if not isinstance(value, types.FunctionType | types.MethodType):
                yield (*path, *at), value, describe(value)
            return
        seen.add(id(value))
        yield (*path, *at), value, type(value) if (*at, ITEMS) in ignored else (type(value), len(inner))
        for step, v in inner:
            yield from visit(v, (*at, step), depth + 1)

    yield from visit(hook, (), 0)
    function = getattr(hook, "__func__", hook)
    for step, value in globals_of(function) if isinstance(function, types.FunctionType) else ():
        yield from visit(value, (step,), 0)


class Same:
    """Equal for the same object alone, as long as that is there: an `id` is given to others afterwards."""

    __slots__ = ("_hash", "_of")

    def __init__(self, value: Any) -> None:
        """Tensors, and whatever else can be referred to weakly, are not kept alive."""
        self._hash = id(value)
        try:
            self._of: Any = weakref.ref(value)
        except TypeError:
            self._of = lambda: value

    def __eq__(self, other: object) -> bool:
        """Whether both are of one object."""
        return isinstance(other, Same) and (mine := self._of()) is not None and mine is other._of()

    def __hash__(self) -> int:
        """Of the identity."""
        return self._hash


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or gets other memory: no count shows ``tensor.data = value``."""
    # What stands for a tensor has no memory, and fake ones may not be asked for it.
    memory = tensor.data_ptr() if type(tensor) is torch.Tensor and not is_traced(tensor) else 0
    try:
        return tensor._version, memory
    except RuntimeError:  # a tensor of inference mode has none
        return -1, memory


def walk(value: Any, path: Path, seen: set[int], depth: int = 0) -> Iterator[tuple[Path, Any, Any]]:
    """Every container and leaf in a value, each once: its path, itself, and what describes it."""
    inner = children(value) if depth < DEEPEST else None
    if inner is None:
        yield path, value, describe(value)
        return
    # Cycles, and what several attributes share, are described once.
    if id(value) in seen:
        yield path, None, "above"
        return
    seen.add(id(value))
    # Two functions of one closure are different code; two lists of equal items are the same state.
    kind: Any = Same(value) if isinstance(value, types.FunctionType) else len(inner)
    kind = tuple(map(hash, value)) if isinstance(value, dict) else kind  # their order
    kind = (value.__func__, Same(value.__self__)) if isinstance(value, types.MethodType) else kind
    kind = (kind, value.maxlen) if isinstance(value, deque) else kind
    kind = (kind, describe(value)) if isinstance(value, SIMPLE) else kind
    yield path, value, (type(value), kind)
    for step, v in inner:
        yield from walk(v, (*path, step), seen, depth + 1)
