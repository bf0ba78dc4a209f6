"""lower_operators: where a strategy needs other code than the operator's own, that code.

Before::

    embedding = aten.embedding(w, tokens)        # w [vocab{model}, hidden]: each device holds some rows

After::

    index = axis_index("model"); start = index * 64; local = tokens - start; ...
    rows = aten.embedding(w, where(outside, 0, local)); embedding = where(outside, 0, rows)     # +sum{model}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.ir.graph import inherit_origin, is_operator, map_nodes, producer
from autopar.ir.node_info import info, set_info, torch_meta
from autopar.ir.ops.collectives import Collective, axis_index, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.assignment import machine_of
from autopar.sharding.candidates import letter_parts, lowered_bytes, strategies
from autopar.sharding.dims import Operator
from autopar.sharding.redistribute import Machine


def lower_operators(program: Program, plan: Plan) -> Program:
    """Replace every operator that is split along a letter with a lowering."""
    machine = machine_of(plan)
    changed = False
    for node in list(program.graph.graph.nodes):
        if is_operator(node) and info(node).operator is not None:
            letters = lowered_letters(info(node).operator, info(node).strategy)
            lower = info(node).operator.rule.lower
            # Letters of one lowering may be split together, such as the batch and a spatial dim of a batch norm.
            if any(lower[c] is not lower[letters[0]] for c in letters):
                raise ValueError(f"node {node.name} is split along {letters}, each with other code; choose one of them")
            if letters:
                _lower(program.graph.graph, node, letters, machine)
                changed = True
    if changed:
        propagate(program, plan)
    return program


def lowered_letters(operator: Operator, names: tuple[str, ...]) -> list[str]:
    """Letters with a lowering that are split by one strategy name an axis."""
    by_name = {s.name: s for s in strategies(operator)}
    factors = [by_name[n].factor for n in names]
    return list(dict.fromkeys(f[0] for f in factors if f is not None and f[0] in operator.rule.lower))


@dataclass
class Context:
    """A lowering's view of the device that its code runs on, see `autopar.rules.rule.Lowering`."""

    graph: fx.Graph
    tracer: Any
    node: fx.Node
    letter: str
    axes: tuple[int, ...]
    machine: Machine
    reduced: int = 0

    @property
    def parts(self) -> int:
        """Devices that share the letter."""
        return math.prod(self.machine.sizes[a] for a in self.axes)

    def axis_index(self) -> Any:
        """This device's number among them: the first axis is the outermost."""
        index: Any = 0
        for a in self.axes:
            # A node, not a number: the graph is the same on every rank.
            here = fx.Proxy(self.graph.call_function(axis_index, (self.machine.names[a],)), self.tracer)
            index = here if a == self.axes[0] else index * self.machine.sizes[a] + here
        return index

    def global_size(self, letter: str) -> int:
        """Global size of a letter."""
        return math.prod(f.size for f in info(self.node).operator.letters[letter].factors)

    def local_size(self, letter: str) -> int:
        """Size of a letter on this device."""
        return self.global_size(letter) // letter_parts(info(self.node).strategy, letter, self.machine.sizes)

    def all_reduce(self, x: Any, op: str) -> Any:
        """Reduce over the devices that share the letter."""
        # In the order of `Lowering.all_reduces`, by which the cost counts them.
        letters, size = lowered_bytes(info(self.node).operator, self.letter)[self.reduced]
        size /= letter_parts(info(self.node).strategy, letters, self.machine.sizes)
        self.reduced += 1
        for a in self.axes:
            if self.machine.sizes[a] == 1:
                continue
            node = self.graph.call_function(c10d.all_reduce.default, (x.node, op, self.machine.names[a]))
            set_info(node, replace(info(node), collective=Collective("all_reduce", self.machine.names[a], size)))
            x = fx.Proxy(self.graph.call_function(c10d.wait_tensor.default, (node,)), self.tracer)
        return x


def _lower(graph: fx.Graph, node: fx.Node, letters: list[str], machine: Machine) -> None:
    operator: Operator = info(node).operator
    letter = letters[0]
    axes = tuple(a for a, name in enumerate(info(node).strategy) if name.partition(".")[0] in letters)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    # All nodes between this one and the operator are the lowering's.
    last = node.prev
    with graph.inserting_before(node):
        context = Context(graph, tracer, node, letter, axes, machine)
        args, kwargs = map_nodes((node.args, node.kwargs), lambda n: fx.Proxy(n, tracer))
        result = operator.rule.lower[letter].build(context, *args, **kwargs)
    made = last.next
    while made is not node:
        inherit_origin(made, node)
        made = made.next
    # The search has charged for the announced all-reduces: others would make its prediction wrong.
    if context.reduced != len(operator.rule.lower[letter].all_reduces):
        raise ValueError(f"the lowering of {node.target} along {letter} announced other all-reduces than it made")
    several = len(info(node).types) > 1
    if several and not isinstance(result, tuple):
        _replace(node, result.node)
        return
    for i, output in enumerate(result if several else (result,)):
        if output is not None:
            _stand_in(node, i, output.node, several=several)
    graph.erase_node(node)


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Let an operator with the same outputs as ``node`` stand in for it."""
    _describe(other, node)
    set_info(other, replace(info(other), consumer_layouts={}, internal=False))
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _describe(other: fx.Node, node: fx.Node) -> None:
    """Copy what is known of an operator to the node that stands in for it, but for what that itself computes."""
    own = info(other)
    other.meta.update(torch_meta(node, but=("val",)))
    set_info(other, replace(
        info(node), operator=own.operator, strategy=own.strategy, input_layouts=own.input_layouts,
        collective=own.collective, offloaded=own.offloaded,
    ))  # fmt: skip


def _stand_in(node: fx.Node, index: int, value: fx.Node, *, several: bool) -> None:
    """Let ``value`` be output ``index`` of ``node`` for all its users."""
    source, position = producer(value)
    # The notes of a node are of all its outputs; a second output could not have its own.
    if position:
        raise ValueError(f"the lowering of {node.target} returns output {position} of {source.target}, not the first")
    _describe(source, node)
    set_info(source, info(source).only(index))
    if not several:
        set_info(value, replace(info(value), offloaded=info(node).offloaded))
        node.replace_all_uses_with(value)
        return
    for user in [u for u in node.users if u.args[1] == index]:
        set_info(value, replace(info(value), offloaded=info(user).offloaded))
        user.replace_all_uses_with(value)
        user.graph.erase_node(user)
