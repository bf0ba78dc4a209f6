"""Patches of images as columns, and columns added up where their patches are: ``F.unfold`` and ``F.fold``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.rules.rule import Lowering, Rule, Spec, dims, rule
from autopar.strategies.convolution.windows import Window, at, sends

aten = torch.ops.aten


@rule(aten.im2col.default)
def im2col(
    x: Spec, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Rule:
    """Patches of images, as columns: those of a device's rows, with rows of its neighbors."""
    names = _patches(x.shape, kernel, dilation, padding, stride)
    window, dim, lower = names.window, x.ndim - 2, {}

    def build(context: Any, x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
        size = context.local_size("Y") * window.stride
        wide = halo.window(context, x, dim, size, window.low, window.behind, 0.0)
        return aten.im2col.default(wide, kernel, dilation, [0, at(padding, 1)], stride)

    if "Y" not in names.blocked and not window.alone:
        lower["Y"] = Lowering(build, least=-(-halo.reach(window.low, window.behind) // window.stride))
    blocked = names.blocked if sends(x) or not lower else names.blocked + "Y"
    return Rule(f"{names.x}->{names.out}", blocked=blocked, linear=((0,),), sizes=names.sizes, lower=lower)


@rule(aten.col2im.default)
def col2im(
    columns: Spec, output_size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int],
) -> Rule:  # fmt: skip
    """Columns added up where their patches are: what is in a neighbor's rows goes there."""
    channels = columns.shape[-2] // math.prod(at(kernel, i) for i in range(2))
    shape = (*columns.shape[:-2], channels, *output_size)
    names = _patches(shape, kernel, dilation, padding, stride)
    window, ndim, lower = names.window, len(shape), {}

    def build(context: Any, columns: Any, sizes: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
        size, low, behind = context.local_size("Y") * window.stride, window.low, window.behind
        wide = [size + low + behind, sizes[1]]
        made = aten.col2im.default(columns, wide, kernel, dilation, [0, at(padding, 1)], stride)
        return halo.add_window(context, made, ndim, ndim - 2, size, low, behind)

    if "Y" not in names.blocked and not window.alone:
        lower["Y"] = Lowering(build, least=-(-halo.reach(window.low, window.behind) // window.stride))
    blocked = names.blocked if sends(columns) or not lower else names.blocked + "Y"
    rows: dict[int | str, str | tuple[str, ...]] = {1: ("" if "Y" in blocked else "Y", "")}
    return Rule(f"{names.out}->{names.x}", blocked=blocked, linear=((0,),), sizes=names.sizes, scaled=rows, lower=lower)


@dataclass(frozen=True)
class _Patches:
    """Equations of images and of their patches.

    Attributes:
        x: of images.
        out: of patches.
        blocked: letters along which they are not split.
        sizes: of the letters that shapes do not tell.
        window: of the rows.
    """

    x: str
    out: str
    blocked: str
    sizes: dict[str, int]
    window: Window


def _patches(shape: Sequence[int], *numbers: Sequence[int]) -> _Patches:
    """Of a kernel, dilation, padding and stride; rows are split where there is a row of patches for each stride."""
    windows = []
    for i in range(2):
        kernel, step, pad, stride = (at(n, i) for n in numbers)
        windows.append(Window(kernel, stride, pad, pad, step))
    (rows, columns), batch = windows, "n" * (len(shape) - 3)
    aligned = rows.aligned(shape[-2])
    inside = ["Y" + "r" * (rows.stride > 1), "z"] if aligned else ["y", "z"]
    sizes = {"u": rows.kernel, "v": columns.kernel, "Z": columns.outputs(shape[-1])}
    sizes |= {"r": rows.stride} if aligned and rows.stride > 1 else {}
    sizes |= {} if aligned else {"Y": rows.outputs(shape[-2])}
    blocked = "uvZz" + ("r" * ("r" in sizes) if aligned else "yY")
    return _Patches(dims([*batch, "c", *inside]), dims([*batch, "cuv", "YZ"]), blocked, sizes, rows)
