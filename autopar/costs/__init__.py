"""What computation, communication and memory cost: closed forms that know no graph and no framework."""

from autopar.costs.collectives import COLLECTIVES, FORMS, collective_seconds, wire_bytes
from autopar.costs.flops import (
    attention_backward_flops,
    attention_flops,
    conv_backward_flops,
    conv_flops,
    matmul_backward_flops,
    matmul_flops,
)
from autopar.costs.kernels import Work, busy_seconds, kernel_seconds, product, stream
from autopar.costs.memory import format_bytes, optimizer_state_bytes, parse_bytes

__all__ = [
    "COLLECTIVES",
    "FORMS",
    "Work",
    "attention_backward_flops",
    "attention_flops",
    "busy_seconds",
    "collective_seconds",
    "conv_backward_flops",
    "conv_flops",
    "format_bytes",
    "kernel_seconds",
    "matmul_backward_flops",
    "matmul_flops",
    "optimizer_state_bytes",
    "parse_bytes",
    "product",
    "stream",
    "wire_bytes",
]
