"""Nested batches and model outputs as flat lists of tensors, and back."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from autopar._torch_compat import pytree_node
from autopar.errors import CaptureError
from autopar.ir.signature.subclasses import refuse_own_functions

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, pathlib.PurePath, uuid.UUID, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """In a skeleton, in place of tensor number ``index``."""

    index: int


@dataclass(frozen=True)
class RuntimeFloat:
    """In a skeleton, in place of a float that is known when a step runs: a function of the floats of the batch.

    Attributes:
        text: for people; equal for equal functions.
        compute: from the floats of the batch.
    """

    text: str
    compute: Callable[[Sequence[float]], Any] = field(compare=False)

    @staticmethod
    def of_batch(index: int) -> RuntimeFloat:
        """Float number ``index`` of the batch itself."""
        return RuntimeFloat(f"float {index}", operator.itemgetter(index))

    def value(self, numbers: Sequence[float]) -> float:
        """The float, from those of the batch."""
        found: float = self.compute(numbers)
        return found

    def __repr__(self) -> str:
        return self.text


class FloatProxy(ABC):
    """What stands for a float while a model is traced; in the skeleton of an output a `RuntimeFloat` stands for it."""

    @abstractmethod
    def leaf(self) -> RuntimeFloat:
        """What stands for it in a skeleton."""


class Contents:
    """What the lists, dicts, sets and objects of a value hold now, to tell later whether one holds something else."""

    def __init__(self, value: Any, what: str) -> None:
        """Of ``value``, which is called ``what``."""
        self._known: dict[int, tuple[Any, str, dict[Any, Any]]] = {}
        self._add(value, what)

    def _add(self, value: Any, path: str) -> None:
        # Not isinstance for proxies: one says that its class is float.
        if id(value) in self._known or issubclass(type(value), (torch.Tensor, FloatProxy, type, *_PLAIN)):
            return
        held = _held(value)
        if held is not None:
            self._known[id(value)] = value, path, held
            for key, each in held.items():
                self._add(each, path + _step(key))

    def changed(self) -> str:
        """The path of the first that holds something else, and what of it; empty if none does."""
        for value, path, before in self._known.values():
            now = _held(value) or {}
            for key in dict.fromkeys([*before, *now]):
                if key not in now or key not in before or now[key] is not before[key]:
                    return path + _step(key)
        return ""


def _step(key: tuple[str, Any]) -> str:
    return f".{key[1]}" if key[0] == "attribute" else f"[{key[1]!r}]"


def _held(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by its place there; None for any other value."""
    found: dict[Any, Any]
    if isinstance(value, tuple | list):
        found = {("item", i): v for i, v in enumerate(value)}
    elif isinstance(value, Mapping):
        found = {("item", k): v for k, v in value.items()}
    elif isinstance(value, AbstractSet):
        found = {("item", v): None for v in value}
    else:
        own = getattr(value, "__dict__", None)
        if own is None:
            return None
        # A property that is computed once and kept is no change.
        kept = {k for k in own if isinstance(getattr(type(value), k, None), functools.cached_property)}
        found = {("attribute", k): v for k, v in own.items() if k not in kept}
    return found


