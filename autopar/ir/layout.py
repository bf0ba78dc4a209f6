"""Placements and layouts: how a tensor is distributed on a mesh, in factors of its dims.

A tensor dim is an ordered product of *factors* (``[(batch seq), hidden]``). A layout says, for each mesh axis, whether
the tensor is replicated, a partial result that still has to be reduced, or split along one factor of one dim. Axes
that split the same factor nest in mesh order: the first axis is the outermost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element; one byte for bool and eight-bit types."""
    return ITEM_BYTES.get(dtype, 1)


@dataclass(frozen=True, order=True)
class Factor:
    """An irreducible dimension of the program, such as batch 256 or head 128."""

    name: str
    size: int


@dataclass(frozen=True)
class TensorType:
    """A global tensor: its dtype's name and its dims as products of factors; a dim of size 1 has no factor.

    Attributes:
        dtype: name of the dtype.
        dims: factors of each dim.
        reduce: name of the dtype in which ``Partial`` terms are added up; empty for its own.
        used: sizes of a parameter or result without its padding, see `autopar.passes.pad_dims`; empty: not padded.
        drawn: the kernels that read it draw it by themselves, see `autopar.passes.rng.draw_in_attention`.
        relaid: copies that a redistribution makes for the strides of what it takes and gives, see
            `autopar.rules.shapes.known_strides.LikelyCopies`; what is not row-major has one at least.
        routed: dims in which it is in an order of each device's own where they are split, see
            `autopar.ir.ops.routing`: no redistribution cuts them otherwise. None: it depends on no such order.
        experts: how many experts that order is by, if devices may have the rows of some of them; else 0.
        message: what its messages may be in few bits as, see `autopar.ir.quantized.messages`; empty: never.
        order: it is the order itself, which says nothing of tokens that other devices have.
    """

    dtype: str
    dims: tuple[tuple[Factor, ...], ...]
    reduce: str = ""
    used: tuple[int, ...] = ()
    drawn: bool = False
    relaid: int = 0
    routed: tuple[int, ...] | None = None
    experts: int = 0
    message: str = ""
    order: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Global sizes without padding: what the user sees."""
        return self.used or self.shape

    @property
    def numel(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of all elements; none of what kernels draw by themselves."""
        return 0 if self.drawn else self.numel * item_bytes(self.dtype)

    def may_move(self, source: Placement, target: Placement) -> bool:
        """Whether a redistribution may turn one placement into another on one axis.

        A dim that is routed stays as it is, but rows of devices' own tokens may become those of their own experts and
        back, and counts of the former those of the latter. Of rows that all devices have each may take those of its
        experts, and what comes of these is a term of the whole.
        """
        if isinstance(target, TokensStay):
            return isinstance(source, Replicate) and self.routed in ((0,), ())
        if isinstance(source, TokensStay):
            # A sum of booleans is no boolean.
            return isinstance(target, Partial) and self.routed == (0,) and self.dtype != "bool"
        if isinstance(source, ByExpert) or isinstance(target, ByExpert):
            if not self.routed:
                return isinstance(source, Partial)
            if self.routed != (0,) or not isinstance(source, Split) or not isinstance(target, Split):
                return False
            return (source.dim, source.factor) == (target.dim, target.factor)
        return not any(isinstance(p, Split) and p.dim in (self.routed or ()) for p in (source, target))

    @property
    def by_expert(self) -> tuple[ByExpert, ...]:
        """Placements in which each device has what belongs to its experts."""
        dims = (self.routed or (0,)) if self.experts else ()
        moved = (ByExpert(d, j) for d in dims if not self.order for j in range(len(self.dims[d])))
        return (*moved, *(stays for d in dims if (stays := self.tokens_stay(d)) is not None))

    def tokens_stay(self, dim: int) -> TokensStay | None:
        """The placement of rows along a dim where every device has all tokens: its largest factor stands for them."""
        sizes = [f.size for f in self.dims[dim]]
        return TokensStay(dim, sizes.index(max(sizes))) if sizes else None

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Every ``(dim, index of the factor in that dim)``, in order: where a split can be."""
        return tuple((d, j) for d, dim in enumerate(self.dims) for j in range(len(dim)))

    def __str__(self) -> str:
        """``float32[(batch:4 seq:16), hidden:64]``."""
        dims = (" ".join(f"{f.name}:{f.size}" for f in dim) for dim in self.dims)
        parts = [f"({d})" if " " in d else d or "1" for d in dims]
        return f"{self.dtype}[{', '.join(parts)}]"


@dataclass(frozen=True, order=True)
class Replicate:
    """Every device along the axis holds the whole tensor."""

    def __str__(self) -> str:
        """``R``."""
        return "R"


@dataclass(frozen=True, order=True)
class Partial:
    """Every device along the axis holds a term; ``op`` over the axis gives the tensor."""

    op: str = "sum"

    def __str__(self) -> str:
        """``P(sum)``."""
        return f"P({self.op})"


@dataclass(frozen=True, order=True)
class Split:
    """Each device along the axis holds one block of factor number ``factor`` of dim ``dim``."""

    dim: int
    factor: int = 0

    def __str__(self) -> str:
        """``S(0.1)``: dim 0, factor 1."""
        return f"S({self.dim}.{self.factor})"


@dataclass(frozen=True, order=True)
class Interleaved(Split):
    """Each device along the axis holds one block of each of ``parts`` equal runs of the factor, one after another.

    On the way only: an axis is so while those outside of it, which are to split the factor too, have terms of a sum.

    Attributes:
        parts: devices along those axes.
    """

    parts: int = 1

    def __str__(self) -> str:
        """``S(0.1)/2``: of two runs of factor 1 of dim 0."""
        return f"S({self.dim}.{self.factor})/{self.parts}"


@dataclass(frozen=True, order=True)
class ByExpert(Split):
    """Each device along the axis holds the rows of its experts, of tokens that were split along the factor before.

    Experts are split in blocks. How many rows these have is known when the graph runs: sizes are as if all had equally
    many. Of counts, which have no rows, each device has those of its experts.
    """

    def __str__(self) -> str:
        """``E(0.1)``: rows of dim 0, of tokens that were split along factor 1."""
        return f"E({self.dim}.{self.factor})"


@dataclass(frozen=True, order=True)
class TokensStay(ByExpert):
    """Each device along the axis holds the rows of its experts, of tokens that all devices along it have.

    It takes them from what it has, and nothing is sent. ``factor`` is the largest of the dim, and says only what is
    counted in parts. Outputs of its rows are terms of sums over the axis.
    """

    def __str__(self) -> str:
        """``T(0.1)``: rows of dim 0."""
        return f"T({self.dim}.{self.factor})"


@dataclass(frozen=True, order=True)
class At:
    """Only the devices at coordinate ``index`` along the axis hold the tensor: those of a pipeline's stage."""

    index: int

    def __str__(self) -> str:
        """``@1``."""
        return f"@{self.index}"


