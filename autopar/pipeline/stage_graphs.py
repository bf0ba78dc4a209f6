"""The pieces of a stage: graphs that run for a microbatch, forward and backward, and graphs that run once a step.

What one stage computes and another takes is passed from neighbor to neighbor. What is computed of the batch alone
(masks) or of parameters alone (views, casts, gathers) is computed in every stage that takes it; what the plan keeps of
the latter, once a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar._torch_compat import BoxedCodeGen
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Output, Program, is_hoisted
from autopar.pipeline.forward_order import forward_nodes

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Pieces of a microbatch; the whole backward is its parts for the input and for the weights."""


@dataclass(frozen=True)
class StageGraph:
    """A part of a program that takes and returns values by name.

    Attributes:
        nodes: its operators, in order.
        takes: names of nodes of the program.
        gives: the same.
        root: where the graph's constants are.
    """

    nodes: tuple[fx.Node, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    root: fx.GraphModule

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The graph, which takes a list and empties it."""
        graph = fx.Graph()
        sources = {a.name: a for n in self.nodes for a in n.all_input_nodes}
        known = {sources[name]: graph.placeholder(name) for name in self.takes}
        for old, new in known.items():
            new.meta = dict(old.meta)
        for node in self.nodes:
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].meta = dict(node.meta)
        names = {old.name: new for old, new in known.items()}
        graph.output([names[name] for name in self.gives])
        graph.set_codegen(BoxedCodeGen())
        return fx.GraphModule(self.root, graph)


@dataclass(frozen=True)
class Transfer:
    """A value that goes from one stage to another, once a step."""

    name: str
    source: int
    target: int


class StageGraphs:
    """A program with stages (`autopar.passes.pipeline.assign_stages`) in pieces.

    Attributes:
        program: its graph on local tensors.
        stages: how many there are.
    """

    def __init__(self, program: Program, stages: int) -> None:
        self.program, self.stages = program, stages
        self.graph = program.graph.graph
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self.forward, self.per_step = forward_nodes(program), program.per_step
        self.free = free_nodes(program)
        self.steady = {n for n in self.order if n.op == "call_function" and is_hoisted(n)}
        self._pieces: dict[tuple[int, str | int], StageGraph] = {}
        self._firsts: dict[int, StageGraph] = {}

    @property
    def described(self) -> list[tuple[Output, fx.Node | None]]:
        """The program's outputs."""
        return list(zip(self.program.outputs, self.program.output_values, strict=True))

    def stage(self, node: fx.Node) -> int:
        """The stage that computes a node."""
        found = info(node).stage
        assert found is not None
        return found

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The stages that compute with each parameter, by name; the first of them holds it."""
        users: dict[fx.Node, set[int]] = {n: set() for n, i in self.inputs.items() if i.kind == "parameter"}
        for node in reversed(self.order):
            if node.op != "call_function":
                continue
            stages = users.setdefault(node, set()) if node in self.free else {self.stage(node)}
            for argument in node.all_input_nodes:
                if argument in self.free or argument in users:
                    users.setdefault(argument, set()).update(stages)
        return {self.inputs[n].name: tuple(sorted(users[n])) for n in users if n in self.inputs}

    def _kind(self, node: fx.Node) -> str:
        """``F``, ``B`` or ``once``."""
        return "once" if node in self.per_step else FORWARD if node in self.forward else BACKWARD

    def _uses(self, node: fx.Node) -> set[tuple[str, int]]:
        """Kinds and stages of the operators that take a value."""
        return {(self._kind(u), self.stage(u)) for u in node.users if u.op == "call_function"}

    @cached_property
    def _crossing(self) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
        """What each stage receives from the one before it, and from the one behind it."""
        down: list[list[fx.Node]] = [[] for _ in range(self.stages)]
        up: list[list[fx.Node]] = [[] for _ in range(self.stages)]
        for node in self.order:
            if node.op != "call_function" or node in self.free or node in self.per_step:
                continue
            here = self.stage(node)
            taken = [s for kind, s in self._uses(node) if kind != "once"]
            if node in self.forward:
                for s in range(here + 1, max(taken, default=here) + 1):
                    down[s].append(node)
            for s in range(min(taken, default=here), here):
                up[s].append(node)
        return down, up

    def made(self) -> list[StageGraph]:
        """The pieces that have been asked for."""
        return list(self._pieces.values())

    def received(self, stage: int) -> tuple[str, ...]:
        """What a stage receives from the one before it, in order."""
        return tuple(n.name for n in self._crossing[0][stage]) if 0 < stage < self.stages else ()

    def returned(self, stage: int) -> tuple[str, ...]:
        """What a stage receives from the one behind it, in order."""
        return tuple(n.name for n in self._crossing[1][stage]) if 0 <= stage < self.stages - 1 else ()

    def node(self, name: str) -> fx.Node:
        """The node of this name."""
        return self._names[name]

    @cached_property
    def _names(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.order}

    def _own(self, stage: int, kind: str) -> list[fx.Node]:
        return [
            n for n in self.order
            if n.op == "call_function" and n not in self.free and self._kind(n) == kind and self.stage(n) == stage
        ]  # fmt: skip

    @cached_property
    def kept(self) -> set[fx.Node]:
        """Values of a microbatch that the step needs at its end: sums, and results of rows."""
        taken = {a for n in self.per_step for a in n.all_input_nodes} | {v for v in self.program.output_values if v}
        return {n for n in taken if n.op == "call_function" and n not in self.per_step and n not in self.free}

    @cached_property
    def kept_names(self) -> frozenset[str]:
        """Names of `kept`."""
        return frozenset(n.name for n in self.kept)

    def piece(self, stage: int, kind: str) -> StageGraph:
        """The graph that a stage runs for a microbatch."""
        if (stage, kind) not in self._pieces:
            self._pieces[stage, kind] = self._cut(stage, kind)
        return self._pieces[stage, kind]

    def first(self, stage: int) -> StageGraph:
        """What a stage computes before the first microbatch, for all of them."""
        if stage not in self._firsts:
            pieces = [self.piece(stage, FORWARD), self.piece(stage, BACKWARD), self.free_outputs()]
            pieces += [self.last(stage, level) for level in range(self.rounds)]
            wanted = {self.node(name) for piece in pieces for name in piece.takes} & self.steady
            self._firsts[stage] = self._piece(_ancestors(wanted, self.steady), wanted)
        return self._firsts[stage]

    def _cut(self, stage: int, kind: str) -> StageGraph:
        if kind == FORWARD:
            nodes = self._own(stage, FORWARD)
            late = self._own(stage, BACKWARD)
            computed = self._with_free(nodes)
            sent = [self.node(n) for n in (*self.received(stage + 1), *self.returned(stage - 1))]
            wanted = {a for n in self._with_free(late, without=computed) for a in n.all_input_nodes} & computed
            return self._piece(computed, {*nodes} & {*sent, *self.kept} | wanted)
        early = self._with_free(self._own(stage, FORWARD))
        nodes = self._own(stage, BACKWARD)
        computed = self._with_free(nodes, without=early)
        sends = {self.node(n) for n in self.returned(stage - 1)} & {*nodes}
        if kind == BACKWARD:
            return self._piece(computed, sends | self.kept & computed)
        for_input = _ancestors(sends, computed)
        rest = computed - for_input
        if kind == INPUT:
            wanted = {a for n in rest for a in n.all_input_nodes} & for_input
            return self._piece(for_input, sends | wanted | self.kept & for_input)
        return self._piece(rest, self.kept & rest)

    def _with_free(self, nodes: Iterable[fx.Node], without: Collection[fx.Node] = ()) -> set[fx.Node]:
        """These nodes, and what is computed for them of the batch or of parameters alone."""
        found = set(nodes)
        waiting = list(found)
        while waiting:
            for argument in waiting.pop().all_input_nodes:
                fresh = argument not in found and argument not in without and argument not in self.steady
                if fresh and argument in self.free and argument.op != "placeholder":
                    found.add(argument)
                    waiting.append(argument)
        return found

    def _piece(self, nodes: set[fx.Node], gives: Iterable[fx.Node]) -> StageGraph:
        ordered = sorted(nodes, key=self.order.__getitem__)
        taken = sorted({a for n in ordered for a in n.all_input_nodes if a not in nodes}, key=self.order.__getitem__)
        given = sorted(gives, key=self.order.__getitem__)
        names = (tuple(n.name for n in taken), tuple(n.name for n in given))
        return StageGraph(tuple(ordered), *names, self.program.graph)

    # What runs once a step, when all microbatches are through.

    @cached_property
    def _levels(self) -> dict[fx.Node, int]:
        """Of every operator that runs once: how many transfers come before it, one after the other."""
        found: dict[fx.Node, int] = {}
        for node in self.order:
            if node in self.per_step and node not in self.free:
                before = [(found.get(a, 0), self.stage(a)) for a in node.all_input_nodes if self._moves(a)]
                found[node] = max((n + (s != self.stage(node)) for n, s in before), default=0)
        return found

    def _moves(self, node: fx.Node) -> bool:
        """Whether a stage must get the value from the one that computes it."""
        return node.op == "call_function" and node not in self.free

    @property
    def rounds(self) -> int:
        """How many pieces a stage runs at the end of a step, with transfers between them."""
        return max(self._levels.values(), default=0) + 1

    def last(self, stage: int, level: int) -> StageGraph:
        """What a stage runs at the end of a step, between transfers."""
        if (stage, level) not in self._pieces:
            self._pieces[stage, level] = self._last(stage, level)
        return self._pieces[stage, level]

    def _last(self, stage: int, level: int) -> StageGraph:
        nodes = {n for n, found in self._levels.items() if found == level and self.stage(n) == stage}
        outside = {n for n in nodes if any(u not in nodes for u in n.users)}
        return self._piece(self._with_free(nodes), outside)

    def free_outputs(self) -> StageGraph:
        """What computes those outputs that every stage has by itself."""
        wanted = {v for v in self.program.output_values if v is not None and v.op == "call_function" and v in self.free}
        return self._piece(self._with_free(wanted), wanted)

    def transfers(self, level: int) -> list[Transfer]:
        """What goes from stage to stage in front of the pieces of a level; the last is that of the outputs."""
        if level == self.rounds:
            return self._final_transfers()
        found = set()
        for node, own in self._levels.items():
            if own == level:
                found |= {
                    (self.order[a], Transfer(a.name, self.stage(a), self.stage(node)))
                    for a in node.all_input_nodes
                    if self._moves(a) and self.stage(a) != self.stage(node)
                }
        return [t for _, t in sorted(found, key=lambda f: (f[0], f[1].target))]

    def _final_transfers(self) -> list[Transfer]:
        """Scalars and buffers go to all stages, gradients to those that hold the parameter; other results stay."""
        found = []
        for output, value in self.described:
            if value is None or not self._moves(value) or self.home(output, value) is not None:
                continue
            everyone = tuple(range(self.stages))
            targets = self.holders(output.name) if output.kind == "gradient" else everyone
            found += [Transfer(value.name, self.stage(value), t) for t in targets if t != self.stage(value)]
        return list(dict.fromkeys(found))

    def home(self, output: Output, value: fx.Node) -> int | None:
        """The stage that alone has a result; None: all have it."""
        if output.kind != "result" or not self._moves(value) or not value.meta["val"].ndim:
            return None
        return self.stage(value)

    def holders(self, parameter: str) -> tuple[int, ...]:
        """The stages that hold a parameter: the first that computes with it, or all."""
        node = next(n for n, i in self.inputs.items() if (i.kind, i.name) == ("parameter", parameter))
        stages = self.owners[parameter]
        if is_held_by_all(node.meta["val"].shape, self.stages) or not stages:
            return tuple(range(self.stages))
        return stages[:1]

    def borrowed(self) -> list[Transfer]:
        """Parameters that go to further stages that compute with them, at the beginning of a step."""
        found = []
        for node, spec in self.inputs.items():
            if spec.kind == "parameter":
                holders = self.holders(spec.name)
                found += [Transfer(node.name, holders[0], s) for s in self.owners[spec.name] if s not in holders]
        return found


def is_held_by_all(shape: Iterable[int], stages: int) -> bool:
    """Whether every stage holds a parameter: torch's placements cannot say of so small a one that only one does."""
    first = next(iter(shape), 0)
    return first < stages


def free_nodes(program: Program) -> set[fx.Node]:
    """Values that depend on the batch and buffers alone and cost little, or on parameters and buffers alone."""
    kinds = {n: i.kind for n, i in zip(program.placeholders, program.inputs, strict=True)}
    sources: dict[fx.Node, frozenset[str]] = {}
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            kind = kinds[node]
            sources[node] = frozenset({"batch" if kind == "tangent" else kind} - {"buffer"})
            found.add(node)
            continue
        sources[node] = frozenset().union(*(sources[a] for a in node.all_input_nodes))
        heavy = getattr(node.target, "overloadpacket", None) in flop_registry
        apart = all(a in found for a in node.all_input_nodes) and len(sources[node]) < 2
        if (apart and not heavy and node.target is not accumulate) or is_hoisted(node):
            found.add(node)
    return found


def _ancestors(nodes: Iterable[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """Nodes that some are computed from, and these, as far as they are ``within`` others."""
    found: set[fx.Node] = set()
    waiting = [n for n in nodes if n in within]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [a for a in node.all_input_nodes if a in within]
    return found
