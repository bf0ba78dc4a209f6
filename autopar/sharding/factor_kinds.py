"""What the factors of a program mean: which are samples, which positions, and which an operator can be split along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx

from autopar.ir.graph import producer
from autopar.ir.layout import Factor, TensorType
from autopar.ir.ops import float8
from autopar.ir.program import Program
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims

Ids = frozenset[int]
"""Factors by `id`: two of one name and size may be different ones."""


def ids(factors: Iterable[Factor]) -> Ids:
    """Factors as what they are compared by."""
    return frozenset(map(id, factors))


def input_types(program: Program, dims: Dims, kind: str) -> dict[str, TensorType]:
    """Type of every parameter, batch tensor or buffer, by name."""
    ends = zip(program.placeholders, program.inputs, strict=True)
    return {i.name: dims.types[n, 0] for n, i in ends if i.kind == kind}


def factors_of(types: Iterable[TensorType]) -> dict[int, Factor]:
    """Every factor of some types, by id, in order."""
    return {id(f): f for type_ in types for dim in type_.dims for f in dim}


def batch_factors(program: Program, dims: Dims) -> list[Factor]:
    """The leading factor of dim 0 of the batch tensors, of those that have as many samples as most of them."""
    types, rows = input_types(program, dims, "batch").values(), _samples(program, dims)
    found = [t.dims[0][0] for t in types if t.dims and t.dims[0] and t.shape[0] == rows]
    return list({id(f): f for f in found}.values())


def _samples(program: Program, dims: Dims) -> int:
    """Samples that most of the batch tensors have."""
    rows = [t.shape[0] for t in input_types(program, dims, "batch").values() if t.dims and t.dims[0]]
    # By majority: a batch may hold a table or a mask besides that has no samples.
    return Counter(rows).most_common(1)[0][0] if rows else 1


def sequence_factors(program: Program, dims: Dims) -> list[Factor]:
    """The leading factor of the second dim of the batch tensors that are sequences, of tokens or of vectors."""
    found, rows = {}, _samples(program, dims)
    for type_ in input_types(program, dims, "batch").values():
        # Integers of two dims are tokens, and floating numbers are features, whose second dim is no sequence.
        tokens = len(type_.dims) == 2 and type_.dtype.startswith(("int", "uint"))
        if (tokens or len(type_.dims) == 3) and type_.shape[0] == rows and type_.dims[1]:
            found[id(type_.dims[1][0])] = type_.dims[1][0]
    return list(found.values())


def rows_of_images(program: Program, dims: Dims) -> list[Factor]:
    """The leading factor of the third dim of the batch tensors that are images, [sample, channel, row, column]."""
    samples, types = _samples(program, dims), input_types(program, dims, "batch").values()
    images = [t for t in types if len(t.dims) == 4 and t.shape[0] == samples and t.dims[2]]
    return list({id(t.dims[2][0]): t.dims[2][0] for t in images}.values())


def operator_types(node: fx.Node, program: Program, dims: Dims) -> Iterator[TensorType]:
    """Types of an operator's arguments and results; its `Operator` has those of the first call like it."""
    for source in program.sources[node]:
        yield dims.types[source]
    for i in range(len(dims.operators[node].outputs)):
        if (node, i) in dims.types:
            yield dims.types[node, i]


def split_factors(node: fx.Node, program: Program, dims: Dims) -> dict[str, Factor]:
    """The factor that each splitting strategy of an operator splits, by the strategy's name; none by experts.

    Of letters that are split together it is the factor of the first one.
    """
    operator = dims.operators[node]
    found = {}
    for strategy in strategies(operator):
        if not strategy.factors or strategy.owned:
            continue
        name, j = strategy.factors[0]
        letter = operator.letters[name]
        # Through the types of this very node: `operator` may be of another layer, with factors of other names.
        if letter.inputs:
            i, d, start = letter.inputs[0]
            found[strategy.name] = dims.types[program.sources[node][i]].dims[d][start + j]
        else:
            i, d, start = letter.outputs[0]
            found[strategy.name] = dims.types[node, i].dims[d][start + j]
    return found


def blocked_factors(node: fx.Node, program: Program, dims: Dims) -> list[Factor]:
    """Factors of an operator's arguments along which it cannot be split."""
    operator = dims.operators[node]
    types = [dims.types[v] for v in program.sources[node]]
    blocked = [operator.letters[c] for c in operator.rule.blocked if c in operator.letters]
    # Through the types of this very node, as above.
    return [f for x in blocked for i, d, j in x.inputs for f in types[i].dims[d][j : j + len(x.factors)]]


