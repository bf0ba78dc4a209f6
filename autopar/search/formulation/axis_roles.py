"""What a mesh axis is for, as restrictions: hand-made layouts are pins for the same search.

On an axis with a role, operators keep the strategies that split what the role says:

==========  =====================================================  ===================================================
role        operators                                              parameters
==========  =====================================================  ===================================================
data        split along the batch, where they have it              replicated
optimizer   split along the batch, where they have it              split, and gathered for use; gradients all-reduced
shard       split along the batch, where they have it              split, and gathered for use; gradients scattered
expert      split along the batch, or where experts are at work    those of experts split along these, else replicated
            along these: rows go to their experts; of samples
            that do not divide along the sequence
context     split along the sequence, where they have it; behind   as shard
            what has lost it, as the search decides
tensor      split along the tensor-parallel factors                split along those factors, else replicated
sequence    as tensor; along the sequence between the linears      as tensor
local       see `autopar.search.formulation.local_axes`            each worker has its own
compressed  as local                                               the same on all workers
==========  =====================================================  ===================================================

Everything is found by factors, nothing by names. What the roles leave open, such as where partial sums are added up,
the search decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import InfeasibleError
from autopar.ir.graph import module_path, producer, user_line
from autopar.ir.layout import ByExpert, Factor, Layout, Placement, Replicate, Split, TensorType, is_boundary_layout
from autopar.ir.program import Program
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.tensor_parallel import tensor_factors
from autopar.sharding.candidates import BY_EXPERT, REPLICATE, candidates, layouts, split_parts, strategies
from autopar.sharding.dims import Dims
from autopar.sharding.factor_kinds import (
    Ids,
    batch_factors,
    batched_experts,
    behind_sequence,
    blocked_factors,
    factors_of,
    from_parameters,
    ids,
    input_types,
    into_gradients,
    operator_types,
    rows_of_images,
    sequence_factors,
    shared_factor,
    split_factors,
)
from autopar.sharding.layer_classes import LayerClasses

DATA, OPTIMIZER, SHARD, EXPERT, CONTEXT = "data", "optimizer", "shard", "expert", "context"
TENSOR, SEQUENCE, LOCAL, COMPRESSED, STALE = "tensor", "sequence", "local", "compressed", "stale"
WORKER_ROLES = (LOCAL, COMPRESSED, STALE)
"""Roles of an axis of workers, which is left out of what is planned."""

ROLES = (DATA, OPTIMIZER, SHARD, EXPERT, CONTEXT, TENSOR, SEQUENCE, *WORKER_ROLES)

SPLIT_BATCH, SPLIT_STATES = (DATA, OPTIMIZER, SHARD, EXPERT), (OPTIMIZER, SHARD, CONTEXT)
"""Roles that split the batch, and those that split parameters and their states between steps."""

BY_POSITION = "expert by position"
"""What the role `EXPERT` is where samples do not divide: outside of the experts it splits the sequence."""

Roles = tuple[str | None, ...]
"""The role of each axis; None: the search decides."""


@dataclass(frozen=True)
class RoleFactors:
    """The factors that roles split, in one program.

    Attributes:
        batch: samples are along these.
        tensor: the tensor-parallel ones.
        sequence: positions are along these; empty where no axis splits the sequence.
        hidden: the other factors of weights that have a tensor-parallel one.
        experts: the weights of a mixture's experts are along these.
        weights: names of these weights, where batched products multiply all places of an expert; empty where grouped
            products multiply sorted rows.
    """

    batch: Ids
    tensor: Ids
    sequence: Ids
    hidden: Ids
    experts: Ids
    weights: frozenset[str] = frozenset()


def by_roles(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    axes: Mapping[str, int],
    roles: Roles,
    restrictions: Restrictions,
) -> Restrictions:
    """Restrictions with those of the axes' roles added; layouts that are decided already win.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        axes: name and size of each mesh axis.
        roles: of each axis.
        restrictions: what is decided already.

    Raises:
        InfeasibleError: there is nothing that a role could split, or sizes do not divide.
    """
    if not any(roles):
        return restrictions
    roles = _experts_by_position(program, dims, axes, roles)
    factors = find_factors(program, dims, axes, roles)
    sizes = tuple(axes.values())
    # Operators that only transform parameters or gradients may follow their shards, off the batch.
    casts, sums = from_parameters(program), into_gradients(program)
    positions = {CONTEXT, BY_POSITION} & {*roles}
    behind = behind_sequence(program, dims, factors.sequence) if positions else set()
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    placements: dict[tuple[str, str], tuple[Placement | None, ...]] = {}
    allowed: dict[str, tuple[frozenset[str] | None, ...]] = {}
    for key, members in classes.members.items():
        node = members[0]
        if node in dims.operators:
            chain = node in casts or node in sums
            chains = {SHARD: chain, EXPERT: chain, OPTIMIZER: node in casts}
            chains |= dict.fromkeys(positions, chain or node in behind)
            found = [_allowed(node, program, dims, role, factors, chains.get(str(role), False)) for role in roles]
            if positions and not len(candidates(dims.operators[node], sizes, _named(found, node, dims)).choice):
                # Devices may have fewer positions than their neighbors lack, of a long kernel.
                found = [None if role in positions else names for role, names in zip(roles, found, strict=True)]
            allowed[key] = tuple(found)
        elif node in inputs and inputs[node].kind in ("parameter", "batch"):
            find = _batch_layout if inputs[node].kind == "batch" else _parameter_layout
            router = factors.weights and inputs[node].name not in factors.weights
            known = replace(factors, experts=ids(())) if router else factors
            layout = find(dims.types[node, 0], roles, sizes, known)
            open_ = tuple(None if role is None else p for role, p in zip(roles, layout, strict=True))
            placements.update({(inputs[n].kind, inputs[n].name): open_ for n in members})
    # ZeRO-1 all-reduces gradients, although a reduce-scatter would do for its shards: that is what it is.
    if OPTIMIZER in roles:
        whole = tuple(Replicate() if role == OPTIMIZER else None for role in roles)
        placements.update({("consumer", name): whole for name in _gradients(program, classes)})
    return replace(restrictions, strategies=allowed, placements=placements)


def _named(allowed: Sequence[frozenset[str] | None], node: fx.Node, dims: Dims) -> list[frozenset[str]]:
    """Strategies that an operator may take on each axis, all of them by name."""
    every = frozenset(s.name for s in strategies(dims.operators[node]))
    return [every if names is None else names for names in allowed]


def _gradients(program: Program, classes: LayerClasses) -> set[str]:
    """Names of the gradients' consumer layouts: class and output."""
    outputs = zip(program.outputs, program.output_values, strict=True)
    gradients = [producer(v) for o, v in outputs if o.kind == "gradient" and v is not None]
    return {f"{classes.key[node]} {out}" for node, out in gradients}


