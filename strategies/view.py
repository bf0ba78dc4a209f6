"""Operators that only move elements: views, slices, concatenations, padding.

A dim that is cut into equal pieces is ``(pr)``: the number of the piece, and the position in it; r stays free. Sizes
that do not factor alike on both sides are letters of their own on each, and blocked.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.ir.ops.sequence.own_rows import filled
from autopar.ir.ops.sequence.padded.windows import padded_windows, padded_windows_backward
from autopar.rules.rule import Lowering, Rule, Spec, dims, letters, rule

aten = torch.ops.aten

ONE = ((0,),)


def _names(count: int, sizes: Sequence[int]) -> list[str]:
    """A letter for each dim, the first ``count`` at most; none where the size is 1."""
    return [c if n != 1 else "" for c, n in zip(letters(count), sizes, strict=True)]


@rule(aten.reshape.default)
def view(x: Spec, shape: Sequence[int]) -> Rule:
    """Row-major reshape: a walk over both lists of sizes that cuts off common factors from the left."""
    left: list[str] = [""] * x.ndim
    right: list[str] = [""] * len(shape)
    sizes: dict[str, int] = {}
    blocked = ""

    def fresh(size: int, *dims_of: tuple[list[str], int]) -> str:
        letter = letters(1, len(sizes))
        sizes[letter] = size
        for side, i in dims_of:
            side[i] += letter
        return letter

    if 0 in shape:  # no elements, and any sizes beside the zero
        return Rule(f"{'1' * x.ndim}->{'1' * len(shape)}", linear=ONE, view=True)
    # Dims of size 1 have no letter, and may come and go anywhere.
    ins = [(i, n) for i, n in enumerate(x.shape) if n != 1]
    outs = [(j, n) for j, n in enumerate(shape) if n != 1]
    while ins and outs:
        (i, a), (j, b) = ins.pop(0), outs.pop(0)
        # The next factor of both sides; what is left of either dim meets the next one of the other.
        common = math.gcd(a, b)
        if common > 1:
            fresh(common, (left, i), (right, j))
            ins = [(i, a // common), *ins] if a != common else ins
            outs = [(j, b // common), *outs] if b != common else outs
            continue
        # No common factor: both runs up to where they meet again are opaque to each other.
        blocked += fresh(a, (left, i)) + fresh(b, (right, j))
        while a != b:
            if a < b:
                i, n = ins.pop(0)
                blocked += fresh(n, (left, i))
                a *= n
            else:
                j, n = outs.pop(0)
                blocked += fresh(n, (right, j))
                b *= n
    return Rule(
        f"{dims(left) or '.'}->{dims(right) or '.'}",
        blocked=blocked,
        linear=ONE,
        shapes=(1,),
        view=True,
        sizes=sizes,
    )


@rule(aten.permute.default)
def permute(x: Spec, order: Sequence[int]) -> Rule:
    """Dims in another order."""
    names = letters(x.ndim)
    return Rule(f"{names or '.'}->{''.join(names[d] for d in order) or '.'}", linear=ONE, view=True)


@rule(aten.expand.default)
def expand(x: Spec, shape: Sequence[int], *, implicit: bool = False) -> Rule:
    """Dims of size 1 repeated, new dims in front: these are split where they appear."""
    right = _names(len(shape), shape)
    aligned = zip(right[len(shape) - x.ndim :], x.shape, strict=True)
    left = [c if n != 1 else "" for c, n in aligned]
    return Rule(f"{dims(left) or '.'}->{dims(right) or '.'}", linear=ONE, shapes=(1,), view=True)


class _Pieces:
    """Dim ``dim`` of ``shape`` seen as pieces of length ``unit``; the other dims have a letter each."""

    def __init__(self, ndim: int, dim: int, unit: int) -> None:
        self.names: list[str] = list(letters(ndim))
        self.dim = dim % ndim
        self.unit = unit
        self.inner = self.names[self.dim] if unit > 1 else ""
        self.counts: dict[int, str] = {}

    def tensor(self, size: int) -> str:
        """The equation of a tensor whose dim is ``size`` long: equal numbers of pieces share a letter."""
        # Tensors of equally many pieces: their pieces are the same ones.
        count = size // self.unit
        if count != 1 and count not in self.counts:
            self.counts[count] = letters(1, len(self.names) + len(self.counts))
        outer = self.counts[count] if count != 1 else ""
        return dims([outer + self.inner if d == self.dim else c for d, c in enumerate(self.names)])

    def rule(self, equation: str, **options: Any) -> Rule:
        """The rule of a linear operator that is free within pieces."""
        sizes = {letter: count for count, letter in self.counts.items()}
        if self.inner:
            sizes[self.inner] = self.unit
        return Rule(equation, blocked="".join(self.counts.values()), sizes=sizes, **options)

    def scaled(self, *arguments: int) -> dict[int | str, str]:
        """Arguments that count elements within a piece."""
        return dict.fromkeys(arguments, self.inner) if self.inner else {}


def _cut(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """First element and length of a slice."""
    first, stop, _ = slice(start, end).indices(size)
    return first, max(0, -(-(stop - first) // step))


def _sliced(ndim: int, dim: int, size: int, start: Any, end: Any, step: int) -> tuple[_Pieces, str, str]:
    """The whole and the slice: pieces for step 1, every step-th element of groups otherwise."""
    first, length = _cut(size, start, end, step)
    if step == 1:
        # The longest pieces whose bounds include those of the slice: within a piece it may be split.
        pieces = _Pieces(ndim, dim, math.gcd(size, first, length) if length else 1)
        return pieces, pieces.tensor(size), pieces.tensor(length)
    pieces = _Pieces(ndim, dim, 1)
    # Every step-th element of a dim of whole groups is one position in each: groups stay free.
    if first < step and length * step == size == (size if end is None else end) and length > 1:
        names, inner = list(pieces.names), letters(1, ndim)
        pieces.inner, pieces.unit = names[dim], length
        pieces.counts[step] = inner
        whole = [c + inner if d == dim else c for d, c in enumerate(names)]
        return pieces, dims(whole), dims(names)
    return pieces, pieces.tensor(size), pieces.tensor(length)


@dataclass(frozen=True)
class _Few:
    """A few pieces of a dim that devices have blocks of: those that have them have all there is of a sum.

    Attributes:
        pieces: of the dim.
        outer: their letter.
        first: the first of the few.
        end: the first behind them.
    """

    pieces: _Pieces
    outer: str
    first: int
    end: int

    def read(self, rule: Rule) -> Rule:
        """The rule of what reads them: each device has a term, zeros where it has none of them."""
        dim = self.pieces.dim

        def build(context: Any, x: Any, *_: Any) -> Any:
            found = [
                filled(aten.slice.Tensor(x, dim, a, b), context.axis_index() != device, 0)
                for device, a, b, _ in self.places(context)
            ]
            return found[0] if len(found) == 1 else aten.cat.default(found, dim)

        return replace(self._lowered(rule, build), reduce=self.outer)

    def written(self, rule: Rule) -> Rule:
        """The rule of what is zero but for them: each device takes its own."""
        dim, ndim = self.pieces.dim, len(self.pieces.names)

        def build(context: Any, grad: Any, *_: Any) -> Any:
            total, size = None, context.local_size(self.outer) * self._unit(context)
            for device, a, b, at in self.places(context):
                own = filled(aten.slice.Tensor(grad, dim, at, at + b - a), context.axis_index() != device, 0)
                own = aten.constant_pad_nd.default(own, halo.pads(ndim, dim, a, size - b))
                total = own if total is None else aten.add.Tensor(total, own)
            return total

        return self._lowered(rule, build)

    def places(self, context: Any) -> list[tuple[int, int, int, int]]:
        """Which devices have some, where in their block these begin and end, and where in the few they begin."""
        size, unit = context.local_size(self.outer), self._unit(context)
        found = []
        for device in range(self.first // size, -(-self.end // size)):
            start, end = max(self.first, device * size), min(self.end, (device + 1) * size)
            own = (start - device * size, end - device * size, start - self.first)
            found.append((device, *(n * unit for n in own)))
        return found

    def _unit(self, context: Any) -> int:
        return context.local_size(self.pieces.inner) if self.pieces.inner else 1

    def _lowered(self, rule: Rule, build: Callable[..., Any]) -> Rule:
        return replace(
            rule, blocked="".join(set(rule.blocked) - {self.outer}), lower={self.outer: Lowering(build, places=True)}
        )


FEW = 8
"""Of a dim that is split one piece of so many, at most, is read as terms of a sum; more are read from the whole."""


def _few(pieces: _Pieces, size: int, start: int | None, end: int | None, step: int) -> _Few | None:
    """Those of a slice, if they are few."""
    first, length = _cut(size, start, end, step)
    if step != 1 or not length or FEW * length > size:
        return None
    unit = pieces.unit
    return _Few(pieces, pieces.counts[size // unit], first // unit, (first + length) // unit)


def _adds(x: Spec) -> bool:
    """Whether what devices have of a tensor can be added up."""
    return x.dtype is None or x.dtype in _ADDED


_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


@rule(aten.slice.Tensor)
def slice_(x: Spec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Rule:
    """Part of a dim; ``start`` and ``end`` are scaled where they fall between pieces."""
    pieces, whole, part = _sliced(x.ndim, dim % x.ndim, x.shape[dim], start, end, step)
    scaled = pieces.scaled(2, 3) if step == 1 else pieces.scaled(3)
    # A step's start counts within a group, and stays as it is on every device.
    made = pieces.rule(f"{whole}->{part}", linear=ONE, scaled=scaled, view=True)
    few = _few(pieces, x.shape[dim], start, end, step) if _adds(x) else None
    return made if few is None else few.read(made)


@rule(aten.slice_backward.default)
def slice_backward(grad: Spec, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Rule:
    """Zeros but for a slice."""
    pieces, whole, part = _sliced(grad.ndim, dim % grad.ndim, shape[dim], start, end, step)
    scaled = pieces.scaled(3, 4) if step == 1 else pieces.scaled(4)
    made = pieces.rule(f"{part}->{whole}", linear=ONE, scaled=scaled, shapes=(1,))
    few = _few(pieces, shape[dim], start, end, step)
    return made if few is None else few.written(made)


@rule(aten.select.int)
def select(x: Spec, dim: int, index: int) -> Rule:
    """One element of a dim; where this is split, a term of a sum on each device, zeros but on the one that has it."""
    names = letters(x.ndim)
    removed, index = names[dim % x.ndim], index % x.shape[dim]
    equation = f"{names}->{names.replace(removed, '') or '.'}"

    def build(context: Any, x: Any, *_: Any) -> Any:
        device, place = divmod(index, context.local_size(removed))
        return filled(aten.select.int(x, dim, place), context.axis_index() != device, 0)

    if not _adds(x):
        return Rule(equation, blocked=removed, linear=ONE, view=True)
    return Rule(equation, reduce=removed, lower={removed: Lowering(build, places=True)}, linear=ONE, view=True)


@rule(aten.select_backward.default)
def select_backward(grad: Spec, shape: Sequence[int], dim: int, index: int) -> Rule:
    """Zeros but for one element of a dim; where this is split, only the device that has it takes the gradient."""
    names = letters(len(shape))
    removed, index = names[dim % len(shape)], index % shape[dim]

    def build(context: Any, grad: Any, shape: Sequence[int], *_: Any) -> Any:
        device, place = divmod(index, context.local_size(removed))
        own = filled(grad, context.axis_index() != device, 0)
        return aten.select_backward.default(own, shape, dim, place)

    equation = f"{names.replace(removed, '') or '.'}->{names}"
    return Rule(equation, lower={removed: Lowering(build, places=True)}, linear=ONE, shapes=(1,))


@rule(aten.slice_scatter.default)
def slice_scatter(
    x: Spec, source: Spec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Rule:
    """``x`` with a slice replaced."""
    pieces, whole, part = _sliced(x.ndim, dim % x.ndim, x.shape[dim], start, end, step)
    scaled = pieces.scaled(3, 4) if step == 1 else pieces.scaled(4)
    return pieces.rule(f"{whole},{part}->{whole}", linear=((0, 1),), scaled=scaled)


@rule(aten.select_scatter.default)
def select_scatter(x: Spec, source: Spec, dim: int, index: int) -> Rule:
    """``x`` with one element of a dim replaced."""
    names = letters(x.ndim)
    removed = names[dim % x.ndim]
    return Rule(f"{names},{names.replace(removed, '') or '.'}->{names}", blocked=removed, linear=((0, 1),))


@rule(aten.unbind.int)
def unbind(x: Spec, dim: int = 0) -> Rule:
    """Every element of a dim."""
    names = letters(x.ndim)
    removed = names[dim % x.ndim]
    outputs = [names.replace(removed, "") or "."] * x.shape[dim]
    return Rule(f"{names}->{','.join(outputs)}", blocked=removed, linear=ONE, view=True)


@rule(aten.stack.default)
def stack(tensors: Sequence[Spec], dim: int = 0) -> Rule:
    """A new dim made of tensors of one shape."""
    names = letters(tensors[0].ndim + 1)
    new = names[dim % len(names)]
    inputs = [names.replace(new, "") or "."] * len(tensors)
    return Rule(f"{','.join(inputs)}->{names}", blocked=new, linear=(tuple(range(len(tensors))),))


@rule(aten.split_with_sizes.default, aten.split.Tensor)
def split(x: Spec, sizes: int | Sequence[int], dim: int = 0) -> Rule:
    """Consecutive parts of a dim, in pieces as long as the largest length that divides all of them."""
    total = x.shape[dim]
    # A size gives parts of that length, the last one shorter; of nothing, one part.
    lengths = [min(sizes, total - i) for i in range(0, total, sizes or 1)] if isinstance(sizes, int) else list(sizes)
    parts = lengths or [0]
    pieces = _Pieces(x.ndim, dim, math.gcd(*parts) or 1)
    whole, outputs = pieces.tensor(total), [pieces.tensor(n) for n in parts]
    return pieces.rule(f"{whole}->{','.join(outputs)}", linear=ONE, scaled=pieces.scaled(1), view=True)


@rule(aten.cat.default)
def cat(tensors: Sequence[Spec], dim: int = 0) -> Rule:
    """Tensors one after the other along a dim; the reverse of a split."""
    parts = [t.shape[dim] for t in tensors]
    pieces = _Pieces(tensors[0].ndim, dim, math.gcd(*parts) or 1)
    inputs = ",".join(pieces.tensor(n) for n in parts)
    return pieces.rule(f"{inputs}->{pieces.tensor(sum(parts))}", linear=(tuple(range(len(parts))),))


def _may_shift(x: Spec, d: int, low: int) -> bool:
    """Whether devices that have blocks of a dim can be sent what is shifted over their bounds."""
    return 2 * abs(low) <= x.shape[d] and _sends(x)


def _shifted(letter: str, d: int, low: int, fill: Any, local: Callable[[Any], Any] = lambda x: x) -> Lowering:
    """Elements of a dim moved up by ``low``; ``local``: what is done besides, to each device's part."""

    def build(context: Any, x: Any, *_: Any) -> Any:
        return halo.window(context, local(x), d, context.local_size(letter), low, -low, fill)

    return Lowering(build, least=halo.reach(low, -low))


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(x: Spec, pad: Sequence[int], value: float = 0) -> Rule:
    """Elements added at (or with negative numbers taken from) both ends of the last dims."""
    ends = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = {d: e for d, e in ends.items() if any(e)}
    # Each of several terms would be padded with the value.
    linear = ONE if value == 0 else ()
    if not padded:
        return Rule(f"{letters(x.ndim) or '.'}->{letters(x.ndim) or '.'}", linear=linear)
    if len(padded) == 1:
        ((d, (low, high)),) = padded.items()
        if low + high == 0 and _may_shift(x, d, low):
            same = letters(x.ndim)
            return Rule(f"{same}->{same}", linear=linear, lower={same[d]: _shifted(same[d], d, low, value)})
        pieces = _Pieces(x.ndim, d, math.gcd(x.shape[d], low, high) or 1)
        equation = f"{pieces.tensor(x.shape[d])}->{pieces.tensor(x.shape[d] + low + high)}"
        return pieces.rule(equation, linear=linear, scaled=pieces.scaled(1))
    # Several padded dims: their blocks do not line up, and each side has letters of its own.
    names = list(letters(2 * x.ndim))
    left = names[: x.ndim]
    right = [names[x.ndim + d] if d in padded else c for d, c in enumerate(left)]
    blocked = "".join(left[d] + right[d] for d in padded)
    return Rule(f"{dims(left)}->{dims(right)}", blocked=blocked, linear=linear)