def flatten(
    value: Any,
    what: str = "value",
    *,
    numbers: list[float] | None = None,
    shared: bool = False,
    drop: Callable[[Any, str], bool] | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """Tensors of ``value`` in order, and its skeleton: the same structure with a `Leaf` for each tensor.

    Args:
        value: nested sequences, mappings, dataclasses and classes registered with torch's pytrees.
        what: its name, for errors.
        numbers: floats of the value are put here, with a `RuntimeFloat` in the skeleton; default: they are constants.
        shared: a tensor that is there twice is one tensor.
        drop: whether a value, given with its path, is replaced by None.

    Raises:
        CaptureError: ``value`` holds something else; names its path.
    """
    visitor = _Visitor(numbers, shared, drop)
    return visitor.tensors, visitor.visit(value, what)


def unflatten(skeleton: Any, tensors: Sequence[Any], numbers: Sequence[float] | None = ()) -> Any:
    """The value whose skeleton, tensors and numbers are given; without numbers it has a `RuntimeFloat` for each."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.index]
    if isinstance(skeleton, _Record):
        items = {k: unflatten(v, tensors, numbers) for k, v in skeleton.items.items()}
        return skeleton.rebuild(items, {k: unflatten(v, tensors, numbers) for k, v in skeleton.attributes.items()})
    if isinstance(skeleton, _Sequence):
        values = [unflatten(v, tensors, numbers) for v in skeleton.items]
        return skeleton.rebuild(values, {k: unflatten(v, tensors, numbers) for k, v in skeleton.attributes.items()})
    if isinstance(skeleton, _Constant):
        return set(skeleton.value) if type(skeleton.value) is set else skeleton.value
    if type(skeleton) in (list, tuple):
        return type(skeleton)(unflatten(v, tensors, numbers) for v in skeleton)
    is_number = isinstance(skeleton, RuntimeFloat) and numbers is not None
    return skeleton.value(numbers) if is_number else skeleton


class _Visitor:
    def __init__(self, numbers: list[float] | None, shared: bool, drop: Callable[[Any, str], bool] | None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers, self.drop = numbers, drop
        self.known: dict[int, Leaf] | None = {} if shared else None
        self.inside: set[int] = set()

    def visit(self, v: Any, path: str) -> Any:
        """The skeleton of a value."""
        if self.drop is not None and self.drop(v, path):
            return None
        if isinstance(v, torch.Tensor):
            return self._tensor(v, path)
        # Not isinstance: a proxy says that its class is float.
        if issubclass(type(v), FloatProxy):
            return v.leaf()
        # Exactly floats: a subclass, such as numpy's, may compute otherwise.
        if self.numbers is not None and type(v) is float:
            self.numbers.append(v)
            return RuntimeFloat.of_batch(len(self.numbers) - 1)
        if isinstance(v, _PLAIN):
            # Another class than it says: a number of the model's state in disguise, while it is traced.
            said: Any = v.__class__
            return v if type(v) is said else said(v)
        if isinstance(v, AbstractSet) or _is_numpy_scalar(v):
            return self._constant(v, path)
        # Ids of the containers around this one: the same list twice side by side is fine.
        if id(v) in self.inside:
            raise CaptureError(f"{path} contains itself; pass or return what has an end")
        self.inside.add(id(v))
        try:
            return self._container(v, path)
        finally:
            self.inside.discard(id(v))

    def _tensor(self, v: torch.Tensor, path: str) -> Leaf:
        if v.layout is not torch.strided or v.is_nested or v.is_quantized:
            kind = "nested" if v.is_nested else "quantized" if v.is_quantized else str(v.layout).removeprefix("torch.")
            remedy = (
                "torch.nested.to_padded_tensor" if v.is_nested else ".dequantize" if v.is_quantized else ".to_dense"
            )
            raise CaptureError(
                f"{path} is a {kind} tensor; only dense ones are laid out: pass or return {remedy}() of it"
            )
        if self.known is not None and id(v) in self.known:
            return self.known[id(v)]
        refuse_own_functions([(path, v)], libraries=False)
        self.tensors.append(v)
        leaf = Leaf(len(self.tensors) - 1)
        if self.known is not None:
            self.known[id(v)] = leaf
        return leaf

    def _constant(self, v: Any, path: str) -> Any:
        if isinstance(v, AbstractSet) and any(isinstance(x, torch.Tensor) for x in v):
            raise CaptureError(f"{path} is a {type(v).__name__} that holds tensors, in no order; take a list or a dict")
        if isinstance(v, AbstractSet) and not (type(v) in (set, frozenset) and all(_is_constant(x) for x in v)):
            raise self._unknown(v, path)
        return _Constant(frozenset(v) if type(v) is frozenset else set(v) if type(v) is set else v)

    def _container(self, v: Any, path: str) -> Any:
        if isinstance(v, tuple) and hasattr(v, "_fields"):
            return _Sequence(type(v), [self.visit(x, f"{path}.{n}") for n, x in zip(v._fields, v, strict=True)])
        # Plain ones stay plain in the skeleton, which is then readable as text.
        if type(v) in (list, tuple):
            return type(v)([self.visit(x, f"{path}[{i}]") for i, x in enumerate(v)])
        if isinstance(v, list | tuple):
            return _Sequence(type(v), [self.visit(x, f"{path}[{i}]") for i, x in enumerate(v)], self._others(v, path))
        if isinstance(v, Mapping) and not isinstance(v, UserDict):
            return self._mapping(v, path)
        if isinstance(v, UserDict | SimpleNamespace) or (dataclasses.is_dataclass(v) and not isinstance(v, type)):
            return _Record(type(v), {}, self._attributes(v, path))
        # Last: classes that torch knows, among them containers that are handled above in a more readable way.
        node = pytree_node(type(v))
        if node is not None:
            children, context = node.flatten_fn(v)
            items = [self.visit(x, f"{path}[{i}]") for i, x in enumerate(children)]
            return _Sequence(type(v), items, make=lambda values: node.unflatten_fn(values, context), context=context)
        raise self._unknown(v, path)

    def _mapping(self, v: Mapping[Any, Any], path: str) -> Any:
        # Of transformers' ModelOutput the items are those fields that are not None.
        kind: Any = type(v)
        fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        items = {name: getattr(v, name) for name in fields} | dict(v)
        if any(isinstance(k, torch.Tensor) for k in items):
            raise CaptureError(f"{path} has a tensor as a key; take a list of pairs")
        found = {k: self.visit(x, f"{path}[{k!r}]") for k, x in items.items()}
        others = {} if fields else self._others(v, path)
        return _Record(type(v), found, others, getattr(v, "default_factory", None), getattr(v, "__dict__", None) is v)

    def _others(self, v: Any, path: str) -> dict[str, Any]:
        """Attributes of an instance of a subclass of a builtin container."""
        others = getattr(v, "__dict__", {})
        return {} if others is v else {k: self.visit(x, f"{path}.{k}") for k, x in others.items()}

    def _attributes(self, v: Any, path: str) -> dict[str, Any]:
        """Fields of a dataclass and whatever else was set; of a `UserDict` what can be carried, and its data."""
        names = [f.name for f in dataclasses.fields(v) if hasattr(v, f.name)] if dataclasses.is_dataclass(v) else []
        names += [n for n in getattr(v, "__dict__", {}) if n not in names]
        found = {}
        for name in names:
            try:
                found[name] = self.visit(getattr(v, name), path if name == "data" else f"{path}.{name}")
            except CaptureError:
                if name == "data" or not isinstance(v, UserDict):
                    raise  # a tokenizer's own objects in transformers' BatchEncoding are left out
        return found

    def _unknown(self, v: Any, path: str) -> CaptureError:
        remedy = "return or pass one of those, or register the class with torch.utils._pytree.register_pytree_node"
        if type(v).__module__ == "numpy":
            remedy = "take torch.from_numpy(...) of it, or its values would become constants of the graph"
        return CaptureError(
            f"{path} is a {type(v).__name__}, which is no tensor, constant, sequence, mapping or dataclass; {remedy}"
        )


def _is_constant(v: Any) -> bool:
    return isinstance(v, _PLAIN) or _is_numpy_scalar(v) or (type(v) is tuple and all(map(_is_constant, v)))


def _is_numpy_scalar(v: Any) -> bool:
    return any(f"{t.__module__}.{t.__qualname__}" == "numpy.generic" for t in type(v).__mro__)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class _Constant:
    """A set of constants, or a number of numpy's."""

    value: Any

    def __repr__(self) -> str:
        # The order of a set differs from process to process, and this text is a key.
        inner = sorted(map(repr, self.value)) if isinstance(self.value, AbstractSet) else repr(self.value)
        return f"{_name(type(self.value))}({inner})"


@dataclass(frozen=True)
class _Sequence:
    """An instance of a subclass of list or tuple, or of a class registered with torch's pytrees."""

    kind: type
    items: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    make: Callable[[list[Any]], Any] | None = None
    context: Any = None

    def rebuild(self, items: list[Any], attributes: Mapping[str, Any]) -> Any:
        if self.make is not None:
            return self.make(items)
        if hasattr(self.kind, "_make"):
            return self.kind._make(items)
        # Structure sequences of torch (``torch.return_types.max``) and sizes take one sequence.
        if hasattr(self.kind, "n_sequence_fields") or self.kind is torch.Size:
            return self.kind(items)
        if issubclass(self.kind, tuple):
            # Without __init__ and __new__ of the subclass, whose arguments are not known.
            made: Any = tuple.__new__(self.kind, items)
        else:
            made = self.kind.__new__(self.kind)
            list.extend(made, items)
        return _with_attributes(made, attributes)

    def __repr__(self) -> str:
        return f"{_name(self.kind)}({self.items!r}, {self.attributes!r}, {self.context!r})"


@dataclass(frozen=True)
class _Record:
    """A mapping, item by item, or an instance of a dataclass, attribute by attribute."""

    kind: type
    items: dict[Any, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    factory: Any = None
    own_dict: bool = False

    def rebuild(self, items: dict[Any, Any], attributes: Mapping[str, Any]) -> Any:
        if self.kind is dict:
            return items
        if dataclasses.is_dataclass(self.kind) and issubclass(self.kind, Mapping):
            return self._output(items)
        if issubclass(self.kind, dict):
            made: Any = self.kind.__new__(self.kind)
            if self.own_dict:  # the attributes are the items
                made.__dict__ = made
            if isinstance(made, defaultdict):
                made.default_factory = self.factory
            # Not the class's own, which may convert or refuse what it is given.
            put = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
            for key, value in items.items():
                put(made, key, value)
            return _with_attributes(made, attributes)
        if issubclass(self.kind, SimpleNamespace):
            return self.kind(**attributes)
        if issubclass(self.kind, Mapping) and not issubclass(self.kind, UserDict):
            return self.kind(items)  # type: ignore[call-arg]
        return _with_attributes(object.__new__(self.kind), attributes)

    def _output(self, items: dict[Any, Any]) -> Any:
        """A `ModelOutput`, whose constructor takes its fields."""
        fields = {f.name for f in dataclasses.fields(self.kind)}
        made = self.kind(**{k: v for k, v in items.items() if k in fields})
        for key, value in items.items():
            if key not in fields:
                made[key] = value
        return made

    def __repr__(self) -> str:
        inner = ", ".join(f"{k!r}={v!r}" for k, v in [*self.items.items(), *self.attributes.items()])
        factory = f", {getattr(self.factory, '__qualname__', self.factory)}" if self.factory is not None else ""
        return f"{_name(self.kind)}({inner}{factory})"


def _with_attributes(made: Any, attributes: Mapping[str, Any]) -> Any:
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # frozen dataclasses, too
    return made
