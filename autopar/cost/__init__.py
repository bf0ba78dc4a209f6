"""What computation, communication and memory cost: closed forms in numpy that know no graph and no framework."""

from autopar.cost.collectives import (
    COLLECTIVES,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    wire_bytes,
)
from autopar.cost.compute import (
    attention_backward_flops,
    attention_flops,
    conv_backward_flops,
    conv_flops,
    matmul_backward_flops,
    matmul_flops,
)
from autopar.cost.kernels import Work, busy_seconds, kernel_seconds, product, stream
from autopar.cost.memory import format_bytes, optimizer_state_bytes, parse_bytes

__all__ = [
    "COLLECTIVES",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention_backward_flops",
    "attention_flops",
    "broadcast",
    "busy_seconds",
    "conv_backward_flops",
    "conv_flops",
    "format_bytes",
    "kernel_seconds",
    "matmul_backward_flops",
    "matmul_flops",
    "optimizer_state_bytes",
    "parse_bytes",
    "product",
    "reduce_scatter",
    "stream",
    "wire_bytes",
]
