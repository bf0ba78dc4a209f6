"""Windows of a spatial dim, which convolutions, pooling and patches read."""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.rules.rule import Spec

INSIDE, KERNEL, OUTSIDE, REST = "xyz", "uvw", "XYZ", "pqr"


@dataclass(frozen=True)
class Window:
    """What one output position reads along one spatial dim.

    Attributes:
        kernel: size of the kernel.
        stride: from one output's first element to the next one's.
        low: zeros before the first element.
        high: zeros behind the last.
        step: from one element of the kernel to the next.
    """

    kernel: int
    stride: int
    low: int
    high: int
    step: int

    @property
    def reach(self) -> int:
        """Elements from the first that an output reads to its last."""
        return self.step * (self.kernel - 1) + 1

    @property
    def behind(self) -> int:
        """How many elements behind a block's last one its last output reads; negative: so many it leaves."""
        return self.reach - self.low - self.stride

    def outputs(self, size: int) -> int:
        """How many positions of a dim have an output."""
        return (size + self.low + self.high - self.reach) // self.stride + 1

    def aligned(self, size: int) -> bool:
        """Whether a block of input is a block of output, as many times as long as the stride says."""
        return size == self.outputs(size) * self.stride

    @property
    def alone(self) -> bool:
        """Whether the outputs of a block read nothing but that block."""
        return self.low == 0 and self.behind <= 0

    @property
    def tiles(self) -> bool:
        """Whether outputs read consecutive patches."""
        return self.kernel == self.stride and self.low == self.high == 0 and (self.step == 1 or self.kernel == 1)


def at(sizes: Sequence[int], i: int) -> int:
    """That of a spatial dim among numbers of each, or one of all."""
    return sizes[i] if len(sizes) > 1 else sizes[0]


def sends(x: Spec) -> bool:
    """Whether rows of a tensor can be sent."""
    return x.dtype is None or not x.dtype.is_complex
