"""The rule language: one equation an operator, from which every way to split it follows.

A rule names each dim of the operator's tensors by *letters*. ``"mk,kn->mn"`` is a matrix product; ``"(ab)c->abc"`` is a
view that splits the first dim; ``1`` is a dim of size one or one that is broadcast. On one mesh axis every letter
offers a strategy: split it wherever it occurs; an output without it is ``Partial`` if the rule *reduces* the letter.
Rules are pure: they see the call's arguments (tensors as `Spec`) and nothing of meshes, costs or graphs.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from autopar.costs.arguments import FLAG, FUNCTION, a, number, optional, require, whole
from autopar.errors import InvalidRuleError

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Dims = tuple[tuple[str, ...], ...]
"""The letters of one tensor, dim by dim."""

ANY = ""
ROW_MAJOR = "row-major"
LAST = "last"
PAIRS = "pairs"
MATRIX = "matrix"
"""What a kernel may ask of an argument's strides, see `Rule.strides` and `autopar.rules.strides`."""

ALIGNED = 16
"""Bytes that the start and the longer stride of a `MATRIX` are multiples of."""


@dataclass(frozen=True)
class Spec:
    """What a rule sees of a tensor argument: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: Any = None

    def __post_init__(self) -> None:
        """Refuse what is no shape."""
        require(shape=(self.shape, a(tuple, "the sizes of all dims, as a tuple")))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Lowering:
    """Other code than the operator's own, for one letter split over some axes, or for several that share the object.

    A key of several letters in `Rule.lower`, such as ``"qk"``, is a strategy of its own: all of them are split together
    by one axis. Single letters may then be blocked.

    Attributes:
        build: ``build(context, *args, **kwargs)`` emits the local code with `torch.ops.aten` calls on graph proxies.
            ``args`` are the operator's own arguments, tensors replaced by local proxies, sizes already local.
            ``context.axis_index()`` is this device's number along the split, ``context.parts`` how many there are,
            ``context.steps`` how many steps a ring has (as many, but where its price is computed from a shorter one),
            ``context.each_step()`` their numbers, one after the other,
            ``context.all_reduce(x, op)`` sums (or takes the maximum) over the devices of the split; with
            ``joined=True`` it is of a number that only the end of the step needs, and costs nothing. Over one axis
            (``context.axis_count``) there is ``context.swap_blocks(x, back)``, see
            `autopar.ir.ops.balanced_attention.swap_blocks`. ``context.shift(x)`` is the ``x`` of the device before
            this one (``back=True``: of the one after it), of the first device that of the last one;
            ``context.mirror(x)`` that of the device opposite; ``context.all_gather(x)`` is all of them, in a new
            first dim. ``context.start_shift(x)`` begins a shift over one axis, and gives a function that waits for it
            and returns what came: what is emitted between overlaps with it.
            It returns the output, or a tuple of all outputs with None for one that does not exist, or the result of
            an operator that has the same outputs. What it emits is what the strategy costs.
        together: at some point all arguments are live, and at least as many bytes besides as the outputs have.
        least: how many elements of the letter a device must have, such as what its neighbors need of them.
        multiple: of what number they must be a multiple.
        axes: over how many axes they may be split so at most; 0: any number.
        first: of several letters a tensor that has more than one is split along the first of them, and has all of the
            others; else there is no such strategy.
        places: arguments are places along the whole letter, which the operator itself would not find on one device.
        anywhere: it does not matter which elements of the letter a device has, such as for a maximum over all of them:
            any factor of the letter may be split, and not its first alone.
    """

    build: Callable[..., Any]
    together: bool = False
    least: int = 1
    multiple: int = 1
    axes: int = 0
    first: bool = False
    places: bool = False
    anywhere: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no function."""
        require(
            build=(self.build, FUNCTION), together=(self.together, FLAG), least=(self.least, whole(1)),
            multiple=(self.multiple, whole(1)), axes=(self.axes, whole(0)), first=(self.first, FLAG),
            places=(self.places, FLAG), anywhere=(self.anywhere, FLAG),
        )  # fmt: skip

    def takes(self, size: int, axes: int) -> bool:
        """Whether a device may have so many elements of a letter that so many axes split."""
        return size >= self.least and size % self.multiple == 0 and (not self.axes or axes <= self.axes)


@dataclass(frozen=True)
class Padding:
    """What the padding of a letter must hold, so that the result is right.

    Attributes:
        inputs: what each tensor argument that has the letter must hold there; None, or left out: anything.
        output: what the outputs that have the letter hold there then; None: anything.
    """

    inputs: tuple[float | None, ...] = ()
    output: float | None = None


def _equation(value: Any) -> str | None:
    fine = isinstance(value, str) and value.count("->") == 1
    return None if fine else "an equation such as 'mk,kn->mn'"


