"""Arguments of a call, bound to the parameters of a model's ``forward`` as Python binds them.

A call is known by what each parameter gets: ``model(x, y)`` and ``model(y=y, x=x)`` are one, and share graph and plan.
Tensors are numbered in the order of the parameters, and floats come after them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.signature import pytree

_ANY = Signature([Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)])


@dataclass(frozen=True)
class Passed:
    """Arguments in the form in which they are passed.

    Attributes:
        args: positional ones.
        kwargs: named ones.
        bound: by the name of the parameter that each went to, what ``**kwargs`` took under its own names.
        kind: class of a batch that holds one of these alone.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: Mapping[str, Any] = field(default_factory=dict)
    kind: type = tuple

    @property
    def batch(self) -> Any:
        """As ``loss_fn`` gets it: a tuple or a dict, and a dict of all names if there are both."""
        if self.args and self.kwargs:
            # A loss function takes one batch: names are all that positional and named arguments have in common.
            return dict(self.bound)
        if not self.kwargs:
            return self.kind(self.args) if self.kind in (tuple, list) else self.args
        return self.kwargs


@dataclass(frozen=True)
class Arguments:
    """Skeleton of the arguments of a call; its text is the same for calls that mean the same.

    Attributes:
        values: skeletons by the name of the parameter that has them, in order, see `autopar.ir.signature.pytree`.
        positional: for each positional argument its parameter, and its index in ``*args`` if it went there.
        named: for each named one its parameter, and its key in ``**kwargs`` if it went there.
        kind: class of a batch that held only positional or only named ones.
        tensors: how many there are; after them a graph takes the floats.
        numbers: the floats of this call.
        hooked: the form in which arguments are passed matters, as hooks see it.
        attributes: what a script has set on tensors: the tensor's number, the name, the value.
    """

    values: dict[str, Any]
    positional: tuple[tuple[str, int | None], ...]
    named: dict[str, tuple[str, str | None]]
    kind: type
    tensors: int
    numbers: tuple[float, ...] = ()
    hooked: bool = False
    attributes: tuple[tuple[int, str, Any], ...] = ()

    def fill(self, tensors: Sequence[Any], numbers: Sequence[float] | None = None) -> Passed:
        """The arguments, given the tensors, after which there may be others; by default with this call's floats."""
        numbers = self.numbers if numbers is None else numbers
        for i, name, value in self.attributes:
            vars(tensors[i]).setdefault(name, value)
        values = {name: pytree.unflatten(v, tensors, numbers) for name, v in self.values.items()}
        args = [values[name] if i is None else values[name][i] for name, i in self.positional]
        kwargs = {k: values[name] if key is None else values[name][key] for k, (name, key) in self.named.items()}
        # What ``**kwargs`` took is named by its own keys, not by the parameter's.
        extra = next((name for name, key in self.named.values() if key is not None), None)
        bound = {k: v for k, v in values.items() if k != extra} | ({} if extra is None else values[extra])
        return Passed(tuple(args), kwargs, bound, self.kind)

    def __repr__(self) -> str:
        # The text is the key of the graph: only hooks tell positional from named arguments.
        form = f" in {len(self.positional)} positional arguments and {list(self.named)} for hooks of the model"
        form = form if self.hooked else ""
        marked = f", {self.attributes!r}" if self.attributes else ""
        return f"{self.values!r}{form}{marked}"


