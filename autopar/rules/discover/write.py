"""What discovery finds of an operator, and how it is written as a rule for tensors of given shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import InvalidRuleError
from autopar.rules.rule import Rule, dims, letters

TensorDim = tuple[int, int]
"""Number of a tensor, dim."""

Shapes = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class JointDims:
    """Dims that are cut together.

    Attributes:
        inputs: the dims of tensor arguments.
        outputs: the dims of outputs.
        absent: ``reduce`` or ``keep``, for outputs without the letter; empty if there are none.
        scaled: argument (position, or name) that counts elements along the letter.
    """

    inputs: tuple[TensorDim, ...]
    outputs: tuple[TensorDim, ...]
    absent: str = ""
    scaled: int | str | None = None


@dataclass(frozen=True)
class Findings:
    """What was found of an operator, at any size.

    Attributes:
        letters: disjoint; along other dims the operator is not split.
        linear: sets of tensor arguments in which it is linear together.
        shapes: arguments that are the shape of output 0.
        samples: how many calls it passed.
        reason: why it is replicated only; empty if it is not.
        exact: found at the real sizes only: they may say nothing of others.
    """

    letters: tuple[JointDims, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    shapes: tuple[int, ...] = ()
    samples: int = 0
    reason: str = ""
    exact: bool = False


def write_rule(found: Findings, inputs: Shapes, outputs: Shapes, alternating: bool = False) -> Rule:
    """The findings as a rule for tensors of these shapes.

    Args:
        found: what was discovered.
        inputs: shapes of tensor arguments.
        outputs: shapes of outputs, None for one that does not exist.
        alternating: every letter is two, the second of size 2: splitting this one gives alternating elements.

    Raises:
        InvalidRuleError: a dim is not divided by the letter that it should have.
    """
    equation = _Equation([*inputs, *outputs])
    named = [(letter, equation.put(_all_dims(letter, len(inputs)), alternating)) for letter in found.letters]
    # Letters from here on are of dims that nothing was found about: blocked.
    free = len(equation.sizes)
    equation.fill()
    names = equation.names()

    def text(numbers: Sequence[int]) -> str:
        return "".join(names[k] for k in numbers)

    def absent(kind: str) -> str:
        return "".join(text(numbers) for letter, numbers in named if letter.absent == kind)

    tensors = [None if cells is None else dims([text(cell) for cell in cells]) or "." for cells in equation.cells]
    left, right = tensors[: len(inputs)], tensors[len(inputs) :]
    # Of two letters in one dim the sizes do not follow from shapes.
    grouped = any(len(cell) > 1 for cells in equation.cells for cell in cells or ())
    return Rule(
        f"{','.join(t or '.' for t in left)}->{','.join(t or '_' for t in right)}",
        reduce=absent("reduce"),
        keep=absent("keep"),
        blocked="".join(sorted(name for k, name in names.items() if k >= free)),
        linear=found.linear,
        shapes=found.shapes,
        scaled={letter.scaled: text(numbers) for letter, numbers in named if letter.scaled is not None},
        sizes={name: equation.sizes[k] for k, name in names.items()} if grouped else {},
    )


def _all_dims(letter: JointDims, inputs: int) -> list[TensorDim]:
    """Inputs and outputs, numbered through."""
    return [*letter.inputs, *((inputs + j, d) for j, d in letter.outputs)]


class _Equation:
    """An equation being written: each dim's letters, as numbers until all are known."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sizes: list[int] = []
        self.cells: list[list[list[int]] | None] = [None if s is None else [[] for _ in s] for s in shapes]

    def put(self, joint: Sequence[TensorDim], alternating: bool) -> list[int]:
        """Give dims one letter, as long as the shortest of them, or two."""
        lengths = [(self.shapes[i] or ())[d] for i, d in joint]
        # A dim that is longer is a multiple: the letter, and another one for the rest.
        size = min(lengths)
        if size < 2 or any(n % size for n in lengths):
            raise InvalidRuleError(f"dims of {lengths} have no letter in common")
        numbers = self._new(*((size // 2, 2) if alternating and size % 2 == 0 else (size,)))
        for i, d in joint:
            cells = self.cells[i]
            assert cells is not None
            cells[d] = list(numbers)
        return numbers

    def _new(self, *sizes: int) -> list[int]:
        self.sizes += sizes
        return list(range(len(self.sizes) - len(sizes), len(self.sizes)))

    def fill(self) -> None:
        """Letters for what is left of each dim; equally long dims of several tensors share theirs."""
        shared: dict[int, list[int]] = {}
        for shape, cells in zip(self.shapes, self.cells, strict=True):
            used: set[int] = set()
            for length, cell in zip(shape or (), cells or (), strict=True):
                rest = length // math.prod(self.sizes[k] for k in cell)
                if rest < 2:
                    continue
                # Not in one tensor twice: that would say that it is a diagonal.
                spare = [k for k in shared.get(rest, []) if k not in used]
                k = spare[0] if spare and not cell else self._new(rest)[0]
                # Only a whole dim offers its letter to others; the rest of a dim beside a found letter is its own.
                if not spare and not cell:
                    shared.setdefault(rest, []).append(k)
                used.add(k)
                cell.append(k)

    def names(self) -> dict[int, str]:
        """A letter for each number, in order of appearance."""
        order = dict.fromkeys(k for cells in self.cells for cell in cells or () for k in cell)
        return dict(zip(order, letters(len(order)), strict=True))
