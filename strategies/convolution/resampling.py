"""Images that are enlarged, made smaller, padded with what they have, or whose channels become pixels."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.rules.rule import Lowering, Rule, Spec, dims, letters, rule

aten = torch.ops.aten


def _planes(x: Spec, spatial: int) -> tuple[str, str, str, str]:
    """The plane before and after, and the spatial letters of both."""
    names = letters(x.ndim)
    # A window may reach into the next block, so positions are not split; samples and channels are free.
    free = names[: x.ndim - spatial]
    after = letters(spatial, x.ndim)
    return names, free + after, names[len(free) :], after


def _backward(spatial: int) -> Callable[..., Rule]:
    def backward(grad: Spec, x: Spec, *_: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        return Rule(f"{after},{before}->{before}", blocked=inside + outside, linear=((0,),))

    return backward


def _padded(spatial: int) -> Callable[..., Rule]:
    def forward(x: Spec, *_: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        return Rule(f"{before}->{after}", blocked=inside + outside, linear=((0,),))

    return forward


RESAMPLING = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}
"""By number of spatial dims: the operators of `torch.nn.functional.interpolate`."""


@lru_cache(256)
def _repeats(name: str, size: int, out: int, scale: float | None) -> bool:
    """Whether each element of a dim is repeated, all of them as often.

    Kernels multiply positions by a float: at some sizes they take another element, of a block and of the whole.
    """
    if not size or out % size:
        return False
    half, step = 0.5 if "exact" in name else 0.0, 1 / scale if scale else size / out
    return all(
        math.floor(rounded((i + half) * rounded(step))) == i // (out // size)
        for rounded in (float, _single)
        for i in range(out)
    )


def _single(value: float) -> float:
    """The nearest number in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _nearest_rule(
    name: str, before: Sequence[int], after: Sequence[int], scales: Sequence[float | None], backward: bool
) -> Rule:
    """Dims that are repeated are ``x`` and ``(xu)``, and free in x; others are whole."""
    ndim, spatial = len(before), len(after)
    names, others = letters(ndim), letters(spatial, ndim)
    right, blocked, counts, own = list(names), others, dict[str, int](), list[str]()
    for i, (size, out, other) in enumerate(zip(before[-spatial:], after, others, strict=True)):
        d = ndim - spatial + i
        if _repeats(name, size, out, scales[i] if i < len(scales) else None):
            right[d], counts[other] = names[d] + other, out // size
        else:
            right[d], blocked = other, blocked + names[d]
        own.append(names[d] if other in counts else "")
    options: dict[str, Any] = {"blocked": blocked, "linear": ((0,),), "scaled": {1: tuple(own)}, "sizes": counts}
    if backward:
        return Rule(f"{dims(right)}->{names}", shapes=(2,), **options)
    return Rule(f"{names}->{dims(right)}", **options)


def _nearest(name: str) -> Callable[..., Rule]:
    def forward(x: Spec, output_size: Sequence[int], *scales: float | None) -> Rule:
        return _nearest_rule(name, x.shape, output_size, scales, backward=False)

    return forward


def _nearest_backward(name: str) -> Callable[..., Rule]:
    def backward(grad: Spec, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None) -> Rule:
        return _nearest_rule(name, input_size, output_size, scales, backward=True)

    return backward


@dataclass(frozen=True)
class _Between:
    """A dim that is interpolated to a whole number of times the size, or of which every so many elements give one.

    Attributes:
        dim: of the tensor.
        at: among the spatial dims.
        letter: of blocks of it.
        unit: elements before that are a block.
        made: elements after it.
        reach: how many elements of its neighbors a block's interpolation reads, whole blocks.
    """

    dim: int
    at: int
    letter: str
    unit: int
    made: int
    reach: int

    def sizes(self, context: Any) -> tuple[int, int, int]:
        """How many elements a device has before and after, and how many come of its neighbors' at each end."""
        blocks = context.local_size(self.letter)
        return blocks * self.unit, blocks * self.made, self.reach // self.unit * self.made

    def forward(self, target: Any, context: Any, x: Any, output_size: Sequence[int], *rest: Any) -> Any:
        """That of a device's elements, of which those beside the ends of the whole are repeated."""
        size, out, beside = self.sizes(context)
        wide = halo.window(context, x, self.dim, size, self.reach, self.reach, halo.REPLICATE)
        made = target(wide, self.replaced(output_size, self.at, out + 2 * beside), *rest)
        return aten.slice.Tensor(made, self.dim, beside, beside + out)

    def backward(
        self, target: Any, context: Any, grad: Any, output_size: Sequence[int], input_size: Sequence[int], *rest: Any
    ) -> Any:
        """Its gradient: what neighbors' elements get goes there."""
        size, out, beside = self.sizes(context)
        ndim = len(input_size)
        wide = aten.constant_pad_nd.default(grad, halo.pads(ndim, self.dim, beside, beside))
        longer = self.replaced(input_size, self.dim, size + 2 * self.reach)
        made = target(wide, self.replaced(output_size, self.at, out + 2 * beside), longer, *rest)
        return halo.add_window(context, made, ndim, self.dim, size, self.reach, self.reach, halo.REPLICATE)

    @staticmethod
    def replaced(sizes: Sequence[int], at: int, size: int) -> list[int]:
        """Sizes with another one at a place."""
        return [size if i == at else n for i, n in enumerate(sizes)]


