"""`Sample`: one thing that was timed."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("attention", "causal", "training")
"""Kinds of attention that are timed; in training causal attention and its backward together."""

LAUNCH = "launch"
"""The kind of what a host takes to launch a kernel that a GPU has done before the next one comes."""


ALONE = "alone"
"""The kind of a product of one process while the others do nothing; its sizes are as of a matmul."""

BESIDE, BEHIND = "beside", "behind"
"""Kinds of what kernels take longer beside a reduction, and of what a small reduction behind kernels does."""


@dataclass(frozen=True)
class Sample:
    """One kernel or collective and how long it took.

    Attributes:
        kind: ``matmul``, ``attention``, ``causal`` (attention, too), ``training`` (with its backward), ``copy``,
            ``launch``, ``alone``, ``beside``, ``behind``, or a collective's name in `autopar.costs.collectives`.
        dtype: of its tensors.
        sizes: of a matmul: batch, rows, columns, depth; of attention: batch, heads, positions, head; of a copy: bytes
            read and written; of a collective: bytes, as `autopar.costs.collectives` counts them, and members.
        seconds: mean of several runs; of a collective the median, of the slowest member.
        level: of a collective: which of the cluster's links, 0 being the innermost.
        stride: of a collective whose members are not the neighbors of a level: how far apart they are. Then as many
            groups run at once, and share what leaves a node.
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    seconds: float
    level: int = 0
    stride: int = 0

    def __str__(self) -> str:
        """``matmul float32 1x256x256x256``."""
        return f"{self.kind} {self.dtype} {'x'.join(map(str, self.sizes))}"
