"""A dim that is cut into equal pieces: ``(pr)``, the number of the piece and the position in it; r stays free."""

import math
from typing import Any

from autopar.rules.rule import Rule, dims, letters


class Pieces:
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


def cut(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """First element and length of a slice."""
    first, stop, _ = slice(start, end).indices(size)
    return first, max(0, -(-(stop - first) // step))


def sliced(ndim: int, dim: int, size: int, start: Any, end: Any, step: int) -> tuple[Pieces, str, str]:
    """The whole and the slice: pieces for step 1, every step-th element of groups otherwise."""
    first, length = cut(size, start, end, step)
    if step == 1:
        # The longest pieces whose bounds include those of the slice: within a piece it may be split.
        pieces = Pieces(ndim, dim, math.gcd(size, first, length) if length else 1)
        return pieces, pieces.tensor(size), pieces.tensor(length)
    pieces = Pieces(ndim, dim, 1)
    # Every step-th element of a dim of whole groups is one position in each: groups stay free.
    if first < step and length * step == size == (size if end is None else end) and length > 1:
        names, inner = list(pieces.names), letters(1, ndim)
        pieces.inner, pieces.unit = names[dim], length
        pieces.counts[step] = inner
        whole = [c + inner if d == dim else c for d, c in enumerate(names)]
        return pieces, dims(whole), dims(names)
    return pieces, pieces.tensor(size), pieces.tensor(length)
