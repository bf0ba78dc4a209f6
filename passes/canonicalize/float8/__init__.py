"""float8_linear_layers: products of a value and a parameter, and those of their gradients, take float8 operands.

Before (``x`` is ``[tokens, in]``, ``w`` a parameter ``[out, in]``)::

    y = aten.mm(x, wt);  ...;  dx = aten.mm(dy, w);  dw = aten.mm(dyt, x)

After::

    sx = float8_scale(x, [0, 1], "e4m3");  x8 = float8_quantize(x, sx, "e4m3");  ...       # of w, and of dy as "e5m2"
    y = float8_product(x8, w8, sx, sw, "e4m3", "e4m3", dtype=bfloat16)
    dx = float8_product(dy8, w8t, sdy, sw, "e5m2", "e4m3", ...);  dw = float8_product(dy8t, x8t, sdy, sx, ...)

With delayed scaling the scales are of earlier steps, and what was largest in this one is returned for later ones::

    sx = float8_delayed_scale(history_of_w, 0, "e4m3");  ...
    return ..., float8_amax(x), float8_amax(w), float8_amax(dy), ...

A tensor is scaled and rounded once for all products that take it so. It runs on the canonical form, before plans: that
a sharded weight is gathered as bytes, after it has been rounded, is a layout like any other to the search.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.graph import copy_graph, dependent_on, insert_call, user_line
from autopar.ir.node_info import info, set_info
from autopar.ir.ops import float8
from autopar.ir.precision import BLOCKS, DELAYED, TENSORWISE, Float8
from autopar.ir.program import Program
from autopar.passes.canonicalize.float8.folded import fold_batched_products
from autopar.passes.canonicalize.float8.histories import Histories, with_histories

aten = torch.ops.aten

VALUES, GRADIENTS = "e4m3", "e5m2"
"""Formats of values and weights, and of gradients, which need a wider range."""

_VIEWS = {aten.permute.default, aten.reshape.default, aten._to_copy.default}

_PARTS = {
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    operator.getitem,
}  # fmt: skip
"""Through these, and through views, a parameter is the weight of linear layers, as of projections in one matrix."""

_WHOLES = {
    aten.add.Tensor, aten.cat.default, aten.stack.default, aten.slice_backward.default, aten.select_backward.default,
}  # fmt: skip
"""Through these, and through views, the gradient of a weight comes of products."""


@dataclass(frozen=True)
class _Operand:
    """An operand of a product: a matrix, or its transpose, in a format; ``row``: what of its layer it is."""

    matrix: fx.Node
    transposed: bool
    format: str
    row: int


class _Operands(NamedTuple):
    """The operands of a product, and the parameter that is its layer's weight, by name."""

    left: _Operand
    right: _Operand
    weight: str

    @property
    def each(self) -> tuple[_Operand, _Operand]:
        """Left and right."""
        return self.left, self.right


