"""An emulated mesh: one process runs a rewritten graph for all ranks in lock step, without a process group."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.costs.collectives import wire_bytes
from autopar.errors import VerifyError
from autopar.ir.graph import map_nodes, user_line
from autopar.ir.node_info import graph_info, info
from autopar.ir.ops.balanced_attention import swap_blocks, swapped
from autopar.ir.ops.collectives import COALESCED, GROUP_ARGUMENT, IN_PLACE, axis_index, c10d
from autopar.ir.ops.exchange import block_sizes, exchange_rows
from autopar.ir.ops.random import generator_states, restore_generators
from autopar.ir.ops.rows import gather_rows_, reduce_rows_, scatter_rows_
from autopar.ir.ops.sequence.send_block import send_block, sent
from autopar.ir.program import Input, Output, Program
from autopar.ir.shards import coordinates
from autopar.passes.canonicalize.strides import canonicalize_strides
from autopar.passes.kernels.insert_contiguous import with_contiguous
from autopar.rules.strides import random_strides, with_strides

aten = torch.ops.aten

Group = list[int]

Observer = Callable[[fx.Node, list[Any]], None]
"""``observe(node, values)``: sees what a node has made on every rank."""


def emulate(
    program: Program,
    names: Sequence[str],
    sizes: Sequence[int],
    inputs: Sequence[Sequence[torch.Tensor]],
    observe: Observer | None = None,
    draw: random.Random | None = None,
) -> list[list[torch.Tensor | None]]:
    """Run a rewritten program on every rank of a mesh.

    Args:
        program: graph on local tensors, collectives named by mesh axis.
        names: of the mesh axes.
        sizes: of the mesh axes.
        inputs: ``inputs[i][rank]``, the local tensors of each placeholder.
        observe: called with every operator node and its values on all ranks, in order.
        draw: gives inputs and results of operators random strides; for a program that takes any
            (`autopar.passes.kernels.insert_contiguous.insert_contiguous_everywhere`). None: they keep their own.

    Returns:
        ``outputs[i][rank]``; None for an output that does not exist.

    Raises:
        RuntimeError: a node failed on some rank; names node and rank.
    """
    ranks = list(coordinates(sizes))
    groups = {name: _groups(ranks, axis) for axis, name in enumerate(names)}
    environment: dict[fx.Node, list[Any]] = dict(zip(program.placeholders, map(list, inputs), strict=True))
    if draw is not None:
        environment = {node: [_restrided(v, draw) for v in values] for node, values in environment.items()}
    # Values of all ranks are in one memory: each is freed after its last use.
    dead_after = _last_uses(program.graph.graph)
    with torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op == "get_attr":
                constant = getattr(program.graph, str(node.target))
                environment[node] = [constant] * len(ranks)
            elif node.op == "call_function":
                environment[node] = _run_node(node, environment, names, ranks, groups)
                if draw is not None and node.target not in _WITH_OWN_STRIDES:
                    environment[node] = [_restrided(v, draw) for v in environment[node]]
                if observe is not None:
                    observe(node, environment[node])
            for dead in dead_after.get(node, ()):
                del environment[dead]
    return [[None if v is None else environment[v][r] for r in range(len(ranks))] for v in program.output_values]


_WITH_OWN_STRIDES = (aten.contiguous.default, with_strides, operator.getitem)
"""Operators whose strides are asked for, and getitem, whose tuple has been given random strides already."""


def _restrided(value: Any, draw: random.Random) -> Any:
    """A tensor, or all of a tuple or list, with random strides."""
    if isinstance(value, tuple | list):
        return [_restrided(v, draw) for v in value]
    return random_strides(value, draw) if isinstance(value, torch.Tensor) else value


def as_program(graph: fx.GraphModule) -> Program:
    """A graph that is a part of a program's, as a program of its own."""
    (values,) = graph.graph.output_node().args
    outputs = tuple(Output("result", str(i)) for i in range(len(values)))  # type: ignore[arg-type]
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = tuple(Input("batch", str(i)) for i in range(len(placeholders)))
    return Program(graph, inputs, outputs, len(outputs), None)


