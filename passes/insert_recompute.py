"""insert_recompute: what the plan does not save for the backward pass is recomputed there.

Before::

    relu = aten.relu(x); mm = aten.mm(relu, w); ...                                 # forward
    grad_w = aten.mm(relu_t, grad)                                                  # backward, from relu

After::

    relu = aten.relu(x); mm = aten.mm(relu, w); ...
    relu_recomputed = aten.relu(x); grad_w = aten.mm(relu_recomputed_t, grad)                 # x is saved instead

A copy runs right before the first operator that needs it, so that few tensors are live at a time. Values that are only
re-gathered, such as parameters, get an alias that belongs to the backward pass; with one for each user where they are
re-gathered per use, so that they are freed in between.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, is_backward, is_operator, map_nodes, producer
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws
from autopar.memory.recompute import Recompute

aten = torch.ops.aten


def insert_recompute(program: Program, plan: Plan) -> Program:
    """Copy operators into the backward pass; copies have the layouts of their originals."""
    del plan
    recompute: Recompute = graph_info(program.graph).recompute
    set_graph_info(program.graph, replace(graph_info(program.graph), recompute=None))
    if not recompute.values:
        return program
    graph = program.graph.graph
    copies = _Copies(graph, recompute)
    for node in list(graph.nodes):
        if node.op == "output":
            results = list(program.output_values[: program.forward_outputs])
            gradients = program.output_values[program.forward_outputs :]
            node.args = ([*results, *(v if v is None else copies.of(v, node) for v in gradients)],)
        elif is_operator(node) and is_backward(node):
            copies.rewire(node)
    # In reverse: an operator that only erased ones used goes, too. A draw stays, as it moves the generator on.
    for node in reversed(list(graph.nodes)):
        if producer(node)[0] in recompute.backward_only and not node.users and not draws(node):
            graph.erase_node(node)
    return program


class _Copies:
    """The copies made so far."""

    def __init__(self, graph: fx.Graph, recompute: Recompute) -> None:
        self.graph, self.recompute = graph, recompute
        self.made: dict[fx.Node, fx.Node] = {}

    def rewire(self, user: fx.Node) -> None:
        """Let an operator of the backward pass read copies."""
        # Cached: an operator that reads a value twice, such as x * x, gets one copy even where copies are per use.
        user.args, user.kwargs = map_nodes((user.args, user.kwargs), cache(lambda n: self.of(n, user)))

    def of(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """The copy of a node, made before ``user`` if there is none yet; the node itself where it is saved."""
        if producer(node) in self.recompute.per_use:
            with self.graph.inserting_before(user):
                return self._own(node)
        # A stack, not recursion: chains of recomputed operators are longer than Python's calls may be deep.
        pending = [node]
        while pending:
            last = pending[-1]
            missing = [n for n in self._needed(last) if n not in self.made]
            if missing:
                pending += missing
                continue
            pending.pop()
            if last not in self.made and self._repeated(last):
                with self.graph.inserting_before(user):
                    self.made[last] = self._copy(last)
        return self.made.get(node, node)

    def _repeated(self, node: fx.Node) -> bool:
        several = isinstance(node.meta.get("val"), tuple | list)  # its getitems have the values
        return node in self.recompute.nodes if several else producer(node) in self.recompute.values

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """Arguments of a node that are copied before it is."""
        source, _ = producer(node)
        if not self._repeated(node) or source not in self.recompute.nodes:
            return []
        # An output of several comes with its operator.
        if source is not node:
            return [source]
        return [n for n in source.all_input_nodes if self._repeated(n) and producer(n) not in self.recompute.per_use]

    def _own(self, node: fx.Node) -> fx.Node:
        """The copy for one user where copies are per use, else the copy that all users share."""
        return self._copy(node) if producer(node) in self.recompute.per_use else self.made.get(node, node)

    def _copy(self, node: fx.Node) -> fx.Node:
        source, index = producer(node)
        if source in self.recompute.nodes:
            copied = self.graph.node_copy(node, cache(self._own))
            copied.meta = dict(node.meta)
            set_info(copied, replace(info(node), recompute_of=node.name))
        else:
            copied = self._alias(node, index)
        # Of the backward pass: cut as a forward node, its result would be saved after all.
        copied.meta["partitioner_tag"] = "is_backward"
        set_info(copied, replace(info(copied), hoisted=False, hoisted_outputs=()))  # it is of one microbatch
        return copied

    def _alias(self, node: fx.Node, index: int) -> fx.Node:
        source, _ = producer(node)
        # An alias computes nothing: it is a node of the backward pass from which the moves of that pass start.
        alias = self.graph.call_function(aten.alias.default, (node,))
        inherit_origin(alias, node)
        known, layout = info(source), info(source).layout(index)
        consumer = {0: known.consumer_layouts[index]} if index in known.consumer_layouts else {}
        alias.meta["val"] = node.meta["val"]
        set_info(alias, replace(
            info(alias), types=(known.types[index],), layouts=(layout,), input_layouts=(layout,),
            consumer_layouts=consumer,
            forced=frozenset({0} if index in known.forced else ()),
            takes_as_made=True, internal=False, recompute_of=node.name,
        ))  # fmt: skip
        return alias
