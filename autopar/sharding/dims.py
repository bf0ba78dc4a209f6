"""Dimension analysis: which dims of which tensors are the same factor.

A union-find over tensor dims. A rule says which dims of an operator's tensors are the same; a view that splits or
merges dims splits their class into factors, everywhere at once. Afterwards most views never stand in the way of a
split. Factorings that contradict each other (320 as 32 x 10 and as 5 x 64) stay apart: there a tensor is redistributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from autopar.errors import InvalidRuleError, MissingRuleError
from autopar.ir.graph import Value, map_nodes, producer, user_line, values_of
from autopar.ir.layout import Factor, TensorType
from autopar.ir.node_info import info
from autopar.ir.program import Call, Input, Output, Program
from autopar.ir.quantized.axes import FLOATS
from autopar.ir.quantized.messages import messages_of
from autopar.rules.discover.search import discover
from autopar.rules.discover.trials import DiscoveryCall
from autopar.rules.routed import routed_values
from autopar.rules.rule import Rule, Spec, find_rule, letter_sizes
from autopar.rules.shapes.fused_kernels import Fused, fused_operators
from autopar.rules.shapes.known_strides import likely_copies
from autopar.sharding.factor_classes import FactorClasses
from autopar.sharding.factor_names import factor_names

TENSOR = object()
"""Stands for a tensor among the arguments of a call; a node would keep its graph alive."""


@dataclass(frozen=True)
class Letter:
    """Where one letter of a rule occurs in one call, and what it stands for there.

    Attributes:
        factors: the letter's factors, in order.
        inputs: ``(tensor argument, dim, index of the first factor in that dim)`` of each occurrence.
        outputs: the same among outputs.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class Operator:
    """A rule bound to factors; calls that are alike share one, so what is derived from it is derived once.

    Attributes:
        rule: the operator's rule for this call.
        letters: the letters that have the same factors wherever they occur; the others cannot be split.
        inputs: types of the tensor arguments.
        outputs: types of the outputs, None for one that does not exist.
        copied: numbers of the tensor arguments that have not the strides that the kernel asks for, and are copied.
        fused: what it moves, if a compiler puts it into one kernel with others.
        arguments: positional and keyword arguments of the call, `TENSOR` for each tensor.
    """

    rule: Rule
    letters: dict[str, Letter]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]
    copied: tuple[int, ...] = ()
    fused: Fused | None = None
    arguments: tuple[Any, Any] = ((), {})

    def call(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments with these tensors."""
        remaining = iter(tensors)
        args, kwargs = fx.node.map_aggregate(self.arguments, lambda x: next(remaining) if x is TENSOR else x)
        return list(args), dict(kwargs)


@dataclass(frozen=True)
class Dims:
    """The result: a type for every value, and every operator node's bound rule."""

    types: dict[Value, TensorType]
    operators: dict[fx.Node, Operator]

    def type_of(self, node: fx.Node) -> TensorType:
        """Type of the value that a node is; looks through getitem."""
        return self.types[producer(node)]


def analyze(program: Program) -> Dims:
    """Find the factors of every tensor dim.

    Raises:
        MissingRuleError: an operator has no rule.
        InvalidRuleError: a rule does not fit its operator's shapes.
    """
    # Remembered: the search asks at each of its steps, and a program does not change.
    if "dims" not in program.memo:
        program.memo["dims"] = _analyze(program)
    found: Dims = program.memo["dims"]
    return found


def carry_over(program: Program, copy: Program) -> None:
    """Let a copy of a program know what is known of it: to analyze each copy took a fifth of the time of rewriting it.

    Args:
        program: perhaps analyzed.
        copy: the same on a graph of its own, with as many nodes in the same order.
    """
    known: Dims | None = program.memo.get("dims")
    if known is not None:
        own = dict(zip(program.graph.graph.nodes, copy.graph.graph.nodes, strict=True))
        types = {(own[node], i): found for (node, i), found in known.types.items()}
        copy.memo["dims"] = Dims(types, {own[node]: found for node, found in known.operators.items()})


def _analyze(program: Program) -> Dims:
    factors = FactorClasses()
    values = _boundary_dims(program, factors)
    # First: nothing contradicts it yet, and a layout must mean the same for a parameter and its gradient.
    _tie_gradients(factors, program, values)
    equations: dict[Call, Equation] = {}
    for node, call in program.calls.items():
        if call not in equations:
            equations[call] = _equation(node, call)
        _bind(factors, node, equations[call], program.sources[node], values)
    # Only now are all factors known: the last view may have split a dim of the first operator.
    expanded = {value: [factors.expand(dim) for dim in dims] for value, dims in values.items()}
    types = _types(program, expanded, factors)
    orders = routed_values(program.sources.items(), lambda node: equations[program.calls[node]][0])
    for value, order in orders.items():
        experts = int(cast(int, order.sort.args[2]))
        rows = tuple(sorted(order.dims))
        types[value] = replace(types[value], routed=rows, experts=experts, order=order.itself)
    for value, message in messages_of(program, lambda node: equations[program.calls[node]][0].view).items():
        if value in types and types[value].dtype in FLOATS:
            types[value] = replace(types[value], message=message)
    copied = likely_copies(program).arguments
    fused = fused_operators(program, lambda node: equations[program.calls[node]][0]) if program.fused else {}
    shared: dict[Any, Operator] = {}
    operators = {}
    for node, call in program.calls.items():
        # Calls whose factors coincide in the same way share an operator, so that its candidates are found once.
        known = [
            types[v] for v in (*program.sources[node], *((node, i) for i in range(len(call.outputs)))) if v in types
        ]
        # All that decides how a type is moved: sums in another dtype, or copies for strides, are moved by other paths.
        kinds = tuple((t.drawn, t.routed, t.experts, t.order, t.message, t.reduce, t.relaid) for t in known)
        pattern, own = _pattern(program.sources[node], node, expanded, factors.size), fused.get(node)
        key = (call, pattern, copied.get(node, ()), own, kinds)
        if key not in shared:
            found = _operator(node, equations[call], program.sources[node], expanded, factors.size, types)
            shared[key] = replace(found, copied=copied.get(node, ()), fused=own)
        operators[node] = shared[key]
    return Dims(types, operators)


def _boundary_dims(program: Program, factors: FactorClasses) -> dict[Value, list[list[int]]]:
    """Fresh factors for each dim of inputs, constants and outputs of the program."""
    found: dict[Value, list[list[int]]] = {}
    named = {n: i.name for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "parameter"}
    finals = {producer(v) for v in program.output_values if v is not None}
    for node in program.graph.graph.nodes:
        for i, value in enumerate(values_of(node) if node.op != "output" else ()):
            if value is not None and (node.op in ("placeholder", "get_attr") or (node, i) in finals):
                cuts = program.cuts.get(named.get(node, ""), ((),) * value.ndim)
                dims = zip(value.shape, cuts, strict=True)
                # Padding changes a dim's size: it is one factor then.
                found[node, i] = [
                    [f for size in (cut if math.prod(cut) == n else (int(n),)) for f in factors.new(size)]
                    for n, cut in dims
                ]
    return found


def _types(
    program: Program, expanded: Mapping[Value, list[list[int]]], factors: FactorClasses
) -> dict[Value, TensorType]:
    """The type of every value; one `Factor` object for each class, by which factors are told apart."""
    sizes = factors.sizes()
    names = factor_names(program, lambda value: expanded[value], sizes)
    made = {root: Factor(names.get(root, f"d{size}"), size) for root, size in sizes.items()}
    types = {
        (node, i): TensorType(_dtype(node, i), tuple(tuple(made[f] for f in dim) for dim in dims), _reduce(node))
        for (node, i), dims in expanded.items()
    }
    for padded, shape in _used(program):
        types[padded] = replace(types[padded], used=shape)
    for value, count in likely_copies(program).moves.items():
        if value in types:
            types[value] = replace(types[value], relaid=count)
    for node in program.drawn_in_kernels:
        types[node, 0] = replace(types[node, 0], drawn=True)
    return types


def _used(program: Program) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """Padded values of the boundary, and their shapes without the padding."""
    ends: list[tuple[Input | Output, fx.Node]] = [*zip(program.inputs, program.placeholders, strict=True)]
    ends += [(o, v) for o, v in zip(program.outputs, program.output_values, strict=True) if v is not None]
    for spec, node in ends:
        if (spec.kind, spec.name) in program.used:
            yield producer(node), program.used[spec.kind, spec.name]


def _dtype(node: fx.Node, output: int) -> str:
    value = values_of(node)[output]
    assert value is not None
    return str(value.dtype).removeprefix("torch.")


def _reduce(node: fx.Node) -> str:
    dtype = info(node).reduce_dtype
    return "" if dtype is None else str(dtype).removeprefix("torch.")


Equation = tuple[Rule, dict[str, int]]
"""A call's rule, and the sizes of its letters."""


def _equation(node: fx.Node, call: Call) -> Equation:
    rule = node_rule(node)
    inputs, outputs = [shape for shape, _ in call.inputs], [o and o[0] for o in call.outputs]
    count = min(len(rule.outputs), len(outputs))  # a fake tensor may stand for an output that the rule denies
    if len(inputs) != len(rule.inputs) or any(o is not None for o in outputs[count:]):
        raise InvalidRuleError(
            f"rule {rule.equation} of {node.target} does not fit node {node.name}: {inputs} -> {outputs}"
        )
    shapes = [o if rule.outputs[i] is not None else None for i, o in enumerate(outputs[:count])]
    return rule, letter_sizes(rule, inputs, shapes + [None] * (len(rule.outputs) - count))


def node_rule(node: fx.Node) -> Rule:
    """The rule for one call, discovered if none is written.

    Raises:
        MissingRuleError: names the operator, node, the user's line and the remedy.
    """
    function = find_rule(node.target)
    if function is None:
        return _discovered(node)
    # A rule sees shapes and plain arguments; it has no access to nodes.
    args, kwargs = map_nodes((node.args, node.kwargs), _spec)
    try:
        return function(*args, **kwargs)
    except (InvalidRuleError, TypeError, IndexError, ValueError, ArithmeticError) as e:
        raise InvalidRuleError(f"rule of {node.target} failed (node {node.name}, {user_line(node)}): {e}") from e


def _discovered(node: fx.Node) -> Rule:
    values = values_of(node)
    outputs = tuple(None if v is None else Spec(tuple(int(n) for n in v.shape), v.dtype) for v in values)
    # The device decides which kernel discovery falls back to.
    device = next((v.device.type for v in values if v is not None), "cpu")
    try:
        # Runs the operator on small tensors; the result is known from then on, in this process.
        return discover(DiscoveryCall(node.target, map_nodes((node.args, node.kwargs), _spec), outputs, device))
    except MissingRuleError as e:
        raise MissingRuleError(
            f"{e} (node {node.name}, {user_line(node)}); register one with autopar.rule" + _random_hint(node.target)
        ) from e


def _random_hint(target: Any) -> str:
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return ", or draw with torch.rand, torch.randn or torch.bernoulli and compute from that" if random else ""


def _spec(node: fx.Node) -> Spec:
    source, index = producer(node)
    value = values_of(source)[index]
    assert value is not None
    return Spec(tuple(int(n) for n in value.shape), value.dtype)


TensorDim = tuple[str, int, int]
"""Side (``in`` or ``out``), tensor number, dim."""


def _occurrences(
    node: fx.Node, rule: Rule, sources: tuple[Value, ...], values: Mapping[Value, list[list[int]]]
) -> list[tuple[TensorDim, tuple[str, ...], list[int]]]:
    """Letters and factors of every dim of every tensor of the operator."""
    found: list[tuple[TensorDim, tuple[str, ...], list[int]]] = []
    for i, (dims, source) in enumerate(zip(rule.inputs, sources, strict=True)):
        for d, (letters, factors) in enumerate(zip(dims, values[source], strict=True)):
            found.append((("in", i, d), letters, factors))
    for i, dims_or_none in enumerate(rule.outputs):
        if dims_or_none is not None and (node, i) in values:
            for d, (letters, factors) in enumerate(zip(dims_or_none, values[node, i], strict=True)):
                found.append((("out", i, d), letters, factors))
    return found


def _bind(
    factors: FactorClasses,
    node: fx.Node,
    equation: Equation,
    sources: tuple[Value, ...],
    values: dict[Value, list[list[int]]],
) -> None:
    """Unite the dims that a rule says are the same; outputs not known yet take their letters' factors."""
    rule, sizes = equation
    classes: dict[str, list[int]] = {}

    def of(letters: tuple[str, ...]) -> list[int]:
        for c in letters:
            if c not in classes:
                classes[c] = factors.new(sizes[c])
        return [f for c in letters for f in classes[c]]

    for _, letters, dim in _occurrences(node, rule, sources, values):
        if len(letters) == 1 and letters[0] not in classes:
            classes[letters[0]] = dim
        else:
            # A contradiction leaves the dims apart, and the letter unsplit there: see `_letters`.
            factors.unite(dim, of(letters))
    for i, value in enumerate(values_of(node)):
        if value is not None and (node, i) not in values:
            dims = rule.outputs[i] if i < len(rule.outputs) else None
            letters_of = dims if dims is not None else ((),) * value.ndim
            made = zip(letters_of, value.shape, strict=True)
            values[node, i] = [of(letters) if letters else factors.new(int(size)) for letters, size in made]


def _pattern(
    sources: tuple[Value, ...], node: fx.Node, expanded: Mapping[Value, list[list[int]]], size: list[int]
) -> tuple[int, ...]:
    """Which factors of an operator's tensors are the same, and their sizes; equal for the same in another layer."""
    number: dict[int, int] = {}
    found: list[int] = []
    for value in (*sources, *((node, i) for i in range(len(values_of(node))))):
        for dim in expanded.get(value, ()):
            for f in dim:
                found += (number.setdefault(f, len(number)), size[f])
            found.append(-1)
    return tuple(found)


def _operator(
    node: fx.Node,
    equation: Equation,
    sources: tuple[Value, ...],
    expanded: Mapping[Value, list[list[int]]],
    size: list[int],
    types: Mapping[Value, TensorType],
) -> Operator:
    """Bind letters to factors, now that all factors are known."""
    rule, sizes = equation
    inputs = tuple(types[source] for source in sources)
    present = rule.outputs[: len(values_of(node))]
    outputs = tuple(types.get((node, i)) if dims is not None else None for i, dims in enumerate(present))
    letters = _letters(_occurrences(node, rule, sources, expanded), sizes, size, inputs, outputs)
    return Operator(rule, letters, inputs, outputs, arguments=map_nodes((node.args, node.kwargs), lambda _: TENSOR))


def _letters(
    occurrences: list[tuple[TensorDim, tuple[str, ...], list[int]]],
    sizes: Mapping[str, int],
    size: list[int],
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType | None, ...],
) -> dict[str, Letter]:
    """Letters that have the same factors wherever they occur.

    Args:
        occurrences: letters and factors of every dim.
        sizes: of the letters.
        size: of each factor.
        inputs: types of the tensor arguments.
        outputs: types of the outputs.
    """
    parts: dict[str, tuple[int, ...] | None] = {}
    found_at: dict[str, list[tuple[TensorDim, int]]] = {}
    for at, group, dim in occurrences:
        for c, (start, part) in zip(group, _deal(dim, size, [sizes[c] for c in group]), strict=True):
            # Other factors than before: dims that could not be united. Splitting the letter would split them unalike.
            parts[c] = part if parts.get(c, part) == part else None
            found_at.setdefault(c, []).append((at, start))
    found = {}
    for c, part in parts.items():
        if part is None:
            continue
        (side, i, d), start = found_at[c][0]
        type_ = inputs[i] if side == "in" else outputs[i]
        assert type_ is not None
        found[c] = Letter(
            type_.dims[d][start : start + len(part)],
            tuple((i, d, start) for (side, i, d), start in found_at[c] if side == "in"),
            tuple((i, d, start) for (side, i, d), start in found_at[c] if side == "out"),
        )
    return found


