"""`Row`: the problem with memory counted in one way, and its prices; both are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.search.budget.cutoff import NOBODY, Rival
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Built
from autopar.search.formulation.memory_model import Memory
from autopar.search.formulation.pins import Restrictions
from autopar.search.solver.minimize import Limits


@dataclass(frozen=True)
class Row:
    """A way to count memory.

    Attributes:
        make: the problem under restrictions, with memory counted in some way.
        restrictions: what is decided already.
        memory: what counts.
        limits: relative gap and deadline.
        budget: bytes.
        relaxed: whether no plan that fits has more than the budget in this row, so that it bounds all of them.
        rival: where the row proves that no plan is faster, no more is searched.
        like: a row of the same problem with other memory, whose labellings are good ones here.
    """

    make: Callable[[Restrictions, Memory], Built]
    restrictions: Restrictions
    memory: Memory
    limits: Limits
    budget: float
    relaxed: bool
    rival: Rival
    like: Row | None = None

    @cached_property
    def built(self) -> Built:
        """The problem."""
        return self.make(self.restrictions, self.memory)

    @cached_property
    def frontier(self) -> Frontier:
        """Its prices."""
        found = Frontier(self.built.problem, self.limits, useless=(self.budget, self.rival))
        if self.like is not None:
            found.take_over(self.like.frontier)
        return found

    def narrowed(self, memory: Memory) -> Row:
        """The row with memory counted in another way, which bounds no other plans than those that it finds."""
        return replace(self, memory=memory, relaxed=False, rival=NOBODY, like=None)
