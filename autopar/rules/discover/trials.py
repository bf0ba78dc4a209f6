"""Small random calls of an operator, on which its rule is found: the same structure, other sizes and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from autopar.rules.rule import Spec

Tree = tuple[tuple[Any, ...], dict[str, Any]]
Sizes = Mapping[int, int]

KINDS = ("normal", "ternary", "sparse", "large", "tiny", *("positive",) * 3, *("above one",) * 3)
"""Values of a floating tensor: ternary ones make comparisons come out equal, sparse ones make elements rare that an
operator may look for, large and tiny ones lie on either side of a threshold (a norm that is clipped, a value that
saturates), the last ones are in narrow domains."""

SCALES = {"large": 100.0, "tiny": 0.001}

DRAWS = 5
"""Calls at each choice of sizes; the first kinds of values that the operator can do with."""

LEAST = 3
"""Fewest such calls that a rule is found from."""

MOST_ELEMENTS = 2**18
"""Calls with more elements than this, over all tensors, are not run."""

LARGEST_RATIO = 8
"""A size that is a small multiple of another one stays this multiple of it."""


@dataclass(frozen=True)
class DiscoveryCall:
    """A call whose rule is wanted: tensors are `Spec`, also among the outputs.

    Attributes:
        target: an operator overload.
        arguments: args and kwargs.
        outputs: None for one that does not exist or is no tensor.
        device: where the operator runs in the model, tried where it cannot run on the CPU.
    """

    target: Any
    arguments: Tree
    outputs: tuple[Spec | None, ...]
    device: str = "cpu"

    @property
    def inputs(self) -> list[Spec]:
        """Tensor arguments in order."""
        found: list[Spec] = []
        map_aggregate(self.arguments, lambda a: found.append(a) if isinstance(a, Spec) else None)
        return found

    @property
    def sizes(self) -> list[int]:
        """Distinct sizes of dims, ascending; 0 and 1 never change and are left out."""
        every = (n for t in (*self.inputs, *self.outputs) if t is not None for n in t.shape)
        return sorted(dict.fromkeys(n for n in every if n > 1))


@dataclass(frozen=True)
class Trial:
    """A call that ran.

    Attributes:
        arguments: with real tensors.
        outputs: what it gave; None for what is no tensor.
        sizes: what each size of the real call has become.
    """

    arguments: Tree
    outputs: tuple[torch.Tensor | None, ...]
    sizes: Sizes

    @property
    def real(self) -> bool:
        """Whether its sizes are those of the real call."""
        return all(n == m for n, m in self.sizes.items())

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensor arguments in order."""
        found: list[torch.Tensor] = []
        map_aggregate(self.arguments, lambda a: found.append(a) if isinstance(a, torch.Tensor) else None)
        return found


