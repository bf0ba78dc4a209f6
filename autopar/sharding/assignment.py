"""A plan applied to a program: the layouts of every node's tensors, and every move between them.

Both the prediction and the rewriting read this one account, so that what is emitted is what was counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from autopar.costs.read_file import brief
from autopar.errors import PlanError
from autopar.ir.graph import Value, is_backward, producer, user_line
from autopar.ir.layout import Layout, TensorType, divides, replicated
from autopar.ir.plan import PER_USE, Plan, Ranges
from autopar.ir.program import Program
from autopar.memory.hoist import find_hoisted
from autopar.memory.offload import NOTHING_OFFLOADED, Offload, find_offloaded
from autopar.memory.recompute import NOTHING_RECOMPUTED, Recompute, find_recomputed
from autopar.rules.remembered import remembered
from autopar.sharding.candidates import combine
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Redistributions, Tables
from autopar.sharding.redistribute.moves import Machine, Move


@dataclass(frozen=True)
class Assignment:
    """Layouts of every tensor.

    Attributes:
        outputs: layout in which each value is made.
        inputs: layouts in which each operator takes its tensor arguments.
        consumer_layouts: layout that a value is brought to first, for all its users.
        forced: values that all users take in that layout, or from it.
        strategies: names of the strategies of each operator, axis by axis.
        finals: layout that each output of the program must have, in order.
        recompute: what the backward pass recomputes or re-gathers.
        hoisted: operators that run once a step, before the first microbatch.
        hoisted_consumer_layouts: values that are brought to their consumer layout once a step, likewise.
        offload: what is in host memory from the forward to the backward pass, and whose optimizer state is.
    """

    outputs: dict[Value, Layout]
    inputs: dict[fx.Node, tuple[Layout, ...]]
    consumer_layouts: dict[Value, Layout]
    strategies: dict[fx.Node, tuple[str, ...]]
    finals: tuple[Layout, ...]
    recompute: Recompute = NOTHING_RECOMPUTED
    hoisted: frozenset[fx.Node] = frozenset()
    hoisted_consumer_layouts: frozenset[Value] = frozenset()
    offload: Offload = NOTHING_OFFLOADED
    forced: frozenset[Value] = frozenset()


def assign(program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> Assignment:
    """Look up every node's layouts in a plan.

    Raises:
        PlanError: the plan has no, or an impossible, entry for a node.
    """
    whole = replicated(len(plan.axes))
    outputs: dict[Value, Layout] = {}
    inputs: dict[fx.Node, tuple[Layout, ...]] = {}
    chosen: dict[fx.Node, tuple[str, ...]] = {}
    sources = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in classes.key:
        if node in sources:
            spec = sources[node]
            table = {"parameter": plan.parameters, "batch": plan.batch, "tangent": plan.results}.get(spec.kind, {})
            outputs[node, 0] = table.get(spec.name, whole)
        elif node.op == "get_attr":
            outputs[node, 0] = whole
        else:
            # A choice for this one node goes before that of its class.
            names = plan.choices.get(f"{classes.key[node]} @{node.name}", plan.choices.get(classes.key[node]))
            chosen[node], inputs[node], made = _operator(node, dims, plan, names)
            outputs.update({(node, i): layout for i, layout in enumerate(made)})
    consumer_layouts, forced = _consumer_layouts(outputs, plan, classes)
    tables = {
        "gradient": plan.parameters, "parameter": plan.parameters, "input_gradient": plan.batch, "result": plan.results,
    }  # fmt: skip
    finals = tuple(tables.get(output.kind, {}).get(output.name, whole) for output in program.outputs)
    moves = {value for value, layout in consumer_layouts.items() if layout != outputs[value]}
    found = Assignment(outputs, inputs, consumer_layouts, chosen, finals, forced=forced)
    if not plan.recompute and not plan.offload and not program.microbatch_invariant:
        return found
    return _with_states(found, program, dims, plan, classes, moves)


def _consumer_layouts(
    outputs: Collection[Value], plan: Plan, classes: LayerClasses
) -> tuple[dict[Value, Layout], frozenset[Value]]:
    """The consumer layout of each value that has one, and the values for which it is forced."""
    found: dict[Value, Layout] = {}
    forced: set[Value] = set()
    for value in outputs:
        node, index = value
        # What the plan says of one node goes before what it says of its class.
        for name in (f"{classes.key[node]} @{node.name} {index}", f"{classes.key[node]} {index}"):
            if name in plan.consumer_layouts and value not in found:
                found[value] = plan.consumer_layouts[name]
                forced.update([value] if name in plan.forced_consumer_layouts else [])
    return found, frozenset(forced)


def _with_states(
    assignment: Assignment, program: Program, dims: Dims, plan: Plan, classes: LayerClasses, moves: Collection[Value]
) -> Assignment:
    """Read off the plan what is not saved for the backward pass, what all microbatches share, and what is offloaded.

    Args:
        assignment: the layouts.
        program: the program.
        dims: its dimension analysis.
        plan: of it.
        classes: which nodes share an entry of the plan.
        moves: values whose consumer layout is another than their own.
    """
    key = classes.key
    number = {n: i for members in classes.members.values() for i, n in enumerate(members)}

    def named(table: Ranges, node: fx.Node, prefix: str = "", suffix: str = "") -> bool:
        """Whether an entry of the plan has this member of its class, or the node itself."""
        shared = table.get(f"{prefix}{key[node]}{suffix}", ())
        ranges = table.get(f"{prefix}{key[node]} @{node.name}{suffix}", shared)
        return any(start <= number[node] < stop for start, stop in ranges)

    relaid = assignment.consumer_layouts
    forward = [n for n in program.sources if not is_backward(n)]
    not_saved = {n for n in forward if named(plan.recompute, n)}
    # What is hoisted is live for the whole step: there is nothing to gain from sending it to the host.
    varying = {n for n in forward if n not in program.microbatch_invariant}
    sent = {n for n in varying if named(plan.offload, n)}
    sent_relaid = {(n, i) for n, i in relaid if n in varying and named(plan.offload, n, "consumer ", f" {i}")}
    not_saved_relaid = {
        (n, i) for n, i in relaid if named(plan.recompute, n, "consumer ", f" {i}") and not is_backward(n)
    }
    # What is redistributed for the backward pass alone is redistributed there: nothing is saved in that layout.
    in_forward = {(n, i) for n, i in relaid if not _only_backward_reads(program, classes, (key[n], i))}
    per_use = {(n, i) for n, i in not_saved_relaid if named(plan.recompute, n, f"{PER_USE}consumer ", f" {i}")}

    def is_view(node: fx.Node) -> bool:
        return dims.operators[node].rule.view

    regathered = not_saved_relaid | _regathered_for_recomputed(program, assignment, not_saved)
    recompute = find_recomputed(program, in_forward | not_saved_relaid, not_saved, regathered, per_use, is_view)
    offload = find_offloaded(program, sent, sent_relaid, recompute, in_forward & set(moves))
    inputs = zip(program.placeholders, program.inputs, strict=True)
    states = frozenset(i.name for n, i in inputs if i.kind == "parameter" and named(plan.offload, n))
    hoisted, hoisted_layouts = find_hoisted(program, in_forward, not_saved, not_saved_relaid)
    return replace(
        assignment, recompute=recompute, offload=replace(offload, states=states), hoisted=hoisted,
        hoisted_consumer_layouts=hoisted_layouts,
    )  # fmt: skip


def _regathered_for_recomputed(program: Program, assignment: Assignment, not_saved: Collection[fx.Node]) -> set[Value]:
    """Values without a consumer layout that a recomputed operator reads in another layout than they have.

    They are re-gathered in the backward pass: else they would be saved in the other layout, which no state says.
    """
    backward = {s for node, sources in program.sources.items() if is_backward(node) for s in sources}
    others = (
        backward | assignment.consumer_layouts.keys() | {producer(v) for v in program.output_values if v is not None}
    )
    return {
        source
        for node in not_saved
        for source, layout in zip(program.sources[node], assignment.inputs[node], strict=True)
        if source not in others and not is_backward(source[0]) and layout != assignment.outputs[source]
    }


def _only_backward_reads(program: Program, classes: LayerClasses, value: tuple[str, int]) -> bool:
    """Whether only the backward pass reads the values of a class."""
    users = (classes.members.get(user, ()) for user, _ in classes.uses.get(value, {}))
    return all(nodes and nodes[0] in program.sources and is_backward(nodes[0]) for nodes in users)


def _operator(
    node: fx.Node, dims: Dims, plan: Plan, names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[Layout, ...], tuple[Layout, ...]]:
    operator = dims.operators[node]
    if names is None:
        raise PlanError(f"the plan says nothing of {node.target} (node {node.name}, {user_line(node)}); plan again")
    try:
        into, made = combine(operator, names)
    except KeyError as e:
        raise PlanError(
            f"the plan wants strategy {brief(str(e))} of {node.target} (node {node.name}), which has none such"
        ) from e
    # A plan of another program, or edited by hand, may name strategies that do not divide.
    uneven = _uneven(operator, names, plan.axis_sizes)
    if uneven is not None:
        raise PlanError(f"the plan splits {uneven} of {node.target} (node {node.name}) into unequal parts; plan again")
    return names, into, made


@remembered(4096)
def _uneven(operator: Operator, names: tuple[str, ...], sizes: tuple[int, ...]) -> TensorType | None:
    """A tensor of the operator that the strategies do not split into equal parts."""
    into, made = combine(operator, names)
    pairs = zip((*operator.inputs, *operator.outputs), (*into, *made), strict=True)
    return next((t for t, layout in pairs if t is not None and not divides(t, layout, sizes)), None)


Uses = Mapping[Value, Sequence[Layout]]


def uses(program: Program, assignment: Assignment) -> tuple[Uses, Uses, Uses]:
    """The layouts in which each value is wanted, in order, by operators and by the program's outputs.

    Returns:
        Of values before the first microbatch, as they are first computed, and as they are recomputed.
    """
    before: dict[Value, list[Layout]] = defaultdict(list)
    first: dict[Value, list[Layout]] = defaultdict(list)
    second: dict[Value, list[Layout]] = defaultdict(list)
    recompute = assignment.recompute

    def in_backward(value: Value) -> dict[Value, list[Layout]]:
        return second if value in recompute.values else first

    for node, sources in program.sources.items():
        backward = is_backward(node)
        for source, layout in zip(sources, assignment.inputs[node], strict=True):
            # A recomputed operator may be counted twice: in the backward pass, and where it first runs.
            if backward or node in recompute.nodes:
                in_backward(source)[source].append(layout)
            if not backward and node not in recompute.backward_only:
                (before if node in assignment.hoisted else first)[source].append(layout)
    for i, (value, layout) in enumerate(zip(program.output_values, assignment.finals, strict=True)):
        if value is not None:
            made = producer(value)
            (first if i < program.forward_outputs else in_backward(made))[made].append(layout)
    for hoisted in assignment.hoisted_consumer_layouts:
        if any(layout != assignment.outputs[hoisted] for layout in first[hoisted]):
            before[hoisted].append(assignment.consumer_layouts[hoisted])
    return before, first, second


def _forward_uses(program: Program, assignment: Assignment) -> Mapping[Value, Sequence[Layout]]:
    """The layouts in which the forward pass wants each value of its own, the model's results included."""
    found: dict[Value, list[Layout]] = defaultdict(list)
    for node, sources in program.sources.items():
        if not is_backward(node) and node not in assignment.recompute.backward_only:
            for source, layout in zip(sources, assignment.inputs[node], strict=True):
                found[source].append(layout)
    for value, layout in zip(program.output_values, assignment.finals[: program.forward_outputs], strict=False):
        if value is not None:
            found[producer(value)].append(layout)
    return found