Placement = Replicate | Partial | Split | At
Layout = tuple[Placement, ...]


def is_held(layout: Layout, coordinates: Sequence[int]) -> bool:
    """Whether the device at ``coordinates`` holds a part of a tensor, and not another stage's devices."""
    return all(p.index == i for p, i in zip(layout, coordinates, strict=True) if isinstance(p, At))


def is_everywhere(layout: Layout) -> bool:
    """Whether devices of every stage hold a part of the tensor."""
    return not any(isinstance(p, At) for p in layout)


def replicated(axes: int) -> Layout:
    """The layout that replicates on each of ``axes`` mesh axes."""
    return (Replicate(),) * axes


_AT_POSITION: dict[str, type[Split]] = {"S(": Split, "E(": ByExpert, "T(": TokensStay}


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``; raises ValueError on anything else."""
    if text == "R":
        return Replicate()
    if text.startswith("P(") and text.endswith(")"):
        return Partial(text[2:-1])
    if text[:2] in _AT_POSITION and text.endswith(")"):
        dim, _, factor = text[2:-1].partition(".")
        return _AT_POSITION[text[:2]](int(dim), int(factor or 0))
    # Only parameters in plans of pipelines have these.
    if text.startswith("@"):
        return At(int(text[1:]))
    raise ValueError(f"not a placement: {text!r}; expected R, P(sum), S(dim.factor) or @stage")


def factor_parts(layout: Layout, sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """How many parts each split ``(dim, factor)`` position is cut into under ``layout`` on axes of ``sizes``."""
    parts: dict[tuple[int, int], int] = {}
    for placement, n in zip(layout, sizes, strict=True):
        if isinstance(placement, Split):
            key = (placement.dim, placement.factor)
            # Axes that split the same factor nest: it is cut into the product of their sizes.
            parts[key] = parts.get(key, 1) * n
    return parts


def divides(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether every split of ``layout`` is into equal blocks of whole elements, and of whole experts."""
    owners = owner_parts(layout, sizes)
    if owners > 1 and (not type_.experts or type_.experts % owners):
        return False
    return all(
        d < len(type_.dims) and j < len(type_.dims[d]) and type_.dims[d][j].size % parts == 0
        for (d, j), parts in factor_parts(layout, sizes).items()
    )


