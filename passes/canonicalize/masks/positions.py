"""Windows of positions, and what is counted along queries and keys."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.canonicalize.masks.constants import value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """Which keys are seen: those whose position less the query's is from ``low`` up to ``high``; None: any."""

    low: int | None = None
    high: int | None = None

    def within(self, other: Window) -> Window:
        """What both show."""
        lows, highs = ([n for n in ends if n is not None] for ends in ((self.low, other.low), (self.high, other.high)))
        return Window(max(lows, default=None), min(highs, default=None))

    def around(self, other: Window) -> Window:
        """At least what either shows."""
        pairs = (self.low, other.low), (self.high, other.high)
        low, high = (
            None if None in pair else ends(n for n in pair if n is not None)
            for pair, ends in zip(pairs, (min, max), strict=True)
        )  # fmt: skip
        return Window(low, high)

    def outside(self) -> Window | None:
        """What it hides, if that is one window."""
        if self.low is None and self.high is not None:
            return Window(low=self.high + 1)
        return Window(high=self.low - 1) if self.high is None and self.low is not None else None


@dataclass(frozen=True)
class Linear:
    """``query`` times the query's position, ``key`` times the key's, and a number; positions in runs of ``base``."""

    query: int
    key: int
    number: int
    base: fx.Node | None = None

    def plus(self, other: Linear, factor: int) -> Linear | None:
        """The sum with a multiple of another one; None: they count different positions."""
        bases = {x.base for x in (self, other) if (x.query, x.key) != (0, 0)}
        if len(bases) > 1:
            return None
        query, key, number = ((getattr(self, n) + factor * getattr(other, n)) for n in ("query", "key", "number"))
        return Linear(query, key, number, *bases)

    def window(self, name: str) -> Window | None:
        """The window that comparing it with 0 shows; None if that is none."""
        if self.query == self.key == 0:
            return Window() if getattr(operator, name)(self.number, 0) else None
        if self.query != -self.key:
            return None
        key, number = self.key, self.number
        if key < 0:  # the same of positive multiples
            name = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}[name]
            key, number = -key, -number
        down, up = -number // key, -(number // key)
        if name == "eq":
            return Window(down, up) if down == up else None
        if name in ("le", "lt"):
            return Window(high=down if name == "le" else up - 1)
        return Window(low=up if name == "ge" else down + 1)


def positions_of_runs(ids: fx.Node | None) -> fx.Node | None:
    """Of ``cumsum(diff(positions, prepend=positions[:, :1] - 1) != 1)`` the positions; None: it is something else."""

    def argument(node: Any, target: Any, *rest: Any) -> Any:
        found = isinstance(node, fx.Node) and node.target is target
        return node.args[0] if found and tuple(node.args[1 : 1 + len(rest)]) == rest else None

    last = None if ids is None else ids.args[1:]
    changes = argument(ids, aten.cumsum.default) if last in ((1,), (-1,)) else None
    steps = argument(changes, aten.ne.Scalar, 1)
    if steps is None or steps.target is not aten.sub.Tensor:
        return None
    after, before = steps.args
    longer = argument(after, aten.slice.Tensor)
    if longer is None or longer is not argument(before, aten.slice.Tensor) or longer.target is not aten.cat.default:
        return None
    size = value_of(longer).shape[1]
    if [_slice(n) for n in (after, before)] != [(1, 1, size), (1, 0, size - 1)] or len(longer.args[0]) != 2:
        return None
    first, positions = longer.args[0]
    source = argument(argument(first, aten.sub.Tensor, 1), aten.slice.Tensor)
    whole = source is positions and _slice(first.args[0]) == (1, 0, 1) and longer.args[1:] in ((1,), (-1,))
    return positions if whole else None


def _slice(node: fx.Node) -> tuple[int, int, int] | None:
    """The dim of a slice, its first element, and that behind its last one."""
    args: Any = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
    value, dim = value_of(args[0]), args[1] % value_of(args[0]).ndim
    size = value.shape[dim]
    start, end = ((n + size if n < 0 else min(n, size)) for n in (args[2] or 0, size if args[3] is None else args[3]))
    return (dim, start, end) if args[4] == 1 else None