def _between(name: str, size: int, out: int, scale: float | None) -> tuple[int, int, int] | None:
    """Elements before and after of a block, and how many of its neighbors it reads; None: there are no blocks."""
    cubic = "cubic" in name
    if size and out % size == 0:
        times = out // size
        return (1, times, 1 + cubic) if scale in (None, times) else None
    if out and size % out == 0:
        # The middle of a block is between two of its elements, or one of them.
        times = size // out
        return (times, 1, cubic * times) if scale is None or 1 / scale == times else None
    return None


def _linear_rule(
    name: str, before: Sequence[int], after: Sequence[int], corners: bool, scales: Sequence[Any], backward: bool
) -> Rule:
    """Dims of which blocks are interpolated with elements of their neighbors; where corners are aligned, none."""
    ndim, spatial = len(before), len(after)
    names, others = letters(ndim), letters(spatial, ndim)
    left, right, blocked = list(names), list(names), others
    counts, own, lower = dict[str, int](), list[str](), dict[str, Lowering]()
    target = getattr(aten, f"{name}_backward" if backward else name).default
    for i, (size, out, other) in enumerate(zip(before[-spatial:], after, others, strict=True)):
        d = ndim - spatial + i
        found = None if corners else _between(name, size, out, scales[i] if i < len(scales) else None)
        own.append(names[d] if found else "")
        if found is None:
            right[d], blocked = other, blocked + names[d]
            continue
        unit, made, reach = found
        if max(unit, made) > 1:
            side = left if unit > 1 else right
            side[d], counts[other] = names[d] + other, max(unit, made)
        if reach:
            block = _Between(d, i, names[d], unit, made, reach)
            build = partial(block.backward if backward else block.forward, target)
            lower[names[d]] = Lowering(build, least=reach // unit)
    options: dict[str, Any] = {"blocked": blocked, "linear": ((0,),), "scaled": {1: tuple(own)}, "sizes": counts}
    if backward:
        return Rule(f"{dims(right)}->{dims(left)}", shapes=(2,), lower=lower, **options)
    return Rule(f"{dims(left)}->{dims(right)}", lower=lower, **options)


def _linear(name: str) -> Callable[..., Rule]:
    def forward(x: Spec, output_size: Sequence[int], corners: bool, *scales: float | None) -> Rule:
        return _linear_rule(name, x.shape, output_size, corners, scales, backward=False)

    return forward


def _linear_backward(name: str) -> Callable[..., Rule]:
    def backward(
        grad: Spec, output_size: Sequence[int], input_size: Sequence[int], corners: bool, *scales: float | None
    ) -> Rule:
        return _linear_rule(name, input_size, output_size, corners, scales, backward=True)

    return backward


for _names in RESAMPLING.values():
    for _name in _names:
        _near = "nearest" in _name
        rule(getattr(aten, _name).default)(_nearest(_name) if _near else _linear(_name))
        rule(getattr(aten, f"{_name}_backward").default)(_nearest_backward(_name) if _near else _linear_backward(_name))

for _kind in ("reflection", "replication"):
    for _n in (1, 2, 3):
        rule(getattr(aten, f"{_kind}_pad{_n}d").default)(_padded(_n))
        rule(getattr(aten, f"{_kind}_pad{_n}d_backward").default)(_backward(_n))


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(x: Spec, r: int) -> Rule:
    """Channels in groups of ``r * r`` become pixels."""
    names = letters(x.ndim - 3, 10)  # from k on: c, h, w, u and v have a meaning here
    sizes = {"u": r, "v": r}
    return Rule(f"{names}(cuv)hw->{names}c(hu)(wv)", blocked="uv", linear=((0,),), sizes=sizes)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Spec, r: int) -> Rule:
    """Pixels of each ``r`` by ``r`` square become channels."""
    names = letters(x.ndim - 3, 10)
    sizes = {"u": r, "v": r}
    return Rule(f"{names}c(hu)(wv)->{names}(cuv)hw", blocked="uv", linear=((0,),), sizes=sizes)