def run_whole(
    program: Program, inputs: Sequence[torch.Tensor], observe: Observer | None = None
) -> list[torch.Tensor | None]:
    """Run a program on global tensors, as one device would, whatever their strides."""
    # A captured graph may have as_strided, which reads storage: copies for strides would change what it finds there.
    program = with_contiguous(canonicalize_strides(program))
    return [v[0] for v in emulate(program, (), (), [[x] for x in inputs], observe=observe)]


def _groups(ranks: list[tuple[int, ...]], axis: int) -> list[Group]:
    """Ranks that differ along one axis only, in order of their coordinate."""
    groups: dict[tuple[int, ...], Group] = {}
    for rank, c in enumerate(ranks):
        groups.setdefault((*c[:axis], *c[axis + 1 :]), []).append(rank)
    return list(groups.values())


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the nodes whose values are not needed after it."""
    dead_after: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        for argument in node.all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                dead_after.setdefault(node, []).append(argument)
    dead_after.pop(graph.output_node(), None)
    return dead_after


def _run_node(
    node: fx.Node,
    environment: dict[fx.Node, list[Any]],
    names: Sequence[str],
    ranks: list[tuple[int, ...]],
    groups: dict[str, list[Group]],
) -> list[Any]:
    """The value of a node on every rank; ``ranks`` has their coordinates."""
    target: Any = _OF_VALUES.get(node.target, node.target)
    argument: Any = node.args[0] if node.args else None
    if target is axis_index:
        axis = list(names).index(str(argument))
        return [c[axis] for c in ranks]
    # Collectives are complete when they return.
    if target is c10d.wait_tensor.default:
        return environment[argument]
    if target in GROUP_ARGUMENT:
        axis_name = str(node.args[GROUP_ARGUMENT[target]])
        if target in _SEVERAL:
            argument = node.args[: _SEVERAL[target]]
        given = environment[argument] if isinstance(argument, fx.Node) else _together(environment, argument)
        return _COLLECTIVES[target](node, given, groups[axis_name])
    results = []
    states = generator_states() if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) else {}
    for rank in range(len(ranks)):
        restore_generators(states)  # each rank has a generator of its own, in the same state
        here = {n: environment[n][rank] for n in node.all_input_nodes}
        args, kwargs = map_nodes((node.args, node.kwargs), here.__getitem__)
        try:
            results.append(target(*args, **kwargs))
        except Exception as e:
            _require_float64(node, target, args, kwargs, e)
            raise RuntimeError(f"node {node.name} ({target}) failed on rank {rank}: {e}") from e
    return results


def _require_float64(node: fx.Node, target: Any, args: Any, kwargs: Any, error: Exception) -> None:
    """Say so where an operator has a kernel for float32 that it has not for float64."""
    single = [
        torch.float32 if a is torch.float64 else a.float() if _is_double(a) else a for a in (*args, *kwargs.values())
    ]
    try:
        target(*single[: len(args)], **dict(zip(kwargs, single[len(args) :], strict=True)))
    except Exception:
        return
    raise VerifyError(
        f"{target} (node {node.name}, {user_line(node)}) has no kernel for float64, in which verify computes: {error}; "
        "verify the model without it (fake quantization off, say): training takes float32 there"
    ) from error


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _together(environment: dict[fx.Node, list[Any]], nodes: Sequence[fx.Node]) -> list[Sequence[Any]]:
    """The values of several nodes, by rank."""
    return list(zip(*(environment[n] for n in nodes), strict=True))


_OF_VALUES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
"""A captured graph has views that were possible on fake tensors, whose strides a kernel's results need not have."""


# The semantics of torch's functional collectives, which gather and scatter along dim 0.


