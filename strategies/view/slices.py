"""Slices, selections, and what joins them again: equal pieces of a dim, few of which are terms of a sum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.ir.ops.sequence.own_rows import filled
from autopar.rules.rule import Lowering, Rule, Spec, letters, rule
from autopar.strategies.view.pieces import Pieces, cut, sliced

aten = torch.ops.aten

ONE = ((0,),)


@dataclass(frozen=True)
class _Few:
    """A few pieces of a dim that devices have blocks of: those that have them have all there is of a sum.

    Attributes:
        pieces: of the dim.
        outer: their letter.
        first: the first of the few.
        end: the first behind them.
    """

    pieces: Pieces
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


def _few(pieces: Pieces, size: int, start: int | None, end: int | None, step: int) -> _Few | None:
    """Those of a slice, if they are few."""
    first, length = cut(size, start, end, step)
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
    pieces, whole, part = sliced(x.ndim, dim % x.ndim, x.shape[dim], start, end, step)
    scaled = pieces.scaled(2, 3) if step == 1 else pieces.scaled(3)
    # A step's start counts within a group, and stays as it is on every device.
    made = pieces.rule(f"{whole}->{part}", linear=ONE, scaled=scaled, view=True)
    few = _few(pieces, x.shape[dim], start, end, step) if _adds(x) else None
    return made if few is None else few.read(made)


@rule(aten.slice_backward.default)
def slice_backward(grad: Spec, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Rule:
    """Zeros but for a slice."""
    pieces, whole, part = sliced(grad.ndim, dim % grad.ndim, shape[dim], start, end, step)
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
    pieces, whole, part = sliced(x.ndim, dim % x.ndim, x.shape[dim], start, end, step)
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
    pieces = Pieces(x.ndim, dim, math.gcd(*parts) or 1)
    whole, outputs = pieces.tensor(total), [pieces.tensor(n) for n in parts]
    return pieces.rule(f"{whole}->{','.join(outputs)}", linear=ONE, scaled=pieces.scaled(1), view=True)


@rule(aten.cat.default)
def cat(tensors: Sequence[Spec], dim: int = 0) -> Rule:
    """Tensors one after the other along a dim; the reverse of a split."""
    parts = [t.shape[dim] for t in tensors]
    pieces = Pieces(tensors[0].ndim, dim, math.gcd(*parts) or 1)
    inputs = ",".join(pieces.tensor(n) for n in parts)
    return pieces.rule(f"{inputs}->{pieces.tensor(sum(parts))}", linear=(tuple(range(len(parts))),))


@rule(aten.glu.default)
def glu(x: Spec, dim: int = -1) -> Rule:
    """The first half of a dim, gated by the second."""
    pieces = Pieces(x.ndim, dim, x.shape[dim] // 2)
    # Two pieces, value and gate: both are split alike, so each device has the gates of its values.
    return pieces.rule(f"{pieces.tensor(x.shape[dim])}->{pieces.tensor(x.shape[dim] // 2)}")


@rule(aten.glu_backward.default)
def glu_backward(grad: Spec, x: Spec, dim: int) -> Rule:
    """Its gradient."""
    pieces = Pieces(x.ndim, dim, x.shape[dim] // 2)
    whole, half = pieces.tensor(x.shape[dim]), pieces.tensor(x.shape[dim] // 2)
    return pieces.rule(f"{half},{whole}->{whole}", linear=ONE)
