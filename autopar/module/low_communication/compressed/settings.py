"""How gradients are compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.costs.arguments import number, one_of, optional, require, whole

POWERSGD, TOPK, ONEBIT, ZEROONE = METHODS = ("powersgd", "topk", "onebit", "zeroone")

_MUST = {"rank": (POWERSGD,), "share": (TOPK,), "freeze": (ONEBIT, ZEROONE)}
_MAY = {"doubling": (ZEROONE,), "local": (ZEROONE,), "longest": (ZEROONE,)}

DOUBLING, LONGEST = 16, 16
"""Those of the paper's experiments, and DeepSpeed's."""


def _share(value: Any) -> str | None:
    fine = number(0, above=True)(value) is None and value <= 1
    return None if fine else "a number above 0, of at most 1"


@dataclass(frozen=True)
class Compression:
    """Of one run; the same on every rank.

    Attributes:
        method: ``"powersgd"``, ``"topk"``, ``"onebit"`` or ``"zeroone"``.
        rank: of ``"powersgd"``: columns of the two factors that are sent of a matrix.
        share: of ``"topk"``: the part of each tensor's numbers that is sent.
        freeze: of ``"onebit"``: steps of plain Adam, after which variances stay as they are; of ``"zeroone"``: steps
            after which they do, though not all of these change them.
        doubling: of ``"zeroone"``: updates of variances after which the distance between two doubles; None: 16.
        local: of it: steps after ``freeze`` after which the distance between exchanges doubles; None: one in each step.
        longest: of it: the longest such distance; None: 16.
        start: steps at the beginning in which gradients are averaged as they are; ``"onebit"`` has ``freeze``.
        seed: of the first guess of ``"powersgd"``.
    """

    method: str
    rank: int | None = None
    share: float | None = None
    freeze: int | None = None
    start: int = 0
    seed: int = 0
    doubling: int | None = None
    local: int | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range, or of another method."""
        require(
            method=(self.method, one_of(*METHODS)),
            rank=(self.rank, optional(whole(1))),
            share=(self.share, optional(_share)),
            freeze=(self.freeze, optional(whole(1))),
            start=(self.start, whole(0)),
            seed=(self.seed, whole(0)),
            doubling=(self.doubling, optional(whole(1))),
            local=(self.local, optional(whole(1))),
            longest=(self.longest, optional(whole(1))),
        )
        for name, methods in {**_MUST, **_MAY}.items():
            given = getattr(self, name)
            if given is None and name in _MUST and self.method in methods:
                raise ValueError(f"method={self.method!r} must have {name}=: give {name}=, it has no default")
            if given is not None and self.method not in methods:
                said = " or ".join(f"method={method!r}" for method in methods)
                raise ValueError(f"{name}={given} is for {said}; leave it out, or use that method")
        if self.longest is not None and self.local is None:
            raise ValueError(f"longest={self.longest} is of distances that double: give local= too, or leave it out")
        if self.seed and self.method != POWERSGD:
            raise ValueError(f"seed={self.seed} is for method={POWERSGD!r}; leave it out, or use that method")
        if self.method in (ONEBIT, ZEROONE) and self.start:
            raise ValueError(f"start={self.start}: method={self.method!r} begins as Adam, see freeze=; give that alone")

    @property
    def plain_steps(self) -> int:
        """How many steps at the beginning average gradients as they are; of ``"zeroone"`` see its schedule."""
        return self.start if self.method != ONEBIT else int(self.freeze or 0)

    @property
    def how_much(self) -> float:
        """The figure that `autopar.costs.outer_exchange.compressed_collectives` wants of the method."""
        return self.rank or self.share or 0

    def __str__(self) -> str:
        """For messages, and to compare ranks."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)
