"""How gradients are compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.costs.arguments import number, one_of, optional, require, whole

POWERSGD, TOPK, ONEBIT = METHODS = ("powersgd", "topk", "onebit")

_TAKES = {"rank": POWERSGD, "share": TOPK, "freeze": ONEBIT}


def _share(value: Any) -> str | None:
    fine = number(0, above=True)(value) is None and value <= 1
    return None if fine else "a number above 0, of at most 1"


@dataclass(frozen=True)
class Compression:
    """Of one run; the same on every rank.

    Attributes:
        method: ``"powersgd"``, ``"topk"`` or ``"onebit"``.
        rank: of ``"powersgd"``: columns of the two factors that are sent of a matrix.
        share: of ``"topk"``: the part of each tensor's numbers that is sent.
        freeze: of ``"onebit"``: steps of plain Adam, after which variances stay as they are.
        start: steps at the beginning in which gradients are averaged as they are; ``"onebit"`` has ``freeze``.
        seed: of the first guess of ``"powersgd"``.
    """

    method: str
    rank: int | None = None
    share: float | None = None
    freeze: int | None = None
    start: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is out of range, or of another method."""
        require(
            method=(self.method, one_of(*METHODS)),
            rank=(self.rank, optional(whole(1))),
            share=(self.share, optional(_share)),
            freeze=(self.freeze, optional(whole(1))),
            start=(self.start, whole(0)),
            seed=(self.seed, whole(0)),
        )
        for name, method in _TAKES.items():
            given = getattr(self, name)
            if given is None and method == self.method:
                raise ValueError(f"method={method!r} must have {name}=: give {name}=, it has no default")
            if given is not None and method != self.method:
                raise ValueError(f"{name}={given} is for method={method!r}; leave it out, or use that method")
        if self.method == ONEBIT and self.start:
            raise ValueError(f"start={self.start}: method='onebit' is plain Adam for freeze= steps; give that alone")

    @property
    def plain_steps(self) -> int:
        """How many steps at the beginning average gradients as they are."""
        return self.start if self.freeze is None else self.freeze

    @property
    def how_much(self) -> float:
        """The figure that `autopar.costs.outer_exchange.compressed_collectives` wants of the method."""
        return self.rank or self.share or 0

    def __str__(self) -> str:
        """For messages, and to compare ranks."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)
