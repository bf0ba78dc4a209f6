"""How stale gradients may be, and where they go."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.costs.arguments import number, optional, require, whole


@dataclass(frozen=True)
class Staleness:
    """Of one run; the same on every rank.

    Attributes:
        staleness: steps that a worker may be ahead of the slowest one; 0: all wait for all, in every step.
        compensation: the factor of delay compensation; 0: gradients are taken as they are.
        owners: how many of the workers, from the first one on, own a part of the parameters; None: all of them.
    """

    staleness: int
    compensation: float = 0.0
    owners: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(
            staleness=(self.staleness, whole(0)),
            compensation=(self.compensation, number(0)),
            owners=(self.owners, optional(whole(0))),
        )
        if self.owners == 0:
            raise ValueError(
                f"staleness={self.staleness} without owners (owners=0): stale gradients go to who owns the parameters; "
                "leave owners= out, so that every worker owns a part, or give 1 for one server of all"
            )

    def owners_of(self, workers: int) -> int:
        """How many own a part.

        Raises:
            ValueError: there are fewer workers, or one alone.
        """
        if workers < 2:
            raise ValueError(
                f"staleness={self.staleness} without owners: there is one worker, and nobody else's gradients; "
                "give the axis of role 'stale' at least two devices, or leave the role out"
            )
        if self.owners is not None and self.owners > workers:
            raise ValueError(f"owners={self.owners}: there are {workers} workers; take as many at most")
        return workers if self.owners is None else self.owners

    def __str__(self) -> str:
        """For messages, and to compare ranks."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)
