"""`Program`: one step of a model as one graph of ATen operators on global tensors."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.ir.checkpoint_regions import pinned
from autopar.ir.graph import (
    Value,
    block_prefixes,
    is_backward,
    operators,
    producer,
    static_arguments,
    tensor_arguments,
)
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.attention import attention_drawing, is_kept_only
from autopar.ir.ops.float8 import amax
from autopar.ir.ops.random import replayed, seeded
from autopar.ir.signature.floats import Guard
from autopar.ir.signature.outputs import Total
from autopar.ir.structure import output_types, structure_of

GRADIENTS = ("gradient", "input_gradient")
"""Kinds of outputs that are gradients."""

RECORDED = "recorded"
"""Kind of an output of the backward pass that a history gets, see `autopar.ir.ops.float8.delayed`."""

OF_BACKWARD = (*GRADIENTS, RECORDED)
"""Kinds of outputs that the backward pass makes."""


@dataclass(frozen=True)
class Input:
    """What a placeholder of the graph stands for.

    Attributes:
        kind: ``parameter``, ``buffer``, ``batch`` or ``tangent``.
        name: qualified name of a parameter or buffer; index of a batch tensor or of the output of a tangent.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Output:
    """What an output of the graph is: a ``buffer``'s new value, a ``result`` of the model, or a gradient.

    Attributes:
        kind: ``buffer``, ``result``, ``gradient`` of a parameter, ``input_gradient`` of a batch tensor, or
            ``recorded``, the largest entry of what a row of a history is of.
        name: of the buffer or parameter; index of the result or of the batch tensor; of the history, its row and a
            number, as in ``up.weight_amax_history:2:0``.
    """

    kind: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """An operator call, whichever tensors it takes; equal calls are one object, by whose identity they are looked up.

    Attributes:
        target: the operator overload.
        arguments: text of the arguments that are not tensors.
        inputs: shape and dtype of each tensor argument.
        outputs: of each output; None for one that does not exist.
    """

    target: Any
    arguments: str
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


@dataclass(frozen=True)
class RepeatedLayers:
    """What a program leaves out of a model: it has three of the model's blocks, which are alike.

    A block is a module of the list, or where these take turns (sliding windows and full attention, say) all of one
    turn. Modules at the beginning of the list may be others, such as dense layers before mixtures of experts: the
    program has all of these. Every count of the whole model's graph is what three blocks have, and for each further one
    the difference between three and two.

    Attributes:
        path: of the list of modules, such as ``model.layers``.
        blocks: how many alike ones the model has.
        shorter: the program of two blocks.
        lead: how many other modules come before them.
        period: how many modules a block has.
    """

    path: str
    blocks: int
    shorter: Program
    lead: int = 0
    period: int = 1

    def extrapolate(self, three: Any, two: Any) -> Any:
        """A number of the whole model, or a mapping to numbers, from those of three and of two blocks; absent is 0."""
        # Keys of three blocks are all there are: whatever two have, three have.
        if isinstance(three, Mapping):
            return {k: self.extrapolate(v, two.get(k, {} if isinstance(v, Mapping) else 0)) for k, v in three.items()}
        return three + (self.blocks - SHORT) * (three - two)

    def names(self, name: str) -> tuple[str, ...]:
        """The model's tensors (or modules) that one of the program stands for: the middle block's for all between."""
        number, place = self.block(name)
        # Three blocks: the first and the last stand for themselves.
        numbers = {0: (0,), 1: range(1, self.blocks - 1), 2: (self.blocks - 1,)}.get(number, ())
        return tuple(self.name(i, place) for i in numbers) or (name,)

    def alike(self, name: str) -> tuple[str, ...]:
        """The program's tensors (or modules) that stand for the one of this name and those of the blocks like its."""
        number, place = self.block(name)
        return tuple(self.name(i, place) for i in range(SHORT)) if 0 <= number < self.blocks else (name,)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.path)}\.(\d+)([.:].*)?")

    def modules(self, number: int) -> tuple[str, ...]:
        """The names of the modules of one of the alike blocks."""
        return tuple(self.name(number, (i, "")) for i in range(self.period))

    def name(self, number: int, place: tuple[int, str]) -> str:
        """The name of what is at a place of one of the alike blocks."""
        return f"{self.path}.{self.lead + number * self.period + place[0]}{place[1]}"

    def block(self, name: str) -> tuple[int, tuple[int, str]]:
        """Which of the alike blocks a name is of, counted from 0 and negative for none, and its place in the block.

        A place is the number of the block's module, and what follows in the name.
        """
        # ``:`` begins the number of a module output, as in ``layers.0.attn:1``.
        found = self._pattern.fullmatch(name)
        if found is None:
            return -1, (0, "")
        number, i = divmod(int(found[1]) - self.lead, self.period)
        return number, (i, found[2] or "")

    def is_inside(self, name: str) -> bool:
        """Whether a module is in one of the alike blocks, and is not the first of it."""
        number, place = self.block(name)
        return number >= 0 and place != (0, "")


