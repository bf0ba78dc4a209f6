"""Snapshots: what one rank holds of a training state, in a file in memory that is whole or not there.

A file has a header in JSON, and the bytes of its tensors behind it, each at a multiple of `ALIGNED`. Nothing of it is
meant to last: the process that starts in place of a lost one reads it, with the same versions of everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.errors import AutoparError

SUFFIX, PARTIAL, ALIGNED = ".snapshot", ".partial", 64


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how large it is, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """The part of both; None: there is none.

        >>> Box((0, 0), (4, 4)).common(Box((2, 3), (4, 4)))
        Box(offsets=(2, 3), sizes=(2, 1))
        """
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(n > 0 for n in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The same, as slices of a tensor that has ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes, strict=True))


class Moment(NamedTuple):
    """What parts must have in common to belong together.

    Attributes:
        step: of the run.
        start: how often ranks had met before those that wrote them did.
        name: of that meeting: two that follow the same one have names of their own.
    """

    step: int
    start: int
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A rank's file.

    Attributes:
        file: its path.
        moment: what it is of.
        rank: whose state it is.
        about: whatever else was given.
        boxes: which part of each tensor it has.
        kinds: dtype and first byte of each.
    """

    file: Path
    moment: Moment
    rank: int
    about: dict[str, Any]
    boxes: dict[str, Box]
    kinds: dict[str, tuple[str, int]]

    def tensor(self, name: str) -> torch.Tensor:
        """The part that is there, as it is in the file: not to be written to."""
        dtype, start = getattr(torch, self.kinds[name][0]), self.kinds[name][1]
        sizes = self.boxes[name].sizes
        count = self.boxes[name].elements * dtype.itemsize
        if not count:
            return torch.empty(sizes, dtype=dtype)
        return self._bytes()[start : start + count].view(dtype).view(sizes)

    def _bytes(self) -> torch.Tensor:
        return torch.from_file(str(self.file), shared=False, size=self.file.stat().st_size, dtype=torch.uint8)


def box_of(tensor: torch.Tensor) -> Box:
    """Which part of a tensor this rank has: all of a plain one."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def write_snapshot(
    folder: Path,
    moment: Moment,
    rank: int,
    about: Mapping[str, Any],
    parts: Mapping[str, tuple[Box, torch.Tensor]],
) -> Path:
    """Write what a rank has; the file has its name when all of it is there.

    Args:
        folder: that is there.
        moment: what it is of.
        rank: whose state it is.
        about: whatever else is to be known, for JSON.
        parts: by name, which part of a tensor, and its values.

    Raises:
        AutoparError: the file system is full.
    """
    kinds: dict[str, tuple[str, int]] = {}
    end = 0
    for name, (_, tensor) in parts.items():
        kinds[name] = str(tensor.dtype).removeprefix("torch."), end
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    tensors = {name: [*kinds[name], box.offsets, box.sizes] for name, (box, _) in parts.items()}
    header = json.dumps({"moment": moment, "rank": rank, "about": about, "tensors": tensors}).encode()
    header += b" " * (-(len(header) + 8) % ALIGNED)
    path = folder / f"{moment.name}-{moment.step}-{rank}{SUFFIX}"
    partial = path.with_suffix(PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "big") + header)
            for _, tensor in parts.values():
                plain = tensor.detach().to("cpu").contiguous()
                data: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
                file.write(data)
                file.write(b"\0" * (-plain.nbytes % ALIGNED))
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise AutoparError(
            f"a snapshot of {end} bytes could not be written to {folder}: {e.strerror}; give its file system room for "
            "three of them per process (in a container: --shm-size), or start without --elastic and --restarts"
        ) from None
    return partial.rename(path)


def read_snapshot(path: Path) -> Snapshot:
    """What `write_snapshot` has written; its tensors are read when they are asked for."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "big")
        found = json.loads(file.read(size))
    step, start, name = found["moment"]
    tensors = found["tensors"].items()
    return Snapshot(
        path, Moment(step, start, name), found["rank"], found["about"],
        {n: Box(tuple(offsets), tuple(sizes)) for n, (_, _, offsets, sizes) in tensors},
        {n: (dtype, 8 + size + first) for n, (dtype, first, _, _) in tensors},
    )  # fmt: skip


def snapshots_in(folder: Path) -> list[Snapshot]:
    """All that are whole; what killed writers have left is deleted."""
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
    return [read_snapshot(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def lacking(shapes: Mapping[str, Iterable[int]], held: Iterable[Mapping[str, Box]]) -> list[str]:
    """Names of the tensors of which parts are missing.

    Args:
        shapes: of whole tensors.
        held: parts that there are; two of them are the same, or have nothing in common.
    """
    found: dict[str, set[Box]] = {name: set() for name in shapes}
    for boxes in held:
        for name in shapes.keys() & boxes.keys():
            found[name].add(boxes[name])
    return [n for n, shape in shapes.items() if sum(box.elements for box in found[n]) != math.prod(shape)]
