"""`LiveRanges`: from when to when a device holds what the backward pass takes, by what is kept and what is made again.

While an operator of the backward pass runs, there is of what the forward pass made what is still taken and was *kept*,
and what was made *again*: a value is made again at most once, in front of what takes it first, and then needs what it
is made of, which is held until then. Which values are kept is chosen by a mixed-integer program that makes the largest
sum as small as it can be (HiGHS).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.interrupt import obey

Key = Any

FIRST, MORE, ROUNDS = 12, 12, 8
"""How many operators have a row at first, how many more get one where the solution needs more, and how often."""

SECONDS = 60.0
"""For each program; its bound holds when they are over, too."""

CLOSE = 1e-4
"""Relative: programs are solved to so small a gap."""

WORTH = 2e-3
"""To make everything again costs as much as so large a share of the bytes, where costs count; the gap is a quarter."""

MIB = 2.0**20
"""The unit of the programs, in which coefficients are neither tiny nor huge."""


@dataclass(frozen=True)
class LiveRanges:
    """What is certain of the operators of the backward pass.

    Attributes:
        base: bytes that are there while each runs, whatever is kept.
        size: of what the forward pass makes and the backward pass may take, in the order in which it is made.
        first: the operator that takes each itself first, if one does.
        last: the one that takes it last.
        sources: what each is made of.
        fixed: what is never made again.
    """

    base: list[float] = field(default_factory=list)
    size: dict[Key, float] = field(default_factory=dict)
    first: dict[Key, int] = field(default_factory=dict)
    last: dict[Key, int] = field(default_factory=dict)
    sources: dict[Key, set[Key]] = field(default_factory=dict)
    fixed: set[Key] = field(default_factory=set)

    def certain(self) -> NDArray[np.float64]:
        """Bytes of each operator if nothing of the forward pass is kept that it does not take itself."""
        here = [sum(n for s, n in self.size.items() if self.first.get(s, math.inf) <= t <= self.last.get(s, -1))
                for t in range(len(self.base))]  # fmt: skip
        return np.array(self.base, dtype=np.float64) + np.array(here, dtype=np.float64)

    def spans(self, again: Collection[Key]) -> dict[Key, tuple[int, int]]:
        """From which operator to which each is there if these are made again, and the others kept."""
        need = {s: float(self.first.get(s, math.inf)) for s in self.size}
        until = {s: float(self.last.get(s, -1)) for s in self.size}
        for s in reversed(list(self.size)):  # what is made later first: it makes what it is made of needed
            for u in self.sources[s] & need.keys() if s in again and need[s] < math.inf else ():
                need[u] = min(need[u], need[s])
                until[u] = max(until[u], need[s] - 1)
        begin = {s: int(need[s]) if s in again and need[s] < math.inf else 0 for s in self.size}
        return {s: (begin[s], int(until[s])) for s in self.size}

    def under(self, again: Collection[Key]) -> NDArray[np.float64]:
        """Bytes of each operator then."""
        found = np.array(self.base)
        for s, (begin, until) in self.spans(again).items():
            found[begin : until + 1] += self.size[s] if until >= begin else 0.0
        return found


def fewest(
    lives: LiveRanges,
    *,
    enough: float = 0.0,
    cost: Mapping[Key, float] = MappingProxyType({}),
    seconds: float = SECONDS,
) -> tuple[float, set[Key]]:
    """Bytes below which no choice makes the most that is there at once, and what is made again in one that is close.

    Operators get a row of the program where the solution needs more than it says.

    Args:
        lives: what is chosen for.
        enough: bytes; less is not looked for.
        cost: of making each again, which decides between choices that need as much. The bound is a little less then.
        seconds: for each program.
    """
    rows = [int(t) for t in np.argsort(lives.certain())[::-1][:FIRST]]
    bound, best = 0.0, (math.inf, set[Key]())
    for _ in range(ROUNDS):
        bound, again = minimize(lives, rows, enough=enough, cost=cost, seconds=seconds)
        needed = lives.under(again)
        best = min(best, (max(enough, float(needed.max())), again), key=lambda found: found[0])
        more = [int(t) for t in np.argsort(needed)[::-1][:MORE] if t not in rows]
        if best[0] <= max(enough, bound) * (1 + 1e-6) or not more:
            break
        rows += more
    return bound, best[1]


def minimize(
    lives: LiveRanges,
    rows: Collection[int],
    *,
    enough: float = 0.0,
    cost: Mapping[Key, float] = MappingProxyType({}),
    seconds: float = SECONDS,
) -> tuple[float, set[Key]]:
    """The same for some operators alone.

    Variables: the bytes; of each value whether it is made again and whether it is needed at all, and for each row
    whether it is needed by then and whether it is there. A value that is kept, or needed already, is there until it is
    taken last, by an operator itself or by what is made again of it. It is not forbidden to make a value again sooner
    than in front of its first user, so that the bound holds for such graphs, too.
    """
    names, users = list(lives.size), _users(lives)
    model = _Model()
    most = model.variable(lower=enough / MIB, upper=math.inf, price=1.0)
    scale = WORTH * max(lives.certain().max(initial=0.0), enough) / MIB / (sum(cost.values()) or 1.0)
    again = {s: model.variable(upper=0.0 if s in lives.fixed else 1.0, integral=True, price=scale * cost.get(s, 0.0))
             for s in names}  # fmt: skip
    ever = {s: model.variable(lower=1.0 if s in lives.first else 0.0) for s in names}
    for s in names:
        for u in users[s]:
            model.at_least({ever[s]: 1.0, ever[u]: -1.0, again[u]: -1.0}, -1.0)
    for t in rows:
        needed = {s: model.variable(lower=1.0 if lives.first.get(s, math.inf) <= t else 0.0) for s in names}
        there = {s: model.variable() for s in names}
        for s in names:
            if lives.last.get(s, -1) >= t:
                model.at_least({there[s]: 1.0, needed[s]: -1.0}, 0.0)
                model.at_least({there[s]: 1.0, again[s]: 1.0}, 1.0)
            for u in users[s]:  # made again of it by then, or later
                model.at_least({needed[s]: 1.0, needed[u]: -1.0, again[u]: -1.0}, -1.0)
                later = {there[s]: 1.0, needed[u]: 1.0, again[u]: -1.0, ever[u]: -1.0}
                model.at_least({**later, needed[s]: -1.0}, -2.0)
                model.at_least({**later, again[s]: 1.0}, -1.0)
        model.at_least({most: 1.0} | {there[s]: -lives.size[s] / MIB for s in names}, lives.base[t] / MIB)
    bound, solution = model.least(seconds, WORTH / 4 if cost else CLOSE)
    return bound * MIB, set() if solution is None else {s for s in names if solution[again[s]] > 0.5}


def _users(lives: LiveRanges) -> dict[Key, list[Key]]:
    """What is made of each."""
    users: dict[Key, list[Key]] = {s: [] for s in lives.size}
    for s in lives.size:
        for u in lives.sources[s] & users.keys():
            users[u].append(s)
    return users


@dataclass(frozen=True)
class _Model:
    """A mixed-integer program that is being written down."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    price: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, *, lower: float = 0.0, upper: float = 1.0, integral: bool = False, price: float = 0.0) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(integral)
        self.price.append(price)
        return len(self.lower) - 1

    def at_least(self, terms: Mapping[int, float], limit: float) -> None:
        self.entries.extend((len(self.limits), column, value) for column, value in terms.items())
        self.limits.append(limit)

    def least(self, seconds: float, gap: float) -> tuple[float, NDArray[np.float64] | None]:
        """A lower bound on the price, and values of the variables that come close to it, if any are known."""
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False), ("threads", 1), ("random_seed", 0), ("time_limit", seconds), ("mip_rel_gap", gap),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        obey(solver)
        solver.passModel(self._program())
        solver.run()
        info = solver.getInfo()
        known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        bound = float(info.mip_dual_bound)
        return bound if np.isfinite(bound) else 0.0, np.asarray(solver.getSolution().col_value) if known else None

    def _program(self) -> highspy.HighsLp:
        rows, columns, values = zip(*self.entries, strict=True)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.price), len(self.limits)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = map(np.array, (self.price, self.lower, self.upper))
        lp.row_lower_, lp.row_upper_ = np.array(self.limits), np.full(len(self.limits), np.inf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.searchsorted(rows, np.arange(len(self.limits) + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = np.array(columns), np.array(values)
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[whole] for whole in self.integral]
        return lp
