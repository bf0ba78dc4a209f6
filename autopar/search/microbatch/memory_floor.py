"""`MemoryFloor`: a lower bound on the step of plans that fit, by the number of microbatches, without making a plan.

Under a price of memory the least of ``seconds + price * bytes`` bounds the seconds of all plans of so many bytes
(`autopar.search.budget.pareto`). More microbatches are no faster, and save a share each of what fewer do: what is known
of a number bounds its multiples, within as many times the bytes.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.ir.program import Program
from autopar.search.budget.pareto import Frontier
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Job
from autopar.search.padding import seconds_by_memory
from autopar.search.solver.duals import examine

PRICES = 3
"""So many prices of memory are tried for a number of microbatches, before the next one."""


@dataclass
class MemoryFloor:
    """Bounds for a mesh, which get better as long as there is time.

    Attributes:
        program: of the whole batch.
        job: what is searched for.
        state_share: of parameters and optimizer states, what counts.
        first: divides the numbers of microbatches that are asked for, but for 1.
        known: by a number of microbatches, seconds by memory: of one problem for each way to pad, of which a plan
            solves one.
        tried: numbers of microbatches and bytes.
    """

    program: Program
    job: Job
    state_share: float
    first: int
    known: dict[int, list[Frontier]] = field(default_factory=dict)
    tried: set[tuple[int, float]] = field(default_factory=set)

    def bound(self, count: int, room: float, to_check: float | None = None) -> float:
        """A lower bound on the step of plans that fit, in seconds; 0: nothing is known.

        Args:
            count: of microbatches.
            room: bytes that what one of them saves, and the share of the states, may take.
            to_check: seconds to verify it in, apart from the search; the bound is what is verified then.
        """
        found = 0.0
        for base in self._dividing(count):
            claims = [f.claim(min(room * count / base, _most(f))) for f in self.known[base]]
            if to_check is not None and min(claim.bound for claim in claims) > found:
                claims = [replace(claim, bound=examine(claim, to_check / len(claims))) for claim in claims]
            found = max(found, min(claim.bound for claim in claims))
        return found

    def improve(self, count: int, room: float, deadline: float) -> bool:
        """Raise that bound, if there is a way to.

        Args:
            count: of microbatches.
            room: bytes.
            deadline: by the clock, at which searches end.
        """
        first = [self.first] if self.first > 1 and count % self.first == 0 else []
        for base in [*sorted(self._dividing(count), reverse=True)[:1], *first, count]:
            tried = base, room * count / base
            if base not in self.known:
                self.known[base] = self._frontiers(base, deadline)
                for frontier in self.known[base]:
                    frontier.free()
                return True
            if tried not in self.tried:
                self.tried.add(tried)
                for frontier in self.known[base]:
                    with suppress(InfeasibleError):  # the bound says so
                        frontier.around(min(tried[1], _most(frontier)), PRICES)
                return True
        return False

    def _dividing(self, count: int) -> list[int]:
        # One microbatch is another problem: what is computed from parameters alone is nothing that it has in common
        # with others.
        return [base for base in self.known if base == count or (base > 1 and count % base == 0)]

    def _frontiers(self, count: int, deadline: float) -> list[Frontier]:
        part = microbatch_program(self.program, count, deterministic=self.job.deterministic)
        search = replace(self.job.search, time_limit=max(1.0, deadline - time.monotonic()))
        return seconds_by_memory(self.program, part, replace(self.job, search=search), self.state_share)


def _most(frontier: Frontier) -> float:
    """Bytes that no labeling exceeds."""
    return sum(float(n.memory.max()) for n in frontier.problem.nodes)
