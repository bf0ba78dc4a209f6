"""Views of other dims: reshape, permute, expand, repeat.

Sizes that do not factor alike on both sides are letters of their own on each, and blocked.
"""

import math
from collections.abc import Sequence

import torch

from autopar.rules.rule import Rule, Spec, dims, letters, rule

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
