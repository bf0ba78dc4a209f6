"""What is known of the strides that a graph's tensors have when it runs, and which of its kernels ask for others.

Strides in ``meta["val"]`` are what shape propagation thinks. They are known to be right of what certain operators
make: those that always lay out new memory row-major, whatever they are given; views of known tensors; and elementwise
operators on known ones, whose results have the strides of their arguments. Inputs are not known: a batch, a parameter
that is part of another, or one in channels-last order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload, storage_id
from autopar.errors import InvalidRuleError
from autopar.ir.graph import Value, map_nodes, producer, tensor_arguments, values_of
from autopar.ir.node_info import info
from autopar.ir.ops import attention, balanced_attention, cross_entropy, exchange, float8, routing
from autopar.ir.ops.collectives import COALESCED, IN_PLACE, c10d
from autopar.ir.ops.formula import attention_block, attention_rows
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.ops.random import replayed, seeded
from autopar.ir.ops.rows import WRITES_ROWS, new_rows
from autopar.ir.ops.sequence import masked_attention
from autopar.ir.ops.sequence.send_block import send_block
from autopar.ir.program import Program
from autopar.ir.quantized.operators import QUANTIZERS
from autopar.rules.rule import ANY, LAST, ROW_MAJOR, Rule, Spec, find_rule, required_strides
from autopar.rules.shapes.kernel_shapes import called, make, with_required_strides
from autopar.rules.strides import meets, with_strides

aten = torch.ops.aten

ROW_MAJOR_RESULTS = frozenset({
    aten.contiguous.default, aten.mm.default, aten.bmm.default, aten.embedding.default,
    aten.embedding_dense_backward.default, aten.sum.dim_IntList, aten.amax.default, aten.amin.default,
    aten.argmax.default, aten.argmin.default, aten._softmax.default, aten._log_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._fused_rms_norm.default, aten.cumsum.default, aten.gather.default,
    aten.index_select.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default,
    aten.select_backward.default, aten.slice_backward.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.stack.default, aten.topk.default, aten.tril.default, aten.triu.default, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    aten.eye.default, cross_entropy.cross_entropy, cross_entropy.cross_entropy_backward,
    float8.scale, float8.quantize, float8.product, float8.amax, float8.delayed_scale,
    float8.block_scale, float8.block_quantize, float8.block_product,
    routing.sort_by_expert, routing.route, routing.collect, routing.group_ends, routing.add_by_expert,
    routing.multiply_by_expert, routing.outer_by_expert,
    c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default, exchange.exchange_rows, exchange.own_rows, exchange.place_rows,
    balanced_attention.swap_blocks, send_block, new_rows,
    *COALESCED.values(), *QUANTIZERS,
})  # fmt: skip
"""Operators that make new memory, row-major, whatever the strides of their arguments; the oracle's tests show it."""

VIEWS = frozenset({
    aten.reshape.default, aten.view.default, aten.permute.default, aten.expand.default, aten.select.int,
    aten.slice.Tensor, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.alias.default, aten.detach.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.view_as_real.default, aten.view_as_complex.default, aten.diagonal.default, aten.unfold.default,
    c10d.wait_tensor.default, operator.getitem, *IN_PLACE.values(),
})  # fmt: skip
"""Operators that show their argument's memory, or copy what cannot be shown, which its strides decide."""

ELEMENTWISE = frozenset({aten.clone.default, aten._to_copy.default})
"""Operators whose results have the strides of their arguments, besides those with torch's tag."""

OTHERWISE = frozenset({
    aten.native_dropout_backward.default, aten.div.Tensor_mode, aten.pow.Scalar, aten.copysign.Tensor,
    aten.logit_backward.default, aten.rrelu_with_noise_backward.default,
})  # fmt: skip
"""Elementwise operators whose results have other strides than propagation says, seen by running them."""

LAST_RESULTS = frozenset({
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    attention.attention, attention.attention_drawing, masked_attention.attention_masked, attention_rows.attention_rows,
    attention_block.attention_block,
})  # fmt: skip
"""Attention, in whose output the last dim is contiguous, whatever the others."""

