"""`Compiler`: what runs in the place of a local graph, with its regions compiled, and those that are alike once.

Before::

    a = mm(x, w); b = relu(a); c = all_reduce(b, "sum", "3"); d = wait_tensor(c); e = mul(d, 2); f = neg(e)

After, where ``region_0`` and ``region_1`` are compiled::

    b = region_0([x, w])[0]; c = all_reduce(b, "sum", "3"); d = wait_tensor(c); f = region_1([d])[0]
"""

from __future__ import annotations

import hashlib
import logging
import operator
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import BoxedCodeGen, LazyGraphModule, is_boxed
from autopar.ir.ops.random import generator_states, restore_generators
from autopar.runtime.compiled.backend import Backend
from autopar.runtime.compiled.regions import Region, regions_of

VARIANTS = 8
"""For how many strides of its inputs a region is compiled; for others its operators run one by one."""

PATIENCE = 2.0
"""Seconds of compilation after which a line says so, and then each time they have doubled."""

logger = logging.getLogger("autopar")


class CompiledRegion:
    """A region that is compiled when it first runs, for the strides that its inputs have then.

    Attributes:
        graph: its operators, a graph from a list of tensors to a tuple of tensors.
        compilations: how often it has been compiled.
    """

    def __init__(self, graph: fx.GraphModule, compiler: Compiler) -> None:
        self.graph, self.compilations = graph, 0
        self.__name__ = "region"  # in generated code
        self._compiler = compiler
        self._latest: tuple[list[Any], Callable[[list[Any]], Any]] | None = None
        self._known: dict[tuple[Any, ...], Callable[[list[Any]], Any]] = {}

    def __call__(self, values: list[torch.Tensor]) -> Any:
        """What the region returns; the list is emptied, so that each tensor is freed after its last use."""
        # Compiled code reads memory by the strides that it was compiled for: they are compared in every call.
        strides = [v.stride() for v in values]
        if self._latest is None or self._latest[0] != strides:
            self._latest = strides, self._for(tuple(strides), values)
        return self._latest[1](values)

    def _for(self, strides: tuple[Any, ...], values: list[torch.Tensor]) -> Callable[[list[Any]], Any]:
        if strides not in self._known:
            if len(self._known) >= VARIANTS:
                logger.warning("a region has been compiled for %d kinds of strides; others are not compiled", VARIANTS)
                return self.graph
            self.compilations += 1
            self._known[strides] = self._compiler.compile(self.graph, values)
        return self._known[strides]


@dataclass
class Compiler:
    """Compiles local graphs; one for all graphs of a model, whose regions it shares.

    Attributes:
        backend: compiles a region.
        speaks: whether this rank says how long it takes.
        regions: by what makes them alike.
        seconds: that compilations have taken.
    """

    backend: Backend
    speaks: bool = True
    regions: dict[str, CompiledRegion] = field(default_factory=dict)
    seconds: float = 0.0
    _said: float = PATIENCE
    _graphs: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    @property
    def compilations(self) -> int:
        """How many there have been."""
        return sum(r.compilations for r in self.regions.values())

    def executable(self, graph: fx.GraphModule, blocks: Collection[str]) -> fx.GraphModule:
        """The graph in which regions are single nodes; it is called as ``graph`` is."""
        if graph not in self._graphs:
            self._graphs[graph] = self._outer(graph, regions_of(graph.graph, blocks))
        return self._graphs[graph]

    def _outer(self, graph: fx.GraphModule, parts: list[fx.Node | Region]) -> fx.GraphModule:
        outer = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                known[node] = outer.node_copy(node, known.__getitem__)
        for part in parts:
            if isinstance(part, Region):
                self._call(outer, part, known)
            else:
                known[part] = outer.node_copy(part, known.__getitem__)
        outer.node_copy(graph.graph.output_node(), known.__getitem__)
        if is_boxed(graph.graph):
            outer.set_codegen(BoxedCodeGen())
        return LazyGraphModule(graph, outer)

    def _call(self, outer: fx.Graph, part: Region, known: dict[fx.Node, fx.Node]) -> None:
        """Nodes that call a region, and one for each of its results."""
        region = self._region(part)
        # A node of its own: after it the generated code lets go of what is used here last, and the region, which
        # empties the list, can free it before it returns.
        values = outer.call_function(_listed, tuple(known[a] for a in part.inputs))
        call = outer.create_node("call_function", region, (values,), name=_name(part))
        for number, output in enumerate(part.outputs):
            known[output] = outer.create_node("call_function", operator.getitem, (call, number), name=output.name)
            known[output].meta = dict(output.meta)
        for view in part.views:
            known[view] = outer.node_copy(view, known.__getitem__)

    def _region(self, part: Region) -> CompiledRegion:
        graph, text = _alone(part)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.regions:
            self.regions[key] = CompiledRegion(LazyGraphModule(torch.nn.Module(), graph), self)
        return self.regions[key]

    def compile(self, graph: fx.GraphModule, values: list[torch.Tensor]) -> Callable[[list[Any]], Any]:
        """Compile a region for such values; random generators stay as they are, whatever a compiler draws."""
        start, states = time.monotonic(), generator_states()
        try:
            with torch.no_grad():
                return self.backend(graph, [v.detach() for v in values])
        finally:
            restore_generators(states)
            self.seconds += time.monotonic() - start
            if self.speaks and self.seconds >= self._said:
                self._said = 2 * self.seconds
                logger.warning("compiling: %d regions so far, %.0f s", self.compilations, self.seconds)


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _name(part: Region) -> str:
    return f"region_{part.outputs[-1].name}"


def _alone(part: Region) -> tuple[fx.Graph, str]:
    """The graph of a region, which takes a list, and a text that is the same for those that are alike."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    lines: list[str] = []
    for node in (*part.inputs, *part.nodes):
        name = f"v{len(known)}"
        value: Any = node.meta.get("val")
        if node in part.inputs:
            known[node] = graph.placeholder(name)
            lines.append(f"{name}: {tuple(value.shape)} {value.dtype} {value.device}")
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = graph.create_node("call_function", node.target, args, kwargs, name)
            lines.append(f"{known[node].name} = {node.target}{args!r}{kwargs!r}")
        known[node].meta = {"val": value}
    graph.output(tuple(known[n] for n in part.outputs))
    graph.set_codegen(BoxedCodeGen())
    return graph, "\n".join([*lines, repr([known[n].name for n in part.outputs])])
