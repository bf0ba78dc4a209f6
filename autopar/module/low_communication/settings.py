"""What workers that train apart exchange, and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.costs.arguments import FLAG, number, optional, require, whole
from autopar.ir.quantized.blocks import BITS


def _bits(value: Any) -> str | None:
    return None if isinstance(value, int) and value in BITS else "8 or 4"


@dataclass(frozen=True)
class Settings:
    """Of one run; the same on every rank.

    Attributes:
        every: steps of a round, in which each fragment is exchanged once.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum.
        nesterov: whether this is Nesterov's.
        fragments: parts of the model that are exchanged in turn, at equal distances within a round.
        delay: steps after which what was sent is used.
        mix: share of a worker's own parameters that stays when they are.
        bits: of each number that is sent, 8 or 4; None: all.
        synchronous: steps at the beginning in which gradients are averaged instead.
        weighted: whether workers count in a mean as much as the tokens that they have trained on.
        feedback: whether what `bits` leave out is added to the next difference.
    """

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    bits: int | None = None
    synchronous: int = 0
    weighted: bool = False
    feedback: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range, or does not go together."""
        require(
            every=(self.every, whole(1)),
            outer_lr=(self.outer_lr, number(0, above=True)),
            outer_momentum=(self.outer_momentum, number(0)),
            nesterov=(self.nesterov, FLAG),
            fragments=(self.fragments, whole(1)),
            delay=(self.delay, whole(0)),
            mix=(self.mix, number(0)),
            bits=(self.bits, optional(_bits)),
            synchronous=(self.synchronous, whole(0)),
            weighted=(self.weighted, FLAG),
            feedback=(self.feedback, FLAG),
        )
        if self.feedback and self.bits is None:
            raise ValueError("feedback=True without bits: nothing is left out of what is sent; give bits= too, 8 or 4")
        if self.outer_momentum >= 1:
            raise ValueError(f"outer_momentum={self.outer_momentum}: expected a number below 1")
        if self.mix >= 1:
            raise ValueError(f"mix={self.mix}: expected a number below 1; with 1 workers would never meet")
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} and every={self.every}: at most one is sent in a step; take a longer round"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} and every={self.every}: a fragment must be used before it is sent again; take a "
                "shorter delay or a longer round"
            )

    def __str__(self) -> str:
        """For messages, and to compare ranks."""
        # Checkpoints from before there were these have no word of them.
        given = {n: value for n, value in asdict(self).items() if n not in ("weighted", "feedback") or value}
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def turns(self, step: int) -> tuple[int | None, int | None]:
        """The fragments that are used and that are sent at the end of a step, counted from 1.

        Fragment p of P is sent ``(p + 1) * every // P`` steps into each round, and used ``delay`` steps later: A.
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, algorithm 2.

        >>> [Settings(4, fragments=2, delay=1).turns(step) for step in (1, 2, 3, 4, 5)]
        [(None, None), (None, 0), (0, None), (None, 1), (1, None)]
        """
        offsets = {(p + 1) * self.every // self.fragments % self.every: p for p in range(self.fragments)}
        late = step - self.delay
        return (offsets.get(late % self.every) if late > 0 else None), offsets.get(step % self.every)
