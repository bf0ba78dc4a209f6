"""look_up_by_group: rows that multiply a matrix of their own, looked up by expert, are sorted by expert instead.

Before (``ids``: experts of each pair of a token and an expert, flat; 2 pairs a token; transformers' ``batched_mm``)::

    rows = aten.reshape(aten.expand(aten.reshape(x, [32, 1, 8]), [32, 2, 8]), [64, 8, 1])
    w = aten.index(up, [ids]); h = aten.silu(aten.reshape(aten.bmm(w, rows), [64, 6]))
    ...; y = aten.sum(aten.reshape(made, [32, 2, 8]), [1])
    ...; dw = aten.index_put(zeros, [ids], aten.bmm(dh, rows_t), True)

After, which `autopar.ir.ops.routing` describes::

    e, order = autopar.sort_by_expert(ids, 2, 4); ends = autopar.group_ends(e, 4); rows = autopar.route(x, order, 2)
    h = aten.silu(autopar.multiply_by_expert(rows, aten.permute(up, [0, 2, 1]), ends))
    ...; y = autopar.collect(made, order, 2, 64)
    ...; dw = autopar.outer_by_expert(dh, rows, ends)

No matrix is copied for each pair, and devices split the experts. What is computed row by row between products is
computed of sorted rows. Experts of which rows have more than one vector each stay as they are, and so do those of whose
matrices, as they were looked up, something else is computed.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, insert_call, tensor_arguments
from autopar.ir.ops import routing
from autopar.ir.program import Program
from autopar.rules.routed import is_order_free
from autopar.sharding.dims import node_rule

aten = torch.ops.aten

_PUT = (aten.index_put.default, aten._unsafe_index_put.default)

_DIM_AT = {
    aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.slice.Tensor: 1, aten.cat.default: 1,
    aten.sum.dim_IntList: 1, aten.select.int: 1, aten._softmax.default: 1, aten._softmax_backward_data.default: 2,
    aten.slice_backward.default: 2, aten.select_backward.default: 2, aten.amax.default: 1,
}  # fmt: skip
"""Operators that leave rows apart where the dims that they name, by this argument, are others."""

_CHAIN = (aten.reshape.default, aten.permute.default, aten._to_copy.default)


def look_up_by_group(program: Program) -> Program:
    """Sort pairs of a token and an expert, in place of looking up a matrix for each; computes the same."""
    if not any(n.target is aten.index.Tensor and n.meta["val"].ndim > 2 for n in program.graph.graph.nodes):
        return program
    left_out = set[str]()
    while True:
        graph = copy_graph(program.graph)
        parameters = {n.name for n in program.inputs_of("parameter")}
        made = list[tuple[str, fx.Node]]()
        for ids, reads in _reads(graph.graph, parameters).items():
            if ids.name not in left_out and (found := _found(ids, reads)) is not None:
                made.append((ids.name, _Rewriting(graph.graph, found).run()))
        if not made:
            return program
        graph.graph.eliminate_dead_code()
        wrong = {name for name, sort in made if not is_order_free(graph.graph, node_rule, sort)}
        if not wrong:
            return program.with_graph(graph)
        left_out |= wrong


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _table(read: fx.Node) -> fx.Node:
    """What a lookup reads rows of."""
    args: Any = read.args
    table: fx.Node = args[0]
    return table


def _reads(graph: fx.Graph, parameters: set[str]) -> dict[fx.Node, list[fx.Node]]:
    """Reads of rows of tables by the same indices, by these; of matrices of a parameter at least once."""
    found, of_weights = defaultdict[fx.Node, list[fx.Node]](list), set[fx.Node]()
    for node in graph.nodes:
        args: Any = node.args
        if node.op == "placeholder" and node.name in parameters:
            of_weights.add(node)
        elif node.target in _CHAIN and args[0] in of_weights:
            of_weights.add(node)
        if node.target is aten.index.Tensor and len(args[1]) == 1 and isinstance(args[1][0], fx.Node):
            ids = args[1][0]
            if ids.meta["val"].dtype in (torch.int64, torch.int32) and ids.meta["val"].numel() > 1:
                found[ids].append(node)
    return {
        ids: reads for ids, reads in found.items()
        if any(_table(r) in of_weights and len(_shape(_table(r))) == 3 for r in reads)
    }  # fmt: skip


@dataclass(frozen=True)
class _Operand:
    """Matrices of pairs, ``[pairs, a, b]``, as a product takes them.

    Attributes:
        read: the lookup that they come from.
        turned: whether the last two dims of what was looked up are the other way round.
        dtype: that they have been cast to.
    """

    read: fx.Node
    turned: bool
    dtype: torch.dtype


@dataclass
class _Looked:
    """What looks up experts by the same indices.

    Attributes:
        ids: experts of pairs.
        count: of experts.
        pairs: how many there are.
        matrices: lookups of matrices.
        rows: those of vectors.
        products: of a vector and a matrix of each pair, with the matrix and whether it is the first operand.
        gradients: what adds up outer products of pairs by expert, with the product and whether it is turned.
        sums: what adds up rows by expert.
    """

    ids: fx.Node
    count: int
    pairs: int
    matrices: list[fx.Node] = field(default_factory=list)
    rows: list[fx.Node] = field(default_factory=list)
    products: dict[fx.Node, tuple[_Operand, bool]] = field(default_factory=dict)
    gradients: dict[fx.Node, tuple[fx.Node, bool]] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)


def _found(ids: fx.Node, reads: Sequence[fx.Node]) -> _Looked | None:
    """What looks up experts by some indices; None if anything but products of vectors reads the matrices."""
    counts = {_shape(_table(r))[0] for r in reads}
    if len(counts) != 1:
        return None
    found = _Looked(ids, counts.pop(), ids.meta["val"].numel())
    for read in reads:
        if len(_shape(_table(read))) != 3:
            # Of pairs in two dims vectors are looked up as before.
            found.rows += [read] * (len(_shape(ids)) == 1)
            continue
        found.matrices.append(read)
        if not _products(found, _Operand(read, False, read.meta["val"].dtype), read, None):
            return None
    for node in ids.users:
        if node.target in _PUT and not _gradient(found, node):
            return None
    return found if found.products else None


def _products(found: _Looked, operand: _Operand, value: fx.Node, lead: int | None) -> bool:
    """Whether all that reads some matrices multiplies each by a vector; notes these products."""
    lead = len(_shape(found.ids)) if lead is None else lead
    for user in value.users:
        if user.target is aten.bmm.default:
            first = user.args[0] is value
            other: Any = user.args[1 if first else 0]
            vector = _shape(other)[2 if first else 1] == 1
            if not vector or lead != 1 or user.args[0] is user.args[1] or _shape(value)[0] != found.pairs:
                return False
            found.products[user] = operand, first
            continue
        step = _step(user, value, lead)
        if step is None:
            return False
        after, turned = step
        ahead = replace(operand, turned=operand.turned != turned, dtype=user.meta["val"].dtype)
        if not _products(found, ahead, user, after):
            return False
    return True


def _step(node: fx.Node, value: fx.Node, lead: int) -> tuple[int, bool] | None:
    """Of a view or cast of matrices ``[..., a, b]``, how many dims are before these, and whether it turns them."""
    shape = _shape(node)
    if node.target is aten._to_copy.default:
        return lead, False
    if node.target is aten.reshape.default:
        fits = len(shape) > 2 and shape[-2:] == _shape(value)[-2:]
        return (len(shape) - 2, False) if fits else None
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        before = list(range(lead))
        if list(order) == [*before, lead + 1, lead]:
            return lead, True
    return None


def _gradient(found: _Looked, node: fx.Node) -> bool:
    """Whether a node adds up rows, or outer products, of pairs by expert; notes it."""
    args: Any = node.args
    table = args[0]
    adds = len(args) > 3 and bool(args[3]) and len(args[1]) == 1 and args[1][0] is found.ids
    zeros = table.target is aten.full.default and table.args[1] == 0
    if not adds or not zeros or _shape(table)[0] != found.count:
        return False
    if len(_shape(table)) != 3:
        found.sums += [node] * (len(_shape(found.ids)) == 1)
        return True
    value, turned = args[2], False
    while value.target is not aten.bmm.default:
        source = value.args[0] if value.args and isinstance(value.args[0], fx.Node) else None
        if source is None or value.target not in _CHAIN or len(_shape(source)) < 3:
            return False
        step = _step(value, source, len(_shape(source)) - 2)
        if step is None:
            return False
        value, turned = source, turned != step[1]
    if _shape(value)[0] != found.pairs or _shape(value.args[0])[2] != 1:
        return False
    found.gradients[node] = value, turned
    return True


class _Rewriting:
    """Puts products of sorted rows in the place of lookups."""

    def __init__(self, graph: fx.Graph, found: _Looked) -> None:
        """Of one set of indices."""
        self.graph, self.found = graph, found
        self.sorted = dict[fx.Node, fx.Node]()
        self.tokens = self._pairs_of_a_token()
        outer = [product for product, _ in found.gradients.values()]
        self.operands = {self._vector(p) for p in found.products} | {a for p in outer for a in p.all_input_nodes}
        self.operands |= {n.args[2] for n in found.sums}  # type: ignore[misc]
        self.inside = self._rows_inside()

    def _vector(self, product: fx.Node) -> fx.Node:
        _, first = self.found.products[product]
        return product.args[1 if first else 0]  # type: ignore[return-value]

    def _pairs_of_a_token(self) -> int:
        """How many pairs follow one another that are of one token, as far as it shows: of rows that are repeated."""
        for product in self.found.products:
            _, first = self.found.products[product]
            base = _repeated(product.args[1 if first else 0], self.found.pairs)
            if base is not None:
                return base[1]
        return 1

    def _rows_inside(self) -> set[fx.Node]:
        """What is computed of sorted rows: row by row, of what products and lookups make."""
        inside = {*self.found.products, *self.found.rows}
        leads = self._leads_to_products()
        wide = {a for o in self.operands for a in self._beside(o)}
        for node in self.graph.nodes:
            rows = _row_arguments(node, self.found.pairs) if node not in inside else None
            if rows is None or not any(a in inside for a in rows):
                continue
            rest = [a for a in rows if a not in inside and not self._is_narrow(a)]
            if node in leads or all(a in wide for a in rest):
                inside.add(node)
        return inside

    def _leads_to_products(self) -> set[fx.Node]:
        """What products take vectors from, row by row."""
        found, pending = set[fx.Node](), list(self.operands)
        while pending:
            node = pending.pop()
            rows = _row_arguments(node, self.found.pairs)
            if node not in found and rows is not None and node not in self.found.products:
                found.add(node)
                pending += rows
        return found

    def _is_narrow(self, value: fx.Node) -> bool:
        """Whether a row is one number."""
        return isinstance(value.meta["val"], torch.Tensor) and value.meta["val"].numel() == self.found.pairs

    def _beside(self, operand: fx.Node) -> list[fx.Node]:
        """The rows that a vector, not of sorted rows, is the product of with one number each."""
        while _is_view(operand, self.found.pairs) and _row_arguments(operand, self.found.pairs):
            operand = operand.args[0]  # type: ignore[assignment]
        rows = _row_arguments(operand, self.found.pairs) if operand.target is aten.mul.Tensor else None
        return [a for a in rows or () if not self._is_narrow(a)] if rows and len(rows) == 2 else []

    def run(self) -> fx.Node:
        """Rewrite the graph in place.

        Returns:
            the sort.
        """
        found, order = self.found, {n: i for i, n in enumerate(self.graph.nodes)}
        members = [*found.matrices, *found.rows, *found.products]
        first = min(members, key=order.__getitem__)
        with self.graph.inserting_before(first):
            ids = _within(self.graph, first, found)
            if len(_shape(ids)) > 1:
                ids = insert_call(self.graph, first, aten.reshape.default, ids, [found.pairs])
            sort = insert_call(self.graph, first, routing.sort_by_expert, ids, self.tokens, found.count)
            self.experts, self.order = (insert_call(self.graph, first, operator.getitem, sort, i) for i in (0, 1))
            self.ends = insert_call(self.graph, first, routing.group_ends, self.experts, found.count)
        gone = {*self.inside, *found.gradients, *found.sums}
        # In the graph's order: what one makes, later ones may read.
        for node in sorted(gone, key=order.__getitem__):
            with self.graph.inserting_before(node):
                if node in self.inside:
                    self.sorted[node] = self._made(node)
                elif node in found.gradients:
                    node.replace_all_uses_with(self._outer(node, *found.gradients[node]))
                else:
                    rows = self._flat(node.args[2], node)
                    made = insert_call(self.graph, node, routing.add_by_expert, rows, self.experts, found.count)
                    node.replace_all_uses_with(made)
        for node in sorted(self.inside, key=order.__getitem__):
            if isinstance(node.meta["val"], torch.Tensor):
                self._leave(node, gone)
        return sort

    def _made(self, node: fx.Node) -> fx.Node:
        """A node's rows, sorted."""
        found = self.found
        if node in found.products:
            return self._reshaped(self._product(node), node)
        if node in found.rows:
            (table, _) = node.args
            made = insert_call(self.graph, node, aten.index.Tensor, table, [self.experts])
            return self._reshaped(made, node)
        return self._like(node)

    def _like(self, node: fx.Node) -> fx.Node:
        """The same operator of sorted rows."""
        rows = _row_arguments(node, self.found.pairs) or []
        args: Any
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: self._of(a, node) if a in rows else a)
        if _is_view(node, self.found.pairs):
            return self._reshaped(args[0], node)
        return insert_call(self.graph, node, node.target, *args, **kwargs)

    def _reshaped(self, value: fx.Node, node: fx.Node, shape: Sequence[int] | None = None) -> fx.Node:
        """In a node's shape, or another one."""
        shape = _shape(node) if shape is None else tuple(shape)
        while value.target is aten.reshape.default:
            value = value.args[0]  # type: ignore[assignment]
        return value if _shape(value) == shape else insert_call(
            self.graph, node, aten.reshape.default, value, list(shape)
        )  # fmt: skip

    def _of(self, value: fx.Node, origin: fx.Node) -> fx.Node:
        """The sorted rows of a value."""
        if value not in self.sorted:
            rows = _row_arguments(value, self.found.pairs)
            if (base := _repeated(value, self.found.pairs)) is not None and base[1] == self.tokens > 1:
                source, k, rest = base
                tokens = self._reshaped(source, origin, [self.found.pairs // k, *rest])
                made = insert_call(self.graph, origin, routing.route, tokens, self.order, k)
                self.sorted[value] = self._reshaped(made, value)
            elif rows and _is_view(value, self.found.pairs):
                self.sorted[value] = self._reshaped(self._of(rows[0], origin), value)
            elif rows and self._beside(value):
                self.sorted[value] = self._like(value)
            else:
                made = insert_call(self.graph, origin, routing.route, value, self.order, 1)
                self.sorted[value] = made
        return self.sorted[value]

    def _flat(self, value: Any, origin: fx.Node) -> fx.Node:
        """Sorted rows ``[pairs, ...]`` of vectors."""
        width = math.prod(_shape(value)) // self.found.pairs
        return self._reshaped(self._of(value, origin), origin, [self.found.pairs, width])

    def _product(self, node: fx.Node) -> fx.Node:
        operand, first = self.found.products[node]
        rows, weight = self._flat(self._vector(node), node), _table(operand.read)
        if operand.dtype != operand.read.meta["val"].dtype:
            weight = insert_call(self.graph, node, aten._to_copy.default, weight, dtype=operand.dtype)
        # ``matrix @ vector`` is the vector times the transposed matrix.
        if operand.turned != first:
            weight = insert_call(self.graph, node, aten.permute.default, weight, [0, 2, 1])
        return insert_call(self.graph, node, routing.multiply_by_expert, rows, weight, self.ends)

    def _outer(self, node: fx.Node, outer: fx.Node, turned: bool) -> fx.Node:
        a, b = (self._flat(v, node) for v in outer.args)
        if turned:
            a, b = b, a
        made = insert_call(self.graph, node, routing.outer_by_expert, a, b, self.ends)
        if made.meta["val"].dtype != node.meta["val"].dtype:
            made = insert_call(self.graph, node, aten._to_copy.default, made, dtype=node.meta["val"].dtype)
        return made

    def _leave(self, node: fx.Node, gone: set[fx.Node]) -> None:
        """Give tokens, or pairs as they were, to those who read a value that is computed of sorted rows."""
        k, pairs = self.tokens, self.found.pairs
        made = self.sorted[node]
        others = [u for u in node.users if u not in gone and not self._is_in_outer(u)]
        for user in list(others):
            added = _adds_tokens(user, node, pairs, k) if k > 1 else None
            if added is None:
                continue
            for total, rest in added:
                with self.graph.inserting_before(total):
                    rows = self._reshaped(made, total, [pairs, *rest])
                    tokens = insert_call(self.graph, total, routing.collect, rows, self.order, k, pairs)
                    total.replace_all_uses_with(self._reshaped(tokens, total))
            others.remove(user)
        if others:
            at = min(others, key=_place)
            with self.graph.inserting_before(at):
                back = insert_call(self.graph, node, routing.collect, made, self.order, 1, pairs)
            for user in others:
                user.replace_input_with(node, back)

    def _is_in_outer(self, node: fx.Node) -> bool:
        """Whether a node leads to a gradient of matrices alone."""
        outer = {product for product, _ in self.found.gradients.values()}
        pending = [node]
        while pending:
            last = pending.pop()
            if last in outer:
                continue
            if last.target not in _CHAIN or not last.users:
                return False
            pending += last.users
        return True


def _place(node: fx.Node) -> Any:
    return node._sort_key


def _within(graph: fx.Graph, origin: fx.Node, found: _Looked) -> fx.Node:
    """Indices as numbers of experts: those of a lookup may count from the end, and are checked."""
    source = found.ids
    while source.target in (aten.reshape.default, aten._to_copy.default):
        source = source.args[0]  # type: ignore[assignment]
    args: Any = source.args
    if source.target is operator.getitem and args[1] == 1 and args[0].target is aten.topk.default:
        scores, dim = args[0].args[0], args[0].args[2] if len(args[0].args) > 2 else -1
        if _shape(scores)[dim] == found.count:
            return found.ids
    value = found.ids.meta["val"]
    numbers = insert_call(graph, origin, aten.arange.default, found.count, dtype=value.dtype, device=value.device)
    return insert_call(graph, origin, aten.index.Tensor, numbers, [found.ids])


def _repeated(value: Any, pairs: int) -> tuple[fx.Node, int, tuple[int, ...]] | None:
    """The tokens, their number of pairs and the shape of one, where rows repeat those of tokens."""
    if value.target is not aten.reshape.default or _shape(value)[0] != pairs:
        return None
    wide = value.args[0]
    if wide.target is not aten.expand.default or wide.args[0].target is not aten.reshape.default:
        return None
    shape, before = _shape(wide), _shape(wide.args[0])
    if len(shape) != len(before):
        return None
    changed = [d for d, (n, m) in enumerate(zip(shape, before, strict=True)) if n != m]
    if len(changed) != 1 or before[changed[0]] != 1:
        return None
    d = changed[0]
    tokens, k, rest = math.prod(shape[:d]), shape[d], shape[d + 1 :]
    return (wide.args[0].args[0], k, rest) if tokens * k == pairs else None


def _row_arguments(node: fx.Node, pairs: int) -> list[fx.Node] | None:
    """Arguments of whose rows an operator computes the same rows, one by one; None if it does anything else."""
    value: Any = node.meta.get("val")
    if node.op != "call_function":
        return None
    args: Any = node.args
    if node.target is operator.getitem:
        source = args[0]
        known = source.target in (aten.split.Tensor, aten.split_with_sizes.default)
        return [source] if known and _row_arguments(source, pairs) else None
    values = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(v, torch.Tensor) and v.ndim and v.shape[0] == pairs for v in values):
        return None
    tensors = tensor_arguments(node)
    rows = [a for a in tensors if isinstance(a.meta["val"], torch.Tensor) and _shape(a)[:1] == (pairs,)]
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default:
        # Others are broadcast along the rows.
        rows = [a for a in rows if len(_shape(a)) == value.ndim]
        others = [a for a in tensors if a not in rows]
        fits = all(len(_shape(a)) < value.ndim or _shape(a)[0] == 1 for a in others)
        return rows if rows and fits else None
    if rows != tensors or not rows:
        return None
    if node.target is aten.reshape.default:
        return rows
    if node.target is aten.permute.default:
        return rows if args[1][0] == 0 else None
    if node.target is aten.expand.default:
        return rows if len(_shape(rows[0])) == value.ndim else None
    if node.target in _DIM_AT:
        at = _DIM_AT[node.target]
        dims = args[at] if len(args) > at else 0
        dims = [dims] if isinstance(dims, int) else dims
        return rows if dims and 0 not in dims else None
    return None


def _is_view(node: fx.Node, pairs: int) -> bool:
    """Whether rows are those of the argument in another shape: vectors are, however they lie."""
    if node.target is aten.permute.default:
        return bool(max(_shape(node)[1:]) * pairs == node.meta["val"].numel())
    return node.target is aten.reshape.default


def _adds_tokens(user: fx.Node, node: fx.Node, pairs: int, k: int) -> list[tuple[fx.Node, tuple[int, ...]]] | None:
    """What adds up the pairs of each token, of a view of pairs, with the shape of one; None if others read the view."""
    if user.target is not aten.reshape.default:
        return None
    shape, found = _shape(user), list[tuple[fx.Node, tuple[int, ...]]]()
    for total in user.users:
        args: Any = total.args
        if total.target is not aten.sum.dim_IntList or len(args[1]) != 1 or total.kwargs:
            return None
        d = args[1][0]
        if shape[d] != k or math.prod(shape[: d + 1]) != pairs or total.meta["val"].dtype != node.meta["val"].dtype:
            return None
        found.append((total, shape[d + 1 :]))
    return found
