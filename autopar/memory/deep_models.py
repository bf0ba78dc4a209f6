"""The peak of a deep model, from what its program holds with three and with two of its alike blocks, point by point.

What is live at a program point grows by the same with every further block: by what a block saves for the backward pass,
leaves to the end, or adds to a collective of many gradients; how much differs from point to point. So each point of
three blocks is compared with the same one of two, once with the last block missing and once with the first. The peak of
the deep model need not be at the point that is the peak of the short ones.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.ir.program import SHORT, RepeatedLayers
from autopar.memory.liveness import MemoryPoint

_T = TypeVar("_T")
Held = Mapping[str, float]
"""Bytes by category."""
Name = tuple[str, str, bool, int]
"""Of a program point: module, operator, whether it is of the backward pass, and which of several like these it is."""
Block = tuple[str, bool]
"""Number of a block, empty for none, and whether its backward pass runs."""
LATER, EARLIER = 0, 1
"""Where a further block is in the model: after the block of a program point, or before it."""


@dataclass(frozen=True)
class Curves:
    """How what is live at each program point grows with the number of blocks.

    Attributes:
        points: of three blocks.
        growth: of each, by a further block after its own and by one before it; None where two blocks have none such.
        named: the same by the point's name.
        most: that a further block adds at any point of a block, or of what is in none, and a pass.
        before_blocks: bytes of the activations made before the blocks, by the point's name.
    """

    points: tuple[MemoryPoint, ...]
    growth: tuple[tuple[Held | None, ...], ...]
    named: Mapping[Name, tuple[Held | None, ...]]
    most: Mapping[tuple[str, bool, int], Held]
    before_blocks: Mapping[Name, float]

    def at(self, names: Sequence[Name], blocks: Sequence[Block], i: int, side: int) -> Held:
        """What a further block adds at a point of another graph, or else at those nearest to it that this one has, too.

        What blocks hold that do not run just then changes little while one runs.

        Args:
            names: of the other graph's points.
            blocks: block and pass of each.
            i: the point.
            side: where the further block is.
        """
        found = _nearest(names, blocks, i, lambda name: self.named.get(name, (None, None))[side])
        return max(found, key=_total, default=self.most[*blocks[i], side])

    def before_blocks_at(self, names: Sequence[Name], blocks: Sequence[Block], i: int) -> float:
        """Bytes of the activations made before the blocks, likewise."""
        return max(_nearest(names, blocks, i, self.before_blocks.get), default=0.0)


def peak_of_blocks(
    parts: Sequence[tuple[float, Sequence[MemoryPoint], Sequence[MemoryPoint]]], repeat: RepeatedLayers
) -> dict[str, float]:
    """Bytes by category at the peak of one device; where blocks differ, an estimate that is rather too large.

    Args:
        parts: the share of the blocks that are treated alike, and what is live with three and with two blocks if all
            are; the first blocks come first.
        repeat: what the program leaves out.
    """
    curves = [
        (share, _curves(_in_blocks(three, repeat), _in_blocks(two, repeat), repeat)) for share, three, two in parts
    ]
    every = [held for i in range(len(curves)) for held in _deep(i, curves, repeat)]
    return max(every, key=_total)


def _deep(part: int, curves: Sequence[tuple[float, Curves]], repeat: RepeatedLayers) -> list[dict[str, float]]:
    """What is live in the deep model at the points of a part, all of its further blocks being after, or before, them.

    What a point holds grows linearly with either number, so one of the two ends has the most.
    """
    own, found = curves[part][1], []
    names, blocks = _names(own.points), [(_number(point, repeat), point.backward) for point in own.points]
    for i, (point, growth) in enumerate(zip(own.points, own.growth, strict=True)):
        for side in (LATER, EARLIER):
            if growth[side] is None and any(g is not None for g in growth):
                continue  # only the other comparison has this point
            held = dict(point.held)
            if part:  # what is made before the blocks, the first part decides whether to save
                saved = curves[0][1].before_blocks_at(names, blocks, i)
                held["activations"] = held.get("activations", 0.0) + saved - point.before_blocks
            for other, (share, curve) in enumerate(curves):
                where = side if other == part else EARLIER if other < part else LATER
                own_growth = growth[side] if other == part else None
                more = curve.at(names, blocks, i, where) if own_growth is None else own_growth
                # Three blocks of its own are in ``point.held`` already.
                _add(held, more, share * repeat.blocks - SHORT * (other == part))
            found.append(held)
    return found


def _add(held: dict[str, float], more: Held, times: float) -> None:
    for category, size in more.items():
        held[category] = held.get(category, 0.0) + times * size


def _curves(three: Sequence[MemoryPoint], two: Sequence[MemoryPoint], repeat: RepeatedLayers) -> Curves:
    """Three blocks compared with two."""
    names = _names(three)
    growth = list(zip(*[_growth(three, two, repeat, shift) for shift in (LATER, EARLIER)], strict=True))
    named = dict(zip(names, growth, strict=True))
    for i, (module, operator, backward, which) in enumerate(names):
        # The middle block has neighbors on both sides in three blocks, and on one in two: what differs would be the
        # ends. So it grows by a later block as the first does, and by an earlier one as the last does.
        if _number(three[i], repeat) == "1":
            _, place = repeat.block(module)
            ends = [(repeat.name(end, place), operator, backward, which) for end in (0, SHORT - 1)]
            first, last = (named.get(end, (None, None)) for end in ends)
            growth[i] = (first[LATER] or growth[i][LATER], last[EARLIER] or growth[i][EARLIER])
    most: dict[tuple[str, bool, int], Held] = defaultdict(dict)
    for point, both in zip(three, growth, strict=True):
        for side, each in enumerate(both):
            key = (_number(point, repeat), point.backward, side)
            most[key] = max(most[key], each or {}, key=_total)
    before_blocks = {name: point.before_blocks for name, point in zip(names, three, strict=True)}
    return Curves(tuple(three), tuple(growth), dict(zip(names, growth, strict=True)), most, before_blocks)


def _nearest(names: Sequence[Name], blocks: Sequence[Block], i: int, get: Callable[[Name], _T | None]) -> list[_T]:
    """What is known of a point; or else of the nearest before and after it in the same block and pass."""
    found = []
    for step in (-1, 1):
        j = i
        while 0 <= j < len(names) and blocks[j] == blocks[i]:
            known = get(names[j])
            if known is not None:
                found.append(known)
                break
            j += step
    return found


def _growth(
    three: Sequence[MemoryPoint], two: Sequence[MemoryPoint], repeat: RepeatedLayers, shift: int
) -> list[Held | None]:
    """By how much more is live at each point than with two blocks: the first two, or with a shift the last."""

    def keys(found: Sequence[MemoryPoint], shift: int) -> list[tuple[str, str, bool, str]]:
        texts, running = [], ""
        for point in found:
            number, rest = _number(point, repeat), point.path
            if number and shift:
                rest = repeat.name(int(number) + shift, repeat.block(point.path)[1])
            if point.in_place:
                running = str(int(number) + shift) if number else ""
            # Of a move that is late, or ahead: while another block runs, something else is live.
            texts.append((rest, point.operator, point.backward, running))
        return texts

    # A diff of the two sequences: a module may call an operator many times, so keys are not unique.
    matcher = difflib.SequenceMatcher(None, keys(three, 0), keys(two, shift), autojunk=False)
    growth: list[Held | None] = [None] * len(three)
    for a, b, size in matcher.get_matching_blocks():
        for i in range(size):
            growth[a + i] = _difference(_settled(three[a + i]), _settled(two[b + i]))
    return growth


def _in_blocks(found: Sequence[MemoryPoint], repeat: RepeatedLayers) -> list[MemoryPoint]:
    """The points, those of no module between two of one block as of that block: sums of a residual's gradients."""

    def last_blocks(points: Iterable[MemoryPoint]) -> list[Block]:
        """Block and pass of the last point before each that is in a block."""
        last, blocks = ("", False), []
        for point in points:
            blocks.append(last)
            if number := _number(point, repeat):
                last = (number, point.backward)
        return blocks

    # From both sides: a sum between two blocks belongs to neither.
    before, after = last_blocks(found), last_blocks(reversed(found))[::-1]
    return [
        replace(p, path=repeat.modules(int(a[0]))[0])
        if not p.path and a[0] and b[0] and a[1] == b[1] == p.backward
        else p
        for p, a, b in zip(found, before, after, strict=True)
    ]


def _number(point: MemoryPoint, repeat: RepeatedLayers) -> str:
    """Which of the alike blocks a point belongs to; empty: none."""
    number, _ = repeat.block(point.path)
    return str(number) if number >= 0 else ""


def _names(found: Sequence[MemoryPoint]) -> list[Name]:
    seen: dict[tuple[str, str, bool], int] = defaultdict(int)
    names = []
    for point in found:
        # Numbered among its like: by position alone, one operator more or less would shift all that follow.
        key = (point.path, point.operator, point.backward)
        names.append((*key, seen[key]))
        seen[key] += 1
    return names


def _settled(point: MemoryPoint) -> Held:
    """What is held besides what is in flight, which is of blocks nearby: a further one adds none."""
    return {k: size - point.in_flight.get(k, 0.0) for k, size in point.held.items()}


def _difference(a: Held, b: Held) -> Held:
    return {k: a.get(k, 0.0) - b.get(k, 0.0) for k in {**a, **b}}


def _total(held: Held) -> float:
    return sum(held.values())
