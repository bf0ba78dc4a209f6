"""Where a rewritten graph multiplies what a collective has just gathered, or sums what a product has just made.

A move of a value may take several collectives along one axis, such as an exchange that makes the first dim the one that
is gathered. Here it is one collective of *units*, which are the blocks of the dims outside of the one that is split:
each of these is gathered into, or scattered from, rows that follow one another in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import is_backward
from autopar.ir.layout import Layout, Partial, Replicate, Split, local_dims
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.ir.program import draws
from autopar.sharding.chunks.products import PRODUCTS, others
from autopar.sharding.redistribute.move_seconds import PIECES
from autopar.sharding.redistribute.moves import Machine

aten = torch.ops.aten

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
"""What happens to rows along the axis, as collectives are called."""

_TARGETS = {
    c10d.all_gather_into_tensor.default: GATHER,
    c10d.reduce_scatter_tensor.default: SCATTER,
    c10d.all_reduce.default: REDUCE,
}

_CARRIES = frozenset({
    aten.reshape.default, aten.permute.default, aten.contiguous.default, c10d.wait_tensor.default,
    c10d.all_to_all_single.default,
})  # fmt: skip
"""What a move consists of beside the collective: its numbers stay as they are."""

_VIEWS = (aten.permute.default, aten.reshape.default)


@dataclass(frozen=True)
class Site:
    """Products and the collective of their rows.

    Attributes:
        kind: what happens to the rows.
        collective: the node that does it.
        moved: the nodes of the move, in order, the collective and its wait among them, and other collectives.
        source: the value before the move.
        value: the value after it.
        products: that read the gathered rows; or the one whose rows are summed.
        added: the sum of the product and something else, if it is that which is communicated; and the product's term.
        units: how many blocks of rows are communicated by themselves.
        parts: devices along the axis.
    """

    kind: str
    collective: fx.Node
    moved: tuple[fx.Node, ...]
    source: fx.Node
    value: fx.Node
    products: tuple[fx.Node, ...]
    units: int
    parts: int
    added: tuple[fx.Node, fx.Node] | None = None

    @property
    def replaced(self) -> frozenset[fx.Node]:
        """What its chunks stand for."""
        return frozenset({*self.moved, *self.products, *([] if self.kind == GATHER else [self.source])})

    @property
    def wait(self) -> fx.Node:
        """The wait for the collective."""
        return next(iter(self.collective.users))

    @property
    def rows(self) -> int:
        """Of the products on this device, where they are whole."""
        return int(self.products[0].meta["val"].shape[0])


def site_at(collective: fx.Node, machine: Machine, order: Mapping[fx.Node, int]) -> Site | None:
    """The site of a collective; None if it has no product, or its rows do not lie one after the other."""
    target: Any = collective.target
    kind, made = _TARGETS.get(target), info(collective).collective
    if kind is None or made is None or made.gradient or made.members != 1 or len(collective.users) != 1:
        return None
    if kind != GATHER and collective.args[1] != "sum":
        return None
    axis = machine.names.index(made.axis)
    for source, before in _sources(collective):
        for value, after in _values(collective):
            units = _units(kind, source, value, axis, machine)
            moved = (*before, collective, *after)
            if units and all(c.axis == made.axis for n in moved if (c := info(n).collective) is not None):
                site = Site(kind, collective, moved, source, value, (), units, machine.sizes[axis])
                return _with_products(site, order)
    return None


def in_the_way(site: Site, order: Mapping[fx.Node, int]) -> bool:
    """Whether something random is between, which must stay in its place: what reads a whole value later comes later."""
    ends = [order[n] for n in (*site.products, *site.moved)]
    node, last = site.collective, max(ends)
    while order[node] > min(ends):
        node = node.prev
    while order[node] < last:
        if draws(node):
            return True
        node = node.next
    return False


def _has_layout(node: fx.Node) -> bool:
    known = info(node)
    return len(known.layouts) == 1 and known.layouts[0] is not None and not known.internal and not known.open_size


def _sources(collective: fx.Node) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Values that the move may begin with, the furthest first, and the nodes between."""
    node, between, found = collective.all_input_nodes[0], tuple[fx.Node, ...](), []
    while True:
        if _has_layout(node):
            found.append((node, between))
        if node.target not in _CARRIES or not _same_move(node, collective) or len(node.users) != 1:
            return found[::-1]
        between, node = (node, *between), node.all_input_nodes[0]


