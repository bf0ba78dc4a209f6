"""Single-axis moves of a tensor from one layout to another: which there are, and the bytes that each sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costs.cluster import Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.outer_exchange import quantized_bytes
from autopar.ir.layout import (
    ByExpert,
    Layout,
    Partial,
    Placement,
    Replicate,
    Split,
    TensorType,
    TokensStay,
    imbalance_of,
    item_bytes,
    owner_parts,
)
from autopar.ir.ops.collectives import Collective
from autopar.ir.quantized.axes import QuantizedAxis
from autopar.sharding.candidates import split_parts

SLICE, OWN_ROWS, PLACE_ROWS = "slice", "own_rows", "place_rows"
LOCAL_MOVES = (SLICE, OWN_ROWS, PLACE_ROWS)
"""Kinds of moves that send nothing."""

WIRE = {"bool": "uint8", "int16": "int32"}
"""What dtypes are sent as that Gloo does not support; complex ones are sent as pairs."""


@dataclass(frozen=True)
class Machine:
    """A mesh on a cluster: everything that a cost depends on.

    Attributes:
        names: of the axes, outermost first.
        sizes: devices along each axis.
        links: the link that a collective along each axis uses.
        device: what each device can do.
        quantized: along which axes messages are in few bits.
        load: of experts, see `autopar.ir.layout.imbalance_of`.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    quantized: tuple[QuantizedAxis, ...] = ()
    load: tuple[float, ...] = ()

    def bits(self, axis: int, what: str) -> int:
        """Of each number of such messages along an axis; 0: whole numbers."""
        return next((q.bits(what) for q in self.quantized if q.axis == self.names[axis]), 0)

    def seconds(self, made: Collective) -> float:
        """Seconds of a collective, its launch and what kernels wait for it besides included."""
        axis, link = self.names.index(made.axis), self.links[self.names.index(made.axis)]
        return float(COLLECTIVES[made.kind](made.bytes, self.sizes[axis], link)) + self.device.launch + link.wait


@dataclass(frozen=True)
class Move:
    """One single-axis step of a redistribution.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` (to and from experts, too), or one of
            `LOCAL_MOVES`.
        axis: index of the mesh axis.
        source: layout before.
        target: layout after.
        bits: of each number that is sent; 0: all of them. Terms of a sum are then exchanged, and added up afterwards.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout
    bits: int = 0

    @property
    def collective(self) -> str:
        """The kind of the collective."""
        return "all_to_all" if self.bits and self.kind == "reduce_scatter" else self.kind


def exchanges(source: Placement, target: Placement) -> bool:
    """Whether rows go between tokens and experts, or counts of them."""
    return isinstance(source, ByExpert) != isinstance(target, ByExpert)


def move_kind(source: Placement, target: Placement) -> str | None:
    """The collective that turns one placement into another on one axis; None if there is none."""
    if isinstance(target, TokensStay):
        return OWN_ROWS
    if isinstance(source, TokensStay):
        return PLACE_ROWS
    if exchanges(source, target):
        return "all_to_all"
    # Nothing becomes Partial: whoever takes the terms would only have to add them up again.
    if isinstance(source, Split):
        return {Replicate: "all_gather", Split: "all_to_all"}.get(type(target))
    if isinstance(source, Partial):
        return {Replicate: "all_reduce", Split: "reduce_scatter"}.get(type(target))
    return SLICE if isinstance(target, Split) else None


def innermost(layout: Layout, axis: int) -> bool:
    """Whether no later axis splits the factor that ``axis`` splits, so that its blocks are contiguous."""
    # Blocks of experts are contiguous whichever tokens they are of.
    if isinstance(layout[axis], ByExpert):
        return not any(isinstance(p, ByExpert) for p in layout[axis + 1 :])
    return layout[axis] not in layout[axis + 1 :]


def reduces(kind: str) -> bool:
    """Whether a kind of move adds terms up."""
    return kind in ("all_reduce", "reduce_scatter")


def sum_dtype(type_: TensorType) -> str:
    """In which dtype the tensor's Partial terms are added up."""
    return type_.reduce or type_.dtype


def held_parts(layout: Layout, sizes: Sequence[int], load: Sequence[float] = ()) -> float:
    """What a tensor's size is divided by on the device that holds most of it under a layout."""
    return split_parts(layout, sizes) / imbalance_of(load, owner_parts(layout, sizes))


def moved_bytes(type_: TensorType, move: Move, sizes: Sequence[int], load: Sequence[float] = ()) -> float:
    """Bytes by which the move's collective is charged: the larger of the local tensors before and after."""
    if move.bits:
        return sizes[move.axis] * quantized_bytes(shard_of(type_, move, sizes), move.bits)
    return sent_whole(type_, move) / min(held_parts(layout, sizes, load) for layout in (move.source, move.target))


def sent_whole(type_: TensorType, move: Move) -> float:
    """Bytes of the whole tensor, as a move sends it: terms are cast to the dtype of the sum before they are sent."""
    return type_.numel * item_bytes(sum_dtype(type_) if reduces(move.kind) else type_.dtype)


def shard_of(type_: TensorType, move: Move, sizes: Sequence[int]) -> int:
    """Elements of the smaller of the local tensors before and after a move."""
    return type_.numel // max(split_parts(move.source, sizes), split_parts(move.target, sizes))
