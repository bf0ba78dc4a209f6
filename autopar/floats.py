"""Floats of a batch as inputs of the graph: a temperature or a weight that changes every step needs no new graph.

While a model is traced, a `Float` stands for each float. It computes as Python does with other floats, and with tensors
as torch does with a Python float, whose dtype never counts (``bf16 * float`` stays bf16). Whatever else asks for its
value, such as ``if alpha > 0``, ``math.exp(alpha)`` or ``F.dropout(p=alpha)``, gets that of this call, and a `Guard` is
noted: the graph then serves the calls whose floats give the same answer, and others get a graph of their own.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.tree import Number, Traced

Compute = Callable[[Sequence[float]], Any]


@dataclass(frozen=True)
class Guard:
    """What a traced graph takes for granted of the floats of a call.

    Attributes:
        text: for people.
        compute: from the floats.
        value: what that gave.
    """

    text: str
    compute: Compute
    value: Any

    def holds(self, numbers: Sequence[float]) -> bool:
        """Whether other floats give the same."""
        try:
            return _same(self.compute(numbers), self.value)
        except (ArithmeticError, ValueError):
            return False


@dataclass(frozen=True)
class Formula(Number):
    """A float as a function of those of the batch."""

    text: str
    compute: Compute

    def value(self, numbers: Sequence[float]) -> float:
        """Its value."""
        found: float = self.compute(numbers)
        return found

    def __repr__(self) -> str:
        return self.text


class Watch:
    """The floats of a call that is traced, and what the model wants to know of them."""

    def __init__(self, numbers: Sequence[float], constant: bool = False) -> None:
        self.numbers = tuple(numbers)
        self.constant = constant
        self.found: dict[str, Guard] = {}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What the graph takes for granted."""
        return tuple(self.found.values())

    def ask(self, text: str, compute: Compute) -> Any:
        """The answer for this call."""
        if text not in self.found:
            self.found[text] = Guard(text, compute, compute(self.numbers))
        return self.found[text].value

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """What the model gets for floats, given the tensors that bring them into the graph."""
        made: list[Any] = []
        for i, tensor in enumerate(tensors):
            formula = Formula(f"float {i}", operator.itemgetter(i))
            float_ = Float(tensor, formula, self)
            made.append(float(float_) if self.constant else float_)
        return made


def watched(numbers: Sequence[float], make: Callable[[Watch], Any]) -> Any:
    """What is made of floats that are inputs; where that fails, of constants."""
    try:
        return make(Watch(numbers))
    except Exception:
        if not numbers:
            raise
    return make(Watch(numbers, constant=True))


def values_or_stand_ins(watch: Watch | None, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Floats for a model that is called with real tensors (no watch), or what stands for them while it is traced."""
    return [t.item() for t in tensors] if watch is None else watch.stand_ins(tensors)


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and bool(a == b)


class Float(Traced):
    """A float of a batch, or what a model computes from some, while it is traced.

    Where Python's result and that of a tensor could differ, as for powers, there is no tensor.
    """

    __slots__ = ("_formula", "_tensor", "_watch")
    __array_ufunc__ = None  # numpy's operators do not take it for an object

    def __init__(self, tensor: torch.Tensor | None, formula: Formula, watch: Watch) -> None:
        self._tensor, self._formula, self._watch = tensor, formula, watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """To ``isinstance`` it is a float."""
        return float

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As with a Python float; what has no form with a tensor in its place gets the value."""
        args, kwargs = _exact(args, without_tensor=True), _exact(kwargs or {}, without_tensor=True)
        with_tensor = _FUNCTIONS.get(function.__name__)
        found = NotImplemented if with_tensor is None else with_tensor(function, *args, **kwargs)
        if found is NotImplemented:
            return function(*_exact(args), **_exact(kwargs))
        return found

    def leaf(self) -> Formula:
        """What computes it."""
        return self._formula

    def _ask(self, what: str, function: Callable[[float], Any]) -> Any:
        compute = self._formula.compute
        return self._watch.ask(f"{what} of {self._formula}", lambda numbers: function(compute(numbers)))

    def __float__(self) -> float:
        found: float = self._ask("value", lambda v: v)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(float, name):
            raise AttributeError(name)
        return getattr(float(self), name)

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __deepcopy__(self, memo: Any) -> float:
        return float(self)

    def __hash__(self) -> int:
        return hash(float(self))

    def __bool__(self) -> bool:
        return bool(self._ask("truth", bool))

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __int__(self) -> int:
        return int(self._ask("int", int))

    __trunc__ = __int__

    def __floor__(self) -> int:
        return int(self._ask("floor", math.floor))

    def __ceil__(self) -> int:
        return int(self._ask("ceil", math.ceil))

    def __round__(self, digits: int | None = None) -> Any:
        return self._ask(f"round to {digits}", lambda v: round(v, digits))

    def __neg__(self) -> Float:
        formula, tensor = self._formula, self._tensor
        negative = None if tensor is None else -tensor
        return Float(negative, Formula(f"-({formula})", lambda n: -formula.compute(n)), self._watch)

    def __pos__(self) -> Float:
        return self

    def __abs__(self) -> Float:
        formula, tensor = self._formula, self._tensor
        positive = None if tensor is None else tensor.abs()
        return Float(positive, Formula(f"abs({formula})", lambda n: abs(formula.compute(n))), self._watch)


def _exact(value: Any, *, without_tensor: bool = False) -> Any:
    """Arguments with the values of floats, or of those that have no tensor."""
    if type(value) is Float:
        return value if without_tensor and value._tensor is not None else float(value)
    if type(value) in (list, tuple):
        return type(value)(_exact(v, without_tensor=without_tensor) for v in value)
    return {k: _exact(v, without_tensor=without_tensor) for k, v in value.items()} if type(value) is dict else value


_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul),
    "truediv": ("/", operator.truediv), "pow": ("**", operator.pow), "mod": ("%", operator.mod),
    "floordiv": ("//", operator.floordiv),
}  # fmt: skip
_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "lt": ("<", operator.lt), "le": ("<=", operator.le), "gt": (">", operator.gt), "ge": (">=", operator.ge),
    "eq": ("==", operator.eq), "ne": ("!=", operator.ne),
}  # fmt: skip
_EXACT_OPERATORS = ("add", "sub", "mul", "truediv")
"""Of a 0-dim float64 tensor the very result that Python gives, as IEEE 754 defines it."""
_DIVISIONS = ("truediv", "mod", "floordiv")


