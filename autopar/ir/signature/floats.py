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
from typing import Any, TypeVar

import torch

from autopar.ir.signature.float_operators import FUNCTIONS
from autopar.ir.signature.pytree import FloatProxy, RuntimeFloat

Compute = Callable[[Sequence[float]], Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Guard:
    """What must hold of a call's floats for a traced graph to serve it.

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
            # A float that makes the computation fail, such as a division by zero, is another case.
            return _same(self.compute(numbers), self.value)
        except (ArithmeticError, ValueError):
            return False


class FloatRecorder:
    """The floats of a call that is traced, and what the model wants to know of them."""

    def __init__(self, numbers: Sequence[float], constant: bool = False) -> None:
        self.numbers = tuple(numbers)
        self.constant = constant
        self.found: dict[str, Guard] = {}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What must hold of a call's floats."""
        return tuple(self.found.values())

    def ask(self, text: str, compute: Compute) -> Any:
        """The answer for this call."""
        # The same question twice is one guard.
        if text not in self.found:
            self.found[text] = Guard(text, compute, compute(self.numbers))
        return self.found[text].value

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """What the model gets for floats, given the tensors that bring them into the graph."""
        made: list[Any] = []
        for i, tensor in enumerate(tensors):
            float_ = Float(tensor, RuntimeFloat.of_batch(i), self)
            # Asked for its value, a float becomes a constant with a guard.
            made.append(float(float_) if self.constant else float_)
        return made


def watched(numbers: Sequence[float], make: Callable[[FloatRecorder], Result]) -> Result:
    """What is made of floats that are inputs; where that fails, of constants."""
    try:
        return make(FloatRecorder(numbers))
    except Exception:
        # Without floats there was nothing to make constant: the second attempt would fail in the same way.
        if not numbers:
            raise
    return make(FloatRecorder(numbers, constant=True))


def values_or_stand_ins(recorder: FloatRecorder | None, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Floats for a model that is called with real tensors (no recorder), or what stands for them while it is traced."""
    return [t.item() for t in tensors] if recorder is None else recorder.stand_ins(tensors)


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        # By bits: NaN equals itself, and 0.0 differs from -0.0, which a division tells apart.
        return struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and bool(a == b)


class Float(FloatProxy):
    """A float of a batch, or what a model computes from some, while it is traced.

    Where Python's result and that of a tensor could differ, as for powers, there is no tensor.
    """

    __slots__ = ("_formula", "_recorder", "tensor")
    __array_ufunc__ = None  # numpy's operators do not take it for an object

    def __init__(self, tensor: torch.Tensor | None, formula: RuntimeFloat, recorder: FloatRecorder) -> None:
        self.tensor, self._formula, self._recorder = tensor, formula, recorder

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """To ``isinstance`` it is a float."""
        return float

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As with a Python float; what has no form with a tensor in its place gets the value."""
        args, kwargs = _exact(args, without_tensor=True), _exact(kwargs or {}, without_tensor=True)
        # By name: a method and a function of torch are different objects, and compute the same.
        with_tensor = FUNCTIONS.get(function.__name__)
        found = NotImplemented if with_tensor is None else with_tensor(function, *args, **kwargs)
        if found is NotImplemented:
            return function(*_exact(args), **_exact(kwargs))
        return found

    def leaf(self) -> RuntimeFloat:
        """What computes it."""
        return self._formula

    def _ask(self, what: str, function: Callable[[float], Any]) -> Any:
        compute = self._formula.compute
        return self._recorder.ask(f"{what} of {self._formula}", lambda numbers: function(compute(numbers)))

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
        formula, tensor = self._formula, self.tensor
        negative = None if tensor is None else -tensor
        return Float(negative, RuntimeFloat(f"-({formula})", lambda n: -formula.compute(n)), self._recorder)

    def __pos__(self) -> Float:
        return self

    def __abs__(self) -> Float:
        formula, tensor = self._formula, self.tensor
        positive = None if tensor is None else tensor.abs()
        return Float(positive, RuntimeFloat(f"abs({formula})", lambda n: abs(formula.compute(n))), self._recorder)


def _exact(value: Any, *, without_tensor: bool = False) -> Any:
    """Arguments with the values of floats, or of those that have no tensor."""
    if type(value) is Float:
        # Those with a tensor stay as they are for `FUNCTIONS`, which puts the tensor in.
        return value if without_tensor and value.tensor is not None else float(value)
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


def _formula(value: Any) -> RuntimeFloat:
    if type(value) is Float:
        return value._formula
    return RuntimeFloat(repr(value), lambda numbers: value)


def _binary(name: str, first: Any, second: Any) -> Any:
    """Of a float and another number or a tensor."""
    sign, function = {**_OPERATORS, **_COMPARISONS}[name]
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return _beside_tensor(name, first, second)
    if not all(type(v) in (Float, float, int, bool) for v in (first, second)):
        return NotImplemented
    a, b = _formula(first), _formula(second)
    recorder: FloatRecorder = (first if type(first) is Float else second)._recorder
    text = f"({a} {sign} {b})"

    def compute(numbers: Sequence[float]) -> Any:
        return function(a.compute(numbers), b.compute(numbers))

    if name in _COMPARISONS:
        return recorder.ask(text, compute)
    # A tensor would give infinity where Python raises.
    if name in _DIVISIONS and recorder.ask(f"{b} is zero", lambda numbers: b.compute(numbers) == 0):
        raise ZeroDivisionError("float division by zero")
    left, right = (v.tensor if type(v) is Float else float(v) for v in (first, second))
    tensor = None
    if name in _EXACT_OPERATORS and left is not None and right is not None:
        tensor = function(left, right)
    # torch computes a square as a product, too; other powers differ in the last bit.
    elif name == "pow" and left is not None and type(second) in (int, float) and second == 2:
        tensor = left * left
    # A negative number to a fractional power is complex in Python.
    elif type(function(_known(first), _known(second))) is not float:  # a complex power
        return NotImplemented
    return Float(tensor, RuntimeFloat(text, compute), recorder)


def _known(value: Any) -> Any:
    """The value in this call, without a guard."""
    return value._formula.compute(value._recorder.numbers) if type(value) is Float else value


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
