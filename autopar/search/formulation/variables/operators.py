"""Variables of operators: a candidate, that is a strategy on each axis, for each class of operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.ir.graph import is_backward
from autopar.ir.layout import Placement, TensorType
from autopar.rules.remembered import remembered
from autopar.search.formulation.variables.activation_states import with_states
from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.variable import Floats, Ints, Port, Variable
from autopar.sharding.candidates import REPLICATE, Candidates, candidates, strategies
from autopar.sharding.dims import Operator
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute.moves import Machine


def operator_variable(context: BuildContext, key: str) -> Variable:
    """The variable of a class of operators."""
    node, count = context.classes.members[key][0], context.classes.count[key]
    operator = context.dims.operators[node]
    chosen, seconds = timed_candidates(operator, _allowed(context, key, operator), context.tables.machine)
    types, ports = _ports(context, operator, chosen)
    invariant = node in context.program.microbatch_invariant
    runs = 1 if invariant else context.program.runs(node)  # of an invariant, its states say how often it runs
    cost = seconds * (count * runs)
    found = Variable(
        key, count, ports, types, chosen, cost, np.zeros(len(cost)), np.arange(len(cost)), invariant=invariant
    )
    if context.memory.activations and not operator.rule.view:
        working = sum((context.bytes(found, port, i) / count for port, i in types), np.zeros(len(cost)))
        # Some label must remain, whatever the limit.
        limit = max(context.memory.working, float(working.min(initial=np.inf)))
        found = replace(found, working=working, cost=np.where(working <= limit, cost, np.inf))
    found = with_states(context, replace(found, backward=is_backward(node)), node)
    if context.memory.point is None or context.memory.point.node not in context.classes.members[key]:
        return found
    return replace(found, memory=found.memory + _while_running(context, found, operator))


@remembered(4096)
def timed_candidates(
    operator: Operator, allowed: tuple[frozenset[str], ...], machine: Machine
) -> tuple[Candidates, Floats]:
    """Candidates of an operator and their seconds: the same for each memory model, and for all prices of seconds."""
    chosen = candidates(operator, machine.sizes, allowed)
    return chosen, operator_seconds(operator, chosen, machine)


def _ports(
    context: BuildContext, operator: Operator, chosen: Candidates
) -> tuple[dict[Port, TensorType], dict[Port, Ints]]:
    """Types and layout numbers of an operator's arguments and results under each candidate."""
    types: dict[Port, TensorType] = {}
    ports: dict[Port, Ints] = {}
    for i, type_ in enumerate(operator.inputs):
        types["in", i] = type_
        ports["in", i] = _layout_numbers(context, type_, [s.inputs[i] for s in chosen.strategies], chosen.choice)
    for i, output in enumerate(operator.outputs):
        if output is not None:
            types["out", i] = output
            ports["out", i] = _layout_numbers(context, output, [s.outputs[i] for s in chosen.strategies], chosen.choice)
    return types, ports


def _layout_numbers(context: BuildContext, type_: TensorType, placements: list[Placement], choice: Ints) -> Ints:
    """Layout number of each candidate, from each strategy's placement of this tensor."""
    table, axes = context.tables.of(type_), range(len(context.sizes))
    numbers = {p: i for i, p in enumerate(dict.fromkeys(placements))}
    code = np.array([numbers[p] for p in placements])[choice]
    # There are far fewer layouts than candidates: each is looked up once, by its placements as digits of a number.
    base = len(numbers)
    packed = code @ (base ** np.arange(len(axes)))
    names, found = list(numbers), np.full(base ** len(axes), -1)
    found[packed] = 0
    for u in np.flatnonzero(found + 1):
        found[u] = table.index[tuple(names[(int(u) // base**a) % base] for a in axes)]
    return found[packed]


def _allowed(context: BuildContext, key: str, operator: Operator) -> tuple[frozenset[str], ...]:
    """Names of the strategies that a class of operators may take on each axis."""
    free, fixed = context.restrictions.free, context.restrictions.fixed.get(key)
    every = frozenset(s.name for s in strategies(operator))
    found: list[Iterable[str]] = []
    for axis in range(len(context.sizes)):
        own = context.restrictions.strategies.get(key, (None,) * len(context.sizes))[axis]
        if free is None or axis in free:
            found.append(every if own is None else own)
        elif fixed:
            found.append((fixed[axis],))
        else:
            found.append((REPLICATE,) if own is None or REPLICATE in own else (min(own),))
    return tuple(map(frozenset, found))


def _while_running(context: BuildContext, variable: Variable, operator: Operator) -> Floats:
    """Bytes of the arguments and results of one operator at the constraint's program point, as far as they count."""
    point = context.memory.point
    assert point is not None
    assert variable.choices is not None
    none = np.zeros(len(variable.cost))
    arguments = sum((context.bytes(variable, "in", i) for i in point.inputs), none)
    results = sum((context.bytes(variable, "out", i) for i in point.outputs), none)
    # Lowered code may free arguments before all results exist: then only the larger of the two is certain.
    lowered = np.zeros(len(none), dtype=bool)
    for axis in range(len(context.sizes)):
        codes = [operator.rule.lower.get(s.factor[0]) if s.factor else None for s in variable.choices.strategies]
        apart = np.array([code is not None and not code.together for code in codes])
        lowered |= apart[variable.choices.choice[variable.candidate, axis]]
    found: Floats = np.where(lowered, np.maximum(arguments, results), arguments + results) / variable.count
    return found
