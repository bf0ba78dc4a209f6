"""What of a device's memory a plan may not use where the user names no budget: term by term, each with its reason.

A plan counts tensors. What else lies on a device is set aside: figures are of `KINDS`, and those that nobody has
measured with autopar say so. What cannot be stated in advance is not here: workspaces of convolutions, and the buffers
of connections from stage to stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from autopar.costs.device import KIND_NAMES
from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError

MIB = 2**20

NCCL_CONNECTION = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 2**22
"""Bytes of the buffers of one NCCL connection, of protocols LL, LL128 and Simple: src/init.cc, DEFAULT_*BUFFSIZE."""


class Kind(NamedTuple):
    """What a process has on a device of this kind besides tensors.

    Attributes:
        process: bytes of the process itself.
        process_is: what they are.
        communicator: bytes of the buffers of one communicator.
        workspace: bytes of the libraries of matrix products.
        fragments: share of the memory that the allocator holds and cannot use.
    """

    process: float
    process_is: str
    communicator: float = 0.0
    workspace: float = 0.0
    fragments: float = 0.0


KINDS: dict[str, Kind] = {
    # Measured: 367 MB resident after a step of a small model, with torch and Gloo. Tensors are malloc's, which gives
    # their blocks back.
    "cpu": Kind(400 * MIB, "interpreter, torch and its libraries"),
    "cuda": Kind(
        # 300 to 400 MB when it is made, kernels being loaded when they are used (pytorch/pytorch issues 107667 and
        # 109888); half as much again for the kernels of a step: assumed.
        600 * MIB,
        "CUDA context with its kernels",
        # 16 channels within a node of Hopper, each with a buffer for both neighbors: assumed of every device.
        2 * 16 * NCCL_CONNECTION,
        # 32 MiB for each handle and stream from Hopper on (aten/src/ATen/cuda/CublasHandlePool.cpp); cuBLAS and
        # cuBLASLt, in the threads of the forward and of the backward pass.
        4 * 32 * MIB,
        # Blocks are cut in 512 bytes, segments in 2 MiB (20 MiB for small ones), and those of a step are of the same
        # sizes each time. Assumed: no measurement of emitted graphs on a GPU exists.
        0.05,
    ),
    "rocm": Kind(
        600 * MIB,
        "HIP context with its kernels",  # assumed as CUDA's
        2 * 32 * NCCL_CONNECTION,  # RCCL has NCCL's buffers and more channels: twice as many assumed
        4 * 128 * MIB,  # 128 MiB each on MI300: the same file
        0.05,
    ),
}
assert set(KINDS) == set(KIND_NAMES)


class Term(NamedTuple):
    """A part of what is set aside: its name, bytes, and what they are."""

    name: str
    size: float
    reason: str


@dataclass(frozen=True)
class DeviceReserve:
    """What is set aside of a device's memory by default, in bytes.

    Attributes:
        memory: of the device, all of it.
        kind: of the device, one of `KINDS`.
        process: of the process itself.
        communicators: buffers of communication.
        groups: how many communicators they are of.
        workspace: of libraries.
        fragments: that the allocator cannot use.
        others: of other programs, where the memory is not the device's own.
    """

    memory: float
    kind: str
    process: float
    communicators: float = 0.0
    groups: int = 0
    workspace: float = 0.0
    fragments: float = 0.0
    others: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all terms."""
        return sum(term.size for term in self.terms())

    @property
    def budget(self) -> float:
        """What is left for a plan.

        Raises:
            ValueError: nothing is.
        """
        left = self.memory - self.total
        if left <= 0:
            raise ValueError(
                f"no memory is left for a plan by default: {self}; name a budget with memory= (--memory), or, if the "
                f'cluster is of no GPU, give its device kind = "cpu"'
            )
        return left

    def terms(self) -> tuple[Term, ...]:
        """What is set aside, without what this kind of device does not have."""
        plural = "s" if self.groups > 1 else ""
        libraries = "workspaces of matrix products, in the threads of both passes"
        found = (
            Term("process", self.process, KINDS[self.kind].process_is),
            Term("communicators", self.communicators, f"buffers of {self.groups} communicator{plural}"),
            Term("workspace", self.workspace, libraries),
            Term("fragments", self.fragments, "memory that the allocator holds and cannot use"),
            Term("others", self.others, "the processes themselves, other programs, the page cache"),
        )
        return tuple(term for term in found if term.size)

    def __str__(self) -> str:
        """One line, for messages."""
        parts = ", ".join(f"{term.name} {format_bytes(term.size)}" for term in self.terms())
        return f"{format_bytes(self.memory)} of the device less {format_bytes(self.total)} ({parts})"


class DefaultBudget(float):
    """Bytes that a plan may use where the user names none: a number that still knows its terms, for messages.

    Attributes:
        reserve: the terms.
    """

    reserve: DeviceReserve

    def __new__(cls, reserve: DeviceReserve) -> DefaultBudget:
        """What the terms leave."""
        made = super().__new__(cls, reserve.budget)
        made.reserve = reserve
        return made

    def __reduce__(self) -> tuple[type[DefaultBudget], tuple[DeviceReserve]]:
        """For pickle and copies."""
        return DefaultBudget, (self.reserve,)


def reserve_of(kind: str, memory: float, axes: Mapping[str, int]) -> DeviceReserve:
    """What is set aside on a device.

    Args:
        kind: of the device, one of `KINDS`.
        memory: bytes of the device.
        axes: name and size of each mesh axis.

    >>> print(reserve_of("cuda", 80e9, {"gpu": 1}))
    74.5 GiB of the device less 4.4 GiB (process 600.0 MiB, workspace 128.0 MiB, fragments 3.7 GiB)
    """
    figures, groups = KINDS[kind], communicators(axes)
    return DeviceReserve(
        float(memory), kind, figures.process, groups * figures.communicator, groups if figures.communicator else 0,
        figures.workspace, figures.fragments * memory,
    )  # fmt: skip


@contextmanager
def naming_default(memory: object) -> Iterator[None]:
    """Errors from within that speak of a budget say what it is made of, if ``memory`` is a `DefaultBudget`.

    Raises:
        InfeasibleError: with the budget's terms.
    """
    try:
        yield
    except InfeasibleError as e:
        if e.budget is None or not isinstance(memory, DefaultBudget):
            raise
        text = f"{e}. The budget is the default: {memory.reserve}"
        raise InfeasibleError(text, needed=e.needed, budget=e.budget, least=e.least) from e


def communicators(axes: Mapping[str, int]) -> int:
    """How many communicators a device is in: one along each axis, and that of all devices where they are not one axis.

    Ranks agree over groups of Gloo, which has its buffers on the host.
    """
    own = sum(size > 1 for size in axes.values())
    return own + (own > 1)
