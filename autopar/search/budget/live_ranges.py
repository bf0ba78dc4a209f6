"""`LiveRanges`: from when to when a device holds activations, depending on which are saved and which recomputed.

While an operator of the backward pass runs, the device holds the *saved* activations that are still to be read, and the
*recomputed* ones: an activation is recomputed at most once, before its first reader, from its own inputs, which are
held until then. Which activations are saved is chosen by a mixed-integer program (HiGHS) that minimizes the peak.
Checkmate (https://arxiv.org/abs/1910.02653) minimizes time within a budget over similar choices, with variables for
each pair of operators; here an operator gets its memory constraint only once a solution violates it.
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

from autopar.search.solver.highs import new_solver

Key = Any

FIRST, MORE, ROUNDS = 12, 12, 8
"""How many operators have a memory constraint at first, how many more get one in each round, and how many rounds."""

SECONDS = 60.0
"""Time limit of each program; its bound holds where time runs out, too."""

CLOSE = 1e-4
"""The relative gap to which programs are solved."""

WORTH = 2e-3
"""Where seconds break ties between peaks, to recompute everything weighs as much as this share of the bytes.

The gap is a quarter of it, so that ties are indeed decided."""

MIB = 2.0**20
"""The unit of the programs, in which coefficients are neither tiny nor huge."""


@dataclass(frozen=True)
class LiveRanges:
    """What is certain of the operators of the backward pass, which are numbered in program order.

    Attributes:
        base: bytes held while each runs, whatever is saved.
        size: bytes of each activation that the backward pass may read, in the order in which they are computed.
        first: the operator that first reads each activation itself, if one does.
        last: the operator that last reads it.
        sources: the activations that each is computed from.
        fixed: those that are never recomputed.
    """

    base: list[float] = field(default_factory=list)
    size: dict[Key, float] = field(default_factory=dict)
    first: dict[Key, int] = field(default_factory=dict)
    last: dict[Key, int] = field(default_factory=dict)
    sources: dict[Key, set[Key]] = field(default_factory=dict)
    fixed: set[Key] = field(default_factory=set)

    def certain(self) -> NDArray[np.float64]:
        """Bytes held while each operator runs if activations are live only from their first reader to their last."""
        read = [sum(n for s, n in self.size.items() if self.first.get(s, math.inf) <= t <= self.last.get(s, -1))
                for t in range(len(self.base))]  # fmt: skip
        return np.array(self.base, dtype=np.float64) + np.array(read, dtype=np.float64)

    def intervals(self, recomputed: Collection[Key]) -> dict[Key, tuple[int, int]]:
        """The first and last operator at which each activation is live, if these are recomputed, the others saved."""
        need = {s: float(self.first.get(s, math.inf)) for s in self.size}
        end = {s: float(self.last.get(s, -1)) for s in self.size}
        # Backwards: when a recomputed activation is needed decides when its sources are.
        for s in reversed(list(self.size)):
            for u in self.sources[s] & need.keys() if s in recomputed and need[s] < math.inf else ():
                need[u] = min(need[u], need[s])
                end[u] = max(end[u], need[s] - 1)
        start = {s: int(need[s]) if s in recomputed and need[s] < math.inf else 0 for s in self.size}
        return {s: (start[s], int(end[s])) for s in self.size}

    def held(self, recomputed: Collection[Key]) -> NDArray[np.float64]:
        """Bytes held while each operator runs, if these activations are recomputed and the others saved."""
        found = np.array(self.base)
        for s, (start, end) in self.intervals(recomputed).items():
            found[start : end + 1] += self.size[s] if end >= start else 0.0
        return found


def minimize_peak(
    ranges: LiveRanges,
    *,
    enough: float = 0.0,
    cost: Mapping[Key, float] = MappingProxyType({}),
    seconds: float = SECONDS,
) -> tuple[float, set[Key]]:
    """A lower bound on the peak in bytes of every choice, and the recomputed activations of a choice close to it.

    Memory constraints are added lazily: an operator gets one where the solution so far holds more than it allows for.

    Args:
        ranges: what is chosen for.
        enough: bytes; a lower peak is not looked for.
        cost: seconds to recompute each, which decide between choices with the same peak. The bound is a little lower
            then.
        seconds: time limit of each program.
    """
    # The operators at which most is live whatever is chosen: there the peak is, most likely.
    constrained = [int(t) for t in np.argsort(ranges.certain())[::-1][:FIRST]]
    bound, best = 0.0, (math.inf, set[Key]())
    for _ in range(ROUNDS):
        bound, recomputed = minimize_peak_at(ranges, constrained, enough=enough, cost=cost, seconds=seconds)
        needed = ranges.held(recomputed)
        best = min(best, (max(enough, float(needed.max())), recomputed), key=lambda found: found[0])
        more = [int(t) for t in np.argsort(needed)[::-1][:MORE] if t not in constrained]
        if best[0] <= max(enough, bound) * (1 + 1e-6) or not more:
            break
        constrained += more
    return bound, best[1]


def minimize_peak_at(
    ranges: LiveRanges,
    operators: Collection[int],
    *,
    enough: float = 0.0,
    cost: Mapping[Key, float] = MappingProxyType({}),
    seconds: float = SECONDS,
) -> tuple[float, set[Key]]:
    """The same as `minimize_peak`, with memory constraints at some operators only.

    Variables: the peak; of each activation, whether it is recomputed and whether it is ever needed; and at each of the
    operators, whether it is needed by then and whether it is held. An activation that is saved, or already needed, is
    held until its last read, by an operator or by a recomputation. The program does not forbid to recompute earlier
    than right before the first reader, so that the bound holds for such graphs, too.
    """
    names, readers = list(ranges.size), _readers(ranges)
    model = _MixedIntegerProgram()
    peak = model.variable(lower=enough / MIB, upper=math.inf, cost=1.0)
    scale = WORTH * max(ranges.certain().max(initial=0.0), enough) / MIB / (sum(cost.values()) or 1.0)
    recomputed = {
        s: model.variable(upper=0.0 if s in ranges.fixed else 1.0, integral=True, cost=scale * cost.get(s, 0.0))
        for s in names
    }
    # Continuous: with binary `recomputed`, the least values that the constraints allow are 0 or 1.
    ever = {s: model.variable(lower=1.0 if s in ranges.first else 0.0) for s in names}
    for s in names:
        for u in readers[s]:  # needed if a reader is needed and recomputed
            model.at_least({ever[s]: 1.0, ever[u]: -1.0, recomputed[u]: -1.0}, -1.0)
    for t in operators:
        needed = {s: model.variable(lower=1.0 if ranges.first.get(s, math.inf) <= t else 0.0) for s in names}
        held = {s: model.variable() for s in names}
        for s in names:
            if ranges.last.get(s, -1) >= t:
                model.at_least({held[s]: 1.0, needed[s]: -1.0}, 0.0)
                # What is saved is held until its last read.
                model.at_least({held[s]: 1.0, recomputed[s]: 1.0}, 1.0)
            for u in readers[s]:
                # A reader that was recomputed by now needed it; one that will be recomputed later still does.
                model.at_least({needed[s]: 1.0, needed[u]: -1.0, recomputed[u]: -1.0}, -1.0)
                later = {held[s]: 1.0, needed[u]: 1.0, recomputed[u]: -1.0, ever[u]: -1.0}
                model.at_least({**later, needed[s]: -1.0}, -2.0)
                model.at_least({**later, recomputed[s]: 1.0}, -1.0)
        model.at_least({peak: 1.0} | {held[s]: -ranges.size[s] / MIB for s in names}, ranges.base[t] / MIB)
    bound, solution = model.minimize(seconds, WORTH / 4 if cost else CLOSE)
    return bound * MIB, set() if solution is None else {s for s in names if solution[recomputed[s]] > 0.5}


def _readers(ranges: LiveRanges) -> dict[Key, list[Key]]:
    """The activations that are computed from each."""
    readers: dict[Key, list[Key]] = {s: [] for s in ranges.size}
    for s in ranges.size:
        for u in ranges.sources[s] & readers.keys():
            readers[u].append(s)
    return readers


class _MixedIntegerProgram:
    """A mixed-integer program, built one variable and one constraint at a time.

    HiGHS gets it as one matrix at the end, which is faster than a call for each row.
    """

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integral: list[bool] = []
        self.cost: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # row, column, coefficient; rows in order
        self.limits: list[float] = []

    def variable(self, *, lower: float = 0.0, upper: float = 1.0, integral: bool = False, cost: float = 0.0) -> int:
        """Add a variable; its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(integral)
        self.cost.append(cost)
        return len(self.lower) - 1

    def at_least(self, terms: Mapping[int, float], limit: float) -> None:
        """Add a constraint: the sum of coefficients times variables is at least the limit."""
        self.entries.extend((len(self.limits), column, value) for column, value in terms.items())
        self.limits.append(limit)

    def minimize(self, seconds: float, gap: float) -> tuple[float, NDArray[np.float64] | None]:
        """A lower bound on the cost, and the best values of the variables that were found, if any."""
        solver = new_solver(seconds, mip_rel_gap=gap)
        solver.passModel(self._program())
        solver.run()
        info = solver.getInfo()
        known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        # Infinite where time ran out before any bound: zero is one.
        bound = float(info.mip_dual_bound)
        return bound if np.isfinite(bound) else 0.0, np.asarray(solver.getSolution().col_value) if known else None

    def _program(self) -> highspy.HighsLp:
        rows, columns, values = zip(*self.entries, strict=True)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.limits)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = map(np.array, (self.cost, self.lower, self.upper))
        lp.row_lower_, lp.row_upper_ = np.array(self.limits), np.full(len(self.limits), np.inf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.searchsorted(rows, np.arange(len(self.limits) + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = np.array(columns), np.array(values)
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[whole] for whole in self.integral]
        return lp