def behind_sequence(program: Program, dims: Dims, sequence: Ids) -> set[fx.Node]:
    """Operators without positions that compute from what has them: on loops, tokens that were picked, latents, slots.

    None of them can be split along the sequence: the search may split them along heads, channels or what else they
    have, where the same on all devices would take longer.
    """
    last, found = set[fx.Node](), set[fx.Node]()
    for node in dims.operators:
        if factors_of(operator_types(node, program, dims)).keys() & sequence:
            made = (dims.types[node, i] for i in range(len(dims.operators[node].outputs)) if (node, i) in dims.types)
            split = sequence & ids(split_factors(node, program, dims).values())
            if not (split and factors_of(made).keys() & sequence):
                last.add(node)
        elif any(source in last or source in found for source, _ in program.sources[node]):
            found.add(node)
    return last | found


def shared_factor(node: fx.Node, program: Program, dims: Dims) -> Factor | None:
    """The leading factor of what all tensors of a product have, as the batch of `bmm`; None: it is none."""
    rule, sources = dims.operators[node].rule, program.sources[node]
    if not rule.reduce or len(sources) != 2:
        return None
    for letter in dims.operators[node].letters.values():
        if len(letter.factors) and len(letter.inputs) == 2 and letter.outputs:
            i, d, j = letter.inputs[0]
            return dims.types[sources[i]].dims[d][j]
    return None


def batched_experts(program: Program, dims: Dims) -> tuple[list[Factor], frozenset[str]]:
    """Factors along which experts are that compute all of their places at once, and names of the experts' weights.

    Experts multiply what they are sent by a matrix each, in a product of batches of which one is a parameter's. Their
    first one may be a plain product, ``[token, hidden]`` by ``[hidden, expert x inner]``: what it makes, they sum over.
    Another parameter that makes numbers for each expert has the factor, too, and is none of theirs: a router. Blocks of
    channels (RecurrentGemma's gates) are no experts: a bias or a rate of all channels has them in its one dim.
    """
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    fixed, found = from_parameters(program), dict[int, Factor]()
    for node in dims.operators:
        made = [producer in fixed for producer, _ in program.sources[node]]
        if sum(made) == 1 and (factor := shared_factor(node, program, dims)) is not None:
            found[id(factor)] = factor
    for type_ in input_types(program, dims, "parameter").values():
        if len(type_.dims) == 1 and len(type_.dims[0]) > 1:
            found = {i: f for i, f in found.items() if i not in ids(type_.dims[0])}
    shared = {node: shared_factor(node, program, dims) for node, o in dims.operators.items() if o.rule.reduce}
    of_weights = [node for node in shared if any(source in fixed for source, _ in program.sources[node])]
    inner = [f for node in of_weights if id(shared[node]) in found for f in _letters(node, program, dims, summed=True)]
    routers = set[fx.Node]()
    for node in of_weights:
        columns = ids(_letters(node, program, dims, summed=False))
        if id(shared[node]) not in found and not (columns & found.keys() and columns & ids(inner)):
            routers |= {_origin(source, program) for source, _ in program.sources[node] if source in fixed}
    named = {inputs[n].name for n in program.inputs_of("parameter") - routers
             if factors_of([dims.types[n, 0]]).keys() & found.keys()}  # fmt: skip
    return list(found.values()), frozenset(named)


def _letters(node: fx.Node, program: Program, dims: Dims, summed: bool) -> list[Factor]:
    """The factors that a product sums over, or those of its result that one of its tensors has."""
    rule, sources = dims.operators[node].rule, program.sources[node]
    found: list[Factor] = []
    for name, letter in dims.operators[node].letters.items():
        if letter.inputs and (name in rule.reduce if summed else len(letter.inputs) == 1):
            i, d, start = letter.inputs[0]
            found += dims.types[sources[i]].dims[d][start : start + len(letter.factors)]
    return found


def _origin(node: fx.Node, program: Program) -> fx.Node:
    """The parameter that something is computed from alone."""
    while program.sources.get(node):
        node = program.sources[node][0][0]
    return node


_ROUNDS = frozenset({float8.quantize, float8.block_quantize})


def from_parameters(program: Program) -> set[fx.Node]:
    """Parameters, and operators that compute from nothing but one of them."""
    found = program.inputs_of("parameter")
    for node, sources in program.sources.items():
        # Casts, transposes and the like, before they meet an activation.
        # What is rounded to float8 comes from its scale, too.
        if (len(sources) == 1 or node.target in _ROUNDS) and sources[0][0] in found:
            found.add(node)
    return found


def into_gradients(program: Program) -> set[fx.Node]:
    """Operators that do nothing but bring one tensor into the form of a gradient."""
    found = set()
    for output, value in zip(program.outputs, program.output_values, strict=True):
        node = producer(value)[0] if output.kind == "gradient" and value is not None else None
        # Backwards from the output, until an operator has two arguments: there the gradient is computed.
        while node is not None and len(program.sources.get(node, ())) == 1:
            found.add(node)
            node = program.sources[node][0][0]
    return found
