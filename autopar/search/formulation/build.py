"""From candidates to a combinatorial problem: variables, their costs, and what it costs to connect them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.costs.host_copies import copy_seconds
from autopar.errors import InfeasibleError
from autopar.ir.checkpoint_regions import SAVED
from autopar.ir.graph import is_backward
from autopar.ir.layout import Layout, Partial, Placement, Replicate, Split, TensorType, is_boundary_layout, item_bytes
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Program, producer
from autopar.search.formulation.memory_model import MemoryModel, carried, stored
from autopar.search.formulation.peak_point import PeakPoint, Timeline
from autopar.search.formulation.pins import Pinned, Restrictions
from autopar.search.formulation.variable import AGAIN, EARLY, KEPT, PASSING, TAKEN, TWICE, Floats, Ints, Port, Variable
from autopar.search.solver.problem import Edge, Node, Problem
from autopar.sharding.candidates import REPLICATE, candidates, split_parts
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.factor_kinds import from_parameters
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Tables


@dataclass(frozen=True)
class Formulation:
    """The problem, and what its variables mean.

    Attributes:
        problem: what is minimized.
        variables: of each of its nodes.
        heaviest: the moment when most is held under labelings together; None if that is not known.
    """

    problem: Problem
    variables: tuple[Variable, ...]
    heaviest: Callable[[Sequence[Ints]], PeakPoint] | None = None


def build(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    tables: Tables,
    memory: MemoryModel,
    restrictions: Restrictions,
) -> Formulation:
    """The layout problem of a program on a machine.

    Args:
        program: the canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: redistribution costs.
        memory: what counts as memory.
        restrictions: what is decided already.
    """
    maker = _Maker(program, dims, classes, tables, memory, restrictions)
    variables = maker.variables()
    number = {v.key: i for i, v in enumerate(variables)}
    edges = []
    for (source, out), (target, into), weight, times in maker.connections(variables):
        u, v = variables[number[source]], variables[number[target]]
        edges.append(_edge(number[source], number[target], u, v, out, into, weight, times, tables))
    nodes = tuple(Node(v.key, v.cost, v.memory) for v in variables)

    def heaviest(labelings: Sequence[Ints]) -> PeakPoint:
        return Timeline(program, dims, classes, tables, maker.may_repeat).heaviest(variables, labelings)

    return Formulation(Problem(nodes, tuple(edges)), tuple(variables), heaviest)


def _edge(
    i: int, j: int, u: Variable, v: Variable, out: Port, into: Port, weight: int, times: int, tables: Tables
) -> Edge:
    """What it costs to connect two variables.

    Args:
        i: number of the source.
        j: number of the target.
        u: the source.
        v: the target.
        out: port of the source.
        into: port of the target.
        weight: how many connections it stands for.
        times: how often each microbatch's moves are made in a step.
        tables: redistribution costs.
    """
    rows, u_group = np.unique(4 * u.ports[out] + u.available, return_inverse=True)
    columns, v_group = np.unique(4 * v.ports[into] + v.passes, return_inverse=True)
    passes = columns % 4
    moves = weight * np.array([times, times, 2 * times, 1])[passes]
    table = tables.of(u.types[out]).seconds[np.ix_(rows // 4, columns // 4)] * moves
    table[~TAKEN[np.ix_(rows % 4, passes)]] = np.inf  # the backward pass takes what is gone
    if v.unmoved:
        table[(table > 0) & (passes == TWICE)] = np.inf
    return Edge(i, j, u_group.astype(np.int64), v_group.astype(np.int64), np.ascontiguousarray(table))


class _Maker:
    """Makes variables and their connections, class by class."""

    def __init__(
        self,
        program: Program,
        dims: Dims,
        classes: LayerClasses,
        tables: Tables,
        memory: MemoryModel,
        restrictions: Restrictions,
    ) -> None:
        self.program, self.dims, self.classes, self.tables = program, dims, classes, tables
        self.memory, self.restrictions = memory, restrictions
        self.sizes = tables.machine.sizes
        self.chains = from_parameters(program) if memory.again == "gathers" else set()
        self.carried = carried(program, classes) if memory.again == "search" else frozenset()
        inputs, shown = zip(program.placeholders, program.inputs, strict=True), program.input_gradients
        self.differentiable = {classes.key[n] for n, i in inputs if i.kind == "batch" and i.name in shown}
        outputs = program.output_values[: program.forward_outputs]
        self.returned = {producer(v)[0] for v in outputs if v is not None}  # and held by the caller anyway
        self.stored = stored(program, dims) if memory.activations and not memory.states else frozenset()
        # Outputs that are taken, by class, and whether the backward pass takes them itself.
        self.taken: dict[str, dict[int, bool]] = defaultdict(dict)
        for (key, out), users in classes.uses.items():
            self.taken[key][out] = any(self._is_late(user) for user, _ in users)

    def variables(self) -> list[Variable]:
        inputs = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        results = {o.name: v for o, v in zip(self.program.outputs, self.program.output_values, strict=True)
                   if o.kind == "result" and v is not None}  # fmt: skip
        made: list[Variable] = []
        for key, members in self.classes.members.items():
            node, count = members[0], self.classes.count[key]
            if node in self.dims.operators:
                made.append(self._operator(key, node, count))
            elif node.op == "get_attr" or inputs[node].kind == "buffer":
                made.append(self._tensor(key, count, self.dims.types[node, 0], "constant", ()))
            elif inputs[node].kind == "parameter":
                names = tuple(inputs[n].name for n in members)
                gradients = self.memory.moment.gradients if self.memory.moment else {}
                memory = sum(self.memory.state[n] + gradients.get(n, 0.0) for n in names) * self.memory.share.states
                found = self._tensor(key, count, self.dims.types[node, 0], "parameter", names, memory)
                away = sum(self.memory.optimizer.get(n, 0.0) for n in names) * self.memory.share.states
                made.append(self._with_states_away(found, away))
            elif inputs[node].kind == "batch":
                made.append(self._tensor(key, count, self.dims.types[node, 0], "batch", (inputs[node].name,)))
            elif inputs[node].name not in results or _is_loss(self.program, inputs[node].name):
                made.append(self._tensor(key, count, self.dims.types[node, 0], "constant", ()))
        for name, value in results.items():
            kind = "constant" if _is_loss(self.program, name) else "result"
            found = self._tensor(f"result {name}", 1, self.dims.type_of(value), kind, (name,))
            if self.memory.moment is not None and name in self.memory.moment.results:
                times = self.program.part.count if name in self.program.part.results else 1
                found = replace(found, memory=found.memory + times * self._bytes(found, "out", 0))
            made.append(found)
        for (key, out), users in self.classes.uses.items():
            node, count = self.classes.members[key][0], self.classes.count[key]
            if self._is_relayed(key, out):
                made.append(self._relay(key, out, node, count, users))
        return made

    def _with_states_away(self, variable: Variable, size: float) -> Variable:
        """A parameter's variable with each layout twice, if some of its bytes may lie on the host between steps.

        Only what is split as much as it can be goes there: for the optimizer's step all of it is on the device, and the
        row does not count that.
        """
        if not size:
            return variable
        parts = self.tables.of(variable.types["out", 0]).parts[variable.ports["out", 0]]
        bytes_ = size / parts
        seconds = 2 * copy_seconds(bytes_, self.tables.machine.device, variable.count)
        seconds = np.where(parts == parts.max(), seconds, np.inf)
        return replace(variable, memory=variable.memory - bytes_).in_states((KEPT,), 1, bytes_, seconds)

    def _is_relayed(self, key: str, out: int) -> bool:
        """Whether the values of a class have a form of their own for all their users."""
        users, node = self.classes.uses[key, out], self.classes.members[key][0]
        name = ("consumer", f"{key} {out}")
        asked = name in self.restrictions.placements or name in self.restrictions.layouts
        several = len(users) > 1 or max(users.values()) > self.classes.count[key]
        return asked or several or (node in self.program.microbatch_invariant and self._is_of_one(users))

    def _is_of_one(self, users: Mapping[tuple[str, int], int]) -> bool:
        """Whether the forward pass of each microbatch takes what has these users, and all may share its moved form."""
        invariant = self.program.microbatch_invariant
        nodes = (members[0] for user, _ in users if (members := self.classes.members.get(user, ())))
        return any(n in self.program.sources and n not in invariant and not is_backward(n) for n in nodes)

    def _relay(self, key: str, out: int, node: fx.Node, count: int, users: Mapping[tuple[str, int], int]) -> Variable:
        found = self._tensor(f"consumer {key} {out}", count, self.dims.types[node, out], "consumer", (f"{key} {out}",))
        late = [self._is_late(user) for user, _ in users]
        # What the backward pass alone takes is moved there.
        found = replace(found, steady=node in self.program.microbatch_invariant and not all(late), backward=all(late))
        if not self._has_states(found) or is_backward(node) or all(late):
            return found
        states = [s for s in self._states(node) if not (s in (PASSING, EARLY) and any(late))]
        size = self._bytes(found, "in", 0) if self.memory.activations else np.zeros(len(found.cost))
        # What can be moved again, for nothing if it lies as it was made, goes to the host as it was made.
        sent = any(late) and AGAIN not in states and self._may_go(found, node, states)
        copied = self._copied(node, size, count) if sent else None
        kept = np.minimum(size, self._there(key, out, relay=True)) * self._held(found)
        if any(late) and AGAIN not in states:
            found, states = replace(found, unmoved=True), [*states, AGAIN]
        return found.in_states(states, 1, kept, copied)

    def _has_states(self, variable: Variable) -> bool:
        """Whether there is a choice: what all microbatches may share need not be kept where nothing is made again."""
        return self.memory.states or (variable.steady and self.memory.activations)

    def _states(self, node: fx.Node) -> tuple[int, ...]:
        """States that a forward value may be in; showing another one again costs nothing, and is always allowed."""
        pin = self.program.pins.get(node) if self.memory.regions else None
        if pin is not None:
            return (PASSING, KEPT) if pin == SAVED else (PASSING, AGAIN)
        if not self.memory.activations:
            return (KEPT,)  # it takes nothing that counts
        view = node in self.dims.operators and self.dims.operators[node].rule.view
        repeated = (self.memory.again == "search" and node not in self.carried) or view or node in self.chains
        states = (PASSING, KEPT, AGAIN) if repeated else (PASSING, KEPT)
        return (*states, EARLY) if node in self.program.microbatch_invariant else states

    def may_repeat(self, node: fx.Node) -> bool:
        """Whether what a forward operator makes may be made again."""
        return AGAIN in self._states(node)

    def _is_late(self, key: str) -> bool:
        """Whether a class of users belongs to the backward pass."""
        members = self.classes.members.get(key)  # a result has none; members of a class are all of one pass
        return members is not None and members[0] in self.program.sources and is_backward(members[0])

    def _bytes(self, variable: Variable, port: str, i: int) -> Floats:
        """Bytes of a tensor under each label, all members together."""
        type_ = variable.types[port, i]
        parts = self.tables.of(type_).parts[variable.ports[port, i]]
        return type_.numel * item_bytes(type_.dtype) * variable.count / parts

    def _there(self, key: str, out: int, *, relay: bool = False) -> float:
        """The most bytes that count of what a class keeps, at the row's moment."""
        moment = self.memory.moment
        if moment is None:
            return np.inf
        instead = moment.counted(key, out, self.classes.members[key], relay=relay)
        if instead is None:
            return 0.0
        types = [self.dims.types[value] for value in instead]
        least = (t.numel * item_bytes(t.dtype) / self.tables.of(t).parts.max() for t in types)
        return self.classes.count[key] * min(least, default=np.inf)

    def _while_running(self, variable: Variable, operator: Operator) -> Floats:
        """Bytes of what the operator of the row's moment takes and makes, if all that is there at once."""
        moment = self.memory.moment
        assert moment is not None
        none = np.zeros(len(variable.cost))
        taken = sum((self._bytes(variable, "in", i) for i in moment.inputs), none)
        made = sum((self._bytes(variable, "out", i) for i in moment.outputs), none)
        lowered = np.zeros(len(none), dtype=bool)
        assert variable.choices is not None
        for axis in range(len(self.sizes)):
            codes = [operator.rule.lower.get(s.factor[0]) if s.factor else None for s in variable.choices.strategies]
            apart = np.array([code is not None and not code.together for code in codes])
            lowered |= apart[variable.choices.choice[variable.candidate, axis]]
        found: Floats = np.where(lowered, np.maximum(taken, made), taken + made) / variable.count
        return found

    def _held(self, variable: Variable) -> float:
        """What a byte of a value counts that is kept for a microbatch, or for all of them."""
        return self.memory.share.states if variable.steady else self.memory.share.kept

    def _in_states(self, variable: Variable, node: fx.Node) -> Variable:
        """An operator's variable with what its results take of memory."""
        if node.target is accumulate and self.memory.activations:  # the sum is there all the time
            return replace(variable, memory=self._bytes(variable, "out", 0) * self.memory.share.states)
        if is_backward(node) or not (self.memory.activations or self.memory.states):
            return variable
        taken = self.taken[variable.key]
        # What only serves to make others again may add to what the backward pass takes: the row stays a relaxation.
        used = {out for out, late in taken.items() if late} or taken.keys()
        none = np.zeros(len(variable.cost))
        size, kept, tensors = none, none, 0
        for port, i in variable.types if self.memory.activations else ():
            if port == "out" and i in used and (self._has_states(variable) or (node, i) in self.stored):
                made = self._bytes(variable, "out", i)
                size, kept = size + made, kept + np.minimum(made, self._there(variable.key, i))
                tensors += 1
        kept = kept * self._held(variable)
        if not self._has_states(variable):
            return replace(variable, memory=variable.memory + kept)
        states = self._states(node)
        copied = self._copied(node, size, tensors * variable.count)
        if AGAIN in states:  # what takes less to be made again need not go: either its arguments are there, or they go
            copied = np.where(copied <= variable.cost, copied, np.inf)
        alone = any(not self._is_relayed(variable.key, out) for out in used)  # else its relay goes
        sent = (AGAIN in states or alone) and self._may_go(variable, node, states) and np.isfinite(copied).any()
        runs = self.program.runs(node) if variable.steady else 1
        found = variable.in_states(states, runs, kept, copied if sent else None)
        unseen = self._unseen(variable, node, [i for port, i in variable.types if port == "out" and i not in used])
        if unseen is None:
            return found
        return replace(found, unseen=np.where(found.state == KEPT, np.resize(unseen, len(found.cost)), 0.0))

    def _unseen(self, variable: Variable, node: fx.Node, others: Sequence[int]) -> Floats | None:
        """Bytes that graphs hold of what is kept besides those of outputs that the backward pass takes itself.

        A view holds all that it shows a part of. Of the other outputs there are those of which it takes a view.

        Args:
            variable: of the operator.
            node: the operator.
            others: outputs that are not counted.
        """
        if not self.memory.activations or not self.memory.states:
            return None
        if self.dims.operators[node].rule.view:
            return self._bytes(variable, "out", 0) * max(
                self._shown_elements(node) / max(variable.types["out", 0].numel, 1) - 1, 0
            )
        shown = [i for i in others if self._is_shown_late(variable.key, i)]
        none = np.zeros(len(variable.cost))
        sizes = [np.minimum(self._bytes(variable, "out", i), self._there(variable.key, i)) for i in shown]
        return sum(sizes, none) * self._held(variable) if shown else None

    def _shown_elements(self, node: fx.Node) -> float:
        """Elements of what a view is a view of."""
        while node in self.dims.operators and self.dims.operators[node].rule.view:
            node, out = self.program.sources[node][0]
        return float(self.dims.types[node, out].numel)

    def _is_shown_late(self, key: str, out: int) -> bool:
        """Whether the backward pass takes an output of a class, or a view of it."""
        if self.taken[key].get(out):
            return True
        users = dict.fromkeys(user for user, _ in self.classes.uses.get((key, out), ()))
        nodes = [(user, self.classes.members[user][0]) for user in users if user in self.classes.members]
        views = [user for user, n in nodes if n in self.dims.operators and self.dims.operators[n].rule.view]
        return any(self._is_shown_late(user, 0) for user in views)

    def _may_go(self, variable: Variable, node: fx.Node, states: Sequence[int]) -> bool:
        """Whether what a forward operator makes may lie on the host until the backward pass takes it."""
        view = node in self.dims.operators and self.dims.operators[node].rule.view
        given = node not in self.program.sources or view or node in self.returned
        return self.memory.away and KEPT in states and not given and not variable.steady

    def _copied(self, node: fx.Node, size: Floats, copies: int) -> Floats:
        """Seconds of each label, in a step, to send so many bytes in so many tensors to the host and back."""
        device = self.tables.machine.device
        seconds: Floats = 2 * self.program.runs(node) * copy_seconds(size, device, copies)
        return seconds

    def connections(self, variables: Sequence[Variable]) -> list[tuple[tuple[str, Port], tuple[str, Port], int, int]]:
        """``(source, its port), (target, its port), how many, moves of each a step`` of the quotient graph."""
        known = {v.key for v in variables}
        found = []
        for (key, out), users in self.classes.uses.items():
            source: tuple[str, Port] = (_source(key, self.program), ("out", out))
            relay, times = f"consumer {key} {out}", self.program.moves(self.classes.members[key][0])
            if relay in known:
                count = self.classes.count[key]
                found.append((source, (relay, ("in", 0)), count, times))
                source = (relay, ("out", 0))
            for (target, into), weight in users.items():
                found.append((source, (target, ("in", into)), weight, times))
        return found

    def _operator(self, key: str, node: fx.Node, count: int) -> Variable:
        operator = self.dims.operators[node]
        chosen = candidates(operator, self.sizes, self._allowed(key))
        ports: dict[Port, Ints] = {}
        types: dict[Port, TensorType] = {}
        for i, type_ in enumerate(operator.inputs):
            types["in", i] = type_
            ports["in", i] = self._encode(type_, [s.inputs[i] for s in chosen.strategies], chosen.choice)
        for i, output in enumerate(operator.outputs):
            if output is not None:
                types["out", i] = output
                ports["out", i] = self._encode(output, [s.outputs[i] for s in chosen.strategies], chosen.choice)
        steady = node in self.program.microbatch_invariant
        runs = 1 if steady else self.program.runs(node)
        cost = operator_seconds(operator, chosen, self.tables.machine) * (count * runs)
        found = Variable(
            key, count, ports, types, chosen, cost, np.zeros(len(cost)), np.arange(len(cost)), steady=steady
        )
        if self.memory.activations and not operator.rule.view:
            working = sum((self._bytes(found, port, i) / count for port, i in types), np.zeros(len(cost)))
            limit = max(self.memory.working, float(working.min(initial=np.inf)))
            found = replace(found, working=working, cost=np.where(working <= limit, cost, np.inf))
        found = self._in_states(replace(found, backward=is_backward(node)), node)
        if self.memory.moment is None or self.memory.moment.node not in self.classes.members[key]:
            return found
        return replace(found, memory=found.memory + self._while_running(found, operator))

    def _allowed(self, key: str) -> list[Collection[str]]:
        """Names that a class of operators may take on each axis."""
        free, fixed = self.restrictions.free, self.restrictions.fixed.get(key)
        found: list[Collection[str]] = []
        for axis in range(len(self.sizes)):
            own = self.restrictions.strategies.get(key, (None,) * len(self.sizes))[axis]
            if free is None or axis in free:
                found.append(_EVERYTHING if own is None else own)
            elif fixed:
                found.append((fixed[axis],))
            else:
                found.append((REPLICATE,) if own is None or REPLICATE in own else (min(own),))
        return found

    def _encode(self, type_: TensorType, placements: list[Placement], choice: Ints) -> Ints:
        """Layout number of each candidate, from each strategy's placement of this tensor."""
        table = self.tables.of(type_)
        numbers = {p: i for i, p in enumerate(dict.fromkeys(placements))}
        code = np.array([numbers[p] for p in placements])[choice]
        base = len(numbers)
        packed = code @ (base ** np.arange(len(self.sizes)))
        unique, inverse = np.unique(packed, return_inverse=True)
        names = list(numbers)
        found = [table.index[tuple(names[(int(u) // base**a) % base] for a in range(len(self.sizes)))] for u in unique]
        return np.array(found, dtype=np.int64)[inverse]

    def _tensor(
        self, key: str, count: int, type_: TensorType, kind: str, names: tuple[str, ...], memory: float = 0.0
    ) -> Variable:
        table = self.tables.of(type_)
        # Once for all layouts: there are as many names as layers.
        pins = dict.fromkeys(p for n in names if (p := self.restrictions.layouts.get((kind, n))) is not None)
        roles = next((r for n in names if (r := self.restrictions.placements.get((kind, n))) is not None), None)
        none: Sequence[Placement | None] = (None,) * len(self.sizes)
        wanted = [pin or role for pin, role in zip(next(iter(pins), none), roles or none, strict=True)]
        allowed = [
            i for i, layout in enumerate(table.layouts) if self._admits(kind, type_, layout, key, wanted, list(pins))
        ]
        if not allowed:
            alike = "; repeated layers are laid out alike: pin them alike, or set tie_layers=False"
            raise InfeasibleError(
                f"no layout of {kind} {', '.join(names) or key} of shape {type_.shape} satisfies what is pinned "
                f"({', '.join(map(str, pins))}) on axes of sizes {self.sizes}{alike if len(pins) > 1 else ''}"
            )
        labels = np.array(allowed, dtype=np.int64)
        parts = np.array([split_parts(table.layouts[i], self.sizes) for i in allowed], dtype=np.float64)
        ports: dict[Port, Ints] = {("in", 0): labels, ("out", 0): labels}
        types: dict[Port, TensorType] = {("in", 0): type_, ("out", 0): type_}
        return Variable(key, count, ports, types, None, np.zeros(len(labels)), memory / parts, np.arange(len(labels)))

    def _admits(
        self,
        kind: str,
        type_: TensorType,
        layout: Layout,
        key: str,
        wanted: Sequence[Placement | None],
        pins: Sequence[Pinned],
    ) -> bool:
        """Whether a tensor may lie so.

        Args:
            kind: of the tensor.
            type_: its type.
            layout: how it would lie.
            key: of its class.
            wanted: placement by axis, of a pin or else of a role; None where it is open.
            pins: of all tensors of its class.
        """
        if any(w is not None and p != w for p, w in zip(layout, wanted, strict=True)):
            return False
        # What is pinned holds on every axis, searched or not.
        free, fixed = self.restrictions.free, self.restrictions.fixed.get(key, [w or Replicate() for w in wanted])
        if free is not None and any(layout[a] != fixed[a] for a in range(len(layout)) if a not in free):
            return False
        if kind == "constant":
            return all(isinstance(p, Replicate) for p in layout)
        if kind == "consumer":
            return True
        if any(isinstance(p, Partial) for p in layout):
            return False
        if any(w is not None and p != w for pin in pins for p, w in zip(layout, pin, strict=True)):
            return False
        if kind == "batch":
            data = not self.restrictions.data_axes_only or all(p in (Replicate(), Split(0, 0)) for p in layout)
            return data and (key not in self.differentiable or is_boundary_layout(type_, layout, self.sizes))
        return is_boundary_layout(type_, layout, self.sizes)


class _Everything(list[str]):
    """A list that contains every name."""

    def __contains__(self, item: object) -> bool:
        return True


_EVERYTHING = _Everything()


def _is_loss(program: Program, name: str) -> bool:
    return program.loss is not None and int(name) == program.loss


def _source(key: str, program: Program) -> str:
    """The variable that a class's values come from: a tangent lies as its result does."""
    if key.startswith("tangent "):
        name = key.split()[1]
        return key if _is_loss(program, name) else f"result {name}"
    return key
