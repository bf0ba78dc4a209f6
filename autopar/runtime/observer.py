"""`Observer`: is told what a rank does before the first step of a call."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from autopar.ir.plan import Plan

CAPTURE, SEARCH, REWRITE, VERIFY = "capture", "search", "rewrite", "verify"
"""Phases."""


class Observer:
    """One that says nothing: of all ranks but one."""

    def specializing(self) -> AbstractContextManager[None]:
        """Around all phases of one combination of shapes and modes."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase."""
        return nullcontext()

    def searching(self, what: str, incumbent: float = math.inf, bound: float = 0.0) -> None:
        """The search is at something, with the best objective and bound so far, in seconds of a step."""

    def planned(self, plan: Plan) -> None:
        """The layouts of the parameters are decided."""
