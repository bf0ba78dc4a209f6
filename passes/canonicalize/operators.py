"""canonicalize: one spelling for each operation, so that rules, fingerprints and the search see few operators.

Before::

    t = aten.t(w); a = aten._unsafe_view(mm, [4, 16, 64]); b = aten.view(a, [4, 16, -1, 16]); c = aten.detach(b)
    m = aten.mean.dim(x, [-1], True)

After::

    t = aten.permute(w, [1, 0]); b = aten.reshape(mm, [4, 16, 4, 16])
    s = aten.sum.dim_IntList(x, [2], True); m = aten.div.Scalar(s, 64)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from autopar.ir.graph import copy_graph, is_backward, is_operator, static_arguments, tensor_arguments
from autopar.ir.module_outputs import mark_viewed, pass_on
from autopar.ir.program import Program

aten = torch.ops.aten

_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int, aten._reshape_alias.default,
    aten.view_copy.default,
}  # fmt: skip
_IDENTITIES = {
    aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.clone.default,
    aten.contiguous.default, aten.detach_.default,
}  # fmt: skip
_DROPPED = {aten._assert_tensor_metadata.default}
_LIKE = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1}
# Memory that is not initialized is zero here: elements that are never written would otherwise differ from run to run.
_LIKE |= dict.fromkeys((aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default), 0)
_LIKE |= dict.fromkeys((aten.empty_strided.default, aten.empty_permuted.default, aten.new_empty_strided.default), 0)
_DIM_ARGUMENT = {
    aten.select.int: 1, aten.slice.Tensor: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2,
    aten.cat.default: 1, aten.gather.default: 1, aten.scatter.value: 1, aten.scatter.src: 1, aten._softmax.default: 1,
    aten._log_softmax.default: 1, aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2,
    aten.slice_backward.default: 2, aten.select_backward.default: 2, aten.cumsum.default: 1, aten.unbind.int: 1,
    aten.index_select.default: 1, aten.stack.default: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1,
    aten.amin.default: 1, aten.slice_scatter.default: 2, aten.select_scatter.default: 2,
}  # fmt: skip
_SHARED = {
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.scalar_tensor.default,
    aten.full.default,
}
_SHARED |= {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.slice.Tensor, aten.select.int}


def canonicalize(program: Program) -> Program:
    """Rewrite a captured program into canonical operators; computes the same."""
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        if node.op == "call_function":
            _rewrite(graph.graph, node)
    _merge_equal(graph.graph)
    # After merging: then a view and what it shows are each one node.
    mark_viewed(graph.graph)
    return program.with_graph(graph)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one node by its canonical form, in place."""
    if node.target in _DROPPED:
        graph.erase_node(node)
        return
    if not is_operator(node):
        return
    # First, since the forms compare and replace dims.
    _normalize_dims(node)
    for form in _FORMS:
        if form(graph, node):
            return


