"""How many microbatches: one, and twice as many for as long as memory is short and more make the step faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Certificate, Plan
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff, PrunedError
from autopar.search.solver.interrupt import requested

WORTH = 0.98
"""Where twice as many microbatches need more than this share of the memory, even more will not do."""

Attempt = Callable[[int, Cutoff], Plan]
"""``attempt(count, rival)``: the best plan of ``count`` microbatches, if it is faster than the rival."""


def best_count(attempt: Attempt, cutoff: Cutoff = NO_CUTOFF) -> Plan:
    """The fastest plan of 1, 2, 4, ... microbatches, if it is faster than the rival.

    A step is not faster in more microbatches than its memory asks for: kernels are smaller, and where they are not
    kept, parameters are gathered more often.

    Raises:
        InfeasibleError: none fits; the error is that of the least need.
        NoFasterError: none is faster.
    """
    best: Plan | None = None
    error: InfeasibleError | None = None
    certificates: list[Certificate] = []
    bounds: list[float] = []
    tried: list[int] = []
    count = 1
    while best is None or (best.certificate.binds and not requested()):
        tried.append(count)
        try:
            found = attempt(count, cutoff if best is None else Cutoff.of(best))
        except PrunedError as e:
            if best is None:
                raise
            bounds.append(e.bound)
            break
        except InfeasibleError as e:
            less = e.needed is not None and (error is None or e.needed < WORTH * (error.needed or 0.0))
            if best is not None or not less:
                error = error or e
                break
            error = e
        else:
            certificates.append(found.certificate)
            if best is not None and found.certificate.objective >= best.certificate.objective:
                break
            best = found
        count *= 2
    if best is None:
        assert error is not None
        raise error
    space = best.certificate.space
    if len(tried) > 1:
        space = f"{', '.join(map(str, tried))} microbatches; {space}"
    bound = min(*bounds, *(certificate.lower_bound for certificate in certificates), best.certificate.objective)
    verified = [certificate.checked for certificate in certificates if certificate.checked is not None]
    checked = min(verified) if len(verified) == len(certificates) else None
    return replace(best, certificate=replace(best.certificate, lower_bound=bound, space=space, checked=checked))