@rule(aten.narrow.default)
def narrow(x: Spec, dim: int, start: int, length: int) -> Rule:
    """Part of a dim that shares no factor with the whole: what `pad_dims` removes padding with."""
    whole, part = _cut_off(x, {dim})
    return Rule(f"{whole[0]}->{part[0]}", blocked=whole[1] + part[1], linear=ONE, view=True)


@rule(aten.pad.default)
def pad(x: Spec, pads: Sequence[int], mode: str = "constant", value: float | None = None) -> Rule:
    """Elements added at the end, in dims that share no factor with what they were: what `pad_dims` pads with."""
    left, right = _cut_off(x, {x.ndim - 1 - i // 2 for i, n in enumerate(pads) if n})
    return Rule(f"{left[0]}->{right[0]}", blocked=left[1] + right[1], linear=ONE if not value else ())


def _cut_off(x: Spec, changed: set[int]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Letters before and after dims are changed, with those of the changed dims."""
    names, others = letters(x.ndim), letters(x.ndim, x.ndim)
    after = "".join(others[d] if d in changed else c for d, c in enumerate(names))
    pair = "".join(names[d] for d in sorted(changed)), "".join(others[d] for d in sorted(changed))
    return (names or ".", pair[0]), (after or ".", pair[1])


@rule(aten.flip.default)
def flip(x: Spec, flipped: Sequence[int]) -> Rule:
    """Dims in reverse; devices that have blocks of one change places, all that they have."""
    names = letters(x.ndim)
    # A scalar's dim may be named, too.
    reversed_ = "".join({names[d]: 0 for d in flipped if x.ndim})
    sends = not (x.dtype is not None and x.dtype.is_complex)

    def build(context: Any, x: Any, *_: Any) -> Any:
        return context.mirror(aten.flip.default(x, flipped))

    lower = dict.fromkeys(reversed_, Lowering(build)) if sends else {}
    blocked = "" if sends else reversed_
    return Rule(f"{names or '.'}->{names or '.'}", blocked=blocked, lower=lower, linear=ONE)


@rule(aten.roll.default)
def roll(x: Spec, shifts: Sequence[int], rolled: Sequence[int] = ()) -> Rule:
    """Dims moved around their ends; all of them as one if none is named."""
    names = letters(x.ndim)
    if not rolled or not x.ndim:
        return Rule(f"{names or '.'}->{names or '.'}", blocked=names, linear=ONE)
    steps = dict[int, int]()
    for shift, d in zip(shifts, rolled, strict=True):
        steps[d % x.ndim] = steps.get(d % x.ndim, 0) + shift
    # The shorter way around.
    steps = {d: (n + x.shape[d] // 2) % x.shape[d] - x.shape[d] // 2 for d, n in steps.items() if n and x.shape[d]}
    lower = {}
    for d, n in steps.items():
        others = {other: m for other, m in steps.items() if other != d and m}
        if n and _may_shift(x, d, n):
            lower[names[d]] = _shifted(names[d], d, n, None, partial(_rolled, others))
    # A whole turn is none only as long as the dim has this size.
    blocked = "".join(names[d] for d in steps if names[d] not in lower)
    return Rule(f"{names}->{names}", blocked=blocked, lower=lower, linear=ONE)


def _rolled(steps: Mapping[int, int], x: Any) -> Any:
    return aten.roll.default(x, list(steps.values()), list(steps)) if steps else x


@rule(aten.unfold.default)
def unfold(x: Spec, dim: int, size: int, step: int) -> Rule:
    """Windows of a dim, in a new last dim; free in the windows if they tile the dim."""
    if x.ndim == 0:
        return Rule(".->1", linear=ONE)
    names = list(letters(x.ndim))
    dim %= x.ndim
    window, count = letters(1, x.ndim), letters(1, x.ndim + 1)
    # Windows that tile the dim are a view like a reshape.
    if size == step and x.shape[dim] % size == 0:
        left = [c + window if d == dim else c for d, c in enumerate(names)]
        return Rule(f"{dims(left)}->{dims([*names, window])}", blocked=window, linear=ONE, view=True)
    right = [count if d == dim else c for d, c in enumerate(names)]
    return Rule(f"{dims(names)}->{dims([*right, window])}", blocked=names[dim] + count + window, linear=ONE, view=True)


@rule(aten.unfold_backward.default)
def unfold_backward(gradient: Spec, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Rule:
    """Windows added up where they came from. Its kernel does not check that the windows are as long as it is told."""
    if not input_sizes:
        return Rule("1->.", linear=ONE, shapes=(1,))
    forward = unfold(Spec(tuple(input_sizes)), dim, size, step)
    whole, windows = forward.equation.split("->")
    # Windows of one sample serve all, as those of istft do.
    other = [d for d in range(len(input_sizes)) if d != dim % len(input_sizes)]
    shared = "".join(letters(len(input_sizes))[d] for d in other if gradient.shape[d] != input_sizes[d])
    left = "".join("1" if c in shared else c for c in windows)
    blocked = forward.blocked + shared
    return replace(forward, equation=f"{left}->{whole}", blocked=blocked, shapes=(1,), view=False)


@rule(padded_windows)
def windows(x: Spec, dim: int, size: int, step: int, low: int, high: int, fill: Any) -> Rule:
    """Windows of a dim that is padded first: those that begin in a device's rows, with rows of its neighbors."""
    left, right, outer, blocked, sizes = _windowed(x, dim, step)

    def build(context: Any, x: Any, *_: Any) -> Any:
        rows = context.local_size(outer) * step
        wide = halo.window(context, x, dim, rows, low, size - low - step, fill)
        return aten.unfold.default(wide, dim, size, step)

    lower = {outer: Lowering(build, least=-(-halo.reach(low, size - low - step) // step))}
    linear = ONE if fill == 0 else ()
    return Rule(f"{left}->{right}", blocked=blocked, linear=linear, sizes=sizes, lower=lower if _sends(x) else {})


@rule(padded_windows_backward)
def windows_backward(grad: Spec, sizes: Sequence[int], dim: int, size: int, step: int, low: int, high: int) -> Rule:
    """Windows added up where they came from: what is a neighbor's goes there."""
    left, right, outer, blocked, counts = _windowed(Spec(tuple(sizes), grad.dtype), dim, step)

    def build(context: Any, grad: Any, sizes: Sequence[int], *_: Any) -> Any:
        rows, behind = context.local_size(outer) * step, size - low - step
        wide = [rows + low + behind if d == dim else n for d, n in enumerate(sizes)]
        made = aten.unfold_backward.default(grad, wide, dim, size, step)
        return halo.add_window(context, made, len(sizes), dim, rows, low, behind)

    lower = {outer: Lowering(build, least=-(-halo.reach(low, size - low - step) // step))}
    return Rule(
        f"{right}->{left}", blocked=blocked, linear=ONE, sizes=counts, lower=lower if _sends(grad) else {}, shapes=(1,)
    )


def _windowed(x: Spec, dim: int, step: int) -> tuple[str, str, str, str, dict[str, int]]:
    """Equations of a tensor and of its windows, one for each ``step`` rows; the letter of these, and the others."""
    names = list(letters(x.ndim))
    window, rest = letters(1, x.ndim), letters(1, x.ndim + 1) if step > 1 else ""
    inside = [c + rest if d == dim else c for d, c in enumerate(names)]
    outside = "" if _sends(x) else names[dim]
    return dims(inside), dims([*names, window]), names[dim], window + rest + outside, {rest: step} if rest else {}


def _sends(x: Spec) -> bool:
    """Whether rows can be sent."""
    return x.dtype is None or not x.dtype.is_complex


@rule(aten.repeat.default)
def repeat(x: Spec, repeats: Sequence[int]) -> Rule:
    """Whole tensors one after the other: dims that are repeated are not split, nor are new ones."""
    new = len(repeats) - x.ndim
    names, outer = letters(x.ndim), letters(len(repeats), x.ndim)
    # New dims come first.
    old = [""] * new + [c if n != 1 else "" for c, n in zip(names, x.shape, strict=True)]
    right = [(o if n != 1 else "") + c for o, c, n in zip(outer, old, repeats, strict=True)]
    blocked = "".join(part for part, n in zip(right, repeats, strict=True) if n != 1)
    sizes = {o: n for o, n in zip(outer, repeats, strict=True) if n != 1}
    return Rule(f"{dims(old[new:]) or '.'}->{dims(right) or '.'}", blocked=blocked, linear=ONE, sizes=sizes)


@rule(aten.glu.default)
def glu(x: Spec, dim: int = -1) -> Rule:
    """The first half of a dim, gated by the second."""
    pieces = _Pieces(x.ndim, dim, x.shape[dim] // 2)
    # Two pieces, value and gate: both are split alike, so each device has the gates of its values.
    return pieces.rule(f"{pieces.tensor(x.shape[dim])}->{pieces.tensor(x.shape[dim] // 2)}")


@rule(aten.glu_backward.default)
def glu_backward(grad: Spec, x: Spec, dim: int) -> Rule:
    """Its gradient."""
    pieces = _Pieces(x.ndim, dim, x.shape[dim] // 2)
    whole, half = pieces.tensor(x.shape[dim]), pieces.tensor(x.shape[dim] // 2)
    return pieces.rule(f"{half},{whole}->{whole}", linear=ONE)
