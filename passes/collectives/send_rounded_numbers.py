"""send_rounded_numbers: messages in few bits become those of float32 numbers that are rounded as the bits would.

Before::

    b = to_blocks(p, 1, 8); a = all_gather(b, 8, "data"); w = wait(a); p1 = from_blocks(w, 4096, 8, float32)

After::

    b = to_blocks(p, 1, -8); a = all_gather(b, 8, "data"); w = wait(a); p1 = from_blocks(w, 4096, -8, float32)

That is the recurrence of training in few bits, without codes: `autopar.verify` compares the graph that trains with it.
"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.quantized.operators import QUANTIZERS


def send_rounded_numbers(program: Program, plan: Plan) -> Program:
    """Send what arrives, in float32, where the plan sends it in few bits."""
    for node in program.graph.graph.nodes:
        if node.target in QUANTIZERS:
            bits = node.args[2]
            assert isinstance(bits, int)
            node.update_arg(2, -bits)
    return program
