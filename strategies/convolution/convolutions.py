"""Convolution, forward and backward: batch, groups, channels, and whole patches.

Where the kernel is as large as the stride and nothing is padded (1x1 convolutions, patch embeddings), every output
reads a patch of its own: the spatial dims are ``(Xu)`` and free in X. Where the output is as long as the input, but for
the stride, one spatial dim may be split all the same: a device gets the rows that its outputs read from its neighbors,
or, of a transposed convolution, what its outputs have of their inputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.ir.ops.sequence.padded import convolution as ours
from autopar.rules.rule import Lowering, Rule, Spec, dims, rule
from autopar.strategies.convolution.windows import INSIDE, KERNEL, OUTSIDE, REST, Window, at, sends

aten = torch.ops.aten


@dataclass(frozen=True)
class _Call:
    """A convolution.

    Attributes:
        windows: of each spatial dim.
        args: stride, low and high padding, dilation, whether it is transposed, output padding, groups.
        different: whether it may be padded differently at both ends.
        mode: how it is padded.
    """

    windows: tuple[Window, ...]
    args: tuple[Any, ...]
    different: bool
    mode: str = ours.ZEROS

    @staticmethod
    def of(weight: Spec, args: Sequence[Any], different: bool) -> "_Call":
        """From the arguments behind the tensors."""
        count, mode = len(weight.shape) - 2, ours.ZEROS
        if different:
            stride, low, high, dilation, groups, mode = args
            transposed, more = False, [0] * count
        else:
            stride, low, dilation, transposed, more, groups = args
            high = low
        *lists, more = [[at(n, i) for i in range(count)] for n in (stride, low, high, dilation, more)]
        windows = tuple(Window(weight.shape[2 + i], *(n[i] for n in lists)) for i in range(count))
        return _Call(windows, (*lists, transposed, more, groups), different, mode)

    @property
    def fill(self) -> Any:
        """What stands beyond the ends of the whole."""
        return 0.0 if self.mode == ours.ZEROS else self.mode

    def tiles(self, i: int, size: int) -> bool:
        """Whether patches tile a spatial dim: each output reads one of its own, and they are split like samples."""
        transposed, more = self.args[4:6]
        return self.windows[i].tiles and more[i] == 0 and (transposed or size % self.windows[i].kernel == 0)

    def shared(self, x: Spec) -> int | None:
        """The first other spatial dim of which devices may have blocks, if they get rows of their neighbors."""
        found = (i for i, n in enumerate(x.shape[2:]) if self._aligned(i, n) and not self.tiles(i, n))
        return next(found, None) if sends(x) else None

    def _aligned(self, i: int, size: int) -> bool:
        """Whether a block of a spatial dim is a block of output, but for the stride."""
        window, transposed, more = self.windows[i], *self.args[4:6]
        if transposed:
            return bool(more[i] + window.behind == window.low)
        return window.aligned(size)

    def within(self, dim: int, groups: int) -> tuple[list[Any], bool]:
        """Arguments of the same on elements that have been padded along ``dim``, and whether ends are different."""
        stride, low, high, dilation, _, more, _ = self.args
        low, high = ([0 if i == dim else n for i, n in enumerate(side)] for side in (low, high))
        if low != high or min(low) < 0 or (self.mode != ours.ZEROS and any(low)):
            return [stride, low, high, dilation, groups, self.mode], True
        return [stride, low, dilation, False, more, groups], False

    def unpadded(self, dim: int, groups: int) -> list[Any]:
        """Arguments of a transposed convolution all of whose outputs along ``dim`` are wanted."""
        stride, low, _, dilation, transposed, more, _ = self.args
        low, more = ([0 if i == dim else n for i, n in enumerate(side)] for side in (low, more))
        return [stride, low, dilation, transposed, more, groups]


@dataclass(frozen=True)
class _Letters:
    """Equations of a convolution's tensors.

    Attributes:
        x: of the input.
        weight: of the weight.
        out: of the output.
        blocked: letters along which it cannot be split.
        sizes: of the letters that shapes do not tell.
    """

    x: str
    weight: str
    out: str
    blocked: str
    sizes: dict[str, int]


def _letters_of(call: _Call, x: Spec) -> _Letters:
    transposed = call.args[4]
    small = INSIDE if transposed else OUTSIDE
    inside, outside, blocked = list[str](), list[str](), ""
    sizes = {"g": call.args[6]}
    shared = call.shared(x)
    for i, (window, size) in enumerate(zip(call.windows, x.shape[2:], strict=True)):
        blocked += KERNEL[i]
        if call.tiles(i, size):
            fine, coarse = small[i] + KERNEL[i], small[i]
            inside.append(coarse if transposed else fine)
            outside.append(fine if transposed else coarse)
        elif i == shared:
            rest = REST[i] if window.stride > 1 else ""
            sizes |= {rest: window.stride} if rest else {}
            fine, coarse = small[i] + rest, small[i]
            inside.append(coarse if transposed else fine)
            outside.append(fine if transposed else coarse)
            blocked += rest
        else:
            inside.append(INSIDE[i])
            outside.append(OUTSIDE[i])
            blocked += INSIDE[i] + OUTSIDE[i]
    # A transposed convolution's weight has input channels first.
    first = ["gi", "o"] if transposed else ["go", "i"]
    kernel = KERNEL[: len(inside)]
    return _Letters(dims(["n", "gi", *inside]), dims([*first, *kernel]), dims(["n", "go", *outside]), blocked, sizes)


def _flops(call: _Call, x: Spec, weight: Spec) -> float:
    """Two operations for each weight, sample and position (of the input where transposed, else of the output)."""
    count = 2.0 * x.shape[0] * math.prod(weight.shape)
    for window, size in zip(call.windows, x.shape[2:], strict=True):
        count *= size if call.args[4] else window.outputs(size)
    return count


def _copied(call: _Call, x: Spec, out: float, backward: bool, of_x: bool) -> float:
    """Bytes of what an operator that pads ends differently writes and reads besides, see `ours`.

    Args:
        call: the convolution.
        x: its argument.
        out: elements of its result.
        backward: of its gradients.
        of_x: whether that of its argument is asked for.
    """
    stride, low, high = call.args[:3]
    item = getattr(x.dtype, "itemsize", 4)
    if not call.different:
        return 0.0
    if ours.padding_of_both(stride, low, high, call.mode) is not None:
        return 2.0 * out * item * backward
    sizes = (n + w.low + w.high for n, w in zip(x.shape[2:], call.windows, strict=True))
    return 2.0 * math.prod((*x.shape[:2], *sizes)) * item * (1 + of_x)


def _with_neighbors(call: _Call, x: Spec) -> dict[str, Lowering]:
    """The convolution of a block of rows, with those of the neighbors that it reads."""
    dim = call.shared(x)
    if dim is None or (window := call.windows[dim]).alone:
        return {}
    if call.args[4]:
        return _to_neighbors(call, dim, x.ndim)
    low, high, letter = window.low, window.behind, OUTSIDE[dim]

    def build(context: Any, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
        size, groups = context.local_size(letter) * window.stride, args[-2 if call.different else -1]
        wide = halo.window(context, x, 2 + dim, size, low, high, call.fill)
        rest, different = call.within(dim, groups)
        return (ours.padded_convolution if different else aten.convolution.default)(wide, weight, bias, *rest)

    return {letter: Lowering(build, least=-(-halo.reach(low, high, call.fill) // window.stride))}


def _gradients_with_neighbors(call: _Call, x: Spec) -> dict[str, Lowering]:
    """Its gradients: those of rows that neighbors read come back, those of weights are terms of sums."""
    dim = call.shared(x)
    if dim is None or (window := call.windows[dim]).alone:
        return {}
    if call.args[4]:
        return _gradients_from_neighbors(call, dim, x.ndim)
    low, high, letter, ndim = window.low, window.behind, OUTSIDE[dim], x.ndim

    def build(context: Any, grad: Any, x: Any, weight: Any, bias_sizes: Any, *args: Any) -> Any:
        size, groups, mask = context.local_size(letter) * window.stride, args[-3 if call.different else -2], args[-1]
        wide = halo.window(context, x, 2 + dim, size, low, high, call.fill)
        rest, different = call.within(dim, groups)
        target = ours.padded_convolution_backward if different else aten.convolution_backward.default
        made = target(grad, wide, weight, bias_sizes, *rest, mask)
        # Each output is a node of its own.
        found = [aten.alias.default(made[i]) if wanted else None for i, wanted in enumerate(mask)]
        if mask[0]:
            found[0] = halo.add_window(context, made[0], ndim, 2 + dim, size, low, high, call.fill)
        return tuple(found)

    return {letter: Lowering(build, least=-(-halo.reach(low, high, call.fill) // window.stride))}


def _to_neighbors(call: _Call, dim: int, ndim: int) -> dict[str, Lowering]:
    """The transposed convolution of a block: what it adds to outputs of neighbors goes there."""
    window, letter = call.windows[dim], INSIDE[dim]
    low, behind = window.low, window.behind

    def build(context: Any, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
        size = context.local_size(letter) * window.stride
        wide = aten.convolution.default(x, weight, None, *call.unpadded(dim, args[-1]))
        made = halo.add_window(context, wide, ndim, 2 + dim, size, low, behind)
        return made if bias is None else aten.add.Tensor(made, aten.reshape.default(bias, [-1] + [1] * (ndim - 2)))

    return {letter: Lowering(build, least=-(-halo.reach(low, behind) // window.stride))}


def _gradients_from_neighbors(call: _Call, dim: int, ndim: int) -> dict[str, Lowering]:
    """Its gradients: those of outputs to which neighbors' rows were added come from there."""
    window, letter = call.windows[dim], INSIDE[dim]
    low, behind = window.low, window.behind

    def build(context: Any, grad: Any, x: Any, weight: Any, bias_sizes: Any, *args: Any) -> Any:
        *_, groups, mask = args
        size = context.local_size(letter) * window.stride
        found: list[Any] = [None, None, None]
        if mask[0] or mask[1]:
            wide = halo.window(context, grad, 2 + dim, size, low, behind, 0.0)
            wanted = [mask[0], mask[1], False]
            made = aten.convolution_backward.default(wide, x, weight, None, *call.unpadded(dim, groups), wanted)
            found = [aten.alias.default(made[i]) if asked else None for i, asked in enumerate(wanted)]
        if mask[2]:  # of this device's outputs alone
            found[2] = aten.sum.dim_IntList(grad, [0, *range(2, ndim)])
        return tuple(found)

    return {letter: Lowering(build, least=-(-halo.reach(low, behind) // window.stride))}


def _forward_rule(x: Spec, weight: Spec, bias: Spec | None, args: Sequence[Any], different: bool) -> Rule:
    call = _Call.of(weight, args, different)
    names = _letters_of(call, x)
    # A bias is added once: terms over input channels would each add it. So ``i`` is summed over only without one.
    plain = bias is None
    inputs = [names.x, names.weight, *([] if plain else ["(go)"])]
    return Rule(
        f"{','.join(inputs)}->{names.out}",
        reduce="i" if plain else "",
        blocked=names.blocked + ("" if plain else "i"),
        linear=((0,), (1,)) if plain else ((0, 2), (1, 2)),
        scaled={7 if different else 8: "g"},
        lower=_with_neighbors(call, x),
        sizes=names.sizes,
        flops=_flops(call, x, weight),
        between=_copied(call, x, 0.0, backward=False, of_x=False),
    )


def _backward_rule(
    grad: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, args: Sequence[Any], different: bool
) -> Rule:
    *numbers, mask = args
    call = _Call.of(weight, numbers, different)
    names = _letters_of(call, x)
    # The output mask leaves out gradients that nobody asks for.
    outputs = (t if wanted else "_" for t, wanted in zip((names.x, names.weight, "(go)"), mask, strict=True))
    groups = 8 if different else 9
    return Rule(
        f"{names.out},{names.x},{names.weight}->{','.join(outputs)}",
        # The weight's gradient sums over samples and positions, and the input's over output channels.
        reduce="noxyz" if call.args[4] else "noXYZ",
        keep="i",
        blocked=names.blocked,
        linear=((0,),),
        scaled={groups: "g"} if bias_sizes is None else {3: "go", groups: "g"},
        lower=_gradients_with_neighbors(call, x),
        sizes=names.sizes,
        flops=2.0 * _flops(call, x, weight),
        between=_copied(call, x, math.prod(grad.shape), backward=True, of_x=bool(mask[0])),
    )


@rule(aten.convolution.default)
def convolution(x: Spec, weight: Spec, bias: Spec | None, *args: Any) -> Rule:
    """Convolution; ``args``: stride, padding, dilation, transposed, output padding, groups."""
    return _forward_rule(x, weight, bias, args, different=False)


@rule(ours.padded_convolution)
def padded_convolution(x: Spec, weight: Spec, bias: Spec | None, *args: Any) -> Rule:
    """Convolution; ``args``: stride, padding before and behind, dilation, groups, how it is padded."""
    return _forward_rule(x, weight, bias, args, different=True)


@rule(aten.convolution_backward.default)
def convolution_backward(grad: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *args: Any) -> Rule:
    """Gradients of input, weight and bias; ``args`` as of the convolution, and the output mask."""
    return _backward_rule(grad, x, weight, bias_sizes, args, different=False)


@rule(ours.padded_convolution_backward)
def padded_convolution_backward(
    grad: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *args: Any
) -> Rule:
    """The same of a convolution that is padded differently at both ends, or with what it reads."""
    return _backward_rule(grad, x, weight, bias_sizes, args, different=True)
