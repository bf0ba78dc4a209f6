"""`Cutoff`: what a plan must cost less than, since one as fast is known already."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan

WORTH = 5e-3
"""The search ends where no plan can be faster by more than this share."""


@dataclass(frozen=True)
class Cutoff:
    """What a plan has to beat.

    Attributes:
        seconds: plans that take as long are of no use.
        price: the shadow price of memory of the known plan, in seconds per byte; 0 if more memory would not help.
            Similar problems have similar prices, so that it is the first multiplier that is tried.
    """

    seconds: float = math.inf
    price: float = 0.0

    @property
    def enough(self) -> float:
        """Seconds at which the search ends, if no plan takes less."""
        return (1 - WORTH) * self.seconds

    def require_less(self, bound: float, *, in_any_memory: bool = False) -> None:
        """Stop where the bound, of what fits or of all plans, shows that none is much faster than the known one.

        Raises:
            PrunedError: with the bound.
        """
        # Not only where the bound exceeds the known plan: what could be gained is not worth the search.
        if bound >= self.enough:
            raise PrunedError(bound, in_any_memory=in_any_memory)

    @classmethod
    def of(cls, plan: Plan | None) -> Cutoff:
        """The cutoff of a plan; none if there is no plan."""
        if plan is None:
            return cls()
        # The objective, not the predicted seconds: bounds are in the search's own count.
        return cls(plan.certificate.objective, plan.certificate.memory_price)


NO_CUTOFF = Cutoff()


class PrunedError(InfeasibleError):
    """No plan is much faster than one that is known.

    Attributes:
        bound: seconds that every plan takes at least.
        in_any_memory: whether plans that do not fit take as long: what needs less memory, as more microbatches do, is
            not faster either.
    """

    def __init__(self, bound: float, *, in_any_memory: bool = False) -> None:
        """Keep the bound, which the certificate of the known plan needs."""
        super().__init__(
            f"every plan takes at least {bound:.3g} seconds a step, and one is known that is about as fast"
        )
        self.bound, self.in_any_memory = bound, in_any_memory
