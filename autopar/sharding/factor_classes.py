"""`FactorClasses`: which dims of a program are the same, as a union-find whose classes can be split into factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FactorClasses:
    """Union-find over factors, in which a class can be split; every change can be undone.

    A dim is a list of factors. A factor is a number; its class is that of the root that `find` leads to. A class may
    have been split in two, and its parts again: then `expand` gives the irreducible ones.
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.parts: list[tuple[int, int] | None] = []
        self.log: list[tuple[list[object], int, object]] = []

    def new(self, size: int) -> list[int]:
        """A dim of ``size`` in one fresh factor; no factor if the size is 1."""
        if size == 1:
            return []
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.parts.append(None)
        return [len(self.parent) - 1]

    def find(self, x: int) -> int:
        """The root of a factor's class."""
        root = x
        while self.parent[root] != root:
            root = self.parent[root]
        # Path compression is not logged: while a change may have to be undone, paths stay as they are.
        while not self.log and self.parent[x] != root:
            self.parent[x], x = root, self.parent[x]
        return root

    def expand(self, dim: Sequence[int]) -> list[int]:
        """The irreducible factors of a dim, in order."""
        found: list[int] = []
        stack = list(reversed(dim))
        while stack:
            root = self.find(stack.pop())
            parts = self.parts[root]
            if parts is None:
                found.append(root)
            else:
                stack += reversed(parts)
        return found

    def sizes(self) -> dict[int, int]:
        """Size of every irreducible class, by its root."""
        roots = (x for x in range(len(self.parent)) if self.parent[x] == x and self.parts[x] is None)
        return {x: self.size[x] for x in roots}

    def _set(self, array: list[Any], index: int, value: object) -> None:
        self.log.append((array, index, array[index]))
        array[index] = value

    def unite(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Make two dims the same, splitting classes where one is finer; all or nothing.

        Returns:
            Whether they are the same now; if their factors contradict each other, nothing has changed.
        """
        united = self._unite(a, b)
        if not united:
            # Half of a union would split classes for a view that is redistributed anyway.
            for array, index, old in reversed(self.log):
                array[index] = old
        self.log.clear()
        return united

    def _unite(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Walk both dims from the left, splitting the larger of two factors that meet."""
        if a == b:
            return True
        left, right = self.expand(a)[::-1], self.expand(b)[::-1]
        while left and right:
            x, y = self.find(left.pop()), self.find(right.pop())
            if self.parts[x] is not None or self.parts[y] is not None:  # split meanwhile, through the other side
                left += self.expand([x])[::-1]
                right += self.expand([y])[::-1]
                continue
            if x == y:
                continue
            small, large = (x, y) if self.size[x] <= self.size[y] else (y, x)
            if self.size[small] == self.size[large]:
                # The older class stays the root: names and orders do not depend on what comes later.
                self._set(self.parent, max(x, y), min(x, y))
                continue
            if self.size[large] % self.size[small]:
                return False  # such as 32 x 10 and 5 x 64: neither is finer
            rest = self.new(self.size[large] // self.size[small])[0]
            head = self.new(self.size[small])[0]
            self._set(self.parts, large, (head, rest))
            self._set(self.parent, max(head, small), min(head, small))
            (left if large == x else right).append(rest)
        return not left and not right
