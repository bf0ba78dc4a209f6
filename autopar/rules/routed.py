"""Which values are in an order of each device's own: those of tokens that are sorted by expert, and what comes of them.

From `autopar.ir.ops.routing` on the order is handed down from row to row, by the rules of the operators in between, to
where tokens are collected or rows are added up. All must take rows of one order: a position says nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.ir.graph import Value, operators, producer, tensor_arguments
from autopar.ir.ops import routing
from autopar.rules.rule import Rule

aten = torch.ops.aten

_FILLED = (
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.zeros.default, aten.ones.default,
    aten.new_zeros.default, aten.new_ones.default, aten.zeros_like.default, aten.scalar_tensor.default,
)  # fmt: skip
"""Operators whose results do not change along any dim."""


class OrderError(AutoparError):
    """An operator reads rows by their position in an order that is no other tensor's."""


@dataclass(frozen=True)
class Order:
    """The order that a value is in.

    Attributes:
        sort: the operator that made it.
        dims: of the value that are in it; none of counts, which depend on it as a whole.
        itself: the value is the order: positions among a device's own tokens.
    """

    sort: fx.Node
    dims: frozenset[int]
    itself: bool = False


ROWS = frozenset({0})


def routed_values(
    read: Iterable[tuple[fx.Node, Sequence[Value]]],
    rule_of: Callable[[fx.Node], Rule],
    only: fx.Node | None = None,
) -> dict[Value, Order]:
    """The values that are in an order of each device's own.

    Args:
        read: operators in the graph's order, each with its tensor arguments.
        rule_of: gives the rule of one.
        only: the sort whose order counts; None: every one.

    Raises:
        OrderError: a value that is, is read beside one that is not, or by who tells positions apart.
    """
    found: dict[Value, Order] = {}
    for node, sources in read:
        if node.target is routing.sort_by_expert and only in (None, node):
            found |= {(node, i): Order(node, ROWS, itself=i == 1) for i in range(2)}
        elif any(source in found for source in sources):
            for i, order in _of_operator(node, rule_of(node), sources, found).items():
                found[node, i] = order
    return found


def is_order_free(graph: fx.Graph, rule_of: Callable[[fx.Node], Rule], sort: fx.Node) -> bool:
    """Whether nothing depends on the order that an operator makes, nor does the caller see it.

    Args:
        graph: with the operator.
        rule_of: gives the rule of one.
        sort: whose order it is.
    """
    read = ((n, tuple(producer(a) for a in tensor_arguments(n))) for n in operators(graph))
    try:
        found = routed_values(read, rule_of, sort)
    except OrderError:
        return False
    return not any(producer(value) in found for value in graph.output_node().all_input_nodes)


def _of_operator(node: fx.Node, rule: Rule, sources: Sequence[Value], found: Mapping[Value, Order]) -> dict[int, Order]:
    """The order of each output of an operator that reads some."""
    orders = [found.get(source) for source in sources]
    sorts = {order.sort for order in orders if order is not None}
    if len(sorts) > 1:
        raise OrderError(f"{node.name} reads rows of two orders")
    (sort,) = sorts
    if node.target is routing.route:
        _require(orders == [None, Order(sort, ROWS, itself=True)], node)
        return {0: Order(sort, ROWS)}
    if node.target is routing.collect:
        _require(orders == [Order(sort, ROWS), Order(sort, ROWS, itself=True)], node)
        return {}
    _require(not any(order.itself for order in orders if order is not None), node)
    if node.target is routing.group_ends:
        return {0: Order(sort, frozenset())}
    counted = {i for arguments in rule.counts.values() for i in arguments}
    letters = {c for i, o in enumerate(orders) if o is not None for d in o.dims for c in rule.inputs[i][d]}
    for i, (order, source) in enumerate(zip(orders, sources, strict=True)):
        if i in counted:
            # Ends of some rows, and rows of some ends.
            _require(order is not None and not order.dims and letters <= rule.counts.keys(), node)
            continue
        _require(order is None or order.dims, node)
        read = frozenset(d for d, dim in enumerate(rule.inputs[i]) if letters & set(dim))
        same = read == (order.dims if order is not None else frozenset())
        _require(same or (order is None and all(_is_alike(source[0], d) for d in read)), node)
    for letter in letters:
        unseen = letter not in rule.blocked and letter not in rule.lower and letter not in rule.keep
        _require(unseen and not rule.random, node)
    outputs = {}
    for i, dims in enumerate(rule.outputs):
        here = frozenset(d for d, dim in enumerate(dims or ()) if letters & set(dim))
        if here:
            outputs[i] = Order(sort, here)
        else:
            _require(dims is None or letters <= set(rule.reduce), node)
    return outputs


def _is_alike(node: fx.Node, dim: int) -> bool:
    """Whether a tensor does not change along a dim."""
    if node.target is aten.expand.default:
        (source,) = node.all_input_nodes
        at = dim - node.meta["val"].ndim + source.meta["val"].ndim
        return at < 0 or int(source.meta["val"].shape[at]) == 1
    return node.target in _FILLED


def _require(fine: bool | frozenset[int] | None, node: fx.Node) -> None:
    if not fine:
        raise OrderError(f"{node.name} ({node.target}) reads rows by their position")