def _formula(value: Any) -> Formula:
    if type(value) is Float:
        return value._formula
    return Formula(repr(value), lambda numbers: value)


def _binary(name: str, first: Any, second: Any) -> Any:
    """Of a float and another number or a tensor."""
    sign, function = {**_OPERATORS, **_COMPARISONS}[name]
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return _beside_tensor(name, first, second)
    if not all(type(v) in (Float, float, int, bool) for v in (first, second)):
        return NotImplemented
    a, b = _formula(first), _formula(second)
    watch: Watch = (first if type(first) is Float else second)._watch
    text = f"({a} {sign} {b})"

    def compute(numbers: Sequence[float]) -> Any:
        return function(a.compute(numbers), b.compute(numbers))

    if name in _COMPARISONS:
        return watch.ask(text, compute)
    if name in _DIVISIONS and watch.ask(f"{b} is zero", lambda numbers: b.compute(numbers) == 0):
        raise ZeroDivisionError("float division by zero")
    left, right = (v._tensor if type(v) is Float else float(v) for v in (first, second))
    tensor = None
    if name in _EXACT_OPERATORS and left is not None and right is not None:
        tensor = function(left, right)
    elif name == "pow" and left is not None and type(second) in (int, float) and second == 2:
        tensor = left * left
    elif type(function(_known(first), _known(second))) is not float:  # a complex power
        return NotImplemented
    return Float(tensor, Formula(text, compute), watch)


def _known(value: Any) -> Any:
    """The value of this call, which is not taken for granted."""
    return value._formula.compute(value._watch.numbers) if type(value) is Float else value


def _beside_tensor(name: str, first: Any, second: Any) -> Any:
    if name == "truediv" and isinstance(second, torch.Tensor):
        return second.reciprocal() * first  # as torch does
    named = {"truediv": "div", "mod": "remainder", "floordiv": "floor_divide"}
    return Float.__torch_function__(getattr(torch, named.get(name, name)), (), (first, second))


def _define(name: str) -> None:
    def forward(self: Float, other: Any) -> Any:
        return _binary(name, self, other)

    def backward(self: Float, other: Any) -> Any:
        return _binary(name, other, self)

    setattr(Float, f"__{name}__", forward)
    if name in _OPERATORS:
        setattr(Float, f"__r{name}__", backward)


for _name in (*_OPERATORS, *_COMPARISONS):
    _define(_name)


# Operators of torch. Each takes what the user gave, of which some is a `Float`, and says NotImplemented to what cannot
# be shown to be the same with a tensor in its place.

_LOW = (torch.bfloat16, torch.float16)
_SUMS = ("add", "__add__", "__radd__", "sub", "__sub__", "subtract")


