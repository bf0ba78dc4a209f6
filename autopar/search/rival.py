"""`Rival`: a plan that is known already, so that only a faster one is of use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.plan import Plan


@dataclass(frozen=True)
class Rival:
    """What a plan has to beat.

    Attributes:
        seconds: plans that take as long are of no use.
        price: seconds a byte that the known plan would save with more memory; 0 if more would not help. Prices of
            similar problems are alike, so that it is the first one that is tried.
    """

    seconds: float = math.inf
    price: float = 0.0

    @classmethod
    def of(cls, plan: Plan | None) -> Rival:
        """The rival that a plan is; none if there is no plan."""
        if plan is None:
            return cls()
        return cls(plan.certificate.objective, plan.certificate.memory_price)


NOBODY = Rival()
"""Any plan is of use."""
