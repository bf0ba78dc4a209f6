"""canonicalize_attention: the attention operators of single devices become one.

Capture makes that one of every `scaled_dot_product_attention`; these are in graphs of models that call them by name, or
that were traced without it.

Before::

    out, logsumexp, ..., seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True, scale=0.125)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(d, q, k, v, out, logsumexp, ..., seed, offset, ...)

After (heads of 64 elements)::

    kept = autopar.draw("dropout", [0.1, 4], [batch, heads, queries, keys], [0, 1, 2, 3], dtype=bool)
    out, logsumexp = autopar.attention(q, k, v, None, kept, 0.1, True, None)
    dq, dk, dv, _ = autopar.attention_backward(d, q, k, v, None, kept, out, logsumexp, 0.1, True, None, False)

Random numbers are other ones then, of the same distribution. An operator stays if others read its logarithms or its
random state.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor
from autopar.ir.graph import copy_graph, inherit_origin, map_nodes
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.attention_kernels import wide_dtype
from autopar.ir.ops.random import dropout_draw
from autopar.ir.program import Program

aten = torch.ops.aten

_BACKWARD = {
    getattr(aten, f"_scaled_dot_product_{name}").default: getattr(aten, f"_scaled_dot_product_{name}_backward").default
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
}
"""The operators of single devices, and their backwards."""


def canonicalize_attention(program: Program) -> Program:
    """Rewrite attention operators of single devices into ours, with their backwards; computes the same.

    A scale that is the default is left out.
    """
    if not any(n.target in (*_BACKWARD, attention, attention_backward) for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        if node.target in _BACKWARD:
            _rewrite(graph.graph, node)
    for node in graph.graph.nodes:
        if node.target in (attention, attention_backward):
            _leave_default_scale_out(node)
    graph.graph.lint()
    graph.recompile()
    return replace(program, graph=graph)


@dataclass(frozen=True)
class _Call:
    """A call's arguments by name, whatever the variant calls them."""

    named: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        schema: Any = node.target._schema  # type: ignore[union-attr]
        found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        found.update({a.name: v for a, v in zip(schema.arguments, node.args, strict=False)})
        return cls(found | dict(node.kwargs))

    @property
    def bias(self) -> Any:
        return self.named.get("attn_mask", self.named.get("attn_bias"))

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (*(self.named[name] for name in ("query", "key", "value")), self.bias)

    @property
    def numbers(self) -> tuple[Any, ...]:
        return tuple(self.named[name] for name in ("dropout_p", "is_causal", "scale"))


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    backward = _BACKWARD[node.target]
    users = {u: list(u.users) for u in node.users if u.target is operator.getitem}
    # The result is for all; what else there is, in its own form, for the backward alone.
    private = [user for output, readers in users.items() if output.args[1] != 0 for user in readers]
    if len(users) != len(node.users) or any(u.target is not backward for u in private):
        return
    call = _Call.of(node)
    kept = None
    if call.named["dropout_p"]:
        kept = _draw(graph, node, call)
    for user in dict.fromkeys(private):
        own = _Call.of(user)
        out = own.named["out"]
        (total,) = (u for u in users if u.args[1] == 1)
        wanted = bool(own.named.get("grad_input_mask", (False,) * 4)[3]) and own.bias is not None
        args = (user.args[0], *own.tensors, kept, out, total, *own.numbers, wanted)
        user.target, user.args, user.kwargs = attention_backward, args, {}
    node.target, node.args, node.kwargs = attention, (*call.tensors, kept, *call.numbers), {}
    for made in (node, *dict.fromkeys(private)):
        _refresh(made)
    for output in users:
        if not output.users:  # such as a random state
            graph.erase_node(output)


def _draw(graph: fx.Graph, node: fx.Node, call: _Call) -> fx.Node:
    query, key = (call.named[name].meta["val"] for name in ("query", "key"))
    shape = [*query.shape[:3], key.shape[2]]
    arguments = dropout_draw(call.named["dropout_p"], wide_dtype(query), shape)
    options = {"dtype": torch.bool, "device": query.device}
    with graph.inserting_before(node):
        kept = graph.call_function(torch.ops.autopar.draw.default, arguments, options)
    inherit_origin(kept, node)
    set_info(kept, replace(info(kept), internal=False))
    kept.meta["val"] = query.new_empty(shape, dtype=torch.bool)
    return kept


def _refresh(node: fx.Node) -> None:
    """Shapes of what the operator that a node has become gives."""
    args = map_nodes(node.args, lambda n: n.meta["val"])
    query = next(a for a in args if isinstance(a, torch.Tensor))
    target: Any = node.target
    with query.fake_mode if isinstance(query, FakeTensor) else nullcontext(), torch.no_grad():
        node.meta["val"] = target(*args)
    for user in node.users:
        index: Any = user.args[1]
        if index < len(node.meta["val"]):
            user.meta["val"] = node.meta["val"][index]


def _leave_default_scale_out(node: fx.Node) -> None:
    query, position = (0, 7) if node.target is attention else (1, 10)
    source: Any = node.args[query]
    given: Any = node.args[position]
    if given is not None and math.isclose(given, source.meta["val"].shape[3] ** -0.5, rel_tol=1e-12):
        node.update_arg(position, None)