def _dtype(*values: Any) -> torch.dtype | None:
    """What torch promotes tensors to beside a Python float; None: not a floating dtype of the usual ones."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    found = (
        torch.result_type(tensors[0], 1.0) if len(tensors) == 1 else torch.get_default_dtype() if not tensors else None
    )
    return found if found in (torch.float32, torch.float64, *_LOW) else None


def _as(value: Any, dtype: torch.dtype) -> Any:
    """A float as a tensor of a dtype; other arguments as they are."""
    return value._tensor.to(dtype) if type(value) is Float else value


def _arithmetic(function: Any, a: Any, b: Any, **options: Any) -> Any:
    """``add``, ``sub``, ``mul``, ``div``.

    In 16 bits torch computes with the whole float in 32 bits and rounds the result, but sums on a CPU round it before.
    """
    dtype = _dtype(a, b)
    if options or dtype is None or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)):
        return NotImplemented
    if dtype not in _LOW:
        return function(_as(a, dtype), _as(b, dtype))
    tensor = a if isinstance(a, torch.Tensor) else b
    if tensor.device.type == "cpu" and function.__name__ in _SUMS:
        return function(_as(a, dtype), _as(b, dtype))
    wide = [v.float() if isinstance(v, torch.Tensor) else _as(v, torch.float32) for v in (a, b)]
    return function(*wide).to(dtype)


def _reversed(function: Any, a: Any, b: Any, **options: Any) -> Any:
    return _arithmetic(torch.sub, b, a, **options)


def _in_place(function: Any, a: Any, b: Any, **options: Any) -> Any:
    plain = isinstance(a, torch.Tensor) and a.dtype in (torch.float32, torch.float64) and type(b) is Float
    return function(a, _as(b, a.dtype)) if plain and not options else NotImplemented


def _of_tensors(function: Any, a: Any, b: Any, **options: Any) -> Any:
    """Powers and comparisons."""
    dtype = _dtype(a, b)
    if options or dtype in (None, *_LOW) or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)):
        return NotImplemented
    assert dtype is not None
    if function.__name__ == "pow" and not all(v.is_floating_point() for v in (a, b) if isinstance(v, torch.Tensor)):
        return NotImplemented
    return function(_as(a, dtype), _as(b, dtype))


def _where(function: Any, condition: Any, a: Any = None, b: Any = None, **options: Any) -> Any:
    dtype = _dtype(a, b)
    if options or dtype is None or a is None or b is None or function is torch.Tensor.where:
        return NotImplemented
    return function(condition, _as(a, dtype), _as(b, dtype))


def _masked_fill(function: Any, x: Any, mask: Any, value: Any) -> Any:
    return function(x, mask, _as(value, x.dtype)) if x.is_floating_point() else NotImplemented


def _clamp(function: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    if type(x) is Float or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    bounds = [
        torch.full((), v, dtype=x.dtype, device=x.device) if isinstance(v, int | float) and type(v) is not Float else v
        for v in (min, max)
    ]
    if any(type(v) is not Float and v is not None and v.dtype != x.dtype for v in bounds):
        return NotImplemented
    low, high = (_as(v, x.dtype) for v in bounds)
    return torch.clamp(x, low, high)


def _clamp_min(function: Any, x: Any, min: Any) -> Any:
    return _clamp(function, x, min=min)


def _clamp_max(function: Any, x: Any, max: Any) -> Any:
    return _clamp(function, x, max=max)


def _lerp(function: Any, start: Any, end: Any, weight: Any) -> Any:
    same = isinstance(end, torch.Tensor) and start.dtype == end.dtype in (torch.float32, torch.float64)
    return function(start, end, _as(weight, start.dtype)) if same else NotImplemented


def _full_like(function: Any, x: Any, value: Any, **options: Any) -> Any:
    if options or not x.is_floating_point():
        return NotImplemented
    return torch.ones_like(x) * _as(value, x.dtype)


def _full(function: Any, size: Any, value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if options or not dtype.is_floating_point or type(value) is not Float or any(type(n) is Float for n in size):
        return NotImplemented
    return torch.ones(size, dtype=dtype, device=device) * value._tensor.to(dtype)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"), _arithmetic),
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__div__"), _arithmetic),
    **dict.fromkeys(("rsub", "__rsub__"), _reversed),
    **dict.fromkeys(("add_", "sub_", "mul_", "div_", "multiply_", "divide_", "subtract_"), _in_place),
    **dict.fromkeys(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "fill_"), _in_place),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "pow", "__pow__"), _of_tensors),
    **dict.fromkeys(("where",), _where),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": _clamp_min, "clamp_max": _clamp_max, "lerp": _lerp, "lerp_": _lerp, "full_like": _full_like,
    "full": _full,
}  # fmt: skip
"""By the names of torch's functions and methods."""
