"""The Python state of a model: every attribute that is no parameter, buffer or submodule, and what is in it.

A graph holds for the state that it was traced with. `Slots` says in a form that can be compared what that state is, at
every call, cheaply: what has not been assigned since is not looked at again.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

OWN = frozenset(vars(nn.Module()))
"""Attributes that torch's modules have of their own."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

HOOK_TABLES = (*HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice,
          range, type(Ellipsis))  # fmt: skip

DEEPEST = 12
"""Containers in one another that are looked into."""

Step = tuple[str, Any]
"""``("attr", name)`` or ``("item", key)``."""

Path = tuple[Step, ...]


def children(value: Any) -> list[tuple[Step, Any]] | None:
    """What a container holds, by the step that leads there; None: it is no container."""
    if isinstance(value, Mapping):
        inner = [(("item", k), v) for k, v in value.items()]
        return inner + _attributes(value) if type(value) is not dict else inner
    if isinstance(value, list | tuple | deque):
        return [(("item", i), v) for i, v in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(("item", repr(v)), v) for v in sorted(value, key=repr)]
    if isinstance(value, nn.Module):  # one that is no submodule
        tables = [(("attr", n), t) for table in (value._parameters, value._buffers, value._modules)
                  for n, t in table.items()]  # fmt: skip
        return tables + [(("attr", n), v) for n, v in vars(value).items() if n not in OWN or n == "training"]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(("cell", n), c.cell_contents) for n, c in cells if _is_filled(c)]
        return inner + [(("default", i), d) for i, d in enumerate(value.__defaults__ or ())]
    if isinstance(value, types.MethodType):
        return [] if isinstance(value.__self__, nn.Module) else [(("attr", "__self__"), value.__self__)]
    if isinstance(value, functools.partial):
        return [(("attr", "func"), value.func), (("attr", "args"), value.args), (("attr", "keywords"), value.keywords)]
    if isinstance(value, SIMPLE) or isinstance(value, torch.Tensor | type | types.ModuleType | np.ndarray):
        return None
    return _attributes(value) if hasattr(value, "__dict__") and not callable(value) else None


def _attributes(value: Any) -> list[tuple[Step, Any]]:
    return [(("attr", n), v) for n, v in vars(value).items()] if hasattr(value, "__dict__") else []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises where nothing has been assigned yet
    except ValueError:
        return False
    return True


def describe(value: Any) -> Any:
    """A leaf in a form that is equal for equal state."""
    if isinstance(value, SIMPLE):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), tuple(value.shape), value.dtype, _version(value), value.requires_grad
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
    if isinstance(value, random.Random):
        return "random", hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return "random", repr(value.bit_generator.state)
    return type(value), id(value)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode has none
        return -1


def walk(value: Any, path: Path, seen: set[int], depth: int = 0) -> Iterator[tuple[Path, Any, Any]]:
    """Every container and leaf in a value, each once: its path, itself, and what describes it."""
    inner = children(value) if depth < DEEPEST else None
    if inner is None:
        yield path, value, describe(value)
        return
    if id(value) in seen:
        yield path, None, "above"
        return
    seen.add(id(value))
    kind: Any = id(value) if isinstance(value, types.FunctionType | types.MethodType) else len(inner)
    yield path, value, (type(value), kind)
    for step, v in inner:
        yield from walk(v, (*path, step), seen, depth + 1)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that are the user's."""
    return {n: v for n, v in vars(module).items() if n not in OWN}