def _values(collective: fx.Node) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Values that the move may end with, the furthest first, and the nodes up to them."""
    node, between, found = collective, tuple[fx.Node, ...](), []
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in _CARRIES or not _same_move(node, collective):
            break
        between = (*between, node)
        if _has_layout(node):
            found.append((node, between))
    return found[::-1]


def _same_move(node: fx.Node, collective: fx.Node) -> bool:
    name = info(node).moved_value
    return name is not None and name == info(collective).moved_value and node.op == "call_function"


def _units(kind: str, source: fx.Node, value: fx.Node, axis: int, machine: Machine) -> int:
    """Into how many blocks of rows the dims outside of the split one cut a value; 0 if the move is another one."""
    start, end = info(source).layout(), info(value).layout()
    if info(source).types != info(value).types or any(
        a != b for i, (a, b) in enumerate(zip(start, end, strict=True)) if i != axis
    ):
        return 0
    wanted = {GATHER: (Split, Replicate), SCATTER: (Partial, Split), REDUCE: (Partial, Replicate)}[kind]
    if (type(start[axis]), type(end[axis])) != wanted:
        return 0
    if kind == REDUCE:
        return PIECES
    return _outside(source, start if kind == GATHER else end, axis, machine)


def _outside(source: fx.Node, layout: Layout, axis: int, machine: Machine) -> int:
    """Local blocks outside of the factor that an axis splits; 0 if another axis splits it, too."""
    own = layout[axis]
    assert isinstance(own, Split)
    others = [p for i, p in enumerate(layout) if i != axis and machine.sizes[i] > 1 and isinstance(p, Split)]
    if any(type(p) is not Split or (p.dim, p.factor) == (own.dim, own.factor) for p in others):
        return 0
    type_ = info(source).type()
    sizes = [n for dim in local_dims(type_, layout, machine.sizes) for n in dim]
    return math.prod(sizes[: sum(len(dim) for dim in type_.dims[: own.dim]) + own.factor])


def _with_products(site: Site, order: Mapping[fx.Node, int]) -> Site | None:
    if site.kind == GATHER:
        site = replace(site, products=_readers(site, order))
    else:
        site = _with_maker(site, order)
    if not site.products:
        return None
    units = math.gcd(site.rows, site.units) if site.kind == REDUCE else site.units
    # Whole rows of the product, of each device in a unit.
    if units < 2 or site.rows % (units * (1 if site.kind == REDUCE else site.parts)):
        return None
    return replace(site, units=units)


def _with_maker(site: Site, order: Mapping[fx.Node, int]) -> Site:
    """The product whose terms are summed, and which nothing else reads."""
    whole = _behind_views(site.source)
    if whole.target in PRODUCTS and len(site.source.users) == 1 and _together(whole, site.collective):
        return replace(site, products=(whole,))
    if whole.target is not aten.add.Tensor or whole.kwargs or len(whole.all_input_nodes) != 2:
        return site
    # A residual, or the gradient through another product: of two products the later one.
    for term in sorted(whole.all_input_nodes, key=lambda n: -order[n]):
        (other,) = (n for n in whole.all_input_nodes if n is not term)
        product, value = _behind_views(term), whole.meta["val"]
        alike = all(n.meta["val"].shape == value.shape and n.meta["val"].dtype == value.dtype for n in (term, other))
        if product.target in PRODUCTS and alike and len(term.users) == 1 and _together(product, site.collective):
            return replace(site, products=(product,), added=(whole, term))
    return site


def _together(product: fx.Node, collective: fx.Node) -> bool:
    """Whether one graph of a step runs both."""
    same_pass = is_backward(product) is is_backward(collective)
    return same_pass and info(product).stage == info(collective).stage


def _behind_views(node: fx.Node) -> fx.Node:
    """What a value is a reshape of, where nothing else reads that."""
    while node.target is aten.reshape.default and len(node.all_input_nodes[0].users) == 1:
        node = node.all_input_nodes[0]
    return node


def _readers(site: Site, order: Mapping[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The products of gathered rows with matrices that are there by then."""
    views = [site.value, *(u for u in site.value.users if u.target is aten.reshape.default)]
    found: list[fx.Node] = []
    for view in views:
        for user in view.users:
            product = user.target in PRODUCTS and user.args[0] is view and view not in others(user)
            if product and _together(user, site.collective) and not (found and found[0].args[0] is not view):
                found.append(user)
    found.sort(key=lambda n: order[n])
    roots = {n: [list(views_of(operand))[-1] for operand in others(n)] for n in found}
    return tuple(
        n for n in found
        if all(order[r] < order[found[0]] and not _depends_on(r, site.value, order) for r in roots[n])
    )  # fmt: skip


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """An operand of a product, and what it is a view of, one after the other."""
    yield node
    while node.target in _VIEWS and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        yield node


def _depends_on(node: fx.Node, value: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether a node is computed from a value."""
    pending, seen = [node], {node}
    while pending:
        own = pending.pop()
        if own is value:
            return True
        # What comes before the value cannot be.
        more = [a for a in own.all_input_nodes if order[a] >= order[value] and a not in seen]
        seen.update(more)
        pending += more
    return False
