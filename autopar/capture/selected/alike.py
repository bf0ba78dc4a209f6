"""`Alike`: which tensors of a graph are computed alike, and so are equal: ``labels != -100``, twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.graph import map_nodes


class Alike:
    """Of one graph, whose nodes may come later, but are not changed once they have been asked for."""

    def __init__(self) -> None:
        """No node has been asked for."""
        self._numbers: dict[Any, int] = {}
        self._of: dict[fx.Node, int] = {}

    def number(self, node: fx.Node) -> int:
        """The same of all nodes that are computed alike."""
        pending = [node]  # no recursion: a graph may be deep
        while pending:
            missing = [a for a in pending[-1].all_input_nodes if a not in self._of]
            pending += missing
            if not missing:
                own = pending.pop()
                self._of[own] = self._numbers.setdefault(self._key(own), len(self._numbers))
        return self._of[node]

    def _key(self, node: fx.Node) -> Any:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        # What an operator of somebody else's does a second time is not known.
        own = getattr(node.target, "namespace", "aten") in ("aten", "prims") and not random
        if node.op != "call_function" or not own:
            return node
        args, kwargs = map_nodes((node.args, node.kwargs), lambda n: f"%{self._of[n]}")
        return str(node.target), repr(args), repr(sorted(kwargs.items()))
