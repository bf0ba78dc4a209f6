"""fuse_cross_entropy: where only targets are read of the logarithm of a softmax, it is not made.

Before (``h`` in bfloat16)::

    x = aten._to_copy(h, dtype=float32); softmax = aten._log_softmax(x, 1, False)
    gather = aten.gather(softmax, 1, labels)
    s = aten.scatter(aten.full([rows, vocab], 0), 1, labels, -1.0); d = aten.mul(s, grad)
    dx = aten._log_softmax_backward_data(d, softmax, 1, float32); dh = aten._to_copy(dx, dtype=bfloat16)

After::

    picked, total = autopar.cross_entropy(h, labels, None); gather = aten.sub(picked, total)
    dh = autopar.cross_entropy_backward(aten.mul(grad, -1.0), h, labels, total, None, bfloat16)

Capture makes ``nll_loss`` gathers and scatters, whatever its reduction, weights or ignored labels: those stay as they
are, on a number a row. Who reads more of the softmax, such as label smoothing, keeps all of it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import computed, copy_graph, insert_call
from autopar.ir.ops.cross_entropy import cross_entropy, cross_entropy_backward
from autopar.ir.program import Program

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Gradient:
    """A backward of the softmax, of a gradient that is zero but at one class of each row.

    Attributes:
        node: the backward.
        target: that class.
        given: the gradient there, broadcast over the rows.
        factor: what it is multiplied by.
    """

    node: fx.Node
    target: fx.Node
    given: fx.Node
    factor: float


def fuse_cross_entropy(program: Program) -> Program:
    """Compute the logarithm of a softmax only where it is read, and its gradient from the logits."""
    if not any(n.target is aten._log_softmax.default for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        if node.target is aten._log_softmax.default:
            _fuse(graph.graph, node)
    return program.with_graph(graph)


def _fuse(graph: fx.Graph, softmax: fx.Node) -> None:
    """Fuse one softmax, if all that read it can do without."""
    last = _value(softmax).ndim - 1
    if last < 1 or softmax.args[1] != last or softmax.args[2]:
        return
    gathers = [u for u in softmax.users if _is_pick(u, softmax, last)]
    others = [u for u in softmax.users if u not in gathers]
    gradients = [g for u in others if (g := _gradient(u, softmax, last)) is not None]
    if len(gathers) != 1 or len(gradients) != len(others):
        return
    (gather,) = gathers
    with graph.inserting_before(gather):
        logits = _logits(graph, softmax)
        made = insert_call(graph, gather, cross_entropy, logits, gather.args[2], None)
        picked, total = (insert_call(graph, gather, operator.getitem, made, i) for i in (0, 1))
        found = insert_call(graph, gather, aten.sub.Tensor, picked, total)
    # In place: the node keeps its name, module and line. A softmax of 16 bits is rounded to these.
    gather.target, gather.args, gather.kwargs = aten._to_copy.default, (found,), {"dtype": _value(gather).dtype}
    if _value(found).dtype == _value(gather).dtype:
        gather.target, gather.args, gather.kwargs = aten.sub.Tensor, (picked, total), {}
        graph.erase_node(found)
    for gradient in gradients:
        _fuse_gradient(graph, gradient, logits, total)


def _is_pick(node: fx.Node, softmax: fx.Node, last: int) -> bool:
    """Whether a node reads one class of each row."""
    return node.target is aten.gather.default and node.args[:2] == (softmax, last) and _a_row(node.args[2], softmax)


def _a_row(node: Any, softmax: fx.Node) -> bool:
    """Whether a tensor has one number for each row."""
    return tuple(_value(node).shape) == (*_value(softmax).shape[:-1], 1)


def _gradient(node: fx.Node, softmax: fx.Node, last: int) -> _Gradient | None:
    """The backward that a node is; None if it is none, or of another gradient."""
    if node.target is not aten._log_softmax_backward_data.default or node.args[1] is not softmax:
        return None
    grad: Any = node.args[0]
    given: Any = None
    if grad.target is aten.mul.Tensor and all(isinstance(a, fx.Node) for a in grad.args):
        grad, given = grad.args if grad.args[0].target is aten.scatter.value else reversed(grad.args)
        shape = _value(given).shape
        if shape and shape[-1] != 1:
            return None
    if grad.target not in (aten.scatter.value, aten.scatter_add.default) or len(grad.args) != 4:
        return None
    into, dim, target, written = grad.args
    zeros = into.target is aten.full.default and into.args[1] == 0
    if not zeros or dim != last or _value(into).shape != _value(softmax).shape or not _a_row(target, softmax):
        return None
    if grad.target is aten.scatter.value:
        return None if given is None else _Gradient(node, target, given, float(written))
    return _Gradient(node, target, written, 1.0) if given is None and _a_row(written, softmax) else None


def _logits(graph: fx.Graph, softmax: fx.Node) -> fx.Node:
    """The softmax's argument before it was widened, in its shape."""
    source: Any = softmax.args[0]
    while source.target is aten.reshape.default:
        source = source.args[0]
    if not _casts(source, torch.float32) or _value(source.args[0]).dtype not in _HALF:
        return softmax.args[0]  # type: ignore[return-value]
    narrow: fx.Node = source.args[0]
    shape = list(_value(softmax).shape)
    if list(_value(narrow).shape) == shape:
        return narrow
    return insert_call(graph, softmax, aten.reshape.default, narrow, shape)


def _casts(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node casts to a dtype, and does nothing else."""
    if node.target is not aten._to_copy.default or not set(node.kwargs) <= {"dtype", "layout", "device", "pin_memory"}:
        return False
    before, after = _value(node.args[0]), _value(node)
    return after.dtype == dtype and after.device == before.device and after.layout == before.layout


def _fuse_gradient(graph: fx.Graph, gradient: _Gradient, logits: fx.Node, total: fx.Node) -> None:
    """Replace a backward by ours; what narrows its result to the dtype of the logits is part of it."""
    node, row = gradient.node, list(_value(total).shape)
    with graph.inserting_before(node):
        given = gradient.given
        if gradient.factor != 1.0:
            given = insert_call(graph, node, aten.mul.Scalar, given, gradient.factor)
        if list(_value(given).shape) != row:
            given = insert_call(graph, node, aten.expand.default, given, row)
    narrowed = node
    while len(narrowed.users) == 1 and (narrowed is node or narrowed.target is aten.reshape.default):
        narrowed = next(iter(narrowed.users))
    dtype = node.args[3]
    if _casts(narrowed, _value(logits).dtype):
        dtype = _value(logits).dtype
        # The cast becomes the only reshape, so that it keeps what is known of it.
        shape = list(_value(narrowed).shape)
        narrowed.target, narrowed.args, narrowed.kwargs = aten.reshape.default, (node, shape), {}
    node.target, node.args = cross_entropy_backward, (given, logits, gradient.target, total, None, dtype)
    node.meta["val"] = computed(node)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
