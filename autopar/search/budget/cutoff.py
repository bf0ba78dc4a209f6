"""`Cutoff`: a plan that is known already, so that only a faster one is of use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan

WORTH = 5e-3
"""A plan is not looked for that could be faster by this share at most."""


@dataclass(frozen=True)
class Cutoff:
    """What a plan has to beat.

    Attributes:
        seconds: plans that take as long are of no use.
        price: seconds a byte that the known plan would save with more memory; 0 if more would not help. Prices of
            similar problems are alike, so that it is the first one that is tried.
    """

    seconds: float = math.inf
    price: float = 0.0

    @property
    def enough(self) -> float:
        """Seconds; where no plan takes less, the search ends."""
        return (1 - WORTH) * self.seconds

    def require_less(self, bound: float) -> None:
        """Stop where no plan takes less time than ``bound``, and one is known that does as well.

        Raises:
            NoFasterError: with the bound.
        """
        if bound >= self.enough:
            raise PrunedError(bound)

    @classmethod
    def of(cls, plan: Plan | None) -> Cutoff:
        """The rival that a plan is; none if there is no plan."""
        if plan is None:
            return cls()
        return cls(plan.certificate.objective, plan.certificate.memory_price)


NO_CUTOFF = Cutoff()
"""Any plan is of use."""


class PrunedError(InfeasibleError):
    """No plan is much faster than one that is known.

    Attributes:
        bound: seconds that every plan takes at least.
    """

    def __init__(self, bound: float) -> None:
        """Keep the bound, which the certificate of the known plan needs."""
        super().__init__(
            f"every plan takes at least {bound:.3g} seconds a step, and one is known that is about as fast"
        )
        self.bound = bound