def value_moves(
    table: Redistributions, made: Layout, consumer: Layout | None, wanted: Sequence[Layout], forced: bool = False
) -> list[Move]:
    """Every move of one value, each once, in order: to its consumer layout, and from there to what is wanted.

    Who wants it as it was made takes it as it is, unless the consumer layout is ``forced``.
    """
    if forced and consumer is not None and wanted:
        return [*table.path(made, consumer), *value_moves(table, consumer, None, wanted)]
    found: dict[Move, None] = {}
    reached = {made}
    start = made if consumer is None else consumer
    # Users of the value as it was made need no move; all others go through the consumer layout.
    for source, target in [way for w in wanted if w != made for way in ((made, start), (start, w))]:
        if target in reached:
            continue
        for move in table.path(source, target):
            # Layouts on the way are shared: a later path takes what an earlier one has made.
            if move.target not in reached:
                found[move] = None
                reached.add(move.target)
    return list(found)


HOISTED, IN_FORWARD, IN_BACKWARD = 0, 1, 2
"""When a move is made: before the first microbatch, or in one of the passes."""


class CountedMove(NamedTuple):
    """A move, how often a step makes it, and when: `HOISTED`, `IN_FORWARD` or `IN_BACKWARD`."""

    move: Move
    times: int
    at: int