def shrunk(sizes: Sequence[int], pool: Sequence[int], unchanged: int = 1) -> dict[int, int]:
    """Small even sizes, distinct for distinct ones, in the same order; small multiples stay multiples.

    Args:
        sizes: of the real call, ascending.
        pool: to choose from.
        unchanged: sizes up to this stay as they are.

    >>> shrunk([32, 64, 100], (4, 12, 20))
    {32: 4, 64: 8, 100: 12}
    """
    found = {n: n for n in sizes if n <= unchanged}
    for n in sizes:
        if n in found:
            continue
        ratios = [(found[m], n // m) for m in found if m > unchanged and n % m == 0 and n // m <= LARGEST_RATIO]
        # Largest base first: a size that is a multiple of several follows the nearest.
        scaled = [base * ratio for base, ratio in reversed(ratios) if base * ratio not in found.values()]
        least = max(found.values(), default=0)
        found[n] = scaled[0] if scaled else next((p for p in pool if p > least), 2 * least + 2)
    return found


# Two pools: what holds by accident at one choice of sizes must not be taken for a rule.
FOURS = (4, 12, 20, 28, 44, 52, 68, 76)  # can be cut twice
TWOS = (6, 10, 14, 22, 26, 34, 38, 46)  # share no other factor


def size_pairs(call: DiscoveryCall) -> Iterator[tuple[Sizes, Sizes]]:
    """Two ways at a time to choose sizes: small ones, small ones that leave the smallest alone, real ones last."""
    sizes = call.sizes
    for unchanged in (1, 4):
        yield shrunk(sizes, FOURS, unchanged), shrunk(sizes, TWOS, unchanged)
    real = {n: n for n in sizes}
    yield real, {n: 2 * n for n in sizes}
    yield real, real


def pattern(call: DiscoveryCall) -> Sizes:
    """The same for calls whose sizes are alike: which are equal, small, and small multiples of others."""
    return shrunk(call.sizes, FOURS, unchanged=4)


def capped(call: DiscoveryCall) -> Sizes:
    """The real sizes, the largest halved until the call is small enough to run."""
    found = {n: n for n in call.sizes}
    # Even ones first: halves of odd sizes would change what divides what.
    while _elements(call, found) > MOST_ELEMENTS:
        largest = max(found, key=lambda n: (found[n] % 2 == 0, found[n]))
        if found[largest] <= 2:
            break
        found[largest] //= 2
    return found


def trials(
    call: DiscoveryCall, sizes: Sizes, seed: int, errors: list[str], *, device: str, floating: torch.dtype, follow: bool
) -> list[Trial]:
    """A few calls; values with which it fails, or gives numbers that are not finite, are left out.

    Args:
        call: the real one.
        sizes: what each of its sizes becomes.
        seed: of the values.
        errors: reasons for failures are added to it.
        device: to run on.
        floating: dtype of floating tensors.
        follow: numbers among the arguments that are sizes change with them.
    """
    found: list[Trial] = []
    for i, kind in enumerate(KINDS):
        if len(found) == DRAWS:
            break
        # A generator of its own: the rule must be the same in every process.
        generator = torch.Generator().manual_seed(1000 * seed + i)
        arguments = _draw(call, sizes, kind, generator, device, floating, follow)
        outputs = None if arguments is None else run(call.target, arguments, errors)
        if arguments is None or outputs is None:
            continue
        finite = all(bool(t.isfinite().all()) for t in outputs if t is not None and t.is_floating_point())
        if finite:
            found.append(Trial(arguments, outputs, sizes))
        else:
            errors.append("random arguments give numbers that are not finite")
    return found


def run(target: Callable[..., Any], arguments: Tree, errors: list[str]) -> tuple[torch.Tensor | None, ...] | None:
    """What the operator gives, flat; None if it fails, for a reason that is added to ``errors``."""
    try:
        with torch.no_grad():
            value = target(*arguments[0], **arguments[1])
    except Exception as e:  # whatever a user's kernel raises: it cannot be run this way
        errors.append(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
        return None
    values = list(value) if isinstance(value, tuple | list) else [value]
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


def _elements(call: DiscoveryCall, sizes: Sizes) -> int:
    shapes = [t.shape for t in (*call.inputs, *call.outputs) if t is not None]
    return sum(math.prod(sizes.get(n, n) for n in shape) for shape in shapes)


def _draw(
    call: DiscoveryCall,
    sizes: Sizes,
    kind: str,
    generator: torch.Generator,
    device: str,
    floating: torch.dtype,
    follow: bool,
) -> Tree | None:
    """Random arguments; None if they would be too large."""
    if _elements(call, sizes) > MOST_ELEMENTS:
        return None
    indices = max(2, min(sizes.values(), default=2) // 2)  # valid along every dim, even one that is cut in two

    def made(a: Any) -> Any:
        if isinstance(a, Spec):
            shape = tuple(sizes.get(n, n) for n in a.shape)
            return _random(shape, a.dtype, floating, kind, indices, generator).to(device)
        number = follow and isinstance(a, int) and not isinstance(a, bool)
        return sizes.get(a, a) if number else a

    args, kwargs = map_aggregate(call.arguments, made)
    return args, kwargs


def _random(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    floating: torch.dtype,
    kind: str,
    indices: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """A random tensor on the CPU, where draws are the same on every machine."""
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(indices, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        parts = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]
        return torch.complex(*parts).to(floating.to_complex())
    if kind in ("normal", "sparse", *SCALES):
        values = torch.randn(shape, dtype=torch.float64, generator=generator) * SCALES.get(kind, 1.0)
        if kind == "sparse":
            # Only a tenth of the elements stay: what an operator may look for is then rare.
            values *= torch.rand(shape, dtype=torch.float64, generator=generator) < 0.1
    elif kind in ("positive", "above one"):
        lowest = 0.1 if kind == "positive" else 1.1
        values = torch.rand(shape, dtype=torch.float64, generator=generator) * 0.8 + lowest
    else:
        values = torch.randint(-1, 2, shape, generator=generator).double()
    return values.to(floating)