@dataclass
class _Rounded:
    """What has been rounded so far: bytes and scale of each matrix, by the dims that share a scale, and format.

    With delayed scaling ``histories`` has the row that each matrix is scaled by, in a product of a weight.
    """

    linear: Float8
    histories: Histories | None = None
    known: dict[Any, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    transposes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, operand: _Operand, weight: str, summed: int, product: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Bytes ``[rows, depth]`` and scale of an operand, ``depth`` being its dim ``summed``.

        Scales are ``[1, 1]`` or ``[rows, 1]``; of blocks ``[rows, depth / 32]``.
        """
        dim = 1 - summed if operand.transposed else summed
        if self.linear.scaling == BLOCKS:
            # Blocks lie along the last dim: they are of the transpose.
            matrix = operand.matrix if dim == 1 else self._transpose(operand.matrix, product)
            return self._rounded(matrix, (), operand.format, product)
        if self.histories is not None:
            values, scale = self._delayed(operand, weight, product, self.histories)
            return values if dim == 1 else self._transpose(values, product), scale
        dims = (0, 1) if self.linear.scaling == TENSORWISE else (dim,)
        values, scale = self._rounded(operand.matrix, dims, operand.format, product)
        # With what is summed over in the last dim.
        if dim == 1:
            return values, scale
        return self._transpose(values, product), scale if len(dims) > 1 else self._transpose(scale, product)

    def _rounded(
        self, matrix: fx.Node, dims: tuple[int, ...], format: str, product: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Bytes and scale of a matrix, the scale being of these dims, or of blocks where there are none."""
        key, graph = (matrix, dims, format), product.graph
        if key not in self.known:
            if dims:
                scale = _insert(graph, product, float8.scale, matrix, list(dims), format)
                values = _insert(graph, product, float8.quantize, matrix, scale, format)
            else:
                scale = _insert(graph, product, float8.block_scale, matrix, format)
                values = _insert(graph, product, float8.block_quantize, matrix, scale, format)
            self.known[key] = values, scale
        return self.known[key]

    def _delayed(
        self, operand: _Operand, weight: str, product: fx.Node, histories: Histories
    ) -> tuple[fx.Node, fx.Node]:
        """Bytes of a matrix and its scale by earlier steps."""
        name, row = histories.of[weight, operand.row]
        by, format, graph = (name, row), operand.format, product.graph
        if by not in self.known:
            scale = _insert(graph, product, float8.delayed_scale, histories.inputs[name], row, format)
            self.known[by] = scale, scale
        if (operand.matrix, by) not in self.known:
            scale = self.known[by][1]
            values = _insert(graph, product, float8.quantize, operand.matrix, scale, format, True)
            self.known[operand.matrix, by] = values, scale
        return self.known[operand.matrix, by]

    def _transpose(self, matrix: fx.Node, product: fx.Node) -> fx.Node:
        if matrix not in self.transposes:
            self.transposes[matrix] = _insert(product.graph, product, aten.permute.default, matrix, [1, 0])
        return self.transposes[matrix]


def float8_linear_layers(program: Program, linear: Float8) -> Program:
    """Round the operands of linear layers' products to float8.

    Args:
        program: canonical.
        linear: which layers, and how they are scaled.

    Raises:
        ValueError: there is no linear layer.
    """
    program = replace(program, graph=copy_graph(program.graph), float8=str(linear))
    fold_batched_products(program.graph.graph)
    products = _products(program, linear)
    if not products:
        but = f" beside those that exclude={linear.exclude} names" if linear.exclude else ""
        raise ValueError(
            f"precision with fp8: the model has no linear layer{but}, a product of a matrix of values and a parameter; "
            "leave fp8 out"
        )
    rounded = _Rounded(linear)
    if linear.scaling == DELAYED:
        ordered = [(n, products[n]) for n in program.graph.graph.nodes if n in products]
        program, histories = with_histories(
            program, [(p.weight, o.row, o.matrix, n) for n, p in ordered for o in p.each], linear.history
        )
        rounded = _Rounded(linear, histories)
    for node in program.graph.graph.nodes:
        if node in products:
            left, right, weight = products[node]
            _require_blocks(node, left, linear)
            # Of the left one columns are summed over, of the right one rows.
            (a, scale_a), (b, scale_b) = rounded.of(left, weight, 1, node), rounded.of(right, weight, 0, node)
            # In place: the node keeps its name, module, region, and the dtype in which its terms are added.
            node.args = (a, b, scale_a, scale_b, left.format, right.format, node.meta["val"].dtype)
            node.target = float8.block_product if linear.scaling == BLOCKS else float8.product
    return program.with_graph(program.graph)


def _require_blocks(product: fx.Node, left: _Operand, linear: Float8) -> None:
    """Refuse blocks that do not fill what a product sums over.

    Raises:
        ValueError: names the product and its sizes.
    """
    shape = left.matrix.meta["val"].shape
    depth = shape[0 if left.transposed else 1]
    if linear.scaling == BLOCKS and depth % float8.BLOCK:
        raise ValueError(
            f"precision with mxfp8: {product.name} ({user_line(product)}) sums over {depth} numbers, which are no "
            f"blocks of {float8.BLOCK}; exclude its layer (Float8), take another batch, or scale rowwise"
        )


def _insert(graph: fx.Graph, product: fx.Node, target: object, *args: object) -> fx.Node:
    with graph.inserting_before(product):
        node = insert_call(graph, product, target, *args)
    # What a region's policy says of products is not said of their operands.
    set_info(node, replace(info(node), saved=None))
    return node


def _products(program: Program, linear: Float8) -> dict[fx.Node, _Operands]:
    """The products of linear layers, with their operands."""
    parameters = {n: i.name for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "parameter"}
    outputs = zip(program.outputs, program.output_values, strict=True)
    terms = {o.name: set(_terms(v)) for o, v in outputs if o.kind == "gradient" and v is not None}
    from_tangents = _of_tangents(program)
    products = [n for n in program.graph.graph.nodes if n.target is aten.mm.default]
    matrices = {n: [_base(a) for a in n.args] for n in products if n.meta["val"].is_floating_point()}
    weights = {n: [w for m, _ in both if (w := _parameter(m, parameters))] for n, both in matrices.items()}
    gradients = {n: [m for m, _ in both if m in from_tangents] for n, both in matrices.items()}
    chosen: dict[fx.Node, str] = {}
    for weight, name in parameters.items():
        # Of a tied parameter the pattern may name any of its modules.
        names = [name, *(alias for alias, own in program.aliases.items() if own == name)]
        if any(fnmatchcase(n, pattern) for n in names for pattern in linear.exclude):
            continue
        layers = [n for n in matrices if weights[n] == [weight] and not gradients[n]]
        # A gradient that comes transposed, of ``w @ x.T``, is looked up as what it is the transpose of.
        results = {tuple(s) for n in layers for s in (n.meta["val"].shape, reversed(n.meta["val"].shape))}
        chosen |= dict.fromkeys(layers, name)
        for node, made in gradients.items():
            # Of the gradient of a layer's result, and not of what else is computed from the parameter.
            of_layer = len(made) == 1 and tuple(made[0].meta["val"].shape) in results
            of_weight = not weights[node] and node in terms.get(name, ())
            if of_layer and (weights[node] == [weight] or of_weight):
                chosen.setdefault(node, name)

    def operand(node: fx.Node, matrix: fx.Node, flipped: bool) -> _Operand:
        if matrix in gradients[node]:
            return _Operand(matrix, flipped, GRADIENTS, float8.GRADIENT)
        row = float8.WEIGHT if _parameter(matrix, parameters) else float8.INPUT
        return _Operand(matrix, flipped, VALUES, row)

    found = {}
    for node, name in chosen.items():
        left, right = (operand(node, *m) for m in matrices[node])
        found[node] = _Operands(left, right, name)
    return found


def _base(operand: object) -> tuple[fx.Node, bool]:
    """The matrix of which an operand is a view, and whether it is its transpose."""
    assert isinstance(operand, fx.Node)
    if operand.target is aten.permute.default:
        source = operand.args[0]
        assert isinstance(source, fx.Node)
        if source.meta["val"].ndim == 2:
            return source, True
    return operand, False


def _parameter(node: fx.Node, parameters: Container[fx.Node]) -> fx.Node | None:
    """The parameter that a matrix is, or is a part of, through views and casts; None: it is none."""
    while node.target in _VIEWS or node.target in _PARTS:
        node = node.args[0]  # type: ignore[assignment]
    return node if node in parameters else None


def _of_tangents(program: Program) -> set[fx.Node]:
    """What depends on the gradients of results: gradients."""
    return dependent_on(program.graph.graph, program.inputs_of("tangent"))


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """The products whose sum is a gradient, through views and casts."""
    pending = [gradient]
    while pending:
        node = pending.pop()
        if node.target is aten.mm.default:
            yield node
        elif node.target in _VIEWS or node.target in _WHOLES:
            pending += node.all_input_nodes
