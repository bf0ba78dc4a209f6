"""How little memory can a model do with? A lower bound, apart from the search and from any layout.

Everything is split over all devices. While an operator of the backward pass runs there are the parameters with their
state; what the backward pass has made and takes later; results that the caller gets; and what the operator takes and
makes, with what its library copies. Of what the forward pass made there is what is still taken and was *kept*, and what
was made *again*: a value is made again at most once, in front of what takes it first, and then needs what it is made
of. Which values are kept is chosen by a mixed-integer program that makes the largest sum as small as it can be (HiGHS,
through scipy), whose bound is the answer. It leaves out what moves take, and what is held while the forward pass runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from autopar.dims import analyze
from autopar.liveness import copied_by_convolution
from autopar.origin import is_backward
from autopar.program import Program, values_of
from autopar.search.counted import carried
from autopar.search.find import state_bytes
from autopar.search.quotient import quotient

Storage = Any
FIRST, MORE, ROUNDS = 12, 12, 8
"""How many operators have a row at first, how many more get one where the solution needs more, and how often."""

SECONDS = 60.0
"""For each program; its bound holds when they are over, too."""


def least(program: Program, axes: Mapping[str, int], *, away: bool = False, copies: float = 0.0) -> float:
    """Bytes a device that no plan does without.

    Args:
        program: of the whole batch, without blocks left out.
        axes: of the mesh.
        away: whether optimizer state may lie on the host.
        copies: of the device, see `autopar.cluster.Device`.
    """
    found = _Backward.of(program, copies)
    rows = [int(t) for t in np.argsort(found.certain())[::-1][:FIRST]]
    bound = 0.0
    for _ in range(ROUNDS):
        bound, again = _minimise(found, rows)
        needed = found.under(again)
        more = [int(t) for t in np.argsort(needed)[::-1][:MORE] if t not in rows]
        if needed.max() <= bound * (1 + 1e-6) or not more:
            break
        rows += more
    state = sum(state_bytes(program, "sgd" if away else "adamw", gradients=False).values())
    step = sum(state_bytes(program, "adamw").values())  # which takes all of it, wherever it lay before
    return max(state + bound, step) / math.prod(axes.values())


@dataclass(frozen=True)
class _Backward:
    """What is certain of the operators of the backward pass.

    Attributes:
        base: bytes that are there while each runs and that the forward pass did not make, or that the caller gets.
        size: of the forward pass's storages that may be taken in the backward pass.
        first: the operator that takes each itself first, if one does.
        last: the one that takes it last.
        sources: what each is made of.
        fixed: what is never made again.
    """

    base: list[float] = field(default_factory=list)
    size: dict[Storage, float] = field(default_factory=dict)
    first: dict[Storage, int] = field(default_factory=dict)
    last: dict[Storage, int] = field(default_factory=dict)
    sources: dict[Storage, set[Storage]] = field(default_factory=dict)
    fixed: set[Storage] = field(default_factory=set)

    @staticmethod
    def of(program: Program, copies: float = 0.0) -> _Backward:
        found = _Backward()
        inputs = {s for node in program.placeholders for s in storages(node)}
        outputs = zip(program.outputs, program.output_values, strict=True)
        results = {
            s for o, v in outputs if v is not None and o.kind in ("result", "gradient") for s in storages(v)
        } - inputs
        keeps = carried(program, quotient(program, analyze(program)))
        taken, copied = [], []
        for node in program.sources:
            own = {s for n in node.all_input_nodes for s in storages(n)} - inputs
            made = storages(node) - inputs - own
            if not is_backward(node):
                for s in made:
                    found.size[s], found.sources[s] = float(s.nbytes()), own
                    found.fixed.update({s} if node in keeps else ())
                continue
            t = len(taken)
            taken.append(own | made)
            copied.append(copies * copied_by_convolution(node))
            for s in own & found.size.keys():
                found.first.setdefault(s, t)
                found.last[s] = t
        given = results & found.size.keys()
        early = sum(s.nbytes() for s in given)  # results of the forward pass, which are there all the time
        there: dict[Storage, tuple[int, float]] = {}
        for t, own in enumerate(taken):
            for s in own - found.size.keys():
                there[s] = there.get(s, (t, 0))[0], math.inf if s in results else t
        for t in range(len(taken)):
            now = sum(s.nbytes() for s, (a, b) in there.items() if a <= t <= b)
            found.base.append(float(early + now + copied[t]))
        for s in given:
            del found.size[s]
        return found

    def certain(self) -> np.ndarray[Any, Any]:
        """Bytes of each operator if nothing of the forward pass is kept that it does not take itself."""
        here = [sum(n for s, n in self.size.items() if self.first.get(s, math.inf) <= t <= self.last.get(s, -1))
                for t in range(len(self.base))]  # fmt: skip
        return np.array(self.base) + np.array(here)

    def lives(self, again: Collection[Storage]) -> dict[Storage, tuple[int, int]]:
        """From which operator to which each is there if these are made again, and the others kept."""
        need = {s: float(self.first.get(s, math.inf)) for s in self.size}
        until = {s: float(self.last.get(s, -1)) for s in self.size}
        for s in reversed(list(self.size)):  # what is made later first: it makes what it is made of needed
            for u in self.sources[s] & need.keys() if s in again and need[s] < math.inf else ():
                need[u] = min(need[u], need[s])
                until[u] = max(until[u], need[s] - 1)
        begin = {s: int(need[s]) if s in again and need[s] < math.inf else 0 for s in self.size}
        return {s: (begin[s], int(until[s])) for s in self.size}

    def under(self, again: Collection[Storage]) -> np.ndarray[Any, Any]:
        """Bytes of each operator then."""
        found = np.array(self.base)
        for s, (begin, until) in self.lives(again).items():
            found[begin : until + 1] += self.size[s] if until >= begin else 0.0
        return found


def _minimise(found: _Backward, rows: Collection[int]) -> tuple[float, set[Storage]]:
    """A lower bound on the largest of some operators' bytes, and what is made again in the solution found.

    Variables: the bytes; of each storage whether it is made again and whether it is needed at all, and for each row
    whether it is needed by then and whether it is there. A storage that is kept, or needed already, is there until it
    is taken last, by an operator itself or by what is made again of it.
    """
    names = list(found.size)
    users: dict[Storage, list[Storage]] = {s: [] for s in names}
    for s in names:
        for u in found.sources[s] & users.keys():
            users[u].append(s)
    model = _Model()
    most = model.variable(upper=math.inf)
    again = {s: model.variable(upper=0.0 if s in found.fixed else 1.0, integral=True) for s in names}
    ever = {s: model.variable(lower=1.0 if s in found.first else 0.0) for s in names}
    for s in names:
        for u in users[s]:
            model.at_least({ever[s]: 1.0, ever[u]: -1.0, again[u]: -1.0}, -1.0)
    for t in rows:
        needed = {s: model.variable(lower=1.0 if found.first.get(s, math.inf) <= t else 0.0) for s in names}
        there = {s: model.variable() for s in names}
        for s in names:
            if found.last.get(s, -1) >= t:
                model.at_least({there[s]: 1.0, needed[s]: -1.0}, 0.0)
                model.at_least({there[s]: 1.0, again[s]: 1.0}, 1.0)
            for u in users[s]:  # made again of it by then, or later
                model.at_least({needed[s]: 1.0, needed[u]: -1.0, again[u]: -1.0}, -1.0)
                later = {there[s]: 1.0, needed[u]: 1.0, again[u]: -1.0, ever[u]: -1.0}
                model.at_least({**later, needed[s]: -1.0}, -2.0)
                model.at_least({**later, again[s]: 1.0}, -1.0)
        model.at_least({most: 1.0} | {there[s]: -found.size[s] / 2**20 for s in names}, found.base[t] / 2**20)
    bound, solution = model.least(most)
    return bound * 2**20, set() if solution is None else {s for s in names if solution[again[s]] > 0.5}


@dataclass(frozen=True)
class _Model:
    """A mixed-integer program that is being written down."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, lower: float = 0.0, upper: float = 1.0, *, integral: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(float(integral))
        return len(self.lower) - 1

    def at_least(self, terms: Mapping[int, float], limit: float) -> None:
        self.entries.extend((len(self.limits), column, value) for column, value in terms.items())
        self.limits.append(limit)

    def least(self, variable: int) -> tuple[float, np.ndarray[Any, Any] | None]:
        """A lower bound on one of the variables, and the values of all where it is close to that, if any are known."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        row, column, value = zip(*self.entries, strict=True)
        matrix = csr_array((value, (row, column)), shape=(len(self.limits), len(self.lower)))
        objective = np.zeros(len(self.lower))
        objective[variable] = 1.0
        solution = milp(
            objective, constraints=LinearConstraint(matrix, np.array(self.limits)), integrality=np.array(self.integral),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
        )  # fmt: skip
        return solution.mip_dual_bound or 0.0, solution.x


def storages(node: fx.Node) -> set[Storage]:
    """Of what a node makes, or what its results are views of."""
    return {value.untyped_storage() for value in values_of(node) if value is not None}
