"""route_experts: tokens are sorted by expert where they are, so that a mixture of experts splits along its tokens.

Before (``ids``: experts of each token, flat)::

    e, order = aten.sort(ids); token = aten.floor_divide(order, k); rows = aten.index(x, [token])
    ends = aten.cumsum(aten.histc(e, 8, 0, 7), 0); h = aten._grouped_mm(rows, w, ends)
    inverse = aten.index_put(zeros, [order], aten.arange(pairs)); y = aten.index(h, [inverse])

After::

    e, order = autopar.sort_by_expert(ids, k, 8); rows = autopar.route(x, order, k)
    ends = autopar.group_ends(e, 8); h = aten._grouped_mm(rows, w, ends)
    y = autopar.collect(h, order, 1, pairs)

Operators of torch say where in the whole order a row is: to sort is to see all tokens of all devices. What is computed
row by row needs no such thing, see `autopar.ir.ops.routing`. Frameworks spell positions and counts in many ways, so
what an index or an end is, is not read off the graph: it is computed, for random experts of fewer tokens. A sort stays
as it is if anything else depends on its order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, insert_call, map_nodes
from autopar.ir.ops import routing
from autopar.ir.program import Program
from autopar.rules.routed import is_order_free
from autopar.sharding.dims import node_rule

aten = torch.ops.aten

MOST_PAIRS = 2**16
"""Pairs of a token and an expert; of a batch of more, fewer stand for them."""

FEWER = (5040, 70, 72, 60)
"""How many tokens stand for those of a batch, and for each of several dims of tokens: such as many ``k`` divide."""

DRAWS = 3
"""Of random experts."""

_GROUPED = {
    "aten._grouped_mm.default": 2, "transformers.grouped_mm_fallback.default": 2,
    "transformers.grouped_mm_fallback_backward.default": 2,
}  # fmt: skip
"""Products of groups of rows, and which of their arguments says where groups end."""

_SORTS = (aten.sort.default, aten.sort.stable)


def route_experts(program: Program) -> Program:
    """Sort pairs of a token and an expert by operators that say that any order by experts serves."""
    if not any(str(n.target) in _GROUPED for n in program.graph.graph.nodes):
        return program
    left_out: set[str] = set()
    while True:
        graph = copy_graph(program.graph)
        made = [s for n in list(graph.graph.nodes) if n.name not in left_out and (s := _route(graph.graph, n))]
        if not made:
            return program
        graph.graph.eliminate_dead_code()
        wrong = {name for name, sort in made if not is_order_free(graph.graph, node_rule, sort)}
        if not wrong:
            graph.graph.lint()
            graph.recompile()
            return replace(program, graph=graph)
        left_out |= wrong


def _route(graph: fx.Graph, sort: fx.Node) -> tuple[str, fx.Node] | None:
    """The name of a sort and what takes its place; None if it is none of experts."""
    if sort.target not in _SORTS:
        return None
    (key,) = sort.all_input_nodes
    value = key.meta["val"]
    if value.ndim != 1 or not value.numel():
        return None
    for ids in _chain(key):
        source = _source(ids)
        sizes = _fewer(source.meta["val"].shape) if value.numel() > MOST_PAIRS else {}
        if sizes is None:
            continue
        for count in _counts(graph):
            if -1 in _of_none(ids, count):  # whose rows come before those of the first expert
                continue
            draws = [_Draw(source, ids, sort, count, sizes, seed) for seed in range(DRAWS)]
            grouped = [n for n in graph.nodes if str(n.target) in _GROUPED and all(d.are_ends(_ends(n)) for d in draws)]
            if grouped:
                return sort.name, _rewrite(graph, sort, ids, count, grouped, list(_reads(graph, value.numel(), draws)))
    return None


def _chain(key: fx.Node) -> Iterator[fx.Node]:
    """What a sort's key may be computed of, with constants: experts of pairs are among these, or it sorts none.

    A key is the experts, a number as which they were cast, or one that says which of an expert's pairs comes first:
    ``ids * pairs + place``.
    """
    node, constants = key, _constants(key.graph)
    while node.meta["val"].numel() == key.meta["val"].numel():
        if not node.meta["val"].is_floating_point():
            yield node
        elif node.target is not aten._to_copy.default:
            return
        changing = [a for a in node.all_input_nodes if a not in constants]
        if len(changing) != 1 or not isinstance(changing[0].meta["val"], torch.Tensor):
            return
        node = changing[0]


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """What is the same in each call: made of numbers alone, and not drawn."""
    found = set[fx.Node]()
    for node in graph.nodes:
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "call_function" and not drawn and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _source(ids: fx.Node) -> fx.Node:
    """The experts of each token, token by token, of which experts in a row are a view."""
    source = ids
    while source.target in (aten.reshape.default, aten._to_copy.default, aten.permute.default):
        before = source.all_input_nodes[0]
        if source.target is aten.permute.default and before.meta["val"].shape[-1] >= source.meta["val"].shape[-1]:
            break
        source = before
    return source


_CHOICES = {
    aten.topk.default: 2, aten.max.dim: 1, aten.min.dim: 1, aten.sort.default: 1, aten.sort.stable: 2,
    aten.argmax.default: 1, aten.argmin.default: 1,
}  # fmt: skip
"""Operators that say where along a dim something is, and which argument is the dim."""

_PICKS = {
    aten.where.self: (1, 2), aten.masked_fill.Scalar: (0, 2), aten.masked_fill.Tensor: (0, 2),
    aten.scatter.value: (0, 3), aten.scatter.src: (0, 3), aten.index_put.default: (0, 2), aten.reshape.default: (0,),
    aten.permute.default: (0,), aten.expand.default: (0,), aten._to_copy.default: (0,), aten.slice.Tensor: (0,),
    aten.select.int: (0,), aten.gather.default: (0,), aten.index.Tensor: (0,), aten.masked_scatter.default: (0, 2),
}  # fmt: skip
"""Operators whose numbers are those of some arguments."""

Range = tuple[float, float]

_COMPUTED: dict[Any, Callable[[Range, Range], Sequence[float]]] = {
    aten.add.Tensor: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    aten.sub.Tensor: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    aten.rsub.Scalar: lambda a, b: (b[0] - a[1], b[1] - a[0]),
    aten.mul.Tensor: lambda a, b: [x * y for x in a for y in b],
    aten.minimum.default: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    aten.maximum.default: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}
_COMPUTED |= {
    aten.add.Scalar: _COMPUTED[aten.add.Tensor], aten.sub.Scalar: _COMPUTED[aten.sub.Tensor],
    aten.mul.Scalar: _COMPUTED[aten.mul.Tensor],
}  # fmt: skip


def _range(value: Any, steps: int = 12) -> Range | None:
    """The least and the largest number that integers may be, as far as it shows: of a choice, of dropped pairs."""
    if not isinstance(value, fx.Node):
        return (value, value) if isinstance(value, int) else None
    if not steps:
        return None
    args: Any = value.args
    given = args[0] if value.target is operator.getitem and args[1] == 1 else value
    if isinstance(given, fx.Node) and given.target in _CHOICES:
        at = _CHOICES[given.target]
        source: Any = given.args[0]
        dim = given.args[at] if len(given.args) > at else -1
        return (0, source.meta["val"].shape[dim] - 1) if isinstance(dim, int) else None
    made = value.meta.get("val")
    if not isinstance(made, torch.Tensor) or made.is_floating_point() or made.is_complex():
        return None
    if value.target is aten.full.default or value.target is aten.scalar_tensor.default:
        return _range(args[-1] if value.target is aten.full.default else args[0], steps - 1)
    if made.dtype == torch.bool:
        return (0, 1)
    if value.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
        bounds = (None, args[1]) if value.target is aten.clamp_max.default else (*args[1:], None)[:2]
        low, high = _range(args[0], steps - 1) or (-math.inf, math.inf)
        least, most = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
        return min(max(low, least), most), min(max(high, least), most)
    if value.target in _PICKS:
        ranges = [_range(args[i], steps - 1) for i in _PICKS[value.target] if i < len(args)]
    elif value.target in _COMPUTED and not value.kwargs:
        ranges = [_range(a, steps - 1) for a in args[:2]]
    else:
        return None
    known = [r for r in ranges if r is not None]
    if len(known) < len(ranges):
        return None
    numbers = _COMPUTED[value.target](*known) if value.target in _COMPUTED else [n for r in known for n in r]
    return min(numbers), max(numbers)


def _of_none(ids: fx.Node, count: int) -> list[int]:
    """Numbers of no expert that pairs may have: the one before the first, the one behind the last."""
    low, high = _range(_source(ids)) or (0, 0)
    return [-1] * (low < 0) + [count] * (high >= count)


def _ends(node: fx.Node) -> Any:
    at = _GROUPED[str(node.target)]
    return node.args[at] if len(node.args) > at else None


def _counts(graph: fx.Graph) -> list[int]:
    """How many experts there are: in all layers the same, or nearly."""
    ends = [e for n in graph.nodes if str(n.target) in _GROUPED and isinstance(e := _ends(n), fx.Node)]
    return list(dict.fromkeys(int(e.meta["val"].numel()) for e in ends))


def _fewer(shape: Sequence[int]) -> dict[int, int] | None:
    """A smaller size for each product of dims of experts, the last dim being those of a token; None: one has two."""
    *tokens, last = shape if len(shape) > 1 else (*shape, 1)
    small = [FEWER[0] if len(tokens) == 1 else FEWER[1 + i % 3] for i in range(len(tokens))] + [last]
    found: dict[int, int] = {}
    for i in range(len(tokens)):
        for j in range(i + 1, len(small) + 1):
            size, fewer = math.prod((*tokens, last)[i:j]), math.prod(small[i:j])
            if found.setdefault(size, fewer) != fewer or size == last:
                return None
    return found


class _Draw:
    """What integers are computed from experts of pairs, for random ones.

    Attributes:
        experts: of each pair, sorted.
        order: which pair is at each place.
    """

    def __init__(
        self, source: fx.Node, ids: fx.Node, sort: fx.Node, count: int, sizes: Mapping[int, int], seed: int
    ) -> None:
        """Draw experts for ``source``, of which ``ids`` is a view: the last has all tokens, or most and the first none.

        Sizes of the graph have others instead.
        """
        value, generator = source.meta["val"], torch.Generator().manual_seed(seed)
        self.sizes = sizes
        shape = [sizes.get(n, n) for n in value.shape]
        drawn = torch.randint(0, count, shape, generator=generator)
        # All, in the first draw: what bounds an expert's rows shows there.
        most = torch.rand(shape, generator=generator) < (0.5 if seed else 1.0)
        self.known: dict[fx.Node, Any] = {}
        drawn = torch.where(most | (drawn == 0), count - 1, drawn)
        for number in _of_none(ids, count):
            drawn = torch.where(torch.rand(shape, generator=generator) < 0.2, number, drawn)
        self.known[source] = drawn.to(value.dtype)
        pairs, found = self.of(ids), self.of(sort)
        self.order = torch.arange(0) if found is None else found[1]
        self.experts = self.order if found is None or pairs is None else pairs.flatten()[self.order]
        # Those of no expert come last.
        self.ends = torch.bincount(self.experts.long(), minlength=count)[:count].cumsum(0)
        self.sorts = bool(len(self.order)) and bool((self.experts.diff() >= 0).all())

    def of(self, node: Any) -> Any:
        """What a node gives; None if it depends on anything but the experts."""
        if not isinstance(node, fx.Node):
            return None
        pending = [node]  # no recursion: a model may have more layers than Python has frames
        while pending:
            missing = [a for a in pending[-1].all_input_nodes if a not in self.known]
            if missing and pending[-1] not in self.known:
                pending.append(missing[0])
                continue
            last = pending.pop()
            if last not in self.known:
                self.known[last] = self._computed(last)
        return self.known[node]

    def _computed(self, node: fx.Node) -> Any:
        # A draw has no numbers that are the same each time.
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        if any(self.of(a) is None for a in node.all_input_nodes):
            return None
        # What a larger number means, a bound of tokens say, few tokens do not show.
        numbers = [v for v in (*node.args, *node.kwargs.values()) if isinstance(v, int | float)]
        if self.sizes and any(abs(v) >= FEWER[0] and v not in self.sizes for v in numbers):
            return None
        sized = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._sized)
        args, kwargs = map_nodes(sized, self.of)
        target: Any = node.target
        try:
            return target(*args, **{k: "cpu" if k == "device" else v for k, v in kwargs.items()})
        except RuntimeError:  # another size was no number of tokens
            return None

    def _sized(self, value: Any) -> Any:
        return self.sizes.get(value, value) if type(value) is int else value

    def are_ends(self, node: Any) -> bool:
        """Whether a node says where the rows of each expert end, in the order of the sort."""
        found = self.of(node) if self.sorts else None
        return found is not None and found.shape == self.ends.shape and bool((found == self.ends).all())

    def kinds(self, index: Any, k: float) -> set[str]:
        """What an index may say: of each place its ``token``, ``choice`` or ``expert``, of each pair its ``place``.

        Args:
            index: into the rows of a table.
            k: pairs a row of it. A token's follow one another, or (``choice``) those of all tokens' first choices.
        """
        found = self.of(index)
        if found is None or found.ndim == 0 or found.shape[0] != len(self.order):
            return set()
        columns = found.reshape(len(found), -1)
        if not (columns == columns[:, :1]).all():
            return set()
        column, kinds = columns[:, 0], {"expert": bool((columns[:, 0] == self.experts).all())}
        kinds["token"] = k == int(k) and bool((column == self.order // max(int(k), 1)).all())
        tokens = len(self.order) // max(int(k), 1)  # of one alone, both orders are the same
        kinds["choice"] = 1 < k == int(k) and tokens > 1 and bool((column == self.order % tokens).all())
        kinds["place"] = k == 1 and bool((column[self.order] == torch.arange(len(column))).all())
        return {kind for kind, fits in kinds.items() if fits}


@dataclass(frozen=True)
class _Read:
    """A node that reads or writes rows by an index.

    Attributes:
        node: it.
        table: what has the rows.
        index: into them.
        values: what it writes; None: it reads.
        kind: of the index, see `_Draw.kinds`.
    """

    node: fx.Node
    table: fx.Node
    index: fx.Node
    values: fx.Node | None
    kind: str


def _reads(graph: fx.Graph, pairs: int, draws: Sequence[_Draw]) -> Iterator[_Read]:
    """The nodes that read or write rows in the order of a sort of so many pairs."""
    for node in graph.nodes:
        found = _index_of(node)
        if found is None or node.kwargs:
            continue
        table, index, values = found
        shape = table.meta["val"].shape
        rows = values if values is not None else node
        # Written twice without being added up, a row holds one of the two.
        if values is not None and not _adds(node) and pairs != shape[:1].numel():
            continue
        # Of few pairs an order may be its own inverse, in one draw: in none must it look like the other.
        kinds = [draw.kinds(index, pairs / int(shape[0])) for draw in draws] if len(shape) else [set[str]()]
        common = set.intersection(*kinds)
        whole = torch.Size((pairs, *shape[1:]))  # an index of another shape names a part of each row
        if len(common) == 1 and rows.meta["val"].shape == whole and index.meta["val"].shape in ((pairs,), whole):
            yield _Read(node, table, index, values, *common)


def _rewrite(
    graph: fx.Graph, sort: fx.Node, ids: fx.Node, count: int, grouped: list[fx.Node], reads: list[_Read]
) -> fx.Node:
    """Put our operators in the place of a sort by the experts of pairs, and of what depends on it."""
    (key,) = sort.all_input_nodes
    pairs = len(key.meta["val"])
    of_token = {r: pairs // len(r.table.meta["val"]) for r in reads}
    choices = max((of_token[r] for r in reads if r.kind == "choice"), default=1)
    k = max((of_token[r] for r in reads if r.kind in ("token", "choice")), default=1)
    with graph.inserting_before(sort):
        # A token's pairs then follow one another, so that a device has all of them.
        flat = ids if ids.meta["val"].ndim == 1 else insert_call(graph, sort, aten.reshape.default, ids, [pairs])
        flat = _transposed(graph, flat, choices)
        known = 0 if _of_none(ids, count) else count
        made = insert_call(graph, sort, routing.sort_by_expert, flat, k, known)
        experts, order = (insert_call(graph, sort, operator.getitem, made, i) for i in (0, 1))
        ends = insert_call(graph, sort, routing.group_ends, experts, count)
    for node in grouped:
        node.update_arg(_GROUPED[str(node.target)], ends)
    for read in reads:
        # Pairs are counted in one way: who counts them in another goes on to read positions, and is found by that.
        fits = {"choice": of_token[read] == choices, "token": choices == 1 or of_token[read] == 1}
        if fits.get(read.kind, True):
            _replace(graph, read, experts, order, choices)
    # What is left of the positions is read by who is right with any order, or by nobody.
    for user in list(sort.users):
        # Sorted keys that are no experts are those of the sort as it was: they do not fit rows in an order of ours.
        if user.args[1] == 1 or key is ids:
            user.replace_all_uses_with(order if user.args[1] == 1 else experts)
    return made


def _index_of(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """What a node reads or writes along the first dim by an index: the tensor, the index, and the values it writes."""
    args: Any = node.args
    if node.target is aten.index.Tensor and len(args[1]) == 1:
        return args[0], args[1][0], None
    if node.target is aten.index_put.default and len(args[1]) == 1:
        return args[0], args[1][0], args[2]
    if node.target in (aten.index_select.default, aten.gather.default) and args[1] == 0:
        return args[0], args[2], None
    if node.target in (aten.index_add.default, aten.index_copy.default) and args[1] == 0:
        return args[0], args[2], args[3]
    if node.target in (aten.scatter_add.default, aten.scatter.src) and args[1] == 0:
        return args[0], args[2], args[3]
    if node.target is aten.scatter_reduce.two and (args[1], args[4]) == (0, "sum"):
        return args[0], args[2], args[3]
    return None


def _adds(node: fx.Node) -> bool:
    """Whether what is written is added to what is there."""
    return node.target in (aten.index_add.default, aten.scatter_add.default, aten.scatter_reduce.two) or (
        node.target is aten.index_put.default and len(node.args) > 3 and bool(node.args[3])
    )


def _transposed(graph: fx.Graph, value: fx.Node, outer: int) -> fx.Node:
    """Pairs of an outer and an inner number, the inner ones first; a chain of views, or the value itself."""
    if outer == 1:
        return value
    pairs, *rest = value.meta["val"].shape
    parts = insert_call(graph, value, aten.reshape.default, value, [outer, pairs // outer, *rest])
    turned = insert_call(graph, value, aten.permute.default, parts, [1, 0, *range(2, 2 + len(rest))])
    return insert_call(graph, value, aten.reshape.default, turned, [pairs, *rest])


def _replace(graph: fx.Graph, read: _Read, experts: fx.Node, order: fx.Node, choices: int) -> None:
    """Make one of ours of a node; it keeps its name, module and line.

    The caller has pairs token by token, as ours have them, or choice by choice, with so many ``choices`` of a token.
    """
    node, table, values = read.node, read.table, read.values
    pairs = len(order.meta["val"])
    k = max(1, pairs // len(table.meta["val"]))
    zeros = table.target is aten.full.default and table.args[1] == 0
    if read.kind == "expert":
        # A table of experts is read by any operator; what is added to one is a sum over the rows.
        if zeros and _adds(node):
            node.target, node.args = routing.add_by_expert, (values, experts, len(table.meta["val"]))
        elif values is None and read.index.meta["val"].shape == experts.meta["val"].shape:
            node.replace_input_with(read.index, experts)  # which may come of counts alone
        return
    target = routing.collect if (read.kind == "place") == (values is None) else routing.route
    given = table if values is None else values
    turned = choices if k == 1 else 1
    with graph.inserting_before(node):
        if target is routing.route:
            made = insert_call(graph, node, target, _transposed(graph, given, turned), order, k)
        else:
            rows = insert_call(graph, node, target, given, order, k, pairs)
            made = rows if turned == 1 else _transposed(graph, rows, pairs // turned)
    if not _adds(node) or zeros:
        node.target, node.args = made.target, made.args
        graph.erase_node(made)
        return
    node.target, node.args = aten.add.Tensor, (table, made)