def all_moves(program: Program, dims: Dims, assignment: Assignment, tables: Tables) -> dict[Value, list[CountedMove]]:
    """Every move of a step, by the value moved, in program order."""
    found: dict[Value, list[CountedMove]] = defaultdict(list)
    # Values of repeated layers have the same layouts and uses: their moves are found once.
    known: dict[tuple[Redistributions, Layout, Layout | None, tuple[Layout, ...], bool], list[Move]] = {}
    before, first, second = uses(program, assignment)
    forward = _forward_uses(program, assignment)
    for wanted in (first, second):
        for value, made in assignment.outputs.items():
            early = before.get(value, ()) if wanted is first else ()
            consumer, targets = assignment.consumer_layouts.get(value), (*early, *wanted.get(value, ()))
            if wanted is second and value in assignment.recompute.per_use:
                continue  # counted below
            if value in dims.types and targets and any(layout != made for layout in (*targets, consumer or made)):
                forced = value in assignment.forced
                key = (tables.of(dims.types[value]), made, consumer, targets, forced)
                moves = known[key] if key in known else known.setdefault(key, value_moves(*key))
                once = len(value_moves(*key[:3], early, forced)) if early else 0  # hoisted users come first
                times = program.moves(value[0])
                now = (*early, *(() if wanted is second else forward.get(value, ())))
                # The backward pass makes by itself what it alone needs.
                in_forward = moves if now == targets else value_moves(*key[:3], now, forced)
                for i, move in enumerate(moves):
                    at = HOISTED if i < once else IN_FORWARD if move in in_forward else IN_BACKWARD
                    found[value].append(CountedMove(move, 1 if i < once else times, at))
    for value, layouts, users in _per_use_moves(program, assignment):
        if value in dims.types:
            consumer, table = assignment.consumer_layouts.get(value), tables.of(dims.types[value])
            moves = value_moves(table, assignment.outputs[value], consumer, layouts, value in assignment.forced)
            found[value] += [CountedMove(move, users * program.moves(value[0]), IN_BACKWARD) for move in moves]
    return {value: moves for value, moves in found.items() if moves}


def _per_use_moves(program: Program, assignment: Assignment) -> Iterator[tuple[Value, list[Layout], int]]:
    """What operators re-gather for themselves: the value, its layouts, and how often the operator runs in backward."""
    per_use, recompute = assignment.recompute.per_use, assignment.recompute
    if not per_use:
        return
    for node, sources in program.sources.items():
        times = int(is_backward(node)) or recompute.times(node)
        for value in dict.fromkeys(s for s in sources if s in per_use) if times else ():
            layouts = zip(sources, assignment.inputs[node], strict=True)
            yield value, [layout for source, layout in layouts if source == value], times
    gradients = list(zip(program.output_values, assignment.finals, strict=True))[program.forward_outputs :]
    for output, layout in gradients:
        if output is not None and producer(output) in per_use:
            yield producer(output), [layout], 1


def machine_of(plan: Plan) -> Machine:
    """The mesh that a plan is for."""
    links = plan.cluster.link_for(dict(plan.axes))
    sizes, device = plan.axis_sizes, plan.cluster.device
    return Machine(plan.axis_names, sizes, links, device, quantized=plan.quantized, load=plan.expert_load)
