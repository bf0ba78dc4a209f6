"""The peak of a deep model, from what its program holds with three and with two of its alike blocks, moment by moment.

What is held at a moment grows by the same with every further block: by what a block keeps for the backward pass, leaves
behind, or adds to a collective of many gradients; how much differs from moment to moment. So each moment of three
blocks is set beside the same one of two, once with the last block missing and once with the first. The moment that is
largest in the deep model need not be so in the short ones.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.ir.program import SHORT, RepeatedLayers
from autopar.memory.liveness import Moment

_T = TypeVar("_T")
Held = Mapping[str, float]
Name = tuple[str, str, bool, int]
"""Of a moment: module, operator, pass, and which of them it is."""
LATER, EARLIER = 0, 1
"""Where a block more stands in the model: behind the block that a moment belongs to, or in front of it."""


@dataclass(frozen=True)
class Curves:
    """How what is held at each moment grows with the number of blocks.

    Attributes:
        moments: of three blocks.
        growth: of each, by a block behind its own and by one in front of it; None where two blocks have no such moment.
        named: the same by the moment's name.
        most: that a block more adds at any moment of a block, or of what is in none, and a pass.
        front: bytes of the activations made in front of the blocks, by the moment's name.
    """

    moments: tuple[Moment, ...]
    growth: tuple[tuple[Held | None, ...], ...]
    named: Mapping[Name, tuple[Held | None, ...]]
    most: Mapping[tuple[str, bool, int], Held]
    front: Mapping[Name, float]

    def at(self, names: Sequence[Name], places: Sequence[tuple[str, bool]], i: int, side: int) -> Held:
        """What a block more adds at a moment of another graph, or else at those nearest to it that this one has, too.

        What blocks hold that do not run just then changes little while one runs.

        Args:
            names: of the other graph's moments.
            places: block and pass of each.
            i: the moment.
            side: where the block stands.
        """
        found = _nearest(names, places, i, lambda name: self.named.get(name, (None, None))[side])
        return max(found, key=_total, default=self.most[*places[i], side])

    def front_at(self, names: Sequence[Name], places: Sequence[tuple[str, bool]], i: int) -> float:
        """Bytes of the activations made in front of the blocks, likewise."""
        return max(_nearest(names, places, i, self.front.get), default=0.0)


def peak_of_blocks(
    parts: Sequence[tuple[float, Sequence[Moment], Sequence[Moment]]], repeat: RepeatedLayers
) -> dict[str, float]:
    """Bytes by category at the moment when one device holds the most; where blocks differ, about and rather too many.

    Args:
        parts: the share of the blocks that are treated alike, and what is held with three and with two blocks if all
            are; the first blocks come first.
        repeat: what the program leaves out.
    """
    path = repeat.path
    curves = [(share, _curves(_in_blocks(three, path), _in_blocks(two, path), path)) for share, three, two in parts]
    every = [held for i in range(len(curves)) for held in _deep(i, curves, repeat)]
    return max(every, key=_total)


def _deep(part: int, curves: Sequence[tuple[float, Curves]], repeat: RepeatedLayers) -> list[dict[str, float]]:
    """What the moments of a part hold in the deep model, the further blocks of it all behind, or all in front."""
    own, found = curves[part][1], []
    names, places = _names(own.moments), [(_number(m, repeat.path), m.backward) for m in own.moments]
    for i, (moment, growth) in enumerate(zip(own.moments, own.growth, strict=True)):
        for side in (LATER, EARLIER):
            each = growth[side]
            if each is None and any(g is not None for g in growth):
                continue
            held = dict(moment.held)
            if part:  # what is in front of the blocks is the first ones' to keep
                front = curves[0][1].front_at(names, places, i)
                held["activations"] = held.get("activations", 0.0) + front - moment.front
            for other, (share, curve) in enumerate(curves):
                place = side if other == part else EARLIER if other < part else LATER
                more = curve.at(names, places, i, place) if other != part or each is None else each
                times = share * repeat.blocks - SHORT * (other == part)
                for category, size in more.items():
                    held[category] = held.get(category, 0.0) + times * size
            found.append(held)
    return found


def _curves(three: Sequence[Moment], two: Sequence[Moment], path: str) -> Curves:
    """Three blocks beside two."""
    names = _names(three)
    growth = list(zip(*[_beside(three, two, path, shift) for shift in (LATER, EARLIER)], strict=True))
    named = dict(zip(names, growth, strict=True))
    for i, (module, operator, backward, which) in enumerate(names):
        if _number(three[i], path) == "1":  # beside a block at an end it would be the ends that differ
            tail = module.removeprefix(f"{path}.1")
            ends = [(f"{path}.{end}{tail}", operator, backward, which) for end in (0, SHORT - 1)]
            first, last = (named.get(end, (None, None)) for end in ends)
            growth[i] = (first[LATER] or growth[i][LATER], last[EARLIER] or growth[i][EARLIER])
    most: dict[tuple[str, bool, int], Held] = defaultdict(dict)
    for moment, both in zip(three, growth, strict=True):
        for side, each in enumerate(both):
            key = (_number(moment, path), moment.backward, side)
            most[key] = max(most[key], each or {}, key=_total)
    front = {name: moment.front for name, moment in zip(names, three, strict=True)}
    return Curves(tuple(three), tuple(growth), dict(zip(names, growth, strict=True)), most, front)


def _nearest(
    names: Sequence[Name], places: Sequence[tuple[str, bool]], i: int, get: Callable[[Name], _T | None]
) -> list[_T]:
    """What is known of a moment; or else of the nearest before and behind it in the same block and pass."""
    found = []
    for step in (-1, 1):
        j = i
        while 0 <= j < len(names) and places[j] == places[i]:
            known = get(names[j])
            if known is not None:
                found.append(known)
                break
            j += step
    return found


def _beside(three: Sequence[Moment], two: Sequence[Moment], path: str, shift: int) -> list[Held | None]:
    """What each moment holds more than with two blocks: the first two, or with a shift the last."""

    def keys(found: Sequence[Moment], shift: int) -> list[tuple[str, str, bool]]:
        texts = []
        for m in found:
            number, rest = _number(m, path), m.path
            if number and shift:
                tail = m.path.removeprefix(f"{path}.").partition(".")[2]
                rest = f"{path}.{int(number) + shift}.{tail}".removesuffix(".")
            texts.append((rest, m.operator, m.backward))
        return texts

    matcher = difflib.SequenceMatcher(None, keys(three, 0), keys(two, shift), autojunk=False)
    growth: list[Held | None] = [None] * len(three)
    for a, b, size in matcher.get_matching_blocks():
        for i in range(size):
            growth[a + i] = _difference(three[a + i].held, two[b + i].held)
    return growth


def _in_blocks(found: Sequence[Moment], path: str) -> list[Moment]:
    """The moments, those of no module between two of blocks as if of the former's: sums of a residual's gradients."""

    def next_to(moments: Iterable[Moment]) -> list[tuple[str, bool]]:
        """Block and pass of the last moment before each that is in a block."""
        last, places = ("", False), []
        for moment in moments:
            places.append(last)
            if number := _number(moment, path):
                last = (number, moment.backward)
        return places

    before, behind = next_to(found), next_to(reversed(found))[::-1]
    return [
        replace(m, path=f"{path}.{a[0]}") if not m.path and a[0] and b[0] and a[1] == b[1] == m.backward else m
        for m, a, b in zip(found, before, behind, strict=True)
    ]


def _number(moment: Moment, path: str) -> str:
    """The number of the block that a moment belongs to; empty: it belongs to none."""
    number = moment.path.removeprefix(f"{path}.").partition(".")[0]
    return number if number.isdigit() and moment.path.startswith(f"{path}.") else ""


def _names(found: Sequence[Moment]) -> list[Name]:
    seen: dict[tuple[str, str, bool], int] = defaultdict(int)
    names = []
    for m in found:
        key = (m.path, m.operator, m.backward)
        names.append((*key, seen[key]))
        seen[key] += 1
    return names


def _difference(a: Held, b: Held) -> Held:
    return {k: a.get(k, 0.0) - b.get(k, 0.0) for k in {**a, **b}}


def _total(held: Held) -> float:
    return sum(held.values())
