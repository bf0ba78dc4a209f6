"""From candidates to a combinatorial problem: variables, their costs, and what it costs to connect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.ir.program import Program
from autopar.search.formulation.connections import Connection, connections, features_of, spent
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.program_point import LiveRangeTable, ProgramPoint
from autopar.search.formulation.variables.activation_states import may_recompute
from autopar.search.formulation.variables.consumer_layouts import consumer_layout
from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.operators import operator_variable
from autopar.search.formulation.variables.tensors import (
    is_loss,
    parameter_variable,
    result_variable,
    tensor_variable,
)
from autopar.search.formulation.variables.variable import (
    FORWARD_ONLY,
    IN_BOTH,
    IN_FORWARD,
    READABLE,
    RECOMPUTED,
    SAVED,
    Floats,
    Ints,
    Variable,
)
from autopar.search.overlap.weights import Weights
from autopar.search.solver.problem import Edge, Node, Problem
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.move_seconds import Kinds

MOST_AXES = 2
"""On up to this many axes a reader that takes a value as it was made, beside a consumer layout, pays nothing."""


@dataclass(frozen=True)
class Formulation:
    """The problem, and what its variables mean.

    Attributes:
        problem: what is minimized.
        variables: of each of its nodes.
        peak_point: the program point at which several labelings together hold the most; None if that is not known.
        features: seconds in each region of a step under a labeling, see `autopar.search.overlap.step_time`; None where
            nothing overlaps, or where there is a choice of states.
        spent: the same of some labels of each variable, and of pairs of them.
    """

    problem: Problem
    variables: tuple[Variable, ...]
    peak_point: Callable[[Sequence[Ints]], ProgramPoint] | None = None
    features: Callable[[Ints], dict[str, Floats]] | None = None
    spent: Callable[[Sequence[Ints]], Iterator[tuple[int, int | None, str, Floats]]] | None = None


def build(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    tables: Tables,
    memory: MemoryModel,
    restrictions: Restrictions,
    weights: Weights | None = None,
) -> Formulation:
    """The layout problem of a program on a machine.

    Args:
        program: the canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: redistribution costs.
        memory: what counts as memory.
        restrictions: what is decided already.
        weights: prices of seconds by where they are spent; default: nothing overlaps, and all cost the same.
    """
    context = BuildContext(program, dims, classes, tables, memory, restrictions, weights)
    found = _variables(context)
    joined = tuple(connections(context, {v.key for v in found}))
    variables = _with_readers_as_made(context, found, joined)
    nodes = tuple(Node(v.key, v.cost, v.memory) for v in variables)
    edges = tuple(_edges(context, variables, joined))

    def peak_point(labelings: Sequence[Ints]) -> ProgramPoint:
        # Built only when asked for: a search without a budget needs no live ranges.
        live = LiveRangeTable(program, dims, classes, tables, partial(may_recompute, context))
        return live.peak(variables, labelings)

    stateless = weights is not None and all(v.state is None for v in variables)
    if not stateless:
        return Formulation(Problem(nodes, edges), variables, peak_point)
    features, among = partial(features_of, context, variables, joined), partial(spent, context, variables, joined)
    return Formulation(Problem(nodes, edges), variables, peak_point, features, among)


def _variables(context: BuildContext) -> list[Variable]:
    """One for each class of nodes, then the results, then the consumer layouts."""
    program, classes, types = context.program, context.classes, context.dims.types
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    results = {o.name: v for o, v in zip(program.outputs, program.output_values, strict=True)
               if o.kind == "result" and v is not None}  # fmt: skip
    found: list[Variable] = []
    for key, members in classes.members.items():
        node, count = members[0], classes.count[key]
        if node in context.dims.operators:
            found.append(operator_variable(context, key))
        elif node.op == "get_attr" or inputs[node].kind == "buffer":
            found.append(tensor_variable(context, key, count, types[node, 0], "constant"))
        elif inputs[node].kind == "parameter":
            found.append(parameter_variable(context, key, tuple(inputs[n].name for n in members)))
        elif inputs[node].kind == "batch":
            found.append(tensor_variable(context, key, count, types[node, 0], "batch", (inputs[node].name,)))
        elif inputs[node].name not in results or is_loss(context, inputs[node].name):
            found.append(tensor_variable(context, key, count, types[node, 0], "constant"))
        # Any other input is the tangent of a result, and shares its variable: see `_source`.
    found += [result_variable(context, name, context.dims.type_of(value)) for name, value in results.items()]
    for (key, out), users in classes.uses.items():
        if context.has_consumer_layout(key, out):
            found.append(consumer_layout(context, key, out, users))
    return found


def _with_readers_as_made(
    context: BuildContext, variables: Sequence[Variable], joined: Sequence[Connection]
) -> tuple[Variable, ...]:
    """The variables; consumer layouts tell in which layout their value is made where readers may take it so for less.

    Else they would be charged for a slice of the moved value, which no plan takes; and for a moved value that is saved,
    or moved once more, where the backward pass takes only the value as it was made. On three axes these labels are so
    many that other gaps become wider than what they close.
    """
    known = {v.key: v for v in variables}
    for c in joined:
        if not c.shares(context) or len(context.sizes) > MOST_AXES:
            continue
        source, consumer = known[c.source], known[c.target]
        read = [known[d.target].ports[d.into] for d in joined if d.source == c.target]
        made = np.intersect1d(source.ports[c.out], np.concatenate(read))
        layout = consumer.ports["out", 0]
        table = context.tables.of(consumer.types["out", 0])
        sliced = table.sliced(layout, made) & (layout[:, None] != made)
        # Else to save the moved value holds no more than what was made.
        less = (table.parts[layout][:, None] < table.parts[made]) & np.isfinite(table.seconds(made, layout).T)
        labels, which = np.nonzero(sliced)
        freed, of = np.nonzero(less & _may_be_forward_only(consumer)[:, None])
        known[c.target] = consumer.reading_as_made(
            np.concatenate([np.arange(len(layout)), labels, freed]),
            np.concatenate([np.zeros_like(layout), 1 + made[which], 1 + made[of]]),
            np.arange(len(layout) + len(labels) + len(freed)) >= len(layout) + len(labels),
        )
    return tuple(known.values())


def _may_be_forward_only(consumer: Variable) -> NDArray[np.bool_]:
    """Labels of a consumer layout, one for each layout, of which there is one that holds it in the forward pass alone.

    A consumer layout of an invariant is moved once a step unless the plan says that it is re-gathered.
    """
    if consumer.state is None or (consumer.invariant and (consumer.alias_only or RECOMPUTED not in consumer.state)):
        return np.zeros(len(consumer.cost), dtype=bool)
    found: NDArray[np.bool_] = consumer.state == (SAVED if SAVED in consumer.state else RECOMPUTED)
    return found


def _edges(context: BuildContext, variables: Sequence[Variable], joined: Sequence[Connection]) -> list[Edge]:
    """The edges between classes: from values to their consumer layouts, and from there to the readers."""
    number = {v.key: i for i, v in enumerate(variables)}
    found = []
    for c in joined:
        i, j = number[c.source], number[c.target]
        prices = context.move_prices(*c.value, c.reader)
        chunks = context.chunks(*c.value)
        table, u_group, v_group = _edge_table(variables[i], variables[j], c, context.tables, prices, chunks)
        found.append(Edge(i, j, u_group, v_group, table))
    return found


def _edge_table(
    u: Variable, v: Variable, joined: Connection, tables: Tables, prices: Floats, chunks: Kinds
) -> tuple[Floats, Ints, Ints]:
    """Seconds to move what one variable produces to where another reads it.

    Labels with the same layout and state have the same row or column.

    Args:
        u: the producer.
        v: the reader.
        joined: how they are connected.
        tables: redistribution costs.
        prices: ``[4, 2 + 3 axes]``, see `BuildContext.move_prices`.
        chunks: kinds of collectives that chunks of products may hide.

    Returns:
        The table, the row of each label of the producer, and the column of each label of the reader.
    """
    # A layout, a row or a column of `READABLE` and `Variable.made` are digits of a number.
    known, base = tables.of(u.types[joined.out]), len(READABLE)
    count = base * len(known.layouts)
    rows, u_group = np.unique(count * u.made + base * u.ports[joined.out] + u.readable, return_inverse=True)
    columns, v_group = np.unique(count * v.made + base * v.ports[joined.into] + v.reads, return_inverse=True)
    (row_made, rows), (column_made, columns) = np.divmod(rows, count), np.divmod(columns, count)
    (row, readable), (column, reads) = np.divmod(rows, base), np.divmod(columns, base)
    # By `Variable.reads`: both passes move the value, and before the microbatches it is moved once per step.
    moves = joined.moves
    by_time = joined.weight * np.array([moves, moves, moves, 1])[:, None] * prices
    times = np.concatenate([by_time, by_time[[IN_FORWARD]]])[reads]
    table = known.priced(row, column, times, chunks)
    as_made = row_made[:, None] == column + 1
    table[as_made] = 0
    if column_made.any():
        told = known.sliced(column, row).T & (row[:, None] != column) & np.isin(row + 1, column_made)[:, None]
        table[(told & (column_made == 0)) | ((column_made > 0) & (column_made != row[:, None] + 1))] = np.inf
    freed = (readable == FORWARD_ONLY)[:, None]
    table[~READABLE[np.ix_(readable, reads)] & ~(as_made & freed)] = np.inf
    if v.alias_only:
        table[(table > 0) & (reads == IN_BOTH)] = np.inf
    return np.ascontiguousarray(table), u_group.astype(np.int64), v_group.astype(np.int64)
