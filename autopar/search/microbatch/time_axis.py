"""The microbatch axis as restrictions: only what is split along the samples may be split over time."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.ir.graph import dependent_on
from autopar.ir.layout import Placement, Replicate, Split
from autopar.ir.ops import float8
from autopar.ir.program import Program
from autopar.search.formulation.pins import Restrictions
from autopar.sharding.candidates import REPLICATE, strategies
from autopar.sharding.dims import Dims
from autopar.sharding.factor_kinds import batch_factors, ids, split_factors
from autopar.sharding.layer_classes import LayerClasses

OF_EACH = frozenset({float8.scale})
"""Operators of which each microbatch has a result of its own: what they lower to is left out on this axis.

The scale of float8 values is that of the microbatch, as where each is a batch that gradients are accumulated over.
"""


def along_samples(program: Program, dims: Dims, classes: LayerClasses, count: int) -> Restrictions:
    """Restrictions for an axis of ``count`` microbatches.

    Raises:
        InfeasibleError: there are no samples, or they do not divide.
    """
    batch = batch_factors(program, dims)
    rows = min((f.size for f in batch), default=1)
    if any(f.size % count for f in batch) or not batch:
        raise InfeasibleError(
            f"{rows} samples do not divide into {count} microbatches; choose a number that divides them, or another "
            "batch"
        )
    samples = ids(batch)
    allowed: dict[str, tuple[frozenset[str], ...]] = {}
    placements: dict[tuple[str, str], tuple[Placement, ...]] = {}
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    of_batch = dependent_on(program.graph.graph, program.inputs_of("batch"))
    for key, members in classes.members.items():
        node = members[0]
        if node in dims.operators:
            factors = split_factors(node, program, dims)
            # Lowered code asks which part a device has, or for the other parts: neither exists on this axis.
            lowered = () if node.target in OF_EACH or node.target is float8.amax else dims.operators[node].rule.lower
            along = frozenset(
                n for n, factor in factors.items() if id(factor) in samples and n.partition(".")[0] not in lowered
            )
            whole = frozenset(s.name for s in strategies(dims.operators[node]) if not s.splits)
            # Only operators on the batch must split. Others may have a dim of the same factor that is no batch, such as
            # positions.
            shared = along and node in of_batch
            allowed[key] = (along | whole - {REPLICATE} if shared else along | whole,)
        elif node in inputs and inputs[node].kind in ("parameter", "batch"):
            first = dims.types[node, 0].dims[:1]
            split = inputs[node].kind == "batch" and bool(first and first[0]) and id(first[0][0]) in samples
            placements.update(
                {(inputs[n].kind, inputs[n].name): (Split(0) if split else Replicate(),) for n in members}
            )
    return Restrictions(strategies=allowed, placements=placements)
