"""The graphs of a stage: for a microbatch, forward and backward, and once a step.

What a stage computes from its own sums over microbatches, such as reduced gradients, it computes with the last of them:
reductions run beside the rest of that backward pass. What one stage computes and another uses is sent from neighbor to
neighbor. What is computed from the batch alone (masks) or from parameters alone (views, casts, gathers) is computed in
every stage that uses it: such nodes are *free* of a stage. What the plan hoists of the latter is computed once a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar._torch_compat import BoxedCodeGen, LazyGraphModule
from autopar.ir.graph import computed_from
from autopar.ir.node_info import info
from autopar.ir.ops import float8
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Output, Program, is_hoisted
from autopar.pipeline.forward_order import forward_nodes

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Graphs of a microbatch: forward, the whole backward, and the backward's parts for the input and for the weights."""


@dataclass(frozen=True)
class StageGraph:
    """A part of a program that takes and returns values by name.

    Attributes:
        nodes: its operators, in order.
        takes: names of the program's nodes that it takes.
        gives: names of those that it returns.
        root: has the graph's constants.
    """

    nodes: tuple[fx.Node, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    root: fx.GraphModule

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The graph, which takes a list and empties it."""
        # Built when it is first used: the search asks for names and nodes of many stages, and runs none.
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
        return LazyGraphModule(self.root, graph)


Transfer = tuple[str, int, int]
"""Name of a value that is sent once a step, the stage that sends it, and the stage that receives it."""


class StageGraphs:
    """The graphs of each stage of a program with stages (`autopar.passes.pipeline.assign_stages`).

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
        self.hoisted = {n for n in self.order if n.op == "call_function" and is_hoisted(n)}
        # Identical objects for the same question: `StageGraph.graph` is generated code, and cached on the object.
        self._graphs: dict[tuple[int, str | int], StageGraph] = {}
        self._last_graphs: dict[tuple[int, str], StageGraph] = {}
        self._hoisted_graphs: dict[int, StageGraph] = {}

    @property
    def described(self) -> list[tuple[Output, fx.Node | None]]:
        """The program's outputs."""
        return list(zip(self.program.outputs, self.program.output_values, strict=True))

    def stage(self, node: fx.Node) -> int:
        """The stage that computes a node."""
        stage = info(node).stage
        assert stage is not None
        return stage

    @cached_property
    def parameter_stages(self) -> dict[str, tuple[int, ...]]:
        """The stages that compute with each parameter, by name; the first of them holds it."""
        users: dict[fx.Node, set[int]] = {n: set() for n, i in self.inputs.items() if i.kind == "parameter"}
        # Backwards, so that the users of a free node are complete when its inputs get them.
        for node in reversed(self.order):
            if node.op != "call_function":
                continue
            stages = users.setdefault(node, set()) if node in self.free else {self.stage(node)}
            for argument in node.all_input_nodes:
                if argument in self.free or argument in users:
                    users.setdefault(argument, set()).update(stages)
        return {self.inputs[n].name: tuple(sorted(users[n])) for n in users if n in self.inputs}

    def _pass_of(self, node: fx.Node) -> str:
        """``F``, ``B`` or ``once``."""
        return "once" if node in self.per_step else FORWARD if node in self.forward else BACKWARD

    def _uses(self, node: fx.Node) -> set[tuple[str, int]]:
        """Passes and stages of the operators that take a value."""
        return {(self._pass_of(u), self.stage(u)) for u in node.users if u.op == "call_function"}

    # Graphs that run for each microbatch.

    @cached_property
    def _crossing(self) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
        """What each stage receives from the stage before it, and from the stage after it."""
        from_before: list[list[fx.Node]] = [[] for _ in range(self.stages)]
        from_after: list[list[fx.Node]] = [[] for _ in range(self.stages)]
        for node in self.order:
            if node.op != "call_function" or node in self.free or node in self.per_step:
                continue
            own = self.stage(node)
            using = [s for kind, s in self._uses(node) if kind != "once"]
            # From neighbor to neighbor, through stages that do not use it, as torch's runtime sends: a skip connection
            # over three stages is sent three times.
            if node in self.forward:
                for s in range(own + 1, max(using, default=own) + 1):
                    from_before[s].append(node)
            for s in range(min(using, default=own), own):
                from_after[s].append(node)
        return from_before, from_after

    def built(self) -> list[StageGraph]:
        """The graphs that have been asked for."""
        return [*self._graphs.values(), *self._last_graphs.values()]

    def received(self, stage: int) -> tuple[str, ...]:
        """What a stage receives from the stage before it, in order."""
        return tuple(n.name for n in self._crossing[0][stage]) if 0 < stage < self.stages else ()

    def returned(self, stage: int) -> tuple[str, ...]:
        """What a stage receives from the stage after it, in order."""
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
            if n.op == "call_function" and n not in self.free and self._pass_of(n) == kind and self.stage(n) == stage
        ]  # fmt: skip

    @cached_property
    def needed_at_end(self) -> set[fx.Node]:
        """Values of a microbatch that outlive it: sums over microbatches, and results that consist of rows."""
        used = {a for n in self.per_step for a in n.all_input_nodes} | {v for v in self.program.output_values if v}
        return {n for n in used if n.op == "call_function" and n not in self.per_step and n not in self.free}

    @cached_property
    def names_at_end(self) -> frozenset[str]:
        """Names of `needed_at_end`, and of what is computed once a step from it."""
        return frozenset(n.name for n in self.needed_at_end | self.per_step)

    def microbatch_graph(self, stage: int, kind: str) -> StageGraph:
        """The graph that a stage runs for a microbatch, forward, backward, or one of the backward's two parts."""
        if (stage, kind) not in self._graphs:
            build = self._forward_graph(stage) if kind == FORWARD else self._backward_graph(stage, kind)
            self._graphs[stage, kind] = build
        return self._graphs[stage, kind]

    def last_graph(self, stage: int, kind: str) -> StageGraph:
        """The graph of a stage's last microbatch, of the backward or its part for the weights, and of its own sums.

        All terms of the sums that need no other stage are there by then.
        """
        if (stage, kind) not in self._last_graphs:
            own, end = self.microbatch_graph(stage, kind), self.final_graph(stage, 0)
            gives = {self.node(name) for name in (*own.gives, *end.gives)}
            joined = self._stage_graph({*own.nodes, *end.nodes}, gives) if end.nodes else own
            self._last_graphs[stage, kind] = joined
        return self._last_graphs[stage, kind]

    def places(self) -> dict[fx.Node, frozenset[tuple[int, str | int]]]:
        """By operator: the graphs that run it, each by its stage and kind, or its level at the end of a step.

        Operators of the same graphs may be joined: no value crosses from one graph to another for it.
        """
        found: dict[fx.Node, set[tuple[int, str | int]]] = defaultdict(set)
        for stage in range(self.stages):
            parts: dict[str | int, StageGraph] = {
                kind: self.microbatch_graph(stage, kind) for kind in (FORWARD, INPUT, WEIGHT)
            }
            parts |= {level: self.final_graph(stage, level) for level in range(self.rounds)}
            parts["once"] = self.hoisted_graph(stage)
            for kind, part in parts.items():
                for node in part.nodes:
                    found[node].add((stage, kind))
        return {node: frozenset(own) for node, own in found.items()}

    def hoisted_graph(self, stage: int) -> StageGraph:
        """What a stage computes before the first microbatch, for all of them."""
        if stage not in self._hoisted_graphs:
            graphs = [self.microbatch_graph(stage, FORWARD), self.microbatch_graph(stage, BACKWARD)]
            graphs += [self.free_outputs(), *(self.final_graph(stage, level) for level in range(self.rounds))]
            used = {self.node(name) for graph in graphs for name in graph.takes} & self.hoisted
            self._hoisted_graphs[stage] = self._stage_graph(computed_from(used, self.hoisted), used)
        return self._hoisted_graphs[stage]

    def _forward_graph(self, stage: int) -> StageGraph:
        own = self._own(stage, FORWARD)
        computed = self._with_free(own)
        sent = [self.node(n) for n in (*self.received(stage + 1), *self.returned(stage - 1))]
        # The backward graph reuses what the forward graph has computed; free values that it alone needs, it computes.
        backward = self._with_free(self._own(stage, BACKWARD), without=computed)
        saved = {a for n in backward for a in n.all_input_nodes} & computed
        return self._stage_graph(computed, {*own} & {*sent, *self.needed_at_end} | saved)

    def _backward_graph(self, stage: int, kind: str) -> StageGraph:
        saved = self._with_free(self._own(stage, FORWARD))
        own = self._own(stage, BACKWARD)
        computed = self._with_free(own, without=saved)
        sent = {self.node(n) for n in self.returned(stage - 1)} & {*own}
        if kind == BACKWARD:
            return self._stage_graph(computed, sent | self.needed_at_end & computed)
        # Zero bubble (arXiv 2401.10241): the part for the input is what the stage before waits for, and no more.
        for_input = computed_from(sent, computed)
        for_weight = computed - for_input
        if kind == INPUT:
            shared = {a for n in for_weight for a in n.all_input_nodes} & for_input
            return self._stage_graph(for_input, sent | shared | self.needed_at_end & for_input)
        return self._stage_graph(for_weight, self.needed_at_end & for_weight)

    def _with_free(self, nodes: Iterable[fx.Node], without: Collection[fx.Node] = ()) -> set[fx.Node]:
        """These nodes, and the free nodes that they are computed from."""
        found = set(nodes)
        pending = list(found)
        while pending:
            for argument in pending.pop().all_input_nodes:
                is_new = argument not in found and argument not in without and argument not in self.hoisted
                if is_new and argument in self.free and argument.op != "placeholder":
                    found.add(argument)
                    pending.append(argument)
        return found

    def _stage_graph(self, nodes: set[fx.Node], gives: Iterable[fx.Node]) -> StageGraph:
        # In the order of the whole graph: names and order must be the same on every device that sends or receives.
        ordered = sorted(nodes, key=self.order.__getitem__)
        inputs = sorted({a for n in ordered for a in n.all_input_nodes if a not in nodes}, key=self.order.__getitem__)
        outputs = sorted(gives, key=self.order.__getitem__)
        names = (tuple(n.name for n in inputs), tuple(n.name for n in outputs))
        return StageGraph(tuple(ordered), *names, self.program.graph)

    # Graphs that run once a step, after the last microbatch, with transfers between stages in front of each.

    @cached_property
    def _levels(self) -> dict[fx.Node, int]:
        """Of every operator that runs once a step: how many transfers come before it, one after the other."""
        levels: dict[fx.Node, int] = {}
        for node in self.order:
            if node in self.per_step and node not in self.free:
                before = [(levels.get(a, 0), self.stage(a)) for a in node.all_input_nodes if self._has_stage(a)]
                levels[node] = max((n + (s != self.stage(node)) for n, s in before), default=0)
        return levels

    def _has_stage(self, node: fx.Node) -> bool:
        """Whether one stage computes the value, and others must get it from there."""
        return node.op == "call_function" and node not in self.free

    @property
    def rounds(self) -> int:
        """How many graphs a stage runs at the end of a step, with transfers between them."""
        return max(self._levels.values(), default=0) + 1

    def final_graph(self, stage: int, level: int) -> StageGraph:
        """The graph that a stage runs at the end of a step, after the transfers of this level."""
        if (stage, level) not in self._graphs:
            nodes = {n for n, own in self._levels.items() if own == level and self.stage(n) == stage}
            used_outside = {n for n in nodes if any(u not in nodes for u in n.users)}
            self._graphs[stage, level] = self._stage_graph(self._with_free(nodes), used_outside)
        return self._graphs[stage, level]

    def free_outputs(self) -> StageGraph:
        """The graph of those outputs that every stage computes by itself."""
        outputs = {
            v for v in self.program.output_values if v is not None and v.op == "call_function" and v in self.free
        }
        return self._stage_graph(self._with_free(outputs), outputs)

    def transfers(self, level: int) -> list[Transfer]:
        """What goes from stage to stage before the graphs of a level; the last level is that of the outputs."""
        if level == self.rounds:
            return self._final_transfers()
        found: set[tuple[int, Transfer]] = set()
        for node, own in self._levels.items():
            if own == level:
                found |= {
                    (self.order[a], (a.name, self.stage(a), self.stage(node)))
                    for a in node.all_input_nodes
                    if self._has_stage(a) and self.stage(a) != self.stage(node)
                }
        # One order on all devices, or a send and a receive between two of them would not match.
        return [transfer for _, transfer in sorted(found, key=lambda f: (f[0], f[1][2]))]

    def _final_transfers(self) -> list[Transfer]:
        """Scalars and buffers go to all stages, gradients to those that hold the parameter; other results stay."""
        found: list[Transfer] = []
        for output, value in self.described:
            if value is None or not self._has_stage(value) or self.result_stage(output, value) is not None:
                continue
            every_stage = tuple(range(self.stages))
            targets = self.holders(output.name) if output.kind == "gradient" else every_stage
            found += [(value.name, self.stage(value), t) for t in targets if t != self.stage(value)]
        return list(dict.fromkeys(found))

    def result_stage(self, output: Output, value: fx.Node) -> int | None:
        """The stage that alone has a result; None: all have it."""
        if output.kind != "result" or not self._has_stage(value) or not value.meta["val"].ndim:
            return None
        return self.stage(value)

    def holders(self, parameter: str) -> tuple[int, ...]:
        """The stages that hold a parameter: the first that computes with it, or all."""
        node = next(n for n, i in self.inputs.items() if (i.kind, i.name) == ("parameter", parameter))
        stages = self.parameter_stages[parameter]
        if is_held_by_all(node.meta["val"].shape, self.stages) or not stages:
            return tuple(range(self.stages))
        return stages[:1]

    def parameter_transfers(self) -> list[Transfer]:
        """Parameters that go, at the beginning of a step, to further stages that use them, such as tied ones."""
        found: list[Transfer] = []
        for node, spec in self.inputs.items():
            if spec.kind == "parameter":
                holders = self.holders(spec.name)
                using = self.parameter_stages[spec.name]
                found += [(node.name, holders[0], s) for s in using if s not in holders]
        return found