def owner_parts(layout: Layout, sizes: Sequence[int]) -> int:
    """Among how many devices ``layout`` splits the experts."""
    return math.prod(n for p, n in zip(layout, sizes, strict=True) if isinstance(p, ByExpert))


def imbalance_of(load: Sequence[float], parts: int) -> float:
    """How many times as many rows as in the mean the device has whose experts have most, of so many devices.

    Args:
        load: nothing for equal shares; that factor, whatever the number of devices; or how many tokens each expert
            got, of which each device has a block.
        parts: devices.

    >>> imbalance_of((), 4), imbalance_of((1.5,), 4), imbalance_of((30, 10, 10, 10), 2)
    (1.0, 1.5, 1.3333333333333333)
    """
    if parts == 1 or not load:
        return 1.0
    if len(load) == 1:
        # Nobody has more rows than there are.
        return min(float(load[0]), float(parts))
    own = len(load) // parts
    return max(sum(load[i * own : (i + 1) * own]) for i in range(parts)) * parts / sum(load)


def local_dims(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Local size of every factor of every dim."""
    parts = factor_parts(layout, sizes)
    return tuple(tuple(f.size // parts.get((d, j), 1) for j, f in enumerate(dim)) for d, dim in enumerate(type_.dims))


def local_shape(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of the block that one device holds."""
    return tuple(math.prod(dim) for dim in local_dims(type_, layout, sizes))


def open_shape(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> list[int]:
    """The same for a view: a dim whose size is known when the graph runs is -1."""
    owned = {p.dim for p in layout if isinstance(p, ByExpert)}
    if not owned:
        return list(local_shape(type_, layout, sizes))
    return [-1 if d in owned else n for d, n in enumerate(local_shape(type_, layout, sizes))]


def describe(type_: TensorType, layout: Layout, axes: Sequence[str]) -> str:
    """A layout for people: ``bf16[batch{node}, hidden{gpu}] +sum{gpu}``, axes in braces after what they split."""
    split: dict[tuple[int, int], list[str]] = {}
    partial: dict[str, list[str]] = {}
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            owned = "experts of " if isinstance(placement, ByExpert) else ""
            split.setdefault((placement.dim, placement.factor), []).append(f"{owned}{axis}")
        if isinstance(placement, Partial):
            partial.setdefault(placement.op, []).append(axis)
    dims = []
    for d, dim in enumerate(type_.dims):
        # ``(batch{data} seq)``: factors of one dim in parentheses, as in ``str(type)``.
        names = [f.name + ("{" + ",".join(split[d, j]) + "}" if (d, j) in split else "") for j, f in enumerate(dim)]
        dims.append(f"({' '.join(names)})" if len(names) > 1 else "".join(names) or "1")
    # As people write them; others stay as they are.
    short = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}.get(type_.dtype, type_.dtype)
    sums = "".join(f" +{op}{{{','.join(names)}}}" for op, names in partial.items())
    return f"{short}[{', '.join(dims)}]{sums}"


def is_uneven(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether the layout does not divide, but would if dims were padded: one axis a dim, which is one factor."""
    # Not uneven but wrong: padding would not help.
    if any(isinstance(p, Split) and (p.dim, p.factor) not in type_.positions for p in layout):
        return False
    # Padding makes one dim longer; of a dim of several factors it would tear the others apart.
    uneven = [(d, parts) for (d, j), parts in factor_parts(layout, sizes).items() if type_.dims[d][j].size % parts]
    along = [p.dim for p in layout if isinstance(p, Split)]
    return bool(uneven) and all(len(type_.dims[d]) == 1 and along.count(d) == 1 for d, _ in uneven)


def is_boundary_layout(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether torch's placements express the layout of a parameter or output.

    ``Shard`` says the leading factor of a dim, along any number of axes; ``_StridedShard`` another one, along one axis.
    A padded dim is split along one axis, into just the parts that ``Shard`` makes of the dim without its padding.
    """
    for d, (used, size) in enumerate(zip(type_.stored_shape, type_.shape, strict=True)):
        splits = [(p, n) for p, n in zip(layout, sizes, strict=True) if isinstance(p, Split) and p.dim == d]
        # Several axes on one dim are `Shard`s of the leading factor, in mesh order; no other order can be said.
        if len({p for p, _ in splits}) > 1 or (len(splits) > 1 and splits[0][0].factor > 0):
            return False
        # `Shard` cuts a dim of n into parts of ceil(n / parts), the last ones shorter: only that padding fits it.
        if used != size and splits and (len(splits) > 1 or size // splits[0][1] != -(-used // splits[0][1])):
            return False
    return True
