"""Dimension analysis: which dims of which tensors are the same factor.

A union-find over tensor dims. A rule says which dims of an operator's tensors are the same; a view that splits or
merges dims splits their class into factors, everywhere at once. Afterwards most views never stand in the way of a
split. Factorings that contradict each other (320 as 32 x 10 and as 5 x 64) stay apart: there a tensor is redistributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import InvalidRuleError, MissingRuleError
from autopar.ir.graph import Value, map_nodes, producer, user_line, values_of
from autopar.ir.layout import Factor, TensorType
from autopar.ir.node_info import info
from autopar.ir.program import Call, Input, Output, Program
from autopar.rules.discover.search import discover
from autopar.rules.discover.trials import DiscoveryCall
from autopar.rules.rule import Rule, Spec, find_rule, letter_sizes
from autopar.rules.shapes.known_strides import copied_arguments
from autopar.sharding.factor_names import factor_names


@dataclass(frozen=True)
class Letter:
    """Where one letter of a rule occurs in one call.

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
        copied: numbers of the tensor arguments that do not lie in memory as the kernel asks, and are copied.
    """

    rule: Rule
    letters: dict[str, Letter]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]
    copied: tuple[int, ...] = ()


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
    factors = _Factors()
    values: dict[Value, list[list[int]]] = {}
    calls: dict[fx.Node, _Call] = {}
    known: dict[Call, _Call] = {}
    finals = {producer(v) for v in program.output_values if v is not None}
    for node in program.graph.graph.nodes:
        for i, value in enumerate(values_of(node) if node.op != "output" else ()):
            if value is not None and (node.op in ("placeholder", "get_attr") or (node, i) in finals):
                values[node, i] = [factors.new(int(n)) for n in value.shape]
    # First: nothing contradicts it yet, and a layout must mean the same for a parameter and its gradient.
    _tie_gradients(factors, program, values)
    for node, call in program.calls.items():
        if call not in known:
            known[call] = _call(node, call)
        calls[node] = known[call]
        _bind(factors, node, calls[node], program.sources[node], values)
    sizes = factors.sizes()
    names = factor_names(program, lambda key: [factors.expand(dim) for dim in values[key]], sizes)
    made = {root: Factor(names.get(root, f"d{size}"), size) for root, size in sizes.items()}
    expanded = {key: [factors.expand(dim) for dim in dims] for key, dims in values.items()}
    types = {
        (node, i): TensorType(_dtype(node, i), tuple(tuple(made[f] for f in dim) for dim in dims), _reduce(node))
        for (node, i), dims in expanded.items()
    }
    for padded, shape in _used(program):
        types[padded] = replace(types[padded], used=shape)
    shared: dict[Any, Operator] = {}
    copied = copied_arguments(program)
    return Dims(
        types,
        {
            n: _operator(n, call, program.sources[n], expanded, factors.size, types, copied.get(n, ()), shared)
            for n, call in calls.items()
        },
    )


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


@dataclass(frozen=True, eq=False)
class _Call:
    """An operator call as its rule sees it; equal calls share one.

    Attributes:
        rule: of the call.
        sizes: of the rule's letters.
        outputs: how many outputs both the rule and the node have.
    """

    rule: Rule
    sizes: dict[str, int]
    outputs: int


def _call(node: fx.Node, call: Call) -> _Call:
    rule = node_rule(node)
    inputs, outputs = [shape for shape, _ in call.inputs], [o and o[0] for o in call.outputs]
    count = min(len(rule.outputs), len(outputs))  # a fake tensor may stand for an output that the rule denies
    if len(inputs) != len(rule.inputs) or any(o is not None for o in outputs[count:]):
        raise InvalidRuleError(
            f"rule {rule.equation} of {node.target} does not fit node {node.name}: {inputs} -> {outputs}"
        )
    shapes = [o if rule.outputs[i] is not None else None for i, o in enumerate(outputs[:count])]
    sizes = letter_sizes(rule, inputs, shapes + [None] * (len(rule.outputs) - count))
    return _Call(rule, sizes, count)


def node_rule(node: fx.Node) -> Rule:
    """The rule for one call, discovered if none is written.

    Raises:
        MissingRuleError: names the operator, node, the user's line and the remedy.
    """
    function = find_rule(node.target)
    if function is None:
        return _discovered(node)
    args, kwargs = map_nodes((node.args, node.kwargs), _spec)
    try:
        return function(*args, **kwargs)
    except (InvalidRuleError, TypeError, IndexError, ValueError, ArithmeticError) as e:
        raise InvalidRuleError(f"rule of {node.target} failed (node {node.name}, {user_line(node)}): {e}") from e


def _discovered(node: fx.Node) -> Rule:
    values = values_of(node)
    outputs = tuple(None if v is None else Spec(tuple(int(n) for n in v.shape), v.dtype) for v in values)
    device = next((v.device.type for v in values if v is not None), "cpu")
    try:
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


Place = tuple[str, int, int]
"""Side (``in`` or ``out``), tensor number, dim."""


def _occurrences(
    node: fx.Node, call: _Call, sources: tuple[Value, ...], values: dict[Value, list[list[int]]]
) -> list[tuple[Place, tuple[str, ...], list[int]]]:
    """Letters and factors of every dim of every tensor of the operator."""
    found: list[tuple[Place, tuple[str, ...], list[int]]] = []
    for i, (dims, source) in enumerate(zip(call.rule.inputs, sources, strict=True)):
        for d, (letters, factors) in enumerate(zip(dims, values[source], strict=True)):
            found.append((("in", i, d), letters, factors))
    for i in range(call.outputs):
        dims_or_none = call.rule.outputs[i]
        if dims_or_none is not None and (node, i) in values:
            for d, (letters, factors) in enumerate(zip(dims_or_none, values[node, i], strict=True)):
                found.append((("out", i, d), letters, factors))
    return found


def _bind(
    factors: _Factors, node: fx.Node, call: _Call, sources: tuple[Value, ...], values: dict[Value, list[list[int]]]
) -> None:
    """Unite the dims that a rule says are the same; outputs not known yet take their letters' factors."""
    classes: dict[str, list[int]] = {}
    for _, letters, dim in _occurrences(node, call, sources, values):
        if len(letters) == 1 and letters[0] not in classes:
            classes[letters[0]] = dim
            continue
        for c in letters:
            if c not in classes:
                classes[c] = factors.new(call.sizes[c])
        factors.unite(dim, [f for c in letters for f in classes[c]])
    for i, value in enumerate(values_of(node)):
        if value is None or (node, i) in values:
            continue
        dims = call.rule.outputs[i] if i < call.outputs else None
        made = []
        for d, size in enumerate(value.shape):
            letters = dims[d] if dims is not None else ()
            for c in letters:
                if c not in classes:
                    classes[c] = factors.new(call.sizes[c])
            made.append([f for c in letters for f in classes[c]] if letters else factors.new(int(size)))
        values[node, i] = made


