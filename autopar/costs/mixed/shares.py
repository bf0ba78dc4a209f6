"""`Shares`: along one mesh axis, devices run different numbers of microbatches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Slot = tuple[int, int]
"""A microbatch, and the coordinate along the axis whose rows of it are computed."""


@dataclass(frozen=True)
class Shares:
    """How many microbatches the devices at each coordinate of an axis run.

    A step in equal shares runs ``microbatches`` on each. The rows of a microbatch are split along the axis, and whoever
    runs more than others takes rows that are theirs. Nothing is sent for that: all devices are given the whole batch.

    Attributes:
        axis: of the mesh.
        counts: of microbatches, by coordinate.

    Raises:
        ValueError: a number is not positive, or they do not add up to a multiple of the coordinates.

    >>> Shares("node", (3, 1)).slots
    (((0, 0), (1, 0), (1, 1)), ((0, 1),))
    """

    axis: str
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) < 2 or any(type(n) is not int or n < 1 for n in self.counts):
            raise ValueError(f"shares of axis {self.axis!r} must be two positive whole numbers or more, got {self}")
        if sum(self.counts) % len(self.counts):
            raise ValueError(
                f"shares {self} of axis {self.axis!r} add up to {sum(self.counts)}, which is no multiple of "
                f"{len(self.counts)}: rows of a microbatch are split along the axis, so that there are as many parts "
                "as microbatches times devices; multiply all of them by that"
            )

    def __str__(self) -> str:
        """Such as ``3 : 1``."""
        return " : ".join(map(str, self.counts))

    @property
    def microbatches(self) -> int:
        """Of a step, as a device runs them in equal shares."""
        return sum(self.counts) // len(self.counts)

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """What each coordinate runs: its own rows first, then those that others leave."""
        whole = self.microbatches
        left = iter([(j, k) for k, count in enumerate(self.counts) for j in range(count, whole)])
        return tuple(
            (*((j, i) for j in range(min(count, whole))), *(next(left) for _ in range(count - whole)))
            for i, count in enumerate(self.counts)
        )