def _experts_by_position(program: Program, dims: Dims, axes: Mapping[str, int], roles: Roles) -> Roles:
    """The roles, of which an expert axis splits positions where samples do not divide: of one long sequence, say."""
    parts, _ = _extent(axes, roles, *SPLIT_BATCH)
    if EXPERT not in roles or all(f.size % parts == 0 for f in batch_factors(program, dims) or [Factor("", 1)]):
        return roles
    other = tuple(BY_POSITION if role == EXPERT else role for role in roles)
    parts, _ = _extent(axes, other, CONTEXT, BY_POSITION, SEQUENCE)
    found = sequence_factors(program, dims)
    return other if found and all(f.size % parts == 0 for f in found) else roles


def find_factors(program: Program, dims: Dims, axes: Mapping[str, int], roles: Roles) -> RoleFactors:
    """The factors that the roles split.

    Raises:
        InfeasibleError: there are none, or sizes do not divide.
    """
    batch, count = batch_factors(program, dims), program.microbatches
    parts, along = _extent(axes, roles, *SPLIT_BATCH)
    # Of the whole batch, as users know it.
    each, fewer = (f" in {count} microbatches", ", fewer microbatches") if count > 1 else ("", "")
    if parts > 1 and not batch:
        one = f"a microbatch, one of {count}, has one sample" if count > 1 else "one sample has none"
        raise InfeasibleError(
            f"no tensor of the batch has a dim of samples to split along {along} ({one}); take a batch of a multiple "
            f"of {parts * count}{fewer}, or role 'context', which splits the sequence, or 'tensor'"
        )
    uneven = [f.size * count for f in batch if f.size % parts]
    if uneven:
        raise InfeasibleError(
            f"{uneven[0]} samples{each} do not divide along {along}; take a batch of a multiple of {parts * count}"
            f"{fewer}, or smaller axes"
        )
    along_experts, weights = _experts(program, dims, axes, roles)
    experts = ids(along_experts)
    sequence = _sequence(program, dims, axes, roles)
    if not {TENSOR, SEQUENCE} & set(roles):
        return RoleFactors(ids(batch), ids(()), ids(sequence), ids(()), experts, weights)
    parts, along = _extent(axes, roles, TENSOR, SEQUENCE)
    tensor = tensor_factors(program, dims, parts)
    if not tensor:
        raise InfeasibleError(
            f"nothing is tensor-parallel along {along}: that takes a dim, of a size that {parts} divides, which one "
            "linear makes and a later one sums over, with nothing between that needs it whole; or a vocabulary"
        )
    chosen = ids(tensor)
    hidden: Ids = ids(())
    for type_ in input_types(program, dims, "parameter").values():
        if any(chosen & ids(dim) for dim in type_.dims):
            hidden |= ids(f for dim in type_.dims if not chosen & ids(dim) for f in dim)
    return RoleFactors(ids(batch), chosen, ids(sequence), hidden, experts, weights)