def _operator(
    node: fx.Node,
    call: _Call,
    sources: tuple[Value, ...],
    expanded: dict[Value, list[list[int]]],
    size: list[int],
    types: dict[Value, TensorType],
    copied: tuple[int, ...],
    shared: dict[Any, Operator],
) -> Operator:
    """Bind letters to factors, now that all factors are known; calls whose factors coincide alike share the result."""
    number: dict[int, int] = {}
    pattern: list[int] = []
    for value in (*sources, *((node, i) for i in range(call.outputs))):
        for dim in expanded.get(value, ()):
            for f in dim:
                pattern += (number.setdefault(f, len(number)), size[f])
            pattern.append(-1)
    key = (call, tuple(pattern), copied)
    if key not in shared:
        occurrences = _occurrences(node, call, sources, expanded)
        inputs = tuple(types[source] for source in sources)
        outputs = tuple(types.get((node, i)) if call.rule.outputs[i] is not None else None for i in range(call.outputs))
        letters = _letters(call, occurrences, size, inputs, outputs)
        shared[key] = Operator(call.rule, letters, inputs, outputs, copied)
    return shared[key]


def _letters(
    call: _Call,
    occurrences: list[tuple[Place, tuple[str, ...], list[int]]],
    size: list[int],
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType | None, ...],
) -> dict[str, Letter]:
    parts: dict[str, tuple[int, ...] | None] = {}
    places: dict[str, list[tuple[Place, int]]] = {}
    for place, group, dim in occurrences:
        for c, (start, part) in zip(group, _cut(dim, size, [call.sizes[c] for c in group]), strict=True):
            parts[c] = part if parts.get(c, part) == part else None
            places.setdefault(c, []).append((place, start))
    found = {}
    for c, part in parts.items():
        if part is None:
            continue
        (side, i, d), start = places[c][0]
        type_ = inputs[i] if side == "in" else outputs[i]
        assert type_ is not None
        found[c] = Letter(
            type_.dims[d][start : start + len(part)],
            tuple((i, d, start) for (side, i, d), start in places[c] if side == "in"),
            tuple((i, d, start) for (side, i, d), start in places[c] if side == "out"),
        )
    return found