_CHANNELS_LAST = (4, 5)
"""Numbers of dims with which a tensor may be in channels-last order: of others a concatenation is row-major."""

_ATTENTION = frozenset({
    attention.attention, attention.attention_backward, attention.attention_drawing,
    attention.attention_drawing_backward,
    masked_attention.attention_masked, masked_attention.attention_masked_backward,
})  # fmt: skip
"""Our operators whose kernels ask for strides."""

_FREE = VIEWS | {aten.contiguous.default, aten.as_strided.default, aten.as_strided_scatter.default}
"""What takes any strides although it may have no rule; of raw captures, what reads memory as it is."""


def needs_of(node: fx.Node) -> tuple[str, ...]:
    """What a node's kernel asks of the strides of each of its tensor arguments."""
    target = called(node)
    if not isinstance(target, OpOverload) or target.namespace == "_c10d_functional":
        return ()
    if target.namespace == "autopar" and target not in _ATTENTION:
        return ()
    # What a pass inserted has no rule of the plan; its local call has one in the table.
    rule = info(node).operator.rule if info(node).operator is not None else local_rule(node, target)
    if rule is None and target in _FREE:
        return ()
    count = len(tensors_of(node))
    if rule is None:
        return (ROW_MAJOR,) * count
    needs = required_strides(target, rule)
    return (*(ANY,) * (count - len(needs)), *needs)  # a random operator may be told its generator's state first


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The arguments of a node of a rewritten graph that are tensors, and no numbers of this device."""
    return [a for a in tensor_arguments(node) if _tensor(a) is not None]


def _tensor(node: fx.Node) -> torch.Tensor | None:
    source, index = producer(node)
    return values_of(source)[index]


def local_rule(node: fx.Node, target: OpOverload) -> Rule | None:
    """The rule of a call that a pass has made; None if there is none."""
    function = find_rule(target)
    if function is None:
        return None
    # After the operator, a draw from a seed names it by two numbers, and one from a state takes that.
    before = 3 if node.target is seeded else 2 if node.target is replayed else 0
    args, kwargs = map_nodes((node.args[before:], node.kwargs), _spec)
    try:
        return function(*args, **kwargs)
    except (InvalidRuleError, TypeError, ValueError, IndexError, ArithmeticError):
        return None


def _spec(node: fx.Node) -> Any:
    value = _tensor(node)
    return node.meta.get("val") if value is None else Spec(tuple(int(n) for n in value.shape), value.dtype)


def known_strides(graph: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes whose results have the strides of ``meta["val"]`` when the graph runs."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            # Other constants count as unknown.
            known = isinstance(constant, torch.Tensor) and constant.is_contiguous()
        else:
            known = node.op == "call_function" and _is_known(node, found)
        if known:
            found.add(node)
    return frozenset(found)


def _is_known(node: fx.Node, known: Collection[fx.Node]) -> bool:
    if node.target in ROW_MAJOR_RESULTS:
        return _row_major(node)
    if node.target in WRITES_ROWS:
        return node.args[0] in known
    arguments = tensors_of(node)
    # Row-major values stay so on their way to host memory and back; of other strides nothing is promised.
    if node.target in (to_host, to_device):
        return arguments[0] in known and _row_major(arguments[0])
    if any(_crosses(a, node) and not _row_major(a) for a in arguments):
        return False  # what is sent arrives row-major
    if node.target in VIEWS or (node.target is aten.cat.default and node.meta["val"].ndim in _CHANNELS_LAST):
        return all(a in known for a in arguments)
    if node.target is aten.cat.default:
        return True
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in ELEMENTWISE
    if not elementwise or node.target in OTHERWISE:
        return False
    return all(a in known or _is_line(a) for a in arguments)


def _row_major(node: fx.Node) -> bool:
    return all(v is None or v.is_contiguous() for v in values_of(node))


def _crosses(value: fx.Node, user: fx.Node) -> bool:
    """Whether a value goes from one stage of a pipeline to another."""
    return info(value).stage is not None and info(value).stage != info(user).stage


def _is_line(node: fx.Node) -> bool:
    """Whether a tensor has one dim at most: its stride does not decide those of what is computed from it."""
    return all(v is None or sum(n != 1 for n in v.shape) <= 1 for v in values_of(node))


def has_strides(node: fx.Node, need: str, known: Collection[fx.Node] | None) -> bool:
    """Whether a value is known to have the strides that a kernel asks for; none is where ``known`` is None."""
    if node.target is with_strides and node.args[1] == need:
        return True
    if known is None:
        return False
    # Of outputs with heads in any order the last dim is known all the same.
    if need == LAST and node.target is operator.getitem:
        source, index = node.args
        if index == 0 and isinstance(source, fx.Node) and called(source) in LAST_RESULTS:
            return True
    value = node.meta["val"]
    return node in known and isinstance(value, torch.Tensor) and meets(value, need)


@dataclass(frozen=True)
class LikelyCopies:
    """What will most likely be copied for its strides: this is judged on whole tensors, while graphs run on shards.

    Attributes:
        arguments: numbers of the tensor arguments of an operator that it or a copy before it lays out anew.
        moves: copies besides its own that a redistribution of a value makes, since collectives want, and make,
            row-major tensors: one before it where the value is laid out otherwise, and one after it where a view
            reads it that can show only those other strides.
    """

    arguments: Mapping[fx.Node, tuple[int, ...]]
    moves: Mapping[Value, int]


def likely_copies(program: Program) -> LikelyCopies:
    """The copies on one device; inputs are taken to be row-major.

    Args:
        program: canonical program; its strides in ``meta["val"]`` are not used, as they are those of the capture.
    """
    # Remembered: every candidate plan asks, and a program does not change.
    key = "likely_copies"
    if key not in program.memo:
        program.memo[key] = _likely_copies(program)
    found: LikelyCopies = program.memo[key]
    return found


def _likely_copies(program: Program) -> LikelyCopies:
    arguments: dict[fx.Node, tuple[int, ...]] = {}
    moves: dict[Value, int] = {}
    values: dict[fx.Node, Any] = {}
    for node in program.graph.graph.nodes:
        if node.op == "output":
            continue
        values[node] = _value(node, values)
        if node in program.sources:
            pairs = zip(tensors_of(node), needs_of(node), strict=False)
            copied = tuple(i for i, (a, need) in enumerate(pairs) if not meets(values[a], need))
            copied = (0,) if _copies(node, values) else copied
            if copied:
                arguments[node] = copied
    for node, value in values.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            moves[producer(node)] = 1 + _read_otherwise(node, values)
    return LikelyCopies(arguments, moves)


def _copies(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a view has to copy."""
    source = values[node.all_input_nodes[0]] if node.target in VIEWS else None
    # What one of several outputs is taken from is no tensor.
    if not isinstance(source, torch.Tensor) or not isinstance(values[node], torch.Tensor):
        return False
    return storage_id(values[node]) != storage_id(source)


def _read_otherwise(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a view of a value, or of its views, copies if the value is row-major, and does not as it is."""
    row_major = {node: torch.empty(values[node].shape, dtype=values[node].dtype, device="meta")}
    pending = [node]
    for value in pending:
        for user in value.users:
            if user.target in VIEWS and len(user.all_input_nodes) == 1 and not _copies(user, values):
                row_major[user] = _value(user, row_major)
                if _copies(user, row_major):
                    return True
                pending.append(user)
    return False


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """A node's tensors on the meta device."""
    if node.op == "call_function":
        args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        target: Any = node.target
        try:
            with torch.no_grad():
                rule = local_rule(node, target)
                args, kwargs = with_required_strides(target, rule, args, kwargs) if rule else (args, kwargs)
                return make(target, args, kwargs)
        except Exception:  # a kernel that has no shapes of its own, such as a user's
            pass
    made = [None if v is None else torch.empty(v.shape, dtype=v.dtype, device="meta") for v in values_of(node)]
    return made if isinstance(node.meta.get("val"), tuple | list) else made[0]