def _sequence(program: Program, dims: Dims, axes: Mapping[str, int], roles: Roles) -> list[Factor]:
    """The factors along which positions are, if an axis splits them.

    Raises:
        InfeasibleError: there are none, or axes do not divide them.
    """
    if not {SEQUENCE, CONTEXT, BY_POSITION} & set(roles):
        return []
    found, kind = sequence_factors(program, dims), "positions"
    if not found and SEQUENCE not in roles:
        found, kind = rows_of_images(program, dims), "rows"
    parts, along = _extent(axes, roles, SEQUENCE, CONTEXT, BY_POSITION)
    other = "role 'tensor'" if SEQUENCE in roles else "role 'shard'"
    chosen = ids(found)
    lengths = {n: dim for n, t in input_types(program, dims, "batch").items() for dim in t.dims if chosen & ids(dim)}
    for name, dim in lengths.items():
        length, pieces = math.prod(f.size for f in dim), dim[0].size
        # A view into chunks, such as a scan's, makes two factors of a length that the axis may divide.
        if pieces % parts and length % parts == 0:
            where = _chunks(dim, program, dims)
            factors = " x ".join(str(f.size) for f in dim)
            raise InfeasibleError(
                f"the sequence ({length} {kind} of batch tensor {name}) cannot be split along {along}: {where} "
                f"computes it as {factors}, of which only the first number can be split, and {parts} does not "
                f"divide {pieces}; use {other}, or a smaller axis"
            )
    if not (found and all(f.size % parts == 0 for f in found)):
        size = ", ".join(str(math.prod(f.size for f in dim)) for dim in lengths.values()) or "the batch has none"
        raise InfeasibleError(f"the sequence ({size}) does not divide along {along}; pad it, or use {other}")
    return found


def _chunks(dim: Sequence[Factor], program: Program, dims: Dims) -> str:
    """Where the first factor of a dim is a dim by itself: the first operator that makes one, in words."""
    for node in program.graph.graph.nodes:
        types = operator_types(node, program, dims) if node in dims.operators else ()
        if any(len(found) == 1 and found[0] is dim[0] for type_ in types for found in type_.dims):
            return f"{module_path(node) or 'the model'} ({user_line(node)})"
    return "the model"