def promoted(module: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are plain tensors, which become inputs of the graph as buffers are."""
    found = {n: v for n, v in own_attributes(module).items() if isinstance(v, torch.Tensor)}
    return {n: v for n, v in found.items()
            if not hasattr(type(module), n) and v.layout == torch.strided and not v.is_meta}  # fmt: skip


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Registered buffers and plain tensors among the attributes, by their names, shared ones under each."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found.update({prefix + n: b for n, b in module._buffers.items() if b is not None})
        found.update({prefix + n: t for n, t in promoted(module).items()})
    return found


@dataclass(frozen=True)
class _Seen:
    """What a module's state was described as, and the values that it was read from, which must not be freed."""

    values: tuple[Any, ...]
    inner: tuple[tuple[Any, tuple[Any, ...]], ...]
    described: dict[Path, Any]


Signature = dict[str, dict[Path, Any]]
"""State by the path of the module and the path in it."""


class Slots:
    """The state of a model, described anew where it has changed."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is known yet."""
        self._model = model
        self._known: dict[str, _Seen] = {}
        self._own: tuple[Any, ...] = ()
        self._inputs: frozenset[int] = frozenset()
        self._types: dict[type, tuple[tuple[Any, ...], dict[Path, Any]]] = {}

    def signature(self, constants: bool = False) -> Signature:
        """The state of every module now; entries that have not changed are the same objects.

        Args:
            constants: plain tensors count by their identity and version, not by their shape alone.
        """
        found: Signature = {}
        own = [t for m in self._model.modules() for table in (m._parameters, m._buffers) for t in table.values()]
        if not _same(tuple(own), self._own):
            self._own, self._inputs, self._known = tuple(own), frozenset(map(id, own)), {}
        for path, module in self._model.named_modules():
            found[path] = self._of(path, module, constants)
            kind = type(module)
            if kind not in self._types or not kind.__module__.startswith("torch."):
                found[f"class {kind.__qualname__}"] = self._of_class(kind)
        return found

    def _of(self, path: str, module: nn.Module, constants: bool) -> dict[Path, Any]:
        buffers = tuple((n, None if b is None else (b.shape, b.dtype)) for n, b in module._buffers.items())
        values = (*vars(module).values(), *(v for name in HOOKS for v in getattr(module, name).values()), *buffers)
        known = self._known.get(path)
        if known is not None and _same(known.values, values) and all(_same(c, _contents(v)) for v, c in known.inner):
            return known.described
        inputs = () if constants else promoted(module)
        described: dict[Path, Any] = {(("attr", "training"),): module.training}
        described.update({(("attr", name),): ("buffer", kind) for name, kind in buffers})
        inner: list[tuple[Any, tuple[Any, ...]]] = []
        seen: set[int] = set()
        for name, value in own_attributes(module).items():
            if name in inputs:
                described[("attr", name),] = ("input", tuple(value.shape), value.dtype, value.device)
                continue
            for at, part, text in walk(value, (("attr", name),), seen):
                if id(part) in self._inputs:
                    described[at] = "a parameter or buffer", id(part)
                    continue
                described[at] = text
                if isinstance(part, torch.Tensor | np.ndarray | random.Random | np.random.Generator) or (
                    part is not None and children(part) is not None
                ):
                    inner.append((part, _contents(part)))
        for name in HOOKS:
            for number, hook in getattr(module, name).items():
                described[("attr", name), ("item", number)] = id(hook)
        self._known[path] = _Seen(values, tuple(inner), described)
        return described

    def _of_class(self, kind: type) -> dict[Path, Any]:
        """Simple attributes of the user's classes, and simple globals that their methods name."""
        classes = [c for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
        values: dict[Path, Any] = {}
        for c in classes:
            for name, value in vars(c).items():
                if isinstance(value, SIMPLE) and not name.startswith("__"):
                    values[(("attr", c.__qualname__), ("attr", name))] = value
                if isinstance(value, types.FunctionType):
                    named = ((n, value.__globals__.get(n, len)) for n in value.__code__.co_names)
                    values.update({(("global", n),): v for n, v in named if isinstance(v, SIMPLE)})
        current = tuple(values.values())
        known = self._types.get(kind)
        if known is not None and _same(known[0], current):
            return known[1]
        described = {at: describe(v) for at, v in values.items()}
        self._types[kind] = (current, described)
        return described


def _contents(value: Any) -> tuple[Any, ...]:
    inner = children(value)
    return (describe(value),) if inner is None else tuple(v for _, v in inner)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y or (type(x) is tuple and x == y) for x, y in zip(a, b, strict=True))


def differences(a: Signature, b: Signature, ignored: frozenset[tuple[str, Path]] = frozenset()) -> list[str]:
    """Names of the state that differs, but for what is ignored; empty: none does."""
    found = []
    for module in [*a, *(m for m in b if m not in a)]:
        mine, other = a.get(module, {}), b.get(module, {})
        if mine is other:
            continue
        for at in [*mine, *(p for p in other if p not in mine)]:
            if mine.get(at) != other.get(at) and (module, at) not in ignored:
                found.append(name_of(module, at))
    return found


def name_of(module: str, path: Path) -> str:
    """A path as Python would write it."""
    text = module
    for kind, key in path:
        text += f"[{key!r}]" if kind == "item" else f".{key}" if text else str(key)
    return text
