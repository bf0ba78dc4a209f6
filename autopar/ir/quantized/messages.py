"""Which values of a program are parameters or gradients whose messages may be in few bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from autopar.ir.graph import Value, producer, values_of
from autopar.ir.program import Program
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS

aten = torch.ops.aten


def messages_of(program: Program, is_view: Callable[[fx.Node], bool]) -> dict[Value, str]:
    """Values whose messages may be in few bits: `WEIGHTS` or `GRADIENTS`.

    Parameters, gradients on their way out of the graph, and casts and views of these.

    Args:
        program: canonical.
        is_view: whether an operator only shows its argument's memory.
    """

    def keeps(node: fx.Node) -> bool:
        cast = node.target in (aten._to_copy.default, aten.clone.default)
        return len(program.sources.get(node, ())) == 1 and (cast or is_view(node))

    inputs = zip(program.placeholders, program.inputs, strict=True)
    found: dict[Value, str] = {(n, 0): WEIGHTS for n, i in inputs if i.kind == "parameter"}
    for node, sources in program.sources.items():
        if keeps(node) and sources[0] in found:
            found |= {(node, i): WEIGHTS for i in range(len(values_of(node)))}
    uses = Counter(source for sources in program.sources.values() for source in sources)
    uses.update(producer(v) for v in program.output_values if v is not None)
    for output, last in zip(program.outputs, program.output_values, strict=True):
        value = producer(last) if output.kind == "gradient" and last is not None else None
        # Backwards, as long as nothing else reads it: what else there is needs whole numbers.
        while value is not None and value not in found and uses[value] == 1:
            found[value] = GRADIENTS
            value = program.sources[value[0]][0] if keeps(value[0]) else None
    return found