@dataclass(frozen=True)
class Microbatch:
    """What part of a batch a program computes, see `autopar.search.microbatch.rewrite`.

    What it accumulates is the sum over all microbatches, and what is computed from sums is computed once.

    Attributes:
        count: how many make up the batch.
        before: program of what is computed from the whole batch first, whose results are the last tensors of the
            microbatch's batch; None: there is nothing.
        rows: dim of the batch tensors of which a microbatch takes a slice, by name; it takes the others whole.
        results: dim along which a result consists of the slices of all microbatches, by name.
    """

    count: int = 1
    before: Program | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)


WHOLE = Microbatch()
"""The whole batch at once."""


@dataclass(frozen=True)
class State:
    """What a call of the model changes in the model, besides what the graph says of parameters and buffers.

    Attributes:
        writes: to its Python state, see `autopar.capture.state.writes`; their tensors are results of the graph.
        assigned: buffers that get a new tensor, where others are written in place.
        counted: paths of numbers that the call only counts on.
        observed: calls of recording hooks, see `autopar.capture.state.hooks`.
        computing: hooks that are part of the graph, see `autopar.capture.state.hooks`.
        checks: of values, see `autopar.capture.checks.after_step`.
        reads: what it asks about values of buffers, see `autopar.capture.state.known`: the graph serves calls with the
            same answers.
        constants: plain tensors among the attributes are constants of the graph, and not inputs like buffers.
        stride_read: the user's line that reads strides, which are constants of the graph; empty: none does.
    """

    writes: tuple[Any, ...] = ()
    assigned: frozenset[str] = frozenset()
    counted: frozenset[tuple[str, Any]] = frozenset()
    constants: bool = False
    observed: tuple[Any, ...] = ()
    computing: tuple[Any, ...] = ()
    checks: tuple[Any, ...] = ()
    reads: tuple[Any, ...] = ()
    stride_read: str = ""


STATELESS = State()


SHORT = 3
"""Blocks of a program that leaves some out: the first, the last, and one that stands for those between them."""


