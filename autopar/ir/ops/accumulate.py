"""Sums over the microbatches of a step: the operator in a graph, and the accumulator that adds up as graphs run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# Must stay alive: torch removes the operator with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("accumulate(Tensor term, str op='sum') -> Tensor")


class GradientAccumulator:
    """What has been added up so far in a step.

    Each microbatch makes the same calls of ``autopar.ir.ops.accumulate`` in the same order, and each returns the sum of
    its terms up to now.

    Attributes:
        sums: of each call.
    """

    def __init__(self) -> None:
        """Nothing has been added up."""
        self.sums: list[torch.Tensor] = []
        self._next = 0

    def add(self, term: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum with one more term; with ``op="max"`` the maximum."""
        if self._next == len(self.sums):
            # A copy: the term may be a buffer that the next microbatch writes to.
            self.sums.append(term.clone())
        elif op == "max":
            torch.maximum(self.sums[self._next], term, out=self.sums[self._next])
        else:
            self.sums[self._next].add_(term)
        self._next += 1
        return self.sums[self._next - 1]

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Within, one microbatch runs."""
        self._next = 0
        token = _totals.set(self)
        try:
            yield
        finally:
            _totals.reset(token)


# A context, not an argument: the graph that calls the operator is the same in every step.
_totals: ContextVar[GradientAccumulator | None] = ContextVar("autopar_totals", default=None)


def _accumulate(term: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The sum, or maximum, over the microbatches that have run, this one included; outside of a step there is one."""
    totals = _totals.get()
    # Never the term itself: an operator must not return its argument.
    return term.clone() if totals is None or term.device.type == "meta" else totals.add(term, op)


_library.impl("accumulate", _accumulate, "CompositeExplicitAutograd")

accumulate = torch.ops.autopar.accumulate.default

KERNELS = {accumulate: _accumulate}
"""What the operator does, for those who call it without torch's dispatcher."""