def _all_reduce(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        stacked = torch.stack([values[r] for r in group])
        # A sum of integers or booleans would be int64.
        total = stacked.sum(0).to(stacked.dtype) if node.args[1] == "sum" else stacked.amax(0)
        for r in group:
            results[r] = total
    return results


def _all_gather(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        whole = torch.cat([values[r] for r in group])
        for r in group:
            results[r] = whole
    return results


def _reduce_scatter(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        total = torch.stack([values[r] for r in group]).sum(0).to(values[0].dtype)
        for r, part in zip(group, total.chunk(len(group)), strict=True):
            results[r] = part.contiguous()
    return results


def _all_to_all(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        parts = [values[r].chunk(len(group)) for r in group]
        for i, r in enumerate(group):
            results[r] = torch.cat([p[i] for p in parts])
    return results


def _exchange_rows(node: fx.Node, values: list[Any], groups: list[Group]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = [rows for rows, _ in values]
    for group in groups:
        blocks = [rows.split(block_sizes(rows, sizes, bool(node.args[2]))[0]) for rows, sizes in
                  (values[r] for r in group)]  # fmt: skip
        for i, r in enumerate(group):
            results[r] = torch.cat([b[i] for b in blocks])
    return results


def _swap_blocks(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        for r, blocks in zip(group, swapped([values[r] for r in group], bool(node.args[3])), strict=True):
            results[r] = blocks
    return results


def _send_block(node: fx.Node, values: list[torch.Tensor], groups: list[Group]) -> list[torch.Tensor]:
    results = list(values)
    for group in groups:
        for r, block in zip(group, sent([values[r] for r in group], str(node.args[3])), strict=True):
            results[r] = block.contiguous()
    return results


def _gather_rows(node: fx.Node, values: list[Any], groups: list[Group]) -> list[torch.Tensor]:
    return _written(node.args[2], values, _all_gather(node, [rows for _, rows in values], groups))


def _scatter_rows(node: fx.Node, values: list[Any], groups: list[Group]) -> list[torch.Tensor]:
    return _written(node.args[2], values, _reduce_scatter(node, [terms for _, terms in values], groups))


def _reduce_rows(node: fx.Node, values: list[Any], groups: list[Group]) -> list[torch.Tensor]:
    sums = [terms for _, terms in values]
    for group in groups:
        total = torch.stack([values[r][1] for r in group]).sum(0).to(sums[0].dtype)
        for r in group:
            sums[r] = total
    return _written(node.args[2], values, sums)


def _written(start: Any, values: list[Any], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each device has once rows are written into its tensor, which no other device has."""
    for (whole, _), own in zip(values, rows, strict=True):
        whole.narrow(0, start, len(own)).copy_(own)
    return [whole for whole, _ in values]


_COLLECTIVES: dict[Any, Callable[[fx.Node, list[Any], list[Group]], list[Any]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    exchange_rows: _exchange_rows,
    swap_blocks: _swap_blocks,
    send_block: _send_block,
    gather_rows_: _gather_rows,
    scatter_rows_: _scatter_rows,
    reduce_rows_: _reduce_rows,
}

_SEVERAL = {exchange_rows: 2, gather_rows_: 2, scatter_rows_: 2, reduce_rows_: 2}
"""How many tensors a collective takes, if more than one: which rows go where depends on what is counted."""


def _coalesced(single: Any) -> Any:
    """A collective of each tensor of a list."""

    def run(node: fx.Node, values: list[Any], groups: list[Group]) -> list[Any]:
        made = [single(node, list(tensors), groups) for tensors in zip(*values, strict=True)]
        return list(zip(*made, strict=True))

    return run


_COLLECTIVES |= {together: _coalesced(_COLLECTIVES[single]) for single, together in COALESCED.items()}


def _overwriting(copying: Any) -> Any:
    """A collective after which its arguments hold nothing: who reads one all the same gets a wrong result."""

    def run(node: fx.Node, values: list[Any], groups: list[Group]) -> list[Any]:
        # New memory for the results: devices may share tensors here that each has to itself on a mesh.
        made = copying(node, values, groups)
        for value in (v for given in values for v in (given if isinstance(given, list | tuple) else [given])):
            value.fill_(torch.nan) if value.is_floating_point() or value.is_complex() else value.bitwise_not_()
        return list(made)

    return run


_COLLECTIVES |= {in_place: _overwriting(_COLLECTIVES[copying]) for copying, in_place in IN_PLACE.items()}


def census(program: Program) -> dict[str, dict[str, tuple[int, float]]]:
    """Redistributions and bytes sent per device in a rewritten graph, by axis and kind of collective."""
    sizes = graph_info(program.graph).axes
    totals: dict[str, dict[str, tuple[int, float]]] = {}
    for node in program.graph.graph.nodes:
        collective = info(node).collective
        if collective is None:
            continue
        count, sent = totals.setdefault(collective.axis, {}).get(collective.kind, (0, 0.0))
        more = float(wire_bytes(collective.kind, collective.bytes, sizes[collective.axis]))
        # A bucket is one collective for several tensors: each of them counts.
        totals[collective.axis][collective.kind] = (count + collective.members, sent + more)
    return totals