@dataclass(frozen=True)
class Program:
    """A captured step: the joint forward and backward graph, and what goes in and out.

    Attributes:
        graph: joint graph; call_function nodes on ATen overloads, ``meta["val"]`` a fake tensor.
        inputs: one for each placeholder.
        outputs: one for each output; those of the forward pass come first.
        forward_outputs: how many outputs belong to the forward pass (buffers, then results).
        skeleton: structure of the model's output, see `autopar.ir.signature.pytree`.
        loss: index of the result that is the loss; None if the outputs carry gradients.
        unused: parameters that require a gradient and, in the plain model too, get none.
        aliases: every further name of a tied parameter or shared buffer, to the name that stands for it.
        reached: of each gradient, by kind and name, the results that it comes from, also where those make it zero.
        used: shape without padding of the parameters, tangents and results that are padded, by kind and name.
        repeat: blocks of the model that are left out; such a program can be planned for, not run.
        part: of the batch that the program computes.
        state: what a call does to the model.
        withheld: results that carry gradients in the model, and not here: only the loss, or only scalars do.
        total: how the loss is made, where it is a result of the graph and none of the model.
        guards: what must hold of a call's floats for the graph to serve it.
        storages: of results, and of parameters, buffers and batch tensors after the call, by kind and name, a number of
            the storage that eager mode has each in.
        orders: of results that eager mode has without gaps, by name, their dims from the outermost in memory to the
            innermost; canonical graphs have no copies that only turn a tensor.
        draws_in_kernels: what dropout in attention keeps takes no memory, as on GPUs.
        fused: a compiler puts pointwise operators and reductions that follow each other into one kernel, and costs are
            counted so.
        float8: how linear layers compute in float8; empty: they do not.
        cuts: sizes of the factors that each dim of a parameter has in another graph, by its name, where the layout that
            it has is one of these factors'.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    forward_outputs: int
    skeleton: Any
    loss: int | None = None
    training: bool = True
    unused: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    reached: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    used: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    repeat: RepeatedLayers | None = None
    part: Microbatch = WHOLE
    state: State = STATELESS
    withheld: frozenset[int] = frozenset()
    total: Total | None = None
    guards: tuple[Guard, ...] = ()
    storages: dict[tuple[str, str], int] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draws_in_kernels: bool = False
    fused: bool = False
    float8: str = ""
    cuts: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def with_graph(self, graph: fx.GraphModule) -> Program:
        """The program with a graph that has been rewritten, without what no output depends on."""
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
        return replace(self, graph=graph)

    @property
    def microbatches(self) -> int:
        """How often the program runs in a step."""
        return self.part.count

    @property
    def placeholders(self) -> list[fx.Node]:
        """Placeholder nodes, in the order of ``inputs``."""
        return [n for n in self.graph.graph.nodes if n.op == "placeholder"]

    def inputs_of(self, *kinds: str) -> set[fx.Node]:
        """Placeholder nodes of these kinds of inputs."""
        return {n for n, i in zip(self.placeholders, self.inputs, strict=True) if i.kind in kinds}

    @property
    def output_node(self) -> fx.Node:
        """The graph's output node."""
        return self.graph.graph.output_node()

    @property
    def output_values(self) -> list[fx.Node | None]:
        """The node of each output, in the order of ``outputs``; None for a gradient that does not exist."""
        # One list for all outputs, as torch's tracer leaves it.
        values: Any = self.output_node.args[0]
        return list(values)

    @property
    def input_gradients(self) -> frozenset[str]:
        """Batch tensors, by index, that get a gradient."""
        return frozenset(o.name for o in self.outputs if o.kind == "input_gradient")

    @property
    def results(self) -> list[tuple[Output, fx.Node]]:
        """What the model returns, and the nodes that make it."""
        described = zip(self.outputs, self.output_values, strict=True)
        return [(o, v) for o, v in described if o.kind == "result" and v is not None]

    # What follows is computed once: it holds as long as nobody changes the graph in place. Passes do, so `run_passes`
    # makes a new program after each.

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Results of functions of the program, by their names and other arguments."""
        return {}

    @cached_property
    def sources(self) -> dict[fx.Node, tuple[Value, ...]]:
        """The values that each operator takes, in the order of its `tensor_arguments`."""
        return {n: tuple(producer(a) for a in tensor_arguments(n)) for n in operators(self.graph.graph)}

    @cached_property
    def per_step(self) -> frozenset[fx.Node]:
        """Nodes that read a sum over the microbatches, or what is computed from one: they run once a step."""
        found: set[fx.Node] = set()
        if not self.graph.graph.find_nodes(op="call_function", target=accumulate):
            return frozenset()
        for node in self.graph.graph.nodes:
            # In graph order: arguments come before their users.
            if node.op != "output" and any(a.target is accumulate or a in found for a in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def microbatch_invariant(self) -> frozenset[fx.Node]:
        """What is the same in all microbatches: parameters, buffers, constants, and forward operators on these.

        Random operators are not, nor is what the model's own checkpointing decides on. Where there is one microbatch,
        nothing is.
        """
        if self.part.count == 1:
            return frozenset()
        found = self.inputs_of("parameter", "buffer")
        # Constants of the graph.
        found.update(n for n in self.graph.graph.nodes if n.op == "get_attr")
        for node, sources in self.sources.items():
            # Each microbatch draws numbers of its own.
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            # What is recorded of a weight is returned once a step, from the stage that has the weight.
            varies = random or node.target in (accumulate, amax) or is_backward(node) or node in self.pins
            if not varies and all(source in found for source, _ in sources):
                found.add(node)
        return frozenset(found)

    def runs(self, node: fx.Node) -> int:
        """How often an operator runs in a step."""
        return 1 if node in self.per_step or is_hoisted(node) else self.part.count

    def moves(self, node: fx.Node) -> int:
        """How often a node's result is redistributed in a step: that of `accumulate` once, when it is complete."""
        return 1 if node.target is accumulate else self.runs(node)

    @cached_property
    def calls(self) -> dict[fx.Node, Call]:
        """What each operator node calls."""
        types = {n: output_types(n) for n in self.graph.graph.nodes}
        # A deep model has thousands of calls and few that differ: what is derived from one is derived once.
        known: dict[Any, Call] = {}
        found = {}
        for node, sources in self.sources.items():
            inputs = tuple(types[source][i] for source, i in sources)
            key = (node.target, static_arguments(node), inputs, types[node])
            found[node] = known.get(key) or known.setdefault(key, Call(*key))
        return found

    @cached_property
    def pins(self) -> dict[fx.Node, str]:
        """What the model's own checkpointing decides for forward operators, see `autopar.ir.checkpoint_regions`."""
        return pinned(self.sources)

    @cached_property
    def blocks(self) -> frozenset[str]:
        """Names of the modules that repeat, such as ``layers.3``."""
        return block_prefixes(i.name for i in self.inputs if i.kind == "parameter")

    @cached_property
    def drawn_in_kernels(self) -> frozenset[fx.Node]:
        """Draws that the attention kernels which read them make by themselves."""
        if not self.draws_in_kernels:
            return frozenset()
        return frozenset(n for n in self.graph.graph.nodes if is_kept_only(n))

    @cached_property
    def structure(self) -> Counter[str]:
        """How often each input, operator call and output occurs, see `autopar.ir.structure`."""
        return structure_of(self)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of operators, arguments, shapes and dtypes, of parameter names, and of nothing else."""
        # Of counts, not of the graph: a deep model that was captured in part has the fingerprint of the whole.
        counts: dict[str, int] = self.structure
        if self.repeat is not None:
            counts = self.repeat.extrapolate(counts, self.repeat.shorter.structure)
        return hashlib.sha256(repr(sorted(counts.items())).encode()).hexdigest()[:16]


def is_hoisted(node: fx.Node) -> bool:
    """Whether a node of a rewritten graph runs once a step, before the first microbatch, see `autopar.memory.hoist`."""
    return info(node).hoisted


def draws(node: fx.Node) -> bool:
    """Whether the node, which has been annotated, takes numbers from a random generator."""
    operator_ = info(node).operator
    if operator_ is not None:
        return bool(operator_.rule.random)
    target: Any = node.args[0] if node.target in (seeded, replayed) else node.target
    return target is attention_drawing
