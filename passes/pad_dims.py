"""pad_dims: dims of parameters that no axis divides, such as a vocabulary of 50257, are made longer.

Before::

    logits = aten.mm(x, w)                        # w is [hidden, vocab:10], on an axis of 4
    loss = aten._log_softmax(logits, 1, False)

After::

    logits = aten.mm(x, w)                        # w is [hidden, vocab:12], zero in the last two columns
    outside = aten.ge(aten.arange(12), 10)
    loss = aten._log_softmax(aten.masked_fill(logits, outside, -inf), 1, False)

The padding goes through every operator that stays right with it (`autopar.rules.rule.padding_of`); what an operator
needs there is filled in. Any other operator gets its arguments without padding (`aten.narrow`), and its results are
padded again where that is wanted (`aten.pad`). Parameters and gradients enter and leave the step without it.

Heads of attention are padded, too, which are a factor of dims of weights, ``[heads:25 x head_dim:64, hidden]``: such
weights are kept as they are, and get their padding in the graph, further heads of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.layout import Factor
from autopar.ir.ops.attention import attention
from autopar.ir.ops.formula.attention_rows import attention_rows
from autopar.ir.ops.sequence.masked_attention import attention_masked
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.padded_copy import PaddedCopy

Shapes = Mapping[str, tuple[int, ...]]


def pad_dims(program: Program, plan: Plan) -> Program:
    """Pad what the plan says is padded; computes the same."""
    return pad(program, plan.padding)


def pad(program: Program, shapes: Shapes) -> Program:
    """Give parameters longer dims.

    Args:
        program: canonical program.
        shapes: padded shape of each parameter that has one.

    Raises:
        PlanError: the program's parameters cannot have these shapes.
    """
    if not shapes:
        return program
    # Remembered: a search, and who asks what its plan says, would analyze one more program each.
    key = ("padded", tuple(sorted(shapes.items())))
    if key not in program.memo:
        program.memo[key] = _padded(program, shapes)
    found: Program = program.memo[key]
    return found


def _padded(program: Program, shapes: Shapes) -> Program:
    dims = analyze(program)
    padded = PaddedCopy(program, dims, padded_factors(program, dims, shapes)).run()
    if program.repeat is None:
        return padded
    shorter = program.repeat.shorter
    # The shorter program has fewer layers, and so fewer parameters to pad.
    there = {i.name for i in shorter.inputs if i.kind == "parameter"}
    own = {name: shape for name, shape in shapes.items() if name in there}
    return replace(padded, repeat=replace(program.repeat, shorter=pad(shorter, own)))


def padded_factors(program: Program, dims: Dims, shapes: Shapes) -> dict[int, int]:
    """Padded size of factors, by their `id`: factors of one name and size may be different ones.

    Raises:
        PlanError: a dim has several factors, none of them heads, or two sizes are asked of one factor.
    """
    found: dict[int, int] = {}
    missing = set(shapes) - {i.name for i in program.inputs if i.kind == "parameter"}
    if missing:
        raise PlanError(f"the plan pads parameter {min(missing)!r}, which the model does not have; plan again")
    heads = attention_heads(program, dims)
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        shape = shapes.get(spec.name) if spec.kind == "parameter" else None
        if shape is None:
            continue
        type_ = dims.type_of(node)
        fits = len(shape) == len(type_.dims)
        for dim, n, wanted in zip(type_.dims, type_.shape, shape, strict=False):
            if n != wanted:
                own = [f for f in dim if len(dim) == 1 or id(f) in heads]
                longer, rest = divmod(wanted * own[0].size, n) if len(own) == 1 else (0, 1)
                fits = fits and not rest and longer > own[0].size
                fits = fits and found.setdefault(id(own[0]), longer) == longer
        if not fits:
            raise PlanError(
                f"the plan pads parameter {spec.name!r} to {list(shape)}, which the model's dims ({type_}) do not "
                "allow; plan again"
            )
    return found


def attention_heads(program: Program, dims: Dims) -> dict[int, Factor]:
    """Factors that are the heads of keys in some attention, by their `id`."""
    own = [node for node in dims.operators if node.target in (attention, attention_masked, attention_rows)]
    keys = (dims.types[program.sources[node][1]].dims[1] for node in own)
    return {id(heads[0]): heads[0] for heads in keys if len(heads) == 1}
