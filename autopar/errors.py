"""Every error that autopar raises on purpose; each names the node, tensor or file, the reason and the remedy."""

from __future__ import annotations

from typing import Any


class AutoparError(Exception):
    """Base class of autopar's own errors."""


class CaptureError(AutoparError):
    """The model cannot be turned into one graph."""


class MissingRuleError(AutoparError):
    """An operator in the graph has no sharding rule."""


class InvalidRuleError(AutoparError):
    """A sharding rule contradicts the operator that it describes."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints.

    Attributes:
        needed: smallest budget that would do, in bytes, where it is a matter of memory.
        budget: the budget that was asked for, in bytes.
        least: the `Plan` that needs so much.
    """

    def __init__(
        self, message: str, *, needed: float | None = None, budget: float | None = None, least: Any = None
    ) -> None:
        """Keep the figures beside the message, for programs."""
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.least = least


class CertificateError(AutoparError):
    """A plan's certificate is refuted by the problem that it speaks of: the search has a bug."""


class PassError(AutoparError):
    """A pass left an invalid graph; says which pass, and which passes ran before it."""

    def __init__(self, name: str, previous: tuple[str, ...], reason: str) -> None:
        """Name the failing pass and its history."""
        super().__init__(f"pass {name} failed after ({', '.join(previous) or 'no pass'}): {reason}")
        self.name = name
        self.previous = previous


class VerifyError(AutoparError):
    """The rewritten graph does not compute what the original does."""


class PlanError(AutoparError):
    """A plan or plan file does not belong to this model, mesh, cluster or version, or is corrupt."""


class DeadlockError(AutoparError):
    """Tasks of a simulation wait for one another in a circle: none of them can start."""


class RankError(AutoparError):
    """The ranks of one mesh disagree (model, plan, batch or collective order)."""