def _deal(dim: list[int], size: list[int], letters: Sequence[int]) -> list[tuple[int, tuple[int, ...] | None]]:
    """The dim's factors, dealt to consecutive letters of the given sizes, each with the index of its first factor.

    None for letters whose bounds a factor straddles.
    """
    parts: list[tuple[int, tuple[int, ...] | None]] = []
    # Bounds are products of sizes from the left: of the factors dealt so far, and of the letters.
    position, dealt, boundary = 0, 1, 1
    for letter in letters:
        start, boundary, first = boundary, boundary * letter, position
        aligned = dealt == start
        while position < len(dim) and dealt < boundary:
            dealt *= size[dim[position]]
            position += 1
        parts.append((first, tuple(dim[first:position]) if aligned and dealt == boundary else None))
    return parts


def _tie_gradients(factors: FactorClasses, program: Program, values: Mapping[Value, list[list[int]]]) -> None:
    """A gradient or a new value has the dims of its input, and a result those of its tangent."""
    by_input = {i: n for i, n in zip(program.inputs, program.placeholders, strict=True)}
    kinds = {
        "gradient": "parameter", "parameter": "parameter", "input_gradient": "batch", "buffer": "buffer",
        "result": "tangent",
    }  # fmt: skip
    named = {(i.kind, i.name): n for i, n in by_input.items()}
    # Tied even where no operator connects both, such as through a custom autograd function.
    for output, value in zip(program.outputs, program.output_values, strict=True):
        # A result without a tangent carries no gradient, and has nothing to be tied to; nor has what is recorded.
        source = named.get((kinds.get(output.kind, ""), output.name))
        if source is None or value is None:
            continue
        for a, b in zip(values[source, 0], values[producer(value)], strict=True):
            factors.unite(a, b)