def is_held_by_all(shape: Iterable[int], stages: int) -> bool:
    """Whether every stage holds a parameter, since it is too small to be held by one.

    A parameter of one stage is a DTensor in ``Shard(0)`` along the axis of the stages: its dim 0 needs a row
    for each of them.
    """
    first = next(iter(shape), 0)
    return first < stages


def free_nodes(program: Program) -> set[fx.Node]:
    """Values that each stage computes by itself: of the batch and buffers alone, or of parameters and buffers alone.

    Matrix multiplications and other operators with FLOPs are not among them, unless hoisted.
    """
    kinds = {n: i.kind for n, i in zip(program.placeholders, program.inputs, strict=True)}
    sources: dict[fx.Node, frozenset[str]] = {}
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            kind = kinds[node]
            # A tangent comes with the batch; buffers are on every stage, and may be combined with either.
            sources[node] = frozenset({"batch" if kind == "tangent" else kind} - {"buffer"})
            found.add(node)
            continue
        sources[node] = frozenset().union(*(sources[a] for a in node.all_input_nodes))
        heavy = getattr(node.target, "overloadpacket", None) in flop_registry
        one_source = all(a in found for a in node.all_input_nodes) and len(sources[node]) < 2
        # A sum over microbatches has a state, which must be in one place; what is recorded of a parameter is returned,
        # and stages that do not have it would compute it, too.
        if (one_source and not heavy and node.target not in (accumulate, float8.amax)) or is_hoisted(node):
            found.add(node)
    return found