_LETTERS, _TABLE = a(str, "letters of the equation, such as 'k'"), a(Mapping, "a dict")
_SETS = a((tuple, list), "a tuple of positions of arguments")


@dataclass(frozen=True)
class Rule:
    """How an operator's tensors share dims, and what may be split.

    Attributes:
        equation: tensor arguments (in the order in which they appear among args and kwargs, lists flattened, absent
            ones left out) and outputs, comma separated: ``"mk,kn->mn"``. ``_`` is an output that does not exist.
        reduce: letters summed over; an output without a split letter of these is ``Partial("sum")``.
        keep: letters whose split leaves the outputs without them replicated (complete on every device).
        blocked: letters along which the operator cannot be split.
        linear: sets of tensor arguments in which the operator is jointly linear, the others being held fixed:
            ``Partial`` in exactly these arguments passes through to every output.
        shapes: positions of arguments that are the shape of output 0; made local when the output is split.
        scaled: argument (position, or name) that is a number of elements along some letters: ``{1: "r"}``; of a list
            either every entry is along these, or each along its own: ``{1: ("x", "y")}``.
        lower: letters whose split needs other code; several in one key: they are split together, see `Lowering`.
        flops: floating point operations of the whole operator; None counts memory traffic only.
        rate: what they are of where no tensor's dtype says it: ``float8``, a product with two scales behind its
            operands. A device that states no such rate computes them in float32.
        between: bytes that the operator writes and reads between its arguments and results, where these are all in
            memory: not where its kernels draw an argument by themselves.
        view: the operator moves no data.
        random: the outputs are random; the operator takes numbers from a generator.
        sizes: sizes of letters that shapes alone do not give (two unknown letters in one group).
        padded: letters that may be padded although they are not free or summed over, and how; None: none may.
        zero: whether zero arguments give a zero result; None: where the operator is linear in some of them.
        strides: what the kernels ask of the strides of tensor arguments, in the order of the equation (those left
            out: nothing), or one for all of them: `ROW_MAJOR`, `LAST` (the last dim's stride is 1), `PAIRS` (so, and
            the rest is even: pairs of a complex number), `MATRIX` (rows or columns are whole) or `ANY`. An argument
            with other strides is copied first. None: nothing for the rules in ``strategies/``, which the oracle
            runs on every kind of strides; row-major for all others, discovered ones among them.
        routed: letters along which each device has an order of its own where they are split, see
            `autopar.ir.ops.routing`: local results are no blocks of the whole one, and serve all the same.
        counts: tensor arguments that count elements along a letter in such an order, by that letter: ``{"s": (2,)}``.
            Where it is split each device has its own counts. If the argument is no such, the letter cannot be split.
        positions: tensor arguments that say where along a routed letter elements are. Devices that all have the whole
            may each take some of the positions: of results along the letter they have terms.
        multiples: of what number a device's elements of a letter must be a multiple, where it is split: ``{"k": 8}``.
            Kernels that load rows from multiples of so many bytes take no others.
    """

    equation: str
    reduce: str = ""
    keep: str = ""
    blocked: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    shapes: tuple[int, ...] = ()
    scaled: Mapping[int | str, str | tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    lower: Mapping[str, Lowering] = field(default_factory=lambda: MappingProxyType({}))
    flops: float = 0.0
    rate: str = ""
    between: float = 0.0
    view: bool = False
    random: bool = False
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    padded: Mapping[str, Padding] | None = field(default_factory=lambda: MappingProxyType({}))
    zero: bool | None = None
    strides: str | tuple[str, ...] | None = None
    routed: str = ""
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    positions: tuple[int, ...] = ()
    multiples: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse other types: equations are read when they are needed."""
        require(
            equation=(self.equation, _equation), reduce=(self.reduce, _LETTERS), keep=(self.keep, _LETTERS),
            blocked=(self.blocked, _LETTERS), linear=(self.linear, _SETS), shapes=(self.shapes, _SETS),
            scaled=(self.scaled, _TABLE), lower=(self.lower, _TABLE), sizes=(self.sizes, _TABLE),
            flops=(self.flops, number(0)), rate=(self.rate, a(str, "the name of a dtype")),
            between=(self.between, number(0)), view=(self.view, FLAG),
            random=(self.random, FLAG), padded=(self.padded, optional(_TABLE)), zero=(self.zero, optional(FLAG)),
            routed=(self.routed, _LETTERS), counts=(self.counts, _TABLE), positions=(self.positions, _SETS),
            multiples=(self.multiples, _TABLE),
        )  # fmt: skip

    @cached_property
    def inputs(self) -> tuple[Dims, ...]:
        """Letters of every tensor argument."""
        return _parse_side(self.equation.partition("->")[0])

    @cached_property
    def outputs(self) -> tuple[Dims | None, ...]:
        """Letters of every output; None for one that does not exist."""
        right = self.equation.partition("->")[2]
        return tuple(None if part == "_" else _parse_tensor(part) for part in right.split(","))

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """Every letter, in order of first appearance."""
        seen = dict.fromkeys(c for c in self.equation if c.isalpha())
        return tuple(seen)

    @property
    def joint(self) -> tuple[str, ...]:
        """Letters that one axis may split together, by other code: keys of `lower` of several letters."""
        return tuple(c for c in self.lower if len(c) > 1)


def padding_of(rule: Rule, letter: str) -> Padding | None:
    """What a letter's padding must hold; None if the letter cannot be padded.

    A letter that every output has is free: its elements do not see each other. One that is summed over needs zeros in
    every argument that has it, if the operator is linear in some that all have it.
    """
    if rule.padded is None:
        return None
    if letter in rule.padded:
        return rule.padded[letter]
    # A draw of another shape would draw other numbers; blocked letters, and lowerings, see what is in the padding.
    if rule.random or any(letter in some for some in (rule.blocked, rule.lower, rule.routed, rule.counts)):
        return None
    # Free: padding of the arguments becomes padding of every output.
    if all(_has(letter, t) for t in rule.outputs if t is not None):
        return Padding()
    if letter in rule.keep:
        return None
    summed = letter in rule.reduce and vanishes(rule, letter)
    return Padding((0.0,) * len(rule.inputs)) if summed else None


def vanishes(rule: Rule, letter: str) -> bool:
    """Whether zeros in every argument that has the letter make the result zero."""
    if rule.zero is not None:
        return rule.zero and all(_has(letter, t) for t in rule.inputs)
    # Linear in some argument that is zero there: then so is the result.
    return any(s and all(_has(letter, rule.inputs[i]) for i in s) for s in rule.linear)


def lengthened(
    rule: Rule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    letters: Mapping[str, tuple[int, int]],
) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments with sizes made longer.

    Args:
        rule: of the call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        shape: new shape of output 0.
        letters: size and new size of each letter that gets longer.
    """
    found, named = list(args), dict(kwargs)
    for position in rule.shapes:
        # The size argument of output 0, such as that of ``reshape`` or ``full``.
        found[position] = list(shape)
    for key, counted in rule.scaled.items():

        def longer(value: Any, counted: str) -> Any:
            old, new = (math.prod(letters[c][k] for c in counted if c in letters) for k in (0, 1))
            return value // old * new

        if isinstance(key, int) and key < len(found):
            found[key] = entries(found[key], counted, longer)
        elif str(key) in named:
            named[str(key)] = entries(named[str(key)], counted, longer)
    return found, named


def entries(value: Any, letters: str | tuple[str, ...], change: Callable[[Any, str], Any]) -> Any:
    """A number of elements along letters, changed; or a list of such numbers, see `Rule.scaled`."""
    if not isinstance(value, list | tuple):
        return change(value, "".join(letters))
    own = (letters,) * len(value) if isinstance(letters, str) else letters
    return [entries(v, c, change) for v, c in zip(value, own, strict=True)]


def _has(letter: str, tensor: Dims) -> bool:
    return any(letter in dim for dim in tensor)


def _parse_side(text: str) -> tuple[Dims, ...]:
    return tuple(_parse_tensor(part) for part in text.split(",")) if text != "" else ()


def _parse_tensor(text: str) -> Dims:
    # ``.`` is a tensor without dims, which would otherwise be an empty text.
    text = text.replace(".", "")
    if not re.fullmatch(r"(?:\([A-Za-z]*\)|[A-Za-z1])*", text):
        raise InvalidRuleError(f"cannot read {text!r} in a rule's equation; write dims as letters, (groups) or 1")
    dims = re.findall(r"\([A-Za-z]*\)|[A-Za-z1]", text)
    return tuple(tuple(c for c in dim if c.isalpha()) for dim in dims)


RuleFunction = Callable[..., Rule]

_RULES: dict[Any, RuleFunction] = {}


def _register_own() -> None:
    """Rules of autopar come before all others, whichever module is imported first."""
    # By name: rules are below them, and the strategies import this module.
    if "autopar.strategies" not in sys.modules:
        importlib.import_module("autopar.strategies")


def _operator(value: Any) -> str | None:
    named = isinstance(value, str) and value.count(".") >= 1
    known = hasattr(value, "_schema") and hasattr(value, "overloadpacket")
    return None if named or known else "an operator's overload, such as torch.ops.aten.mm.default, or its name"


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of each operator overload in ``targets``.

    The function takes the operator's own arguments, tensors replaced by `Spec`, and returns a `Rule`. A target may be
    a name, ``"library.operator.overload"``, where the library need not be imported.

    Raises:
        InvalidRuleError: an operator already has a rule.
        ValueError: a target is no operator.
    """
    for target in targets or (None,):
        require(target=(target, _operator))
    _register_own()

    def register(function: RuleFunction) -> RuleFunction:
        require(function=(function, FUNCTION))
        for target in targets:
            # Two rules would depend on which module is imported first.
            if target in _RULES:
                raise InvalidRuleError(f"{target} already has a rule: {_RULES[target].__module__}")
            _RULES[target] = function
        return function

    return register


def find_rule(target: Any) -> RuleFunction | None:
    """The rule registered for an operator overload, or None."""
    _register_own()
    # By name for operators of a library that was not imported when the rule was registered.
    return _RULES.get(target) or _RULES.get(str(target))


def required_strides(target: Any, rule: Rule) -> tuple[str, ...]:
    """What a call's kernel asks of the strides of each tensor argument.

    Args:
        target: the operator overload.
        rule: of the call.
    """
    declared = rule.strides
    if declared is None:
        function = find_rule(target)
        # The oracle runs our own rules on every kind of strides; a user's kernel may read raw memory.
        proven = function is not None and function.__module__.startswith("autopar.strategies")
        declared = ANY if proven else ROW_MAJOR
    if isinstance(declared, str):
        return (declared,) * len(rule.inputs)
    return (*declared, *(ANY,) * len(rule.inputs))[: len(rule.inputs)]


def registered() -> dict[Any, RuleFunction]:
    """Every registered rule, by operator, in order of registration."""
    _register_own()
    return dict(_RULES)


def letters(count: int, start: int = 0) -> str:
    """``count`` letters from the ``start``-th on, for operators on any number of dims."""
    if start + count > len(LETTERS):
        raise InvalidRuleError(f"a rule needs {start + count} letters; at most {len(LETTERS)} exist")
    return LETTERS[start : start + count]


def dims(parts: list[str] | tuple[str, ...]) -> str:
    """One tensor of an equation from the letters of each dim: ``["ab", "c", ""]`` is ``"(ab)c1"``."""
    return "".join(p if len(p) == 1 else f"({p})" if p else "1" for p in parts)


Dim = int | Sequence[int] | None


def whole_dims(x: Spec, dim: Dim) -> tuple[int, ...]:
    """The dims that a reduction's ``dim`` names; None and ``[]`` name all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)) if x.ndim else ()


def whole_equation(x: Spec, dim: Dim, keepdim: bool, outputs: int = 1) -> tuple[str, str]:
    """The equation of a reduction over ``dim``, and the letters that it reduces."""
    # The letters of reduced dims are left out of the result, or are a dim of size 1.
    reduced = whole_dims(x, dim)
    names = letters(x.ndim)
    left = [c if d not in reduced else "" for d, c in enumerate(names) if keepdim or d not in reduced]
    right = ",".join([dims(left) or "."] * outputs)
    return f"{names or '.'}->{right}", "".join(names[d] for d in reduced)


def letter_sizes(
    rule: Rule, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...] | None]
) -> dict[str, int]:
    """The size of every letter, from the global shapes of tensor arguments and outputs.

    Raises:
        InvalidRuleError: the equation does not fit the shapes, or leaves a letter without a size.
    """
    sizes = dict(rule.sizes)
    pairs = [
        (dim, size)
        for sides, shapes in ((rule.inputs, inputs), (rule.outputs, outputs))
        for dims_, shape in _zip(rule, sides, shapes)
        for dim, size in _zip(rule, dims_, shape)
    ]
    pending = pairs
    while pending:
        # In rounds: a letter that one dim determines may leave a single unknown in another.
        unknown = [(dim, size) for dim, size in pending if sum(c not in sizes for c in dim) > 1]
        for dim, size in pending:
            missing = [c for c in dim if c not in sizes]
            known = math.prod(sizes[c] for c in dim if c in sizes)
            # A dim that does not divide is left for the check below, which names both shapes.
            if len(missing) == 1 and known and size % known == 0:
                sizes[missing[0]] = size // known
        # A round that found nothing.
        if len(unknown) == len(pending):
            raise InvalidRuleError(f"{rule.equation}: letters {unknown[0][0]} have no size; give Rule(sizes=...)")
        pending = unknown
    for dim, size in pairs:
        if dim and math.prod(sizes.get(c, -1) for c in dim) != size:
            raise InvalidRuleError(f"{rule.equation} does not fit shapes {list(inputs)} -> {list(outputs)}")
    return sizes


def _zip(rule: Rule, left: Sequence[Any], right: Sequence[Any] | None) -> list[tuple[Any, Any]]:
    """Pairs of an equation's part and what it describes; absent outputs are passed over."""
    if left is None or right is None:
        return []
    if len(left) != len(right):
        raise InvalidRuleError(f"{rule.equation}: {len(left)} parts for {len(right)} ({left} for {right})")
    return list(zip(left, right, strict=True))
