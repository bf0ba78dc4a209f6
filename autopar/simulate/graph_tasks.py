"""`emitted`: a rewritten graph as tasks: what one device computes, sends and holds in a step, in the graph's order.

Kernels run on the device's compute stream. A collective has the stream of its axis: it starts when the kernels launched
before it have ended, as NCCL's do, and the compute stream goes on until it meets the collective's ``wait_tensor``, less
the share of the collective's seconds for which its link occupies the device.
Copies to the host and back are on the compute stream, as they are in `autopar.ir.ops.host`. Memory follows from
liveness: a tensor is live from the kernel that computes it to the last that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.costs.host_copies import copy_seconds
from autopar.ir.graph import tensor_arguments
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import Change, liveness
from autopar.sharding.assignment import machine_of
from autopar.sharding.node_seconds import NodeSeconds
from autopar.sharding.redistribute.moves import Machine
from autopar.simulate.engine import simulate
from autopar.simulate.tasks import COMMUNICATION, COMPUTE, Task
from autopar.simulate.timeline import Timeline

WAIT, COPY, OCCUPIED = "wait", "copy", "occupied"


def emitted(program: Program, plan: Plan) -> list[Task]:
    """The tasks of one device; all devices of a plan without stages do the same.

    Microbatches follow one another, and memory is that of the last. Categories of memory are those of
    `autopar.memory.liveness.liveness`. The optimizer's step is no part of the graph.

    Args:
        program: as `autopar.compiler.rewrite` returns it.
        plan: the plan it was rewritten under; its cluster says what kernels and collectives cost, its optimizer
            what state is held.

    Raises:
        PlanError: the program is not rewritten.
    """
    return _Emitted(program, plan, liveness(program, plan)).run()


def node_seconds(program: Program, plan: Plan) -> dict[str, float]:
    """Seconds that each node of a rewritten graph takes once, by name: its kernel or collective; 0 for a view."""
    walk = _Emitted(program, plan, [])
    for node in walk.begin():
        walk.add(node)
    return {task.name: task.seconds for task in walk.tasks}


class GraphSeconds:
    """Seconds of parts of a rewritten graph, each run by itself: collectives beside kernels, as their order allows.

    The host runs ahead while the device works on earlier microbatches: a part takes at least what all its launches do.
    """

    def __init__(self, program: Program, plan: Plan) -> None:
        """Nothing is known yet of what nodes take."""
        self._program, self._plan = program, plan
        self._seconds = NodeSeconds(machine_of(plan))

    def of(self, nodes: Sequence[fx.Node]) -> float:
        """Of operators in this order; what they take from others is there."""
        walk = _Emitted(self._program, self._plan, [])
        walk.seconds = self._seconds
        walk.begin()
        walk.made_by = defaultdict(int, walk.made_by)
        for node in nodes:
            walk.add(node)
        launching = sum(task.host for task in walk.tasks)
        return max(simulate([replace(task, host=0.0) for task in walk.tasks]).step_seconds, launching)


class _Emitted:
    """Walks a graph for its tasks."""

    def __init__(self, program: Program, plan: Plan, held: list[Change]) -> None:
        self.program, self.held = program, held
        self.machine: Machine = machine_of(plan)
        self.tasks: list[Task] = []
        self.made_by: dict[fx.Node, int] = {}  # the task that computes a node's value, or the storage that it is in
        self.kernel = 0  # the last task of the compute stream
        self.seconds = NodeSeconds(self.machine)
        self.host = self.machine.device.host  # seconds of a launch

    def begin(self) -> list[fx.Node]:
        """What the device computes, when its inputs are there."""
        self.tasks.append(Task("inputs", 0, COMPUTE, 0.0, category=WAIT))
        nodes = self.program.graph.graph.nodes
        self.made_by.update({node: 0 for node in nodes if node.op != "call_function"})
        return [n for n in nodes if n.op == "call_function"]

    def run(self) -> list[Task]:
        program, calls = self.program, self.begin()
        for turn in range(program.microbatches):
            for node in calls:
                # Hoisted nodes run in the first turn, those on the sums in the last, all others in each.
                if turn == (program.microbatches - 1 if node in program.per_step else 0) or program.runs(node) > 1:
                    self.add(node)
        changes: dict[tuple[int, bool], list[tuple[str, float]]] = defaultdict(list)
        for change in self.held:
            task = 0 if change.node is None else self.made_by[change.node]
            changes[task, change.starts].append((change.category, change.size))
        return [
            replace(task, at_start=tuple(changes[i, True]), at_end=tuple(changes[i, False]))
            for i, task in enumerate(self.tasks)
        ]

    def add(self, node: fx.Node) -> None:
        """Add the task of a node; a view or a getitem has none of its own."""
        sources = [self.made_by[a] for a in tensor_arguments(node)]
        device = self.machine.device
        collective = info(node).collective
        if collective is not None:
            seconds = self.seconds.collective(collective)
            self._append(node, collective.axis, seconds, COMMUNICATION, (self.kernel,), self.host)
            link = self.machine.links[self.machine.names.index(collective.axis)]
            if link.occupies:  # no kernel that the next collective would wait for
                busy = link.occupies * (seconds - link.wait)
                self.tasks.append(Task(f"beside {node.name}", 0, COMPUTE, busy, (), OCCUPIED))
        elif node.target is c10d.wait_tensor.default:
            self._append(node, COMPUTE, 0.0, WAIT, tuple(sources), 0.0)
        elif node.target in (to_host, to_device):
            self._append(node, COMPUTE, float(copy_seconds(node.meta["val"].nbytes, device)), COPY, (), self.host)
        else:
            seconds, launches = self.seconds.kernel(node)
            if seconds or launches:
                self._append(node, COMPUTE, seconds, COMPUTE, (), launches * self.host)
            else:
                self.made_by[node] = max(sources, default=0)

    def _append(
        self, node: fx.Node, stream_: str, seconds: float, category: str, after: tuple[int, ...], host: float
    ) -> None:
        self.made_by[node] = len(self.tasks)
        if stream_ == COMPUTE:
            self.kernel = len(self.tasks)
        self.tasks.append(Task(node.name, 0, stream_, seconds, after, category, host))


def step_facts(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """Figures of a plan's simulated step on one device, as plain data: seconds and bytes.

    Args:
        timeline: of the tasks that `emitted` found.
        plan: whose graph it is.
    """
    communication: dict[str, float] = {axis: 0.0 for axis in plan.axis_names}
    for task in timeline.tasks:
        if task.category == COMMUNICATION:
            communication[task.stream] += task.seconds
    inside = timeline.busy[0] + timeline.exposed_communication[0]
    return {
        "step_seconds": timeline.step_seconds,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "overlap": plan.overlap,
        "busy_seconds": timeline.busy[0],
        "communication_seconds": communication,
        "exposed_communication_seconds": timeline.exposed_communication[0],
        "waiting_seconds": max(0.0, timeline.step_seconds - inside),
        "peak_memory_bytes": timeline.peak_memory(0),
    }