def _experts(
    program: Program, dims: Dims, axes: Mapping[str, int], roles: Roles
) -> tuple[list[Factor], frozenset[str]]:
    """The factors along which weights of experts are, if an axis splits them, and `RoleFactors.weights`.

    Raises:
        InfeasibleError: there are none, or axes do not divide them.
    """
    if not {EXPERT, BY_POSITION} & set(roles):
        return [], frozenset()
    parts, along = _extent(axes, roles, EXPERT, BY_POSITION)
    found, weights = list[Factor](), frozenset[str]()
    for node, operator in dims.operators.items():
        for strategy in strategies(operator) if operator.rule.counts else ():
            if strategy.owned:
                placed = zip(strategy.inputs, program.sources[node], strict=True)
                found += [dims.types[v].dims[p.dim][0] for p, v in placed if type(p) is Split]
    if not found:
        found, weights = batched_experts(program, dims)
    if not found:
        raise InfeasibleError(
            f"no experts to split along {along}{_listed(program)}: that takes weights that are one tensor "
            "[expert, ...], in grouped products of tokens that are sorted by expert, each pair of one of these "
            "experts, in an order that nothing else reads, or in batched ones, of one an expert, such as a loop over "
            "weight[e] makes whose rounds differ in e alone; stack the weights of experts that are modules of a list "
            "(torch.stack in __init__, one parameter for all), or take role 'shard'"
        )
    if uneven := [f.size for f in found if f.size % parts]:
        raise InfeasibleError(f"{uneven[0]} experts do not divide along {along}; take a smaller axis")
    return found, weights


def _listed(program: Program) -> str:
    """Experts that are modules of a list, for a message: its name, and the line that calls the first one."""
    for name in sorted(i.name for i in program.inputs if i.kind == "parameter"):
        found = re.match(r"(.*\b\w*experts?)\.0\.", name, re.IGNORECASE)
        if found is None or not any(i.name.startswith(f"{found[1]}.1.") for i in program.inputs):
            continue
        first = f"{found[1]}.0"
        calls = (n for n in program.sources if f"{module_path(n)}.".startswith(f"{first}."))
        line = next((f", which {user_line(n)} calls" for n in calls), "")
        return f" (those of {found[1]!r} are modules of a list{line})"
    return ""


def _extent(axes: Mapping[str, int], roles: Roles, *which: str) -> tuple[int, str]:
    """The number of devices along the axes of some roles, and these axes for a message."""
    found = {a: n for (a, n), role in zip(axes.items(), roles, strict=True) if role in which}
    names = " x ".join(f"{a}={n}" for a, n in found.items())
    return math.prod(found.values()), f"{'axis' if len(found) == 1 else 'axes'} {names}"


def _allowed(
    node: fx.Node, program: Program, dims: Dims, role: str | None, factors: RoleFactors, chain: bool
) -> frozenset[str] | None:
    """Names of the strategies that an operator may take on an axis; None: all.

    Args:
        node: the operator.
        program: its program.
        dims: the program's dimension analysis.
        role: of the axis.
        factors: that the roles split.
        chain: whether it only transforms a parameter or gradient, and so may follow that one's layout, or is of a loop.
    """
    splits = split_factors(node, program, dims)

    def along(wanted: Ids) -> frozenset[str]:
        return frozenset(name for name, factor in splits.items() if id(factor) in wanted)

    every = strategies(dims.operators[node])
    whole = frozenset(s.name for s in every if not s.splits)
    if role is None:
        return None
    is_expert = role in (EXPERT, BY_POSITION)
    tokens = along(factors.sequence if role == BY_POSITION else factors.batch) if is_expert else frozenset()
    if owned := frozenset(s.name for s in every if s.name[-1] == BY_EXPERT[ByExpert] and s.name[:-1] in tokens):
        # Products are where the weights are; what is beside them may be on either side of an exchange.
        return owned if dims.operators[node].rule.counts else owned | tokens
    if is_expert and factors.weights and (experts := along(factors.experts)):
        # Whether tokens are gathered before what makes rows of them, or rows are sent, is a matter of sizes.
        return experts if id(shared_factor(node, program, dims)) in factors.experts else experts | tokens
    if is_expert and (experts := along(factors.experts)):
        return experts | whole  # gradients of the weights of experts that are at work twice, say
    if role in (CONTEXT, BY_POSITION):
        positions = along(factors.sequence)
        # Keys stay whole on the axis where queries are split, or heads are split for as long.
        if any(id(f) in factors.sequence for f in blocked_factors(node, program, dims)):
            return frozenset(splits) if positions else None
        return positions or (None if chain else whole)
    if role in SPLIT_BATCH:
        return along(factors.batch) or (None if chain else whole)
    if found := along(factors.tensor):
        return found
    found = along(factors.sequence) if role == SEQUENCE else frozenset()
    hidden = factors.hidden & factors_of(operator_types(node, program, dims)).keys()
    # A value that is gathered for a linear may be transposed for its gradient: a view costs nothing either way. And a
    # norm's statistics are split as its values are, while masks, positions and labels may be read whole.
    if found and hidden and not dims.operators[node].rule.view:
        return found | (whole - {REPLICATE})
    return found | whole


