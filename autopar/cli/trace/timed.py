"""`Timed`: local graphs node by node, each under its name in torch's profiler; and a step read off the profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx
from torch.profiler import record_function

from autopar._torch_compat import is_boxed
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.runtime.compiled.executable import Executables
from autopar.runtime.compiled.regions import Region
from autopar.simulate.graph_tasks import WAIT
from autopar.simulate.tasks import COMMUNICATION, COMPUTE, Task
from autopar.simulate.timeline import Timeline

NODE, STEP = "node ", "step "
"""What the names of ranges in the profile begin with."""


class Timed(Executables[Callable[..., Any]]):
    """Runs each node by itself."""

    def parts(self, graph: fx.Graph, blocks: Collection[str]) -> list[fx.Node | Region]:
        """All nodes, in their order."""
        return [n for n in graph.nodes if n.op not in ("placeholder", "output")]

    def region(self, graph: fx.GraphModule, boxed: int | None) -> Callable[..., Any]:
        """There are none."""
        raise AssertionError("no region was asked for")

    def called(self, outer: fx.GraphModule) -> Callable[..., Any]:
        """The graph, interpreted."""
        interpreter = _Named(outer)

        def call(*arguments: Any) -> Any:
            if not is_boxed(outer.graph):
                return interpreter.boxed_run(list(arguments))
            return interpreter.boxed_run(arguments[0])

        return call


class _Named(fx.Interpreter):
    """Interprets a graph; the profiler sees the name of each node."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one."""
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        with record_function(NODE + n.name):
            return super().run_node(n)


@dataclass(frozen=True)
class Range:
    """Of a profile, in microseconds."""

    name: str
    start: float
    end: float


def measured_step(ranges: Iterable[Range], graph: fx.Graph, names: Collection[str]) -> Timeline:
    """The fastest step of a profile, as if it was simulated: the step begins at 0.

    Nodes run on the stream on which the simulation has them. A collective lasts from its launch to the end of what Gloo
    reports for it; where Gloo reports nothing, until the wait for it has ended.

    Args:
        ranges: of a profile, in which steps ran in `Timed`.
        graph: the rewritten graph, which says what its nodes are.
        names: of the nodes that are shown; others are views, which the simulation leaves out.

    Raises:
        ValueError: there is no step.
    """
    every = sorted(ranges, key=lambda r: r.start)
    step = min((r for r in every if r.name.startswith(STEP)), key=lambda r: r.end - r.start, default=None)
    if step is None:
        raise ValueError("the profile has no step; run one under the profiler")
    inside = [r for r in every if step.start <= r.start <= step.end]
    nodes = {n.name: n for n in graph.nodes}
    ends = _ends(inside, nodes)
    tasks, times = [], []
    for position, each in enumerate(inside):
        name = each.name.removeprefix(NODE)
        if not each.name.startswith(NODE) or name not in names or name not in nodes:
            continue
        stream, category = _place(nodes[name])
        end = ends.get(position, each.end)
        times.append(((each.start - step.start) / 1e6, (end - step.start) / 1e6))
        tasks.append(Task(name, 0, stream, (end - each.start) / 1e6, (), category))
    start, end_ = np.array(times, dtype=np.float64).reshape(-1, 2).T
    return Timeline(tuple(tasks), start, end_, start, np.arange(len(tasks)))


def _place(node: fx.Node) -> tuple[str, str]:
    """Stream and category of a node, as the simulation has them."""
    made = info(node).collective
    if made is not None:
        return made.axis, COMMUNICATION
    return COMPUTE, WAIT if node.target is c10d.wait_tensor.default else COMPUTE


def _ends(inside: list[Range], nodes: Mapping[str, fx.Node]) -> dict[int, float]:
    """When each collective ended, by its position: the n-th launch of a kind belongs to Gloo's n-th of that kind."""
    launched: dict[str, list[int]] = defaultdict(list)
    reported: dict[str, list[float]] = defaultdict(list)
    for position, each in enumerate(inside):
        node = nodes.get(each.name.removeprefix(NODE))
        if each.name.startswith(NODE) and node is not None and info(node).collective is not None:
            launched[_kind(str(node.target))].append(position)
        elif each.name.startswith("gloo:"):
            reported[_kind(each.name)].append(each.end)
    found: dict[int, float] = {}
    for kind, positions in launched.items():
        if len(reported[kind]) == len(positions):
            found |= {p: max(inside[p].end, end) for p, end in zip(positions, reported[kind], strict=True)}
        else:  # of what Gloo makes of other collectives
            found |= {p: _waited(inside, p, nodes) for p in positions}
    return found


def _waited(inside: list[Range], position: int, nodes: Mapping[str, fx.Node]) -> float:
    """When the next wait for a collective ended."""
    node = nodes[inside[position].name.removeprefix(NODE)]
    waits = {NODE + user.name for user in node.users if user.target is c10d.wait_tensor.default}
    return next((r.end for r in inside[position:] if r.name in waits), inside[position].end)


def _kind(text: str) -> str:
    """What a collective does, from the name of its operator or of Gloo's.

    >>> _kind("_c10d_functional.all_gather_into_tensor.default"), _kind("gloo:_all_gather_base")
    ('all_gather', 'all_gather')
    """
    for kind in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all"):
        if kind in text or kind.replace("_", "") in text:
            return kind
    return text
