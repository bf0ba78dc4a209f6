"""`exchange`: each rank gets the parts of tensors that it needs from ranks that have them, whatever parts those are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.runtime.checkpoint.snapshot_files import Box
from autopar.runtime.mesh import MeshContext

AT_ONCE = 2**28
"""Bytes of whole tensors whose parts are sent together: more memory, or more rounds."""

Boxes = Mapping[str, Box]


class Piece(NamedTuple):
    """What one rank sends another: the part ``box`` of a tensor, out of the part ``held`` that the sender has."""

    name: str
    box: Box
    held: Box


def exchange(
    context: MeshContext,
    group: Any,
    targets: Mapping[str, torch.Tensor],
    needed: Sequence[Boxes],
    held: Sequence[Mapping[str, Sequence[Box]]],
    part: Callable[[str, Box], torch.Tensor],
) -> None:
    """Fill this rank's tensors; every rank calls it.

    Args:
        context: of the ranks.
        group: of processes on the host, of the ranks; None where there is one.
        targets: this rank's local tensors, by names that are the same on all ranks, in the same order.
        needed: of each rank, which part of each its tensors are.
        held: of each rank, which parts it has; together they are everything.
        part: gives one that this rank has.
    """
    me = context.rank
    for names in _rounds(targets, needed):
        coming = [list(_pieces(names, sender, me, needed, held)) for sender in range(len(held))]
        going = [list(_pieces(names, me, taker, needed, held)) for taker in range(len(held))]
        for piece in coming[me]:
            _put(targets, needed[me], piece, part(piece.name, piece.held)[piece.box.within(piece.held)])
        if group is None:
            continue
        coming[me], going[me] = [], []
        sent = [b"".join(_bytes(part(p.name, p.held)[p.box.within(p.held)]) for p in pieces) for pieces in going]
        sizes = [sum(p.box.elements * targets[p.name].element_size() for p in pieces) for pieces in coming]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        out = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8) if any(sent) else received[:0]
        with context.during("moving parts of the state among ranks"):
            dist.all_to_all_single(received, out, sizes, [len(s) for s in sent], group=group)
        at = 0
        for piece in (p for pieces in coming for p in pieces):
            dtype = targets[piece.name].dtype
            count = piece.box.elements * dtype.itemsize
            # A copy: a part may begin where a number of this dtype cannot.
            value = received[at : at + count].clone().view(dtype).view(piece.box.sizes)
            _put(targets, needed[me], piece, value)
            at += count


def _rounds(targets: Mapping[str, torch.Tensor], needed: Sequence[Boxes]) -> Iterator[list[str]]:
    """Names in groups that fit in memory, the same on all ranks."""
    names: list[str] = []
    size = 0
    for name, target in targets.items():
        size += sum(boxes[name].elements for boxes in needed) * target.element_size()
        names.append(name)
        if size >= AT_ONCE:
            yield names
            names, size = [], 0
    if names:
        yield names


def _pieces(
    names: Sequence[str],
    sender: int,
    taker: int,
    needed: Sequence[Boxes],
    held: Sequence[Mapping[str, Sequence[Box]]],
) -> Iterator[Piece]:
    """What one rank sends another, in an order that both know."""
    for name in names:
        for box in sorted(set(held[sender].get(name, ()))):
            common = needed[taker][name].common(box)
            if common is not None and _sender(name, box, taker, held) == sender:
                yield Piece(name, common, box)


def _sender(name: str, box: Box, taker: int, held: Sequence[Mapping[str, Sequence[Box]]]) -> int:
    """Of ranks that have the same part the one that sends it: the taker itself, or another one for each taker."""
    having = [rank for rank, boxes in enumerate(held) if box in boxes.get(name, ())]
    return taker if taker in having else having[taker % len(having)]


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _put(targets: Mapping[str, torch.Tensor], needed: Boxes, piece: Piece, value: torch.Tensor) -> None:
    targets[piece.name][piece.box.within(needed[piece.name])] = value.to(targets[piece.name].device)