def passed(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments that a batch stands for.

    Raises:
        ValueError: it is neither a tuple, a list nor a mapping.
    """
    if isinstance(batch, Passed):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise ValueError(
        f"the batch is a {type(batch).__name__}; pass a tuple of positional arguments, such as (x,), or a dict of "
        "named ones"
    )


def bind(model: nn.Module, batch: Any) -> tuple[list[torch.Tensor], Arguments]:
    """Tensors of a batch in order, and the skeleton of the arguments, with the floats.

    Raises:
        TypeError: the arguments are not those of ``model.forward``; it is Python's own.
        ValueError: the batch is no batch.
        CaptureError: an argument cannot be flattened; names its path.
    """
    args, kwargs = passed(batch)
    parameters, values = _bound(model, args, kwargs)
    order, own = parameters.order, parameters.named
    positional = tuple([
        (order[i], None) if i < len(order) else (parameters.rest, i - len(order)) for i in range(len(args))
    ])  # fmt: skip
    named: dict[str, tuple[str, str | None]] = {k: (k, None) if k in own else (parameters.more, k) for k in kwargs}
    numbers: list[float] = []
    # Bound values in the order of the parameters: how the call passed them makes no difference.
    tensors, skeleton = pytree.flatten(values, "batch", numbers=numbers, shared=True)
    hooked = bool(model._forward_hooks or model._forward_pre_hooks)
    kind = type(batch) if isinstance(batch, tuple | list) else tuple
    attributes = tuple([(i, *own) for i, t in enumerate(tensors) if vars(t) for own in _set_by_scripts(t)])
    return tensors, Arguments(skeleton.items, positional, named, kind, len(tensors), tuple(numbers), hooked, attributes)


_TORCHS = frozenset("fake_mode fake_device constant real_tensor elem pytype dispatch_keys plain owner_stage".split())
"""Attributes that torch and autopar set on tensors; so are names with an underscore in front."""


def _set_by_scripts(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    found = [(n, v) for n, v in vars(tensor).items() if n not in _TORCHS and not n.startswith(("_", "autopar_"))]
    return [
        (n, v if isinstance(v, (*_SIMPLE, _AttributeOfABatchTensor)) else _AttributeOfABatchTensor(n, type(v).__name__))
        for n, v in found
        if not n.endswith("_memo")
    ]


_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _AttributeOfABatchTensor:
    """In the place of an attribute of a tensor of the batch that a graph cannot have: whoever uses it gets an error."""

    def __init__(self, name: str, kind: str) -> None:
        self._said = name, kind

    def _refuse(self, *_: Any, **__: Any) -> Any:
        name, kind = self._said
        raise CaptureError(
            f"the model reads the attribute {name!r} that is set on a tensor of its batch, a {kind}: what is set on "
            "tensors are numbers, texts and flags, or a graph would lose it; pass it as an argument"
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse

    def __getattr__(self, name: str) -> Any:
        """What torch asks an argument for, too, before it takes it for none of its own."""
        if name.startswith("__") and name != "__torch_function__":
            raise AttributeError(name)
        return self._refuse()

    def __repr__(self) -> str:
        """As part of what a graph is for."""
        return f"a {self._said[1]}"


def flatten(model: nn.Module, batch: Any) -> tuple[list[torch.Tensor], Arguments]:
    """Everything of a batch that a graph takes: its tensors, then its floats as tensors; and the skeleton."""
    tensors, arguments = bind(model, batch)
    return [_as_in_memory(t) for t in tensors] + [as_tensor(n) for n in arguments.numbers], arguments


def _as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Values as they are: memory of a lazy conjugate or negative, which graphs and messages read, has others."""
    if tensor.is_complex():
        return tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def as_tensor(number: float) -> torch.Tensor:
    """A float as a tensor of the same precision."""
    return torch.tensor(number, dtype=torch.float64)


class _Parameters:
    """A signature, and what binding asks of it.

    Attributes:
        signature: it.
        order: parameters that positional arguments fill, in order; the rest goes to ``rest``.
        rest: the name of ``*args``, if there is one.
        named: parameters that may be passed by name; others go to ``more``.
        more: the name of ``**kwargs``, if there is one.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        every = signature.parameters
        kinds = {p.kind: name for name, p in every.items()}
        self.order = [n for n, p in every.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.rest, self.more = kinds.get(Parameter.VAR_POSITIONAL, ""), kinds.get(Parameter.VAR_KEYWORD, "")
        self.named = {n for n, p in every.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._names = list(every)
        self._required = {n for n in (*self.order, *self.named) if every[n].default is Parameter.empty}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, in the order of the parameters.

        Raises:
            TypeError: they do not fit.
        """
        given = {**dict(zip(self.order, args, strict=False)), **kwargs}
        plain = len(args) <= len(self.order) and self.named.issuperset(kwargs) and self._required <= given.keys()
        if plain and len(given) == len(args) + len(kwargs):  # what most calls are, in a tenth of the time
            return {n: given[n] for n in self._names if n in given}
        return self.signature.bind(*args, **kwargs).arguments


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Parameters, dict[str, Any]]:
    parameters = _signature(model, True)
    try:
        return parameters, parameters.bind(args, kwargs)
    except TypeError as error:
        # A decorator may take arguments of its own.
        outer = _signature(model, False)
        try:
            return outer, outer.bind(args, kwargs)
        except TypeError:
            _raise_as_python(model, parameters.signature, args, kwargs)
            raise error from None


def _signature(model: nn.Module, follow_wrapped: bool) -> _Parameters:
    # Remembered with what it was made from: to ask for it anew takes longer than the rest of binding a call.
    made_from, known = _made_from(model), _signatures.get((type(model), follow_wrapped))
    if (
        made_from
        and known is not None
        and len(made_from) == len(known[0])
        and all(map(operator.is_, made_from, known[0]))
    ):
        return known[1]
    try:
        found = _Parameters(inspect.signature(model.forward, follow_wrapped=follow_wrapped))
    except (TypeError, ValueError):  # a scripted module's
        return _Parameters(_ANY)
    if made_from:
        _signatures[type(model), follow_wrapped] = made_from, found
    return found


_signatures: dict[tuple[type, bool], tuple[list[Any], _Parameters]] = {}
"""Of a class of models: what its forward's signature was made from, and the signature."""


def _made_from(model: nn.Module) -> list[Any]:
    """The objects that decide the signature of a model's ``forward``; none, where others may decide, too."""
    found: list[Any] = []
    function: Any = getattr(model.forward, "__func__", None)
    while isinstance(function, FunctionType) and "__signature__" not in vars(function):
        found += [function, function.__code__, function.__defaults__, function.__kwdefaults__]
        if "__wrapped__" not in vars(function):
            return found
        function = vars(function)["__wrapped__"]
    return []


def _raise_as_python(model: nn.Module, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call an empty function with this signature: `inspect` words its errors otherwise than Python."""
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    while own.name in signature.parameters:
        own = own.replace(name=f"{own.name}_")
    parameters = [own, *signature.parameters.values()]
    if not any(p.kind is p.POSITIONAL_ONLY for p in parameters[1:]):
        parameters[0] = own.replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
    # Without annotations and defaults, whose text might not be code.
    bare = [
        p.replace(annotation=Parameter.empty, default=p.default if p.default is p.empty else None) for p in parameters
    ]
    scope: dict[str, Any] = {}
    # So that the user reads the very message of a wrong call in eager mode.
    exec(f"def forward{Signature(bare)}: pass", scope)
    function = inspect.unwrap(getattr(model.forward, "__func__", model.forward))
    scope["forward"].__qualname__ = getattr(function, "__qualname__", "forward")
    scope["forward"](model, *args, **kwargs)
