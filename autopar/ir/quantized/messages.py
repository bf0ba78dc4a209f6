"""Which values of a program are parameters or gradients whose messages may be in few bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from autopar.ir.graph import Value, producer, values_of
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Program
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS

aten = torch.ops.aten


_COPIES = frozenset({aten._to_copy.default, aten.clone.default})

_TERMS = frozenset({accumulate, aten.add.Tensor, aten.mul.Scalar, aten.div.Scalar})
"""Operators whose arguments are terms of a gradient where their result is one."""


def messages_of(program: Program, is_view: Callable[[fx.Node], bool]) -> dict[Value, str]:
    """Values whose messages may be in few bits: `WEIGHTS` or `GRADIENTS`.

    Parameters, and casts and views of these; gradients, and what nothing else is computed from and they are the sum of:
    terms of a gradient, reduced before they are added up, would get around few bits.

    Args:
        program: canonical.
        is_view: whether an operator only shows its argument's memory.
    """

    def keeps(node: fx.Node) -> bool:
        return len(program.sources.get(node, ())) == 1 and (node.target in _COPIES or is_view(node))

    inputs = zip(program.placeholders, program.inputs, strict=True)
    found: dict[Value, str] = {(n, 0): WEIGHTS for n, i in inputs if i.kind == "parameter"}
    for node, sources in program.sources.items():
        if keeps(node) and sources[0] in found:
            found |= {(node, i): WEIGHTS for i in range(len(values_of(node)))}
    uses = Counter(source for sources in program.sources.values() for source in sources)
    uses.update(producer(v) for v in program.output_values if v is not None)
    outputs = zip(program.outputs, program.output_values, strict=True)
    pending = [producer(v) for o, v in outputs if o.kind == "gradient" and v is not None]
    # Backwards, as long as nothing else reads it: what else there is needs whole numbers.
    while pending:
        value = pending.pop()
        if value not in found and uses[value] == 1:
            found[value] = GRADIENTS
            goes_on = keeps(value[0]) or value[0].target in _TERMS
            pending += program.sources.get(value[0], ()) if goes_on else ()
    return found