def _become(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Make a node another call; True, for a form that has been applied."""
    # In place: the node keeps its name, module and line.
    node.target, node.args, node.kwargs = target, args, kwargs or {}
    return True


def _forward(node: fx.Node, value: Any) -> bool:
    """Let all users of ``node`` use ``value`` instead; True, for a form that has been applied."""
    pass_on(node, value)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    return True


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _same_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


_NEUTRAL = {
    aten.mul.Tensor: 1, aten.mul.Scalar: 1, aten.div.Tensor: 1, aten.div.Scalar: 1, aten.pow.Tensor_Scalar: 1,
    aten.add.Tensor: 0, aten.add.Scalar: 0, aten.sub.Tensor: 0, aten.sub.Scalar: 0,
}  # fmt: skip
"""The second operand with which an operator changes nothing."""


def _identity(graph: fx.Graph, node: fx.Node) -> bool:
    """``clone``, ``detach``, ``x * 1``, ``x + 0``, ``x ** 1``, casts and expansions to what is there already."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target in _IDENTITIES:
        # A constant has a value only from here on: the tracer leaves none at get_attr nodes.
        if source.op == "get_attr":
            source.meta.setdefault("val", node.meta["val"])
        return isinstance(source.meta.get("val"), torch.Tensor) and _forward(node, source)
    if not _has_type_of(node, source):
        return False  # such as x * 1.0 of integers, which makes floating numbers
    if node.target in _NEUTRAL:
        other = node.args[1]
        plain = isinstance(other, int | float) and not isinstance(other, bool) and other == _NEUTRAL[node.target]
        return plain and not node.kwargs and _forward(node, source)
    return node.target in (aten._to_copy.default, aten.expand.default) and _forward(node, source)


def _has_type_of(node: fx.Node, source: fx.Node) -> bool:
    a, b = source.meta.get("val"), node.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_type(a, b)


def _as_view(graph: fx.Graph, node: fx.Node) -> bool:
    """Every view is a reshape with explicit sizes: a local block need not be contiguous."""
    if node.target not in _VIEWS:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    # A reshape of a reshape depends on the last shape alone.
    while source.target is aten.reshape.default:
        source = source.args[0]
        assert isinstance(source, fx.Node)
    shape = list(_value(node).shape)
    if shape == list(_value(source).shape):
        return _forward(node, source)
    return _become(node, aten.reshape.default, (source, shape))


def _as_permute(graph: fx.Graph, node: fx.Node) -> bool:
    """``t`` and ``transpose`` are permutations; permutations compose."""
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    order = _dim_order(node, _value(source).ndim)
    if source.target is aten.permute.default:
        source, inner = cast("tuple[fx.Node, list[int]]", source.args)
        order = [inner[d] for d in order]
    if order == sorted(order):
        return _forward(node, source)
    return _become(node, aten.permute.default, (source, order))


def _dim_order(node: fx.Node, ndim: int) -> list[int]:
    """The dims of a transposition's argument in the order of its result."""
    order = list(range(ndim))
    if not ndim:  # a scalar, whose dim 0 may be named all the same
        return order
    if node.target is aten.t.default:
        order.reverse()
    elif node.target is aten.transpose.int:
        a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    else:
        order = [int(d) % ndim for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    return order


def _as_sum(graph: fx.Graph, node: fx.Node) -> bool:
    """Sums name their dims; a mean is a sum divided by the *global* count."""
    target = node.target
    if target not in (aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.mean.default):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = _value(source)
    dims = list(range(value.ndim))
    if target in (aten.sum.dim_IntList, aten.mean.dim) and len(node.args) > 1 and node.args[1] and dims:
        dims = sorted(int(d) % value.ndim for d in node.args[1])  # type: ignore[union-attr,arg-type]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
    if target in (aten.sum.default, aten.sum.dim_IntList):
        return _become(node, aten.sum.dim_IntList, (source, dims, keep), kwargs)
    with graph.inserting_before(node):
        # On a shard the count would be the local one; as a number of its own it stays global.
        total = graph.call_function(aten.sum.dim_IntList, (source, dims, keep), kwargs)
    total.meta = dict(node.meta)
    return _become(node, aten.div.Scalar, (total, math.prod(value.shape[d] for d in dims)))


def _as_full(graph: fx.Graph, node: fx.Node) -> bool:
    """Constant tensors depend on no tensor."""
    if node.target in _LIKE:
        fill: Any = _LIKE[node.target]
    elif node.target in (aten.full_like.default, aten.new_full.default):
        fill = node.args[1] if node.target is aten.full_like.default else node.args[2]
    elif node.target in (aten.zeros.default, aten.ones.default):
        fill = 0 if node.target is aten.zeros.default else 1
    else:
        return False
    value = _value(node)
    options = {"dtype": value.dtype, "device": value.device}
    return _become(node, aten.full.default, (list(value.shape), fill), options)


def _as_slice(graph: fx.Graph, node: fx.Node) -> bool:
    """Slices have explicit bounds within the dim."""
    if node.target not in (aten.slice.Tensor, aten.slice_backward.default, aten.slice_scatter.default):
        return False
    first = 1 if node.target is aten.slice.Tensor else 2
    rest = list(node.args[first:])
    rest += [0, None, None, 1][len(rest) :]
    dim, start, end, step = cast(list[Any], rest)
    whole = _value(node.args[0] if node.target is aten.slice.Tensor else node)
    size = whole.shape[dim]
    begin, stop, stride = (*slice(start, end).indices(size)[:2], step or 1)
    # Of a scatter the slice that is written is the result, else the whole tensor.
    if (begin, stop, stride) == (0, size, 1):
        return _forward(node, node.args[1 if node.target is aten.slice_scatter.default else 0])
    return _become(node, node.target, (*node.args[:first], dim, begin, stop, stride))


def _as_cat(graph: fx.Graph, node: fx.Node) -> bool:
    """Empty tensors (a fresh key-value cache) vanish; a single one is the result."""
    if node.target is not aten.cat.default:
        return False
    parts = [p for p in node.args[0] if _value(p).numel()]  # type: ignore[union-attr]
    if len(parts) == 1 and _same_type(_value(parts[0]), _value(node)):
        return _forward(node, parts[0])
    return _become(node, aten.cat.default, (parts or node.args[0], *node.args[1:]))


def _as_repeat(graph: fx.Graph, node: fx.Node) -> bool:
    """``repeat`` expands a new dim before each: ``[a, b]`` to ``[2, a, 3, b]`` to ``[2a, 3b]``."""
    if node.target is not aten.repeat.default:
        return False
    source, counts = cast("tuple[fx.Node, list[int]]", node.args)
    value = _value(source)
    shape = [1] * (len(counts) - value.ndim) + list(value.shape)
    pairs = list(zip(counts, shape, strict=True))
    steps = {
        aten.reshape.default: [n for count, size in pairs for n in ((1, size) if count != 1 else (size,))],
        aten.expand.default: [n for count, size in pairs for n in ((count, size) if count != 1 else (size,))],
    }
    # Views of the source: only the last reshape copies.
    for target, sizes in steps.items() if any(count != 1 for count in counts) else ():
        with graph.inserting_before(node):
            source = graph.call_function(target, (source, sizes))
        value = value.reshape(sizes) if target is aten.reshape.default else value.expand(sizes)
        source.meta = {**node.meta, "val": value}
    _become(node, aten.view.default, (source, list(_value(node).shape)))
    return _as_view(graph, node)


def _as_copy(graph: fx.Graph, node: fx.Node) -> bool:
    """A ``copy`` over a whole tensor is what is copied."""
    if node.target is not aten.copy.default or not _same_type(_value(node.args[1]), _value(node)):
        return False
    return _forward(node, node.args[1])


def _as_conjugate(graph: fx.Graph, node: fx.Node) -> bool:
    """Conjugates are computed: a view that is marked as one lets some kernels down, and its copies have been dropped.

    That of a number, which autograd asks for where a tensor is multiplied with one, is a constant.
    """
    if node.target is not aten._conj.default:
        return False
    if isinstance(node.args[0], fx.Node):
        return _become(node, aten._conj_physical.default, (node.args[0],))
    options = {"dtype": _value(node).dtype, "device": _value(node).device}
    return _become(node, aten.full.default, ([], complex(node.args[0]).conjugate()), options)  # type: ignore[arg-type]


def _as_masked_fill(graph: fx.Graph, node: fx.Node) -> bool:
    """The gradient of ``where``, which is zero elsewhere, is linear in what comes in; ``where`` itself is not.

    So sums over samples may be made after it, as the gradient of a position bias needs in microbatches.
    """
    if node.target is not aten.where.self or not is_backward(node):
        return False
    mask, first, second = node.args
    for source, other, selects in ((first, second, True), (second, first, False)):
        if not (isinstance(source, fx.Node) and _is_zero(other) and _has_type_of(node, source)):
            continue
        if _value(mask).dtype is not torch.bool:
            return False
        if selects:  # `masked_fill` fills where the mask is true
            with graph.inserting_before(node):
                mask = graph.call_function(aten.logical_not.default, (mask,))
            mask.meta = {**node.meta, "val": _value(node.args[0]).logical_not()}
        return _become(node, aten.masked_fill.Scalar, (source, mask, 0))
    return False


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node) or value.target not in (aten.scalar_tensor.default, aten.full.default):
        return False
    fill = value.args[0 if value.target is aten.scalar_tensor.default else 1]
    return isinstance(fill, int | float) and fill == 0


def _without_saved(graph: fx.Graph, node: fx.Node) -> bool:
    """Batch norm's backward in evaluation takes no saved statistics, whose shape depends on the device."""
    if node.target is not aten.native_batch_norm_backward.default or node.args[7]:
        return False
    # Their rule would otherwise have two equations, one for CPUs and one for GPUs.
    node.args = (*node.args[:5], None, None, *node.args[7:])
    return True


_FORMS = (
    _identity, _as_view, _as_permute, _as_sum, _as_full, _as_slice, _as_cat, _as_repeat, _as_copy, _as_conjugate,
    _as_masked_fill, _without_saved,
)  # fmt: skip


def _normalize_dims(node: fx.Node) -> None:
    """Dim arguments count from the front."""
    position = _DIM_ARGUMENT.get(cast(Any, node.target))
    tensors = tensor_arguments(node)
    if position is None or position >= len(node.args) or not tensors:
        return
    ndim = _value(tensors[0]).ndim
    if node.target in (aten.slice_backward.default, aten.select_backward.default):
        ndim = _value(node).ndim
    if node.target is aten.stack.default:
        ndim += 1
    dim = node.args[position]
    if isinstance(dim, int):
        node.update_arg(position, dim % max(ndim, 1))
    elif isinstance(dim, list | tuple):
        node.update_arg(position, [int(d) % max(ndim, 1) for d in cast(list[int], dim)])


def _merge_equal(graph: fx.Graph) -> None:
    """Equal views, and equal masks and positions that depend on no input, are one node.

    What they need is then redistributed once for all their users.
    """
    seen: dict[Any, fx.Node] = {}
    constant: set[fx.Node] = set()
    for node in list(graph.nodes):
        if not is_operator(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue  # equal calls draw different numbers
        arguments = tuple(tensor_arguments(node))
        # Masks and positions are small as a graph and large as tensors: computed once, they are saved once.
        if node.target in _CREATION or (arguments and all(a in constant for a in arguments)):
            constant.add(node)
        elif node.target not in _SHARED:
            continue
        first = seen.setdefault((node.target, arguments, static_arguments(node)), node)
        if first is not node:
            pass_on(node, first)
            node.replace_all_uses_with(first)
            graph.erase_node(node)


_CREATION: set[Callable[..., Any]] = {aten.arange.default, aten.scalar_tensor.default, aten.full.default}
_CREATION |= {aten.arange.start, aten.arange.start_step}
