"""fold_batched_products: products of a value and one matrix for all of a batch are products of two matrices.

Before (``x`` is ``[batch, rows, in]``, ``w`` ``[in, out]``: `torch.einsum`, or `torch.matmul` of a frozen weight)::

    y = aten.bmm(x, aten.expand(w, [batch, -1, -1]));  ...;  dw = aten.sum(aten.bmm(xt, dy), [0])

After::

    y = aten.reshape(aten.mm(aten.reshape(x, [batch * rows, in]), w), [batch, rows, out])
    ...;  dw = aten.mm(xt, aten.reshape(dy, [batch * rows, out]))                     # xt is [in, batch * rows]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import insert_call
from autopar.ir.node_info import info, set_info

aten = torch.ops.aten

_TURNED = [0, 2, 1]


def fold_batched_products(graph: fx.Graph) -> None:
    """Make matrix products of them, in place; those of two batches of matrices stay, as attention's are."""
    folded = _Folded(graph)
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            folded.fold(node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


@dataclass
class _Folded:
    """What has been folded so far.

    Attributes:
        graph: is changed in place.
        values: operands of products with one matrix, whose gradients' products with others are sums over the batch.
        known: nodes made, by what they are of and as what.
    """

    graph: fx.Graph
    values: set[fx.Node] = field(default_factory=set)
    known: dict[tuple[fx.Node, str], fx.Node] = field(default_factory=dict)

    def fold(self, node: fx.Node) -> None:
        """Make one product of two matrices of a batched one, if it is that."""
        a, b = node.args
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        batch, rows, columns = _shape(node)
        if (matrix := self._one_matrix(b, node)) is not None:
            self.values.add(_straight(a))
            self._become(node, (self._rows(a, node), matrix))
        elif (matrix := self._one_matrix(a, node)) is not None:
            self.values.add(_straight(b))
            made = self._product(node, (matrix, self._columns(b, node)))
            split = self._call(node, aten.reshape.default, made, [rows, batch, columns])
            node.target, node.args = aten.permute.default, (split, [1, 0, 2])
        elif self.values & {_straight(a), _straight(b)} and (total := _sum_over_batch(node)) is not None:
            made = self._product(node, (self._columns(a, node), self._rows(b, node)))
            total.target, total.args = aten.reshape.default, (made, list(_shape(total)))
            total.kwargs = {}

    def _become(self, node: fx.Node, operands: tuple[fx.Node, fx.Node]) -> None:
        made = self._product(node, operands)
        node.target, node.args = aten.reshape.default, (made, list(_shape(node)))

    def _product(self, node: fx.Node, operands: tuple[fx.Node, fx.Node]) -> fx.Node:
        made = self._call(node, aten.mm.default, *operands)
        # Its terms are added up in the dtype in which those of the batched product are.
        set_info(made, replace(info(made), reduce_dtype=info(node).reduce_dtype, saved=info(node).saved))
        return made

    def _one_matrix(self, operand: fx.Node, node: fx.Node) -> fx.Node | None:
        """The matrix ``[rows, columns]`` that an operand is, for all of the batch; None: there are several."""
        if (source := _turned(operand)) is not None:
            found = self._one_matrix(source, node)
            return None if found is None else self._known(source, "turned", node, aten.permute.default, found, [1, 0])
        if _shape(operand)[0] == 1:
            return self._known(operand, "matrix", node, aten.reshape.default, operand, list(_shape(operand)[1:]))
        if operand.target is not aten.expand.default:
            return None
        matrix = operand.args[0]
        assert isinstance(matrix, fx.Node)
        if _shape(matrix) == _shape(operand)[1:]:
            return matrix
        if _shape(matrix) != (1, *_shape(operand)[1:]):
            return None
        return self._known(operand, "matrix", node, aten.reshape.default, matrix, list(_shape(operand)[1:]))

    def _rows(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        """``[batch, rows, columns]`` as ``[batch * rows, columns]``."""
        if (source := _turned(operand)) is not None:
            return self._known(
                source, "turned columns", node, aten.permute.default, self._columns(source, node), [1, 0]
            )
        batch, rows, columns = _shape(operand)
        size = [batch * rows, columns]
        return self._known(operand, "rows", node, aten.reshape.default, operand, size)

    def _columns(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        """``[batch, rows, columns]`` as ``[rows, batch * columns]``."""
        if (source := _turned(operand)) is not None:
            return self._known(source, "turned rows", node, aten.permute.default, self._rows(source, node), [1, 0])
        first = self._known(operand, "rows first", node, aten.permute.default, operand, [1, 0, 2])
        batch, rows, columns = _shape(operand)
        return self._known(operand, "columns", node, aten.reshape.default, first, [rows, batch * columns])

    def _known(self, of: fx.Node, kind: str, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        if (of, kind) not in self.known:
            self.known[of, kind] = self._call(node, target, *args)
        return self.known[of, kind]

    def _call(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(node):
            made = insert_call(self.graph, node, target, *args)
        set_info(made, replace(info(made), saved=None))
        return made


def _turned(operand: fx.Node) -> fx.Node | None:
    """What an operand is the transpose of, matrix by matrix."""
    if operand.target is aten.permute.default and list(operand.args[1]) == _TURNED:  # type: ignore[arg-type]
        source = operand.args[0]
        assert isinstance(source, fx.Node)
        return source
    return None


def _straight(operand: fx.Node) -> fx.Node:
    return _turned(operand) or operand


def _sum_over_batch(node: fx.Node) -> fx.Node | None:
    """The sum over the batch that is all that a product is for."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.sum.dim_IntList or users[0].args[1] != [0]:
        return None
    return users[0]
