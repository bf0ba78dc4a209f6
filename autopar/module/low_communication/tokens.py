"""What each worker has trained on since a fragment was last sent: its weight in the mean."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import RankError


class Tokens:
    """Of one worker.

    Attributes:
        total: how many it has trained on.
        sent: how many these were when each fragment was last sent.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.total = 0
        self.sent: dict[int, int] = {}

    def since(self, fragment: int) -> int:
        """How many since a fragment was last sent."""
        return self.total - self.sent.get(fragment, 0)


def weight_of(worker: int, counted: Sequence[tuple[int, int]], *, idle: bool = False) -> float:
    """By what a worker's difference is multiplied, so that the mean over workers is the weighted one.

    Args:
        worker: its number.
        counted: of each rank its worker and the tokens of that.
        idle: whether workers may have counted none; if all have not, they count alike.

    Raises:
        RankError: ranks of one worker have counted differently, or a worker nothing.

    >>> weight_of(0, [(0, 30), (1, 10)]), weight_of(1, [(0, 30), (1, 10)])
    (1.5, 0.5)
    """
    tokens: dict[int, int] = {}
    for rank, (index, count) in enumerate(counted):
        if tokens.setdefault(index, count) != count:
            raise RankError(
                f"ranks of worker {index} have counted {tokens[index]} and {count} tokens, the latter on rank {rank}: "
                "add_tokens() takes those of the whole worker, on each of its ranks"
            )
        if not count and not idle:
            raise RankError(
                f"worker {index} (rank {rank}) has counted no tokens since the last exchange: with weighted=True call "
                "add_tokens() in each step"
            )
    total = sum(tokens.values())
    return len(tokens) * tokens[worker] / total if total else 1.0
