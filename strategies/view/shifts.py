"""Padding, shifts and windows along a dim: devices that have blocks of it get rows of their neighbors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.ir.ops.sequence.padded.windows import padded_windows, padded_windows_backward
from autopar.rules.rule import Lowering, Rule, Spec, dims, letters, rule
from autopar.strategies.view.pieces import Pieces

aten = torch.ops.aten

ONE = ((0,),)


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
        pieces = Pieces(x.ndim, d, math.gcd(x.shape[d], low, high) or 1)
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
            lower[names[d]] = _shifted(names[d], d, n, halo.CIRCULAR, partial(_rolled, others))
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
