"""reverse_scans: a running sum of a dim in reverse, in reverse, is one from the end.

Before::

    a = aten.flip(g, [1]); s = aten.cumsum(a, 1); r = aten.flip(s, [1])

After::

    r = autopar.reverse_cumsum(g, 1)

The gradient of a running sum is spelled so. What is reversed twice is as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph
from autopar.ir.module_outputs import pass_on
from autopar.ir.ops.sequence.scan import reverse_cumsum
from autopar.ir.program import Program

aten = torch.ops.aten


def reverse_scans(program: Program) -> Program:
    """Leave out reversals that are none, or belong to a running sum; computes the same."""
    if not any(n.target is aten.flip.default for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for form in (_twice, _scan):
        for node in list(graph.graph.nodes):
            if node.target is aten.flip.default:
                form(node)
    return program.with_graph(graph)


def _twice(node: fx.Node) -> None:
    """A dim in reverse, in reverse."""
    source: Any = node.args[0]
    if source.target is aten.flip.default and _dims(node) == _dims(source):
        pass_on(node, source.args[0])
        node.replace_all_uses_with(source.args[0])


def _scan(node: fx.Node) -> None:
    """A running sum of a dim in reverse, in reverse."""
    scan: Any = node.args[0]
    first: Any = scan.args[0] if scan.target is aten.cumsum.default and len(scan.users) == 1 else None
    if first is None or first.target is not aten.flip.default:
        return
    along = scan.args[1] % node.meta["val"].ndim
    if _dims(node) == _dims(first) == [along]:
        node.target, node.args = reverse_cumsum, (first.args[0], along)
        node.kwargs = {k: v for k, v in scan.kwargs.items() if v is not None}


def _dims(flip: fx.Node) -> list[int]:
    dims: Any = flip.args[1]
    return sorted(d % flip.meta["val"].ndim for d in dims)
