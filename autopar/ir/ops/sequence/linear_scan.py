"""Linear recurrences along a sequence, ``y[i] = factors[i] y[i - 1] + terms[i]``, as state-space models have.

Torch traces an `associative_scan` as a tree of slices of every second element, whose factors of two no split into
blocks fits. As one operator it is split into blocks: a device needs one row of what all before it have in all.

Before::

    _, y = associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (factors, terms), dim=1, ...)

After::

    y = autopar.linear_scan(factors, terms, 1, False)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar._torch_compat import associative_scan_as, without_modes

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear_scan(Tensor factors, Tensor terms, int dim, bool back=False) -> Tensor")

Combine = Callable[[Any, Any], Any]


def by_operator() -> AbstractContextManager[None]:
    """While it lasts, an `associative_scan` that is a linear recurrence is one operator; others are as they were."""
    return associative_scan_as(_found)


def _found(combine: Combine, xs: Any, dim: int, reverse: bool) -> Any:
    """What `associative_scan` returns; None if it is another scan than a linear recurrence."""
    if not isinstance(xs, tuple | list) or len(xs) != 2 or not all(isinstance(x, Tensor) for x in xs):
        return None
    alike = len({(x.shape, x.dtype, x.device) for x in xs}) == 1 and (xs[0].is_floating_point() or xs[0].is_complex())
    order = _order(combine, type(xs)) if alike and xs[0].ndim and xs[0].shape[dim] else None
    if order is None:
        return None
    factors, terms, dim = xs[order], xs[1 - order], dim % xs[0].ndim
    grown = torch.cumprod(factors.flip(dim), dim).flip(dim) if reverse else torch.cumprod(factors, dim)
    made = grown, _Scan.apply(factors, terms, dim, reverse)  # type: ignore[no-untyped-call]
    kind: Any = type(xs)
    return kind(made if order == 0 else made[::-1])


def _order(combine: Combine, kind: Any) -> int | None:
    """Which of its two tensors are the factors of a linear recurrence, for a function that joins two parts of one.

    It is called with numbers: polynomials of this degree that agree on all of these are the same.
    """
    try:
        with without_modes(), torch.no_grad():
            draw = torch.Generator().manual_seed(0)
            numbers = torch.randint(-50, 50, (4, 16), generator=draw).double().unbind()
            left, right = numbers[:2], numbers[2:]
            made = combine(kind(left), kind(right))
            if not isinstance(made, tuple | list) or [type(x) for x in made] != [Tensor] * 2:
                return None
            for i in range(2):
                expected = left[i] * right[i], right[i] * left[1 - i] + right[1 - i]
                if torch.equal(made[i], expected[0]) and torch.equal(made[1 - i], expected[1]):
                    return i
    except Exception:  # whatever a function of the user's raises for such tensors: then it is another scan
        return None
    return None


def scanned(factors: Tensor, terms: Tensor, dim: int) -> Tensor:
    """``y[i] = factors[i] y[i - 1] + terms[i]``, with its gradients."""
    y: Tensor = _Scan.apply(factors, terms, dim, False)  # type: ignore[no-untyped-call]
    return y


class _Scan(torch.autograd.Function):
    """Its gradient is the recurrence from the other end."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, terms: Tensor, dim: int, back: bool) -> Tensor:
        y: Tensor = linear_scan(factors, terms, dim, back)
        ctx.save_for_backward(factors, y)
        ctx.numbers = dim, back
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factors, y = ctx.saved_tensors
        dim, back = ctx.numbers
        after = _moved(factors.conj(), dim, 1 if back else -1)
        of_terms = _Scan.apply(after, grad, dim, not back)  # type: ignore[no-untyped-call]
        of_factors = of_terms * _moved(y, dim, -1 if back else 1).conj() if ctx.needs_input_grad[0] else None
        return of_factors, of_terms, None, None


def _moved(x: Tensor, dim: int, by: int) -> Tensor:
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [by, -by])


def _linear_scan(factors: Tensor, terms: Tensor, dim: int, back: bool = False) -> Tensor:
    a, b = (x.flip(dim) if back else x for x in (factors, terms))
    y = _scanned(a.movedim(dim, 0), b.movedim(dim, 0)).movedim(0, dim)
    return (y.flip(dim) if back else y).contiguous()


def _scanned(a: Tensor, b: Tensor) -> Tensor:
    """Along the first dim, in twice the logarithm of its length of steps (Blelloch, 1990)."""
    y = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    y[:1] = b[:1]
    if len(b) > 1:
        of_pairs = _scanned(a[1::2] * a[:-1:2], torch.addcmul(b[1::2], a[1::2], b[:-1:2]))
        y[1::2] = of_pairs
        y[2::2] = torch.addcmul(b[2::2], a[2::2], of_pairs[: (len(b) - 1) // 2])
    return y


_library.impl("linear_scan", _linear_scan, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::linear_scan", lambda factors, terms, dim, back=False: terms.new_empty(terms.shape), lib=_library
)

linear_scan = torch.ops.autopar.linear_scan.default
"""``y[i] = factors[i] y[i - 1] + terms[i]`` along a dim, from zero; with ``back`` from the end, with ``y[i + 1]``."""