def _cut(dim: list[int], size: list[int], letters: Sequence[int]) -> list[tuple[int, tuple[int, ...] | None]]:
    """The dim's factors, dealt to consecutive letters of the given sizes, each with the index of its first factor.

    None for letters whose bounds a factor straddles.
    """
    parts: list[tuple[int, tuple[int, ...] | None]] = []
    position, done, boundary = 0, 1, 1
    for letter in letters:
        start, boundary, first = boundary, boundary * letter, position
        aligned = done == start
        while position < len(dim) and done < boundary:
            done *= size[dim[position]]
            position += 1
        parts.append((first, tuple(dim[first:position]) if aligned and done == boundary else None))
    return parts


def _tie_gradients(factors: _Factors, program: Program, values: dict[Value, list[list[int]]]) -> None:
    """A gradient and a new value have the dims of what they are of, an output its tangent's."""
    by_input = {i: n for i, n in zip(program.inputs, program.placeholders, strict=True)}
    kinds = {
        "gradient": "parameter", "parameter": "parameter", "input_gradient": "batch", "buffer": "buffer",
        "result": "tangent",
    }  # fmt: skip
    named = {(i.kind, i.name): n for i, n in by_input.items()}
    for output, value in zip(program.outputs, program.output_values, strict=True):
        source = named.get((kinds[output.kind], output.name))
        if source is None or value is None:
            continue
        for a, b in zip(values[source, 0], values[producer(value)], strict=True):
            factors.unite(a, b)


class _Factors:
    """Union-find over factor classes, in which a class can be split; every change can be undone."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.parts: list[tuple[int, int] | None] = []
        self.log: list[tuple[list[object], int, object]] = []

    def new(self, size: int) -> list[int]:
        """A dim of ``size`` in one fresh factor; no factor if the size is 1."""
        if size == 1:
            return []
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.parts.append(None)
        return [len(self.parent) - 1]

    def find(self, x: int) -> int:
        root = x
        while self.parent[root] != root:
            root = self.parent[root]
        while not self.log and self.parent[x] != root:  # shorten the way, unless it may have to be undone
            self.parent[x], x = root, self.parent[x]
        return root

    def expand(self, dim: Sequence[int]) -> list[int]:
        """The irreducible factors of a dim, in order."""
        found: list[int] = []
        stack = list(reversed(dim))
        while stack:
            root = self.find(stack.pop())
            parts = self.parts[root]
            if parts is None:
                found.append(root)
            else:
                stack += reversed(parts)
        return found

    def sizes(self) -> dict[int, int]:
        """Size of every irreducible class, by its root."""
        roots = (x for x in range(len(self.parent)) if self.parent[x] == x and self.parts[x] is None)
        return {x: self.size[x] for x in roots}

    def _set(self, array: list[Any], index: int, value: object) -> None:
        self.log.append((array, index, array[index]))
        array[index] = value

    def unite(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Make two dims the same, splitting classes where one is finer; all or nothing."""
        done = self._unite(a, b)
        if not done:
            for array, index, old in reversed(self.log):
                array[index] = old
        self.log.clear()
        return done

    def _unite(self, a: Sequence[int], b: Sequence[int]) -> bool:
        if a == b:
            return True
        left, right = self.expand(a)[::-1], self.expand(b)[::-1]
        while left and right:
            x, y = self.find(left.pop()), self.find(right.pop())
            if self.parts[x] is not None or self.parts[y] is not None:  # split meanwhile, through the other side
                left += self.expand([x])[::-1]
                right += self.expand([y])[::-1]
                continue
            if x == y:
                continue
            small, large = (x, y) if self.size[x] <= self.size[y] else (y, x)
            if self.size[small] == self.size[large]:
                # The older class stays the root: names and orders do not depend on what comes later.
                self._set(self.parent, max(x, y), min(x, y))
                continue
            if self.size[large] % self.size[small]:
                return False
            rest = self.new(self.size[large] // self.size[small])[0]
            head = self.new(self.size[small])[0]
            self._set(self.parts, large, (head, rest))
            self._set(self.parent, max(head, small), min(head, small))
            (left if large == x else right).append(rest)
        return not left and not right
