"""Which factors can be tensor-parallel: column-parallel, then row-parallel linears, found by structure.

A factor qualifies if parameters have it, and if the forward pass can be split along it from the linear that produces it
to a later one that sums over it (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). Heads and ffn do; hidden
does not, since norms and the loss need it whole. A vocabulary does: embedding and cross-entropy are lowered to code for
a part of it.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.graph import is_backward
from autopar.ir.layout import Factor, Partial, TensorType
from autopar.ir.ops import float8
from autopar.ir.program import Program
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims
from autopar.sharding.factor_kinds import (
    factors_of,
    from_parameters,
    input_types,
    operator_types,
    split_factors,
)

aten = torch.ops.aten


_MAXIMA = frozenset({float8.scale, float8.amax})
"""Of one number, or of one a row: no work that is split, but what a linear in float8 takes besides."""


def tensor_factors(program: Program, dims: Dims, parts: int) -> list[Factor]:
    """Factors to split into ``parts``, at most one in each parameter.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        parts: devices along all tensor-parallel axes together.
    """
    sources = from_parameters(program)
    # Weights with further heads, see `autopar.passes.pad_dims`, are as parameters.
    padded = {n.name: dims.types[n, 0] for n in program.sources if n in sources and n.target is aten.pad.default}
    parameters = {**input_types(program, dims, "parameter"), **padded}
    outside = factors_of(input_types(program, dims, "batch").values())
    left = {
        key: factor
        for key, factor in factors_of(parameters.values()).items()
        # A factor of the batch, such as its samples, is data parallelism's.
        if factor.size % parts == 0 and key not in outside
    }
    rows = max((dims.types[program.sources[n][0]].shape[0] for n in _embeddings(program)), default=0)
    summed: set[int] = set()  # by a linear, or by lowered code
    lowered: set[int] = set()
    for node in program.sources:
        # What has no arguments, as positions, is no work; nor are further heads of an input, such as a mask's slopes.
        further = node.target is aten.pad.default and program.sources[node][0][0].op != "call_function"
        if is_backward(node) or node.name in padded or further or not program.sources[node]:
            continue
        found = left.keys() & factors_of(operator_types(node, program, dims)).keys()
        for key in found:
            how = _split(node, key, program, dims, sources, rows)
            if how is None:
                del left[key]
            summed |= {key} if how in ("summed", "lowered") else set()
            lowered |= {key} if how == "lowered" else set()
    shown = factors_of(dims.type_of(v) for o, v in zip(program.outputs, program.output_values, strict=True)
                       if o.kind == "result" and v is not None)  # fmt: skip
    left = {key: f for key, f in left.items() if key in summed and (key in lowered or key not in shown)}
    return _one_each(left, lowered, list(parameters.values()))


def _embeddings(program: Program) -> list[fx.Node]:
    return [n for n in program.sources if n.target is aten.embedding.default]


def _split(node: fx.Node, key: int, program: Program, dims: Dims, sources: set[fx.Node], rows: int) -> str | None:
    """How an operator runs with a factor split: ``preserved``, ``summed`` or ``lowered``; None: not at all."""
    operator = dims.operators[node]
    names = [name for name, factor in split_factors(node, program, dims).items() if id(factor) == key]
    found = None
    for strategy in (s for s in strategies(operator) if s.name in names):
        assert strategy.factor is not None
        if strategy.factor[0] in operator.rule.joint:  # one way more to split what another strategy splits
            continue
        if node.target in _MAXIMA:
            return "preserved"
        if strategy.factor[0] in operator.rule.lower:
            table = node.target is aten.embedding.default
            if not table or dims.types[program.sources[node][0]].shape[0] == rows:  # not a table of positions
                return "lowered"
        elif any(isinstance(p, Partial) for p in strategy.outputs):
            # Products of float8 values take two scales besides.
            weights = [s for s in program.sources[node] if s[0] in sources and key in factors_of([dims.types[s]])]
            if weights and len(program.sources[node]) - (2 if operator.rule.rate else 0) == 2:
                found = "summed"
        else:
            found = found or "preserved"
    return found


def _one_each(left: dict[int, Factor], lowered: set[int], parameters: list[TensorType]) -> list[Factor]:
    """At most one factor of each parameter: the leading one of a dim, then the one that fewest parameters have.

    In a model without norms, both ffn and the residual stream qualify; fewer parameters have ffn. A factor between two
    linears comes before a vocabulary, unless it is both dims of some weight: then it is a residual stream.
    """
    trailing = {id(f) for type_ in parameters for dim in type_.dims for f in [f for f in dim if id(f) in left][1:]}
    count = {key: sum(key in factors_of([t]) for t in parameters) for key in left}
    square = {k for k in left for t in parameters if sum(k == id(f) for dim in t.dims for f in dim) > 1}
    second = lowered | square
    chosen: dict[int, Factor] = {}
    for key in sorted(left.keys() - trailing, key=lambda k: (k in second, count[k], list(left).index(k))):
        if not any(key in (own := factors_of([t])) and own.keys() & chosen.keys() for t in parameters):
            chosen[key] = left[key]
    return list(chosen.values())
