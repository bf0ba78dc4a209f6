"""Pooling, forward and backward: batch, channels, and one spatial dim with an output for each stride of its elements.

Where windows do not reach beyond the blocks that devices have of such a dim, as of a kernel as large as the stride,
these are pooled where they are; else a device gets the rows that its windows reach from its neighbors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.rules.rule import Lowering, Rule, RuleFunction, Spec, dims, letters, rule
from autopar.strategies.convolution.windows import INSIDE, OUTSIDE, REST, Window, at, sends

aten = torch.ops.aten


@dataclass(frozen=True)
class _Split:
    """A spatial dim of which devices may have blocks.

    Attributes:
        window: what an output reads along it.
        dim: of the tensor.
        letter: of its outputs.
        after: elements of all dims behind it.
        ndim: of the tensor.
        padding: of all spatial dims, none of this one.
    """

    window: Window
    dim: int
    letter: str
    after: int
    ndim: int
    padding: list[int]

    def size(self, context: Any) -> int:
        """How many rows a device has."""
        return int(context.local_size(self.letter)) * self.window.stride

    def wide(self, context: Any, x: Any, fill: float) -> Any:
        """A device's rows, and those of its neighbors that its outputs read."""
        window = self.window
        return halo.window(context, x, self.dim, self.size(context), window.low, window.behind, fill)

    def as_wide(self, x: Any) -> Any:
        """A tensor of the shape of that, of which only the shape is read."""
        window = self.window
        ends = halo.pads(self.ndim, self.dim, window.low, window.behind)
        return aten.constant_pad_nd.default(x, ends) if window.low or window.behind else x

    def added(self, context: Any, grad: Any) -> Any:
        """The gradient of a device's rows, of that of all that its outputs read."""
        window = self.window
        return halo.add_window(context, grad, self.ndim, self.dim, self.size(context), window.low, window.behind)

    def first(self, context: Any) -> Any:
        """The number of the first element that a device's outputs read, among those of a channel."""
        return (context.axis_index() * self.size(context) - self.window.low) * self.after

    def share(self, context: Any, x: Any) -> Any:
        """Of each output, which share of its kernel along the dim is within the tensor."""
        window = self.window
        rows = halo.inside(context, x, self.size(context), window.low, window.behind)
        line = aten.reshape.default(rows, [1, 1, -1])
        mean = aten.avg_pool2d.default(line, [1, window.kernel], [1, window.stride])
        return aten.reshape.default(mean, [-1] + [1] * (self.ndim - 1 - self.dim))

    def lowered(self, build: Callable[..., Any]) -> dict[str, Lowering]:
        """What another code is for."""
        window = self.window
        return {self.letter: Lowering(build, least=-(-halo.reach(window.low, window.behind) // window.stride))}


@dataclass(frozen=True)
class _Pool:
    """Equations of what is pooled and of the result, with the dim that needs other code where it is split."""

    x: str
    out: str
    blocked: str
    sizes: dict[str, int]
    split: _Split | None

    def rule(self, equation: str, lower: dict[str, Lowering] | None = None, **options: Any) -> Rule:
        """The rule of an operator on these."""
        return Rule(equation, blocked=self.blocked, sizes=self.sizes, lower=lower or {}, **options)


def _pool(x: Spec, numbers: Sequence[Sequence[int]], ceil: bool, places: bool) -> _Pool:
    """Of a kernel, stride, padding and dilation.

    Args:
        x: what is pooled.
        numbers: a kernel, stride, padding and dilation; no stride: as large as the kernel.
        ceil: whether the last window may reach beyond the padding.
        places: whether elements are counted, as those of maxima are: other code wherever the dim is split.
    """
    kernel, stride, padding, dilation = numbers
    spatial = len(kernel)
    first = x.ndim - spatial
    names = letters(first)
    windows, sides = list[Window](), list[int]()
    for i in range(spatial):
        low = at(padding, i)
        windows.append(Window(at(kernel, i), at(stride or kernel, i), low, low, at(dilation, i)))
        sides.append(low)
    inside, outside, blocked, sizes, split = list[str](), list[str](), "", dict[str, int](), None
    long = next((i for i, n in enumerate(x.shape[first:]) if n > 1), 0)
    for i, (window, size) in enumerate(zip(windows, x.shape[first:], strict=True)):
        exact = not ceil or (size + 2 * window.low - window.reach) % window.stride == 0
        free = window.aligned(size) and exact
        if free and (places or not window.alone):
            # Places are numbers within a channel: those of the first dim are told by how many rows are before.
            free = split is None and i == long and sends(x) and not (places and window.step > 1)
            if free:
                ends = [0 if j == i else n for j, n in enumerate(sides)]
                after = math.prod(x.shape[first + i + 1 :])
                split = _Split(window, first + i, OUTSIDE[i], after, x.ndim, ends)
        rest = REST[i] if free and window.stride > 1 else ""
        sizes |= {rest: window.stride} if rest else {}
        inside.append(OUTSIDE[i] + rest if free else INSIDE[i])
        outside.append(OUTSIDE[i])
        blocked += rest if free else INSIDE[i] + OUTSIDE[i]
    return _Pool(dims([*names, *inside]), dims([*names, *outside]), blocked, sizes, split)


def _maximum(target: Any) -> RuleFunction:
    def forward(
        x: Spec, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil: bool = False,
    ) -> Rule:  # fmt: skip
        floating = x.dtype is None or x.dtype.is_floating_point
        pool = _pool(x, (kernel, stride, padding, dilation), ceil, places=True)
        split = pool.split

        def build(context: Any, x: Any, *_: Any) -> Any:
            assert split is not None
            wide = split.wide(context, x, -math.inf if floating else torch.iinfo(given).min)
            values, places = (target(wide, kernel, stride, split.padding, dilation, ceil)[i] for i in range(2))
            places = aten.add.Scalar(places, split.first(context))
            if split.window.low:  # where all is minus infinity the kernel takes the first: not the padding
                inner = aten.remainder.Scalar(places, split.after)
                places = aten.where.self(aten.lt.Scalar(places, 0), inner, places)
            return aten.alias.default(values), places

        given = x.dtype
        return pool.rule(f"{pool.x}->{pool.out},{pool.out}", split.lowered(build) if split else None)

    return forward


def _maximum_backward(target: Any) -> RuleFunction:
    def backward(
        grad: Spec, x: Spec, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], ceil: bool, places: Spec,
    ) -> Rule:  # fmt: skip
        pool = _pool(x, (kernel, stride, padding, dilation), ceil, places=True)
        split = pool.split

        def build(context: Any, grad: Any, x: Any, *args: Any) -> Any:
            assert split is not None
            own = aten.sub.Scalar(args[-1], split.first(context))
            made = target(grad, split.as_wide(x), kernel, stride, split.padding, dilation, ceil, own)
            return split.added(context, made)

        lower = split.lowered(build) if split else None
        return pool.rule(f"{pool.out},{pool.x},{pool.out}->{pool.x}", lower, linear=((0,),))

    return backward


def _mean(target: Any) -> RuleFunction:
    def forward(
        x: Spec, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), ceil: bool = False,
        padded: bool = True, divisor: int | None = None,
    ) -> Rule:  # fmt: skip
        pool = _pool(x, (kernel, stride, padding, (1,)), ceil, places=False)
        split = pool.split

        def build(context: Any, x: Any, *_: Any) -> Any:
            assert split is not None
            made = target(split.wide(context, x, 0.0), kernel, stride, split.padding, ceil, padded, divisor)
            counted = padded or divisor is not None
            return made if counted else aten.div.Tensor(made, split.share(context, made))

        return pool.rule(f"{pool.x}->{pool.out}", split.lowered(build) if split else None, linear=((0,),))

    return forward


def _mean_backward(target: Any) -> RuleFunction:
    def backward(
        grad: Spec, x: Spec, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool,
        padded: bool, divisor: int | None,
    ) -> Rule:  # fmt: skip
        pool = _pool(x, (kernel, stride, padding, (1,)), ceil, places=False)
        split = pool.split

        def build(context: Any, grad: Any, x: Any, *_: Any) -> Any:
            assert split is not None
            counted = padded or divisor is not None
            grad = grad if counted else aten.div.Tensor(grad, split.share(context, grad))
            made = target(grad, split.as_wide(x), kernel, stride, split.padding, ceil, padded, divisor)
            return split.added(context, made)

        lower = split.lowered(build) if split else None
        return pool.rule(f"{pool.out},{pool.x}->{pool.x}", lower, linear=((0,),))

    return backward


def _adaptive(x: Spec, sizes: Sequence[int]) -> tuple[_Pool, tuple[str, ...]]:
    """Means of as many blocks, which are equal where they divide a dim; the letters of these."""
    first = x.ndim - len(sizes)
    parts = [(n, at(sizes, i)) for i, n in enumerate(x.shape[first:])]
    kernel = [n // out if out and n % out == 0 else 0 for n, out in parts]
    inside = [OUTSIDE[i] + (REST[i] if k > 1 else "") if k else INSIDE[i] for i, k in enumerate(kernel)]
    blocked = "".join(REST[i] * (k > 1) if k else INSIDE[i] + OUTSIDE[i] for i, k in enumerate(kernel))
    names, outside = letters(first), OUTSIDE[: len(sizes)]
    own = tuple(OUTSIDE[i] if k else "" for i, k in enumerate(kernel))
    counts = {REST[i]: k for i, k in enumerate(kernel) if k > 1}
    return _Pool(dims([*names, *inside]), dims([*names, *outside]), blocked, counts, None), own


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive(x: Spec, sizes: Sequence[int]) -> Rule:
    """Means of so many blocks of each dim."""
    pool, own = _adaptive(x, sizes)
    return pool.rule(f"{pool.x}->{pool.out}", linear=((0,),), scaled={1: own})


def _adaptive_backward(spatial: int) -> RuleFunction:
    def backward(grad: Spec, x: Spec) -> Rule:
        pool, _ = _adaptive(x, grad.shape[-spatial:])
        return pool.rule(f"{pool.out},{pool.x}->{pool.x}", linear=((0,),))

    return backward


for _n in (2, 3):
    _max, _back = (getattr(aten, f"max_pool{_n}d_with_indices{end}").default for end in ("", "_backward"))
    rule(_max)(_maximum(_max))
    rule(_back)(_maximum_backward(_back))
    _max, _back = (getattr(aten, f"avg_pool{_n}d{end}").default for end in ("", "_backward"))
    rule(_max)(_mean(_max))
    rule(_back)(_mean_backward(_back))
    rule(getattr(aten, f"_adaptive_avg_pool{_n}d_backward").default)(_adaptive_backward(_n))
