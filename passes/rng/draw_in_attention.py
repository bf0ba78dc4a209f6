"""draw_in_attention: on GPUs, attention kernels draw what dropout keeps by themselves, and no mask is in memory.

Before::

    kept = seeded(autopar.draw, 0, block, "dropout", [0.1, 4], [batch, heads, queries, keys], [0, 1, 2, 3], dtype=bool)
    out, logsumexp = autopar.attention(q, k, v, None, kept, 0.1, True, None)
    dq, dk, dv, _ = autopar.attention_backward(d, q, k, v, None, kept, out, logsumexp, 0.1, True, None, False)

After::

    out, logsumexp, seed, offset = seeded(autopar.attention_drawing, 0, block, q, k, v, None, 0.1, True, None)
    dq, dk, dv, _ = autopar.attention_drawing_backward(
        d, q, k, v, None, out, logsumexp, seed, offset, 0.1, True, None, False)

Only where all kernels of a draw take it as it is drawn: one that is redistributed in between stays a mask. Where all
devices draw the numbers of one device, it stays, too, unless there is one device: then the kernel draws what eager
PyTorch draws on a GPU.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.graph import inherit_origin
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.attention import KEPT, attention, attention_drawing, attention_drawing_backward
from autopar.ir.ops.random import draw, seeded
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.kernel_shapes import called
from autopar.rules.shapes.local_shapes import propagate

DRAW_ARGUMENTS = 4
"""Distribution, parameters, size, and order of the dims."""


def draw_in_attention(program: Program, plan: Plan) -> Program:
    """Give draws to the attention kernels that read them, where devices are GPUs."""
    if not plan.cluster.device.draws_dropout:
        return program
    graph = program.graph.graph
    draws: dict[str, list[fx.Node]] = defaultdict(list)
    alone = math.prod(plan.axis_sizes) == 1
    for node in graph.nodes:
        # From a seed, or all devices draw together what one would.
        if node.op == "call_function" and called(node) is draw and (alone or node.target is seeded):
            # Copies that the backward pass recomputes draw the same numbers.
            draws[info(node).recompute_of or node.name].append(node)
    changed = [nodes for nodes in draws.values() if _give(graph, nodes)]
    if changed:
        propagate(program, plan)
    return program


def _give(graph: fx.Graph, draws: Sequence[fx.Node]) -> bool:
    """Let kernels draw what one draw and its copies make; whether they all can."""
    readers = [user for node in draws for user in node.users]
    if not readers or any(u.target not in KEPT or u.args[KEPT[u.target]] not in draws for u in readers):
        return False
    users = set(readers)
    # Another kernel would draw other numbers: which one it is depends on these.
    if len({_decides(user) for user in users}) > 1:
        return False
    ordered = [n for n in graph.nodes if n in users]
    # The backward draws from the state that a forward before it began with.
    if ordered[0].target is not attention:
        return False
    state: tuple[fx.Node, ...] = ()
    for node in ordered:
        if node.target is attention:
            made = _forward(graph, node, node.args[KEPT[attention]])
            state = state or made
        else:
            _backward(node, state)
    for node in draws:
        graph.erase_node(node)
    return True


def _decides(node: fx.Node) -> tuple[Any, ...]:
    """What decides which kernel an attention is, besides shapes that follow from those of the draw."""
    bias, numbers = (node.args[3], node.args[5:8]) if node.target is attention else (node.args[4], node.args[8:11])
    return bias is None, *numbers


def _forward(graph: fx.Graph, node: fx.Node, drawn: Any) -> tuple[fx.Node, ...]:
    """Make an attention draw; what stands for its random state."""
    args = (*node.args[:4], *node.args[5:])
    if drawn.target is draw:
        node.target, node.args = attention_drawing, args
    else:
        # Drawn from a seed, or from a state: what comes before the draw's own arguments.
        before = drawn.args[1 : len(drawn.args) - DRAW_ARGUMENTS]
        node.target, node.args = drawn.target, (attention_drawing, *before, *args)
    known = info(node)
    # Of its random state, which is of this device, there is no layout.
    set_info(node, replace(
        known, operator=None, input_layouts=(), types=(*known.types, None, None), layouts=(*known.layouts, None, None),
    ))  # fmt: skip
    del node.meta["val"]
    made: list[fx.Node] = []
    for index in (2, 3):
        with graph.inserting_after(made[-1] if made else node):
            made.append(graph.call_function(operator.getitem, (node, index)))
        inherit_origin(made[-1], node)
    return tuple(made)


def _backward(node: fx.Node, state: tuple[fx.Node, ...]) -> None:
    node.target = attention_drawing_backward
    node.args = (*node.args[:5], *node.args[6:8], *state, *node.args[8:])
    set_info(node, replace(info(node), operator=None, input_layouts=()))
