"""`MemoryConstraint`: the problem with memory counted in one way, and its multipliers; both are made lazily."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.program_search import ProgramSearch
from autopar.search.solver.minimize import Limits


@dataclass(frozen=True)
class MemoryConstraint:
    """A way to count memory.

    Attributes:
        searched: what is searched.
        restrictions: what is decided already.
        memory: what counts.
        limits: relative gap and deadline.
        budget: bytes.
        relaxed: whether no plan that fits has more than the budget in this row, so that it bounds all of them.
        cutoff: where the row proves that no plan is faster, no more is searched.
        like: a row of the same problem with other memory, whose labelings are good ones here.
    """

    searched: ProgramSearch
    restrictions: Restrictions
    memory: MemoryModel
    limits: Limits
    budget: float
    relaxed: bool
    cutoff: Cutoff
    like: MemoryConstraint | None = None

    @cached_property
    def built(self) -> Formulation:
        """The problem."""
        return self.searched.formulate(self.restrictions, self.memory)

    @cached_property
    def frontier(self) -> Frontier:
        """Its prices."""
        found = Frontier(self.built.problem, self.limits, useless=(self.budget, self.cutoff))
        if self.like is not None:
            found.take_over(self.like.frontier)
        return found

    def narrowed(self, memory: MemoryModel) -> MemoryConstraint:
        """The row with memory counted in another way, which bounds no other plans than those that it finds."""
        return replace(self, memory=memory, relaxed=False, cutoff=NO_CUTOFF, like=None)
