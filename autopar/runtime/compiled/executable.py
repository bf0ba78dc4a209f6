"""`Executables`: what runs in the place of local graphs, with regions of them as single calls, shared where alike.

Before::

    a = mm(x, w); b = relu(a); c = all_reduce(b, "sum", "3"); d = wait_tensor(c); e = mul(d, 2); f = neg(e)

After, with two regions::

    b = region_b([x, w])[0]; c = all_reduce(b, "sum", "3"); d = wait_tensor(c); f = region_f([d])[0]
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from autopar._torch_compat import BoxedCodeGen, LazyGraphModule, forget_source_with, is_boxed
from autopar.runtime.compiled.regions import Region

Runs = TypeVar("Runs", bound=Callable[..., Any])


@dataclass
class Executables(ABC, Generic[Runs]):
    """Makes what runs in the place of local graphs; one for all graphs of a model, whose regions it shares.

    Attributes:
        regions: by what makes them alike; they live as long as a graph that calls them.
    """

    regions: weakref.WeakValueDictionary[str, Runs] = field(default_factory=weakref.WeakValueDictionary, init=False)
    _graphs: weakref.WeakKeyDictionary[fx.GraphModule, Callable[..., Any]] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )

    @abstractmethod
    def parts(self, graph: fx.Graph, blocks: Collection[str]) -> list[fx.Node | Region]:
        """Nodes and regions of a graph in the order in which they run, without placeholders and the output node.

        Args:
            graph: on local tensors.
            blocks: names of the model's repeated modules.
        """

    @abstractmethod
    def region(self, graph: fx.GraphModule, boxed: int | None) -> Runs:
        """What runs a region: a function of a list of its first inputs, which it empties, and of the others.

        Args:
            graph: of the region; it takes all inputs in one list.
            boxed: how many inputs come in the list; None: there is no list.
        """

    def boxed(self, part: Region, dying: list[fx.Node]) -> list[fx.Node] | None:
        """The inputs of a region that it is given in a list, so that it can free each after its last use; or no list.

        Args:
            part: the region.
            dying: inputs that nothing uses after it, and nobody else holds.
        """
        return part.inputs

    def executable(self, graph: fx.GraphModule, blocks: Collection[str]) -> Callable[..., Any]:
        """What runs in the place of a graph; it is called as that is."""
        if graph not in self._graphs:
            outer = self.outer(graph, blocks)
            forget_source_with(outer)
            self._graphs[graph] = self.called(outer)
        return self._graphs[graph]

    def called(self, outer: fx.GraphModule) -> Callable[..., Any]:
        """What is called, given the graph in which regions are single nodes."""
        return outer

    def outer(self, graph: fx.GraphModule, blocks: Collection[str]) -> fx.GraphModule:
        """The graph in which regions are single nodes."""
        parts, outer = self.parts(graph.graph, blocks), fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                known[node] = outer.node_copy(node, known.__getitem__)
        for part in parts:
            if isinstance(part, Region):
                inside, kept = set(part.nodes), () if is_boxed(graph.graph) else ("placeholder",)
                dying = [a for a in part.inputs if a.op not in kept and all(u in known or u in inside for u in a.users)]
                self._call(outer, part, known, self.boxed(part, dying))
            else:
                known[part] = outer.node_copy(part, known.__getitem__)
        outer.node_copy(graph.graph.output_node(), known.__getitem__)
        if is_boxed(graph.graph):
            outer.set_codegen(BoxedCodeGen())
        return LazyGraphModule(graph, outer)

    def _call(self, outer: fx.Graph, part: Region, known: dict[fx.Node, fx.Node], boxed: list[fx.Node] | None) -> None:
        """Nodes that call a region, and one for each of its results."""
        others = [a for a in part.inputs if a not in (boxed or ())]
        region, arguments = self._region(part, boxed, others), [known[a] for a in others]
        if boxed is not None:
            # A node of its own: after it the generated code lets go of what is used here last, and the region, which
            # empties the list, can free it before it returns.
            arguments.insert(0, outer.call_function(_listed, tuple(known[a] for a in boxed)))
        name = f"region_{part.outputs[-1].name}"
        call = outer.create_node("call_function", region, tuple(arguments), name=name)
        for number, output in enumerate(part.outputs):
            known[output] = outer.create_node("call_function", operator.getitem, (call, number), name=output.name)
            known[output].meta = dict(output.meta)
        for view in part.views:
            known[view] = outer.node_copy(view, known.__getitem__)

    def _region(self, part: Region, boxed: list[fx.Node] | None, others: list[fx.Node]) -> Runs:
        count = None if boxed is None else len(boxed)
        graph, text = _alone(part, [*(boxed or ()), *others])
        key = hashlib.sha256(f"{count} {text}".encode()).hexdigest()
        found = self.regions.get(key)
        if found is None:
            found = self.regions[key] = self.region(LazyGraphModule(torch.nn.Module(), graph), count)
        return found


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _alone(part: Region, inputs: list[fx.Node]) -> tuple[fx.Graph, str]:
    """The graph of a region, which takes a list, and a text that is the same for those that are alike."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    lines: list[str] = []
    taken = set(inputs)
    for node in (*inputs, *part.nodes):
        name = f"v{len(known)}"
        value: Any = node.meta.get("val")
        if node in taken:
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
