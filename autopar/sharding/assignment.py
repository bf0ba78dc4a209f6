"""A plan applied to a program: the layouts of every node's tensors, and every move between them.

Both the prediction and the rewriting read this one account, so that what is emitted is what was counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import Value, is_backward, producer, user_line
from autopar.ir.layout import Layout, TensorType, divides, replicated
from autopar.ir.plan import PER_USE, Plan, Ranges
from autopar.ir.program import Program
from autopar.memory.hoist import NOTHING_HOISTED, Hoisted, find_hoisted
from autopar.memory.offload import NOTHING_OFFLOADED, Offload, find_offloaded
from autopar.memory.recompute import NOTHING_RECOMPUTED, Recompute, find_recomputed
from autopar.sharding.candidates import combine
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Machine, Move, Redistributions, Tables


@dataclass(frozen=True)
class Assignment:
    """Layouts of every tensor.

    Attributes:
        outputs: layout in which each value is made.
        inputs: layouts in which each operator takes its tensor arguments.
        consumer_layouts: layout that a value is brought to first, for all its users.
        forced: values that nobody takes but in that layout, or from it.
        strategies: names of the strategies of each operator, axis by axis.
        finals: layout that each output of the program must have, in order.
        recompute: what the backward pass recomputes or re-gathers.
        hoisted: what runs once a step, before the first microbatch.
        offload: what is in host memory from the forward to the backward pass, and whose optimizer state is.
    """

    outputs: dict[Value, Layout]
    inputs: dict[fx.Node, tuple[Layout, ...]]
    consumer_layouts: dict[Value, Layout]
    strategies: dict[fx.Node, tuple[str, ...]]
    finals: tuple[Layout, ...]
    recompute: Recompute = NOTHING_RECOMPUTED
    hoisted: Hoisted = NOTHING_HOISTED
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
            names = plan.choices.get(f"{classes.key[node]} @{node.name}", plan.choices.get(classes.key[node]))
            chosen[node], inputs[node], made = _operator(node, dims, plan, names)
            outputs.update({(node, i): layout for i, layout in enumerate(made)})
    consumer_layouts, held, pinned = {}, set[Value](), frozenset(plan.forced_consumer_layouts)
    for value in outputs:
        node, index = value
        for name in (f"{classes.key[node]} @{node.name} {index}", f"{classes.key[node]} {index}"):
            if name in plan.consumer_layouts and value not in consumer_layouts:
                consumer_layouts[value] = plan.consumer_layouts[name]
                held.update([value] if name in pinned else [])
    finals = []
    for output in program.outputs:
        tables = {
            "gradient": plan.parameters, "parameter": plan.parameters, "input_gradient": plan.batch,
            "result": plan.results,
        }  # fmt: skip
        table = tables.get(output.kind, {})
        finals.append(table.get(output.name, whole))
    moves = {value for value, layout in consumer_layouts.items() if layout != outputs[value]}
    states = _states(program, dims, plan, classes, consumer_layouts, moves)
    return Assignment(outputs, inputs, consumer_layouts, chosen, tuple(finals), *states, frozenset(held))


def _states(
    program: Program,
    dims: Dims,
    plan: Plan,
    classes: LayerClasses,
    consumer_layouts: Collection[Value],
    moves: Collection[Value],
) -> tuple[Recompute, Hoisted, Offload]:
    """Read off the plan what is not kept for the backward pass, what is for all microbatches, and what on the host.

    Args:
        program: the program.
        dims: its dimension analysis.
        plan: of it.
        classes: which nodes share an entry of the plan.
        consumer_layouts: values that are brought to one layout for all their users.
        moves: of these, those for which it is another layout than their own.
    """
    if not plan.recompute and not plan.offload and not program.microbatch_invariant:
        return NOTHING_RECOMPUTED, NOTHING_HOISTED, NOTHING_OFFLOADED

    def within(table: Ranges, node: fx.Node, prefix: str = "", suffix: str = "") -> bool:
        shared = table.get(f"{prefix}{key[node]}{suffix}", ())
        ranges = table.get(f"{prefix}{key[node]} @{node.name}{suffix}", shared)
        return any(start <= number[node] < stop for start, stop in ranges)

    number = {n: i for members in classes.members.values() for i, n in enumerate(members)}
    key = classes.key
    forward = [n for n in program.sources if not is_backward(n)]
    operators = {n for n in forward if within(plan.recompute, n)}
    varying = {n for n in forward if n not in program.microbatch_invariant}  # what is of each microbatch
    sent = {n for n in varying if within(plan.offload, n)}
    shown = {(n, i) for n, i in consumer_layouts if n in varying and within(plan.offload, n, "consumer ", f" {i}")}
    moved = {(n, i) for n, i in consumer_layouts if within(plan.recompute, n, "consumer ", f" {i}")}
    # What is moved for the backward pass alone is moved there: nothing is kept in that layout.
    early = {(n, i) for n, i in consumer_layouts if not _taken_late(program, classes, (key[n], i))}
    moved = {v for v in moved if not is_backward(v[0])}
    each = {(n, i) for n, i in moved if within(plan.recompute, n, f"{PER_USE}consumer ", f" {i}")}
    repeated = find_recomputed(program, early | moved, operators, moved, each, lambda n: dims.operators[n].rule.view)
    offloaded = find_offloaded(program, sent, shown, repeated, early & set(moves))
    inputs = zip(program.placeholders, program.inputs, strict=True)
    offloaded = replace(
        offloaded, states=frozenset(i.name for n, i in inputs if i.kind == "parameter" and within(plan.offload, n))
    )
    return repeated, find_hoisted(program, early, operators, moved), offloaded


def _taken_late(program: Program, classes: LayerClasses, value: tuple[str, int]) -> bool:
    """Whether only the backward pass takes the values of a class."""
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
        raise PlanError(f"the plan wants strategy {e} of {node.target} (node {node.name}), which has none such") from e
    uneven = _uneven(operator, names, plan.axis_sizes)
    if uneven is not None:
        raise PlanError(f"the plan splits {uneven} of {node.target} (node {node.name}) into unequal parts; plan again")
    return names, into, made


@lru_cache(maxsize=4096)
def _uneven(operator: Operator, names: tuple[str, ...], sizes: tuple[int, ...]) -> TensorType | None:
    """A tensor of the operator that the strategies do not split into equal parts."""
    into, made = combine(operator, names)
    pairs = zip((*operator.inputs, *operator.outputs), (*into, *made), strict=True)
    return next((t for t, layout in pairs if t is not None and not divides(t, layout, sizes)), None)


Uses = Mapping[Value, Sequence[Layout]]


def uses(program: Program, assignment: Assignment) -> tuple[Uses, Uses, Uses]:
    """The layouts in which each value is wanted, in order, by operators and by the program's outputs.

    Returns:
        Of values before the first microbatch, as they are made first, and as they are recomputed.
    """
    before: dict[Value, list[Layout]] = defaultdict(list)
    first: dict[Value, list[Layout]] = defaultdict(list)
    second: dict[Value, list[Layout]] = defaultdict(list)
    again, shared = assignment.recompute, assignment.hoisted

    def late(value: Value) -> dict[Value, list[Layout]]:
        return second if value in again.values else first

    for node, sources in program.sources.items():
        backward = is_backward(node)
        for source, layout in zip(sources, assignment.inputs[node], strict=True):
            if backward or node in again.nodes:
                late(source)[source].append(layout)
            if not backward and node not in again.late:
                (before if node in shared.nodes else first)[source].append(layout)
    for i, (value, layout) in enumerate(zip(program.output_values, assignment.finals, strict=True)):
        if value is not None:
            made = producer(value)
            (first if i < program.forward_outputs else late(made))[made].append(layout)
    for moved in shared.consumer_layouts:
        if any(layout != assignment.outputs[moved] for layout in first[moved]):
            before[moved].append(assignment.consumer_layouts[moved])
    return before, first, second


def value_moves(
    table: Redistributions, made: Layout, relay: Layout | None, wanted: Sequence[Layout], held: bool = False
) -> list[Move]:
    """Every move of one value, each once, in order: to its relay, and from there to what is wanted.

    What is wanted as it was made is there, unless the relay is ``held``.
    """
    if held and relay is not None and wanted:
        return [*table.path(made, relay), *value_moves(table, relay, None, wanted)]
    found: dict[Move, None] = {}
    reached = {made}
    start = made if relay is None else relay
    for source, target in [way for w in wanted if w != made for way in ((made, start), (start, w))]:
        if target in reached:
            continue
        for move in table.path(source, target):
            if move.target not in reached:
                found[move] = None
                reached.add(move.target)
    return list(found)


def all_moves(
    program: Program, dims: Dims, assignment: Assignment, tables: Tables
) -> dict[Value, list[tuple[Move, int]]]:
    """Every move of a step and how often it is made, by the value moved, in program order."""
    found: dict[Value, list[tuple[Move, int]]] = defaultdict(list)
    known: dict[tuple[Redistributions, Layout, Layout | None, tuple[Layout, ...], bool], list[Move]] = {}
    before, first, second = uses(program, assignment)
    for wanted in (first, second):
        for value, made in assignment.outputs.items():
            early = before.get(value, ()) if wanted is first else ()
            relay, targets = assignment.consumer_layouts.get(value), (*early, *wanted.get(value, ()))
            if wanted is second and value in assignment.recompute.apart:
                continue  # counted below
            if value in dims.types and targets and any(layout != made for layout in (*targets, relay or made)):
                held = value in assignment.forced
                key = (tables.of(dims.types[value]), made, relay, targets, held)
                moves = known[key] if key in known else known.setdefault(key, value_moves(*key))
                once = len(value_moves(*key[:3], early, held)) if early else 0  # those for users before come first
                times = program.moves(value[0])
                found[value] += [(move, 1 if i < once else times) for i, move in enumerate(moves)]
    for value, layouts, users in _apart(program, assignment):
        if value in dims.types:
            relay, table = assignment.consumer_layouts.get(value), tables.of(dims.types[value])
            moves = value_moves(table, assignment.outputs[value], relay, layouts, value in assignment.forced)
            found[value] += [(move, users * program.moves(value[0])) for move in moves]
    return {value: moves for value, moves in found.items() if moves}


def _apart(program: Program, assignment: Assignment) -> Iterator[tuple[Value, list[Layout], int]]:
    """What operators move for themselves: the value, where to, and how often the operator runs in the backward pass."""
    again = assignment.recompute
    for node, sources in program.sources.items() if again.apart else ():
        times = int(is_backward(node)) or again.times(node)
        for value in dict.fromkeys(s for s in sources if s in again.apart) if times else ():
            layouts = zip(sources, assignment.inputs[node], strict=True)
            yield value, [layout for source, layout in layouts if source == value], times
    late = list(zip(program.output_values, assignment.finals, strict=True))[program.forward_outputs :]
    for output, layout in late if again.apart else ():
        if output is not None and producer(output) in again.apart:
            yield producer(output), [layout], 1


def machine_of(plan: Plan) -> Machine:
    """The mesh that a plan is for."""
    links = plan.cluster.link_for(dict(plan.axes))
    return Machine(plan.axis_names, plan.axis_sizes, links, plan.cluster.device)