def _batch_layout(type_: TensorType, roles: Roles, sizes: tuple[int, ...], factors: RoleFactors) -> Layout:
    rows = bool(type_.dims) and bool(ids(type_.dims[0][:1]) & factors.batch)
    positions = (Split(d, j) for d, j in type_.positions if id(type_.dims[d][j]) in factors.sequence)
    of_role = dict.fromkeys(SPLIT_BATCH, Split(0, 0) if rows else Replicate())
    of_role |= dict.fromkeys((CONTEXT, BY_POSITION), next(positions, Replicate()))
    return tuple(of_role.get(str(role), Replicate()) for role in roles)


def _parameter_layout(type_: TensorType, roles: Roles, sizes: tuple[int, ...], factors: RoleFactors) -> Layout:
    """Tensor and expert axes split their factors; sharding axes split as much as they can, leading dims first."""

    def first(wanted: Ids) -> Placement:
        return next((Split(d, j) for d, j in type_.positions if id(type_.dims[d][j]) in wanted), Replicate())

    of_role = {TENSOR: first(factors.tensor), SEQUENCE: first(factors.tensor)}
    of_role |= dict.fromkeys((EXPERT, BY_POSITION), first(factors.experts))

    def suits(layout: Layout) -> bool:
        """Axes without a role are left to the search, which splits what this leaves of the dims."""
        return all(
            role in SPLIT_STATES or p == of_role.get(str(role), Replicate())
            for role, p in zip(roles, layout, strict=True)
        )

    options = [x for x in layouts(type_, sizes, False) if suits(x) and is_boundary_layout(type_, x, sizes)]
    if not options:
        raise InfeasibleError(f"a parameter of {type_} can be split along one tensor axis only: its part is strided")
    return min(options, key=lambda layout: (-split_parts(layout, sizes), *map(_position, layout)))


def _position(placement: Placement) -> tuple[float, int]:
    return (placement.dim, placement.factor) if isinstance(placement, Split) else (math.inf, 0)


def read_roles(roles: Mapping[str, str], axes: Sequence[str]) -> Roles:
    """The role of each axis.

    Raises:
        ValueError: an axis or a role does not exist.
    """
    for axis, role in roles.items():
        if axis not in axes:
            raise ValueError(f"roles= names axis {axis!r}; the mesh has {', '.join(axes)}")
        if role not in ROLES:
            raise ValueError(f"roles= gives axis {axis!r} the role {role!r}; there are {', '.join(ROLES)}")
        if role in WORKER_ROLES:
            raise ValueError(
                f"roles= gives axis {axis!r} the role {role!r}: only autopar.parallelize and autopar.plan take that; "
                "leave the axis and the role out here, and take a worker's part of the batch"
            )
    return tuple(roles.get(a) for a in axes)
