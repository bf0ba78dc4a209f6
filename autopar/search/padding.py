"""Which dims of parameters a search may pad: those of one factor that some mesh axis does not divide."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.dims import Dims
from autopar.layout import Factor, Split, TensorType
from autopar.program import Program
from autopar.search.restrict import Pinned

MOST = 1.25
"""A dim gets at most this many times longer, unless a layout that is decided already needs more."""

Shapes = dict[str, tuple[int, ...]]


def paddings(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    layouts: Mapping[tuple[str, str], Pinned],
    *,
    search: bool = True,
) -> tuple[Shapes, ...]:
    """Padded shapes of parameters, each a choice to search under; the first pads only what it must.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis.
        layouts: decided already, by kind and name; an uneven split of a parameter is padded.
        search: whether there is anything to choose.
    """
    sizes = tuple(axes.values())
    types = {
        i.name: dims.type_of(n)
        for n, i in zip(program.placeholders, program.inputs, strict=True)
        if i.kind == "parameter"
    }
    needed: dict[int, int] = {}  # padded size by id: factors of one name and size may be different ones
    for name, type_ in types.items():
        for placement, n in zip(layouts.get(("parameter", name), ()), sizes, strict=False):
            factors = type_.dims[placement.dim] if isinstance(placement, Split) else ()
            if len(factors) == 1 and factors[0].size % n:
                needed[id(factors[0])] = -(-factors[0].size // n) * n
    whole = {id(dim[0]): dim[0] for type_ in types.values() for dim in type_.dims if len(dim) == 1}
    useful = {key: padded_size(factor, sizes) for key, factor in whole.items()} | needed
    found = [padded_shapes(types, needed)]
    if search and any(useful[key] != whole[key].size for key in whole.keys() - needed.keys()):
        found.append(padded_shapes(types, useful))
    return tuple(found)


def padded_size(factor: Factor, sizes: tuple[int, ...]) -> int:
    """The next size that the last axis which does not divide a factor divides, and all that do; or its own."""
    for n in reversed(sizes):
        if factor.size % n and factor.size > n:
            unit = math.lcm(n, *(m for m in sizes if factor.size % m == 0))
            longer = -(-factor.size // unit) * unit
            if longer <= MOST * factor.size:
                return longer
    return factor.size


def padded_shapes(types: Mapping[str, TensorType], sizes: Mapping[int, int]) -> Shapes:
    """Shapes of the parameters that have factors with a padded size, given by `id`."""
    found = {}
    for name, type_ in types.items():
        shape = tuple(
            sizes.get(id(dim[0]), n) if len(dim) == 1 else n for dim, n in zip(type_.dims, type_.shape, strict=True)
        )
        if shape != type_.shape:
            found[name] = shape
    return found
