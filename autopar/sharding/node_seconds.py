"""Seconds of the nodes of a rewritten graph: kernels by their operators and strategies, collectives by their bytes."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.costs.kernels import host_wait_seconds, kernel_seconds
from autopar.ir.graph import values_of
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import Collective
from autopar.ir.ops.exchange import HOST_WAITS
from autopar.sharding.candidates import candidates
from autopar.sharding.chunks.products import WRITES_PRODUCTS, rate_of
from autopar.sharding.lowered.cost import emitted_work
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work
from autopar.sharding.redistribute.moves import Machine


class NodeSeconds:
    """What nodes take on one device of a mesh; repeated layers have equal operators, and are worked out once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[tuple[object, tuple[str, ...]], tuple[float, float]] = {}

    def collective(self, made: Collective) -> float:
        """Seconds of a collective, its launch included."""
        return self.machine.seconds(made)

    def kernel(self, node: fx.Node) -> tuple[float, float]:
        """Seconds of a node's kernel, and how many kernels are launched for it: none if it is in that of another."""
        device, operator, names = self.machine.device, info(node).operator, info(node).strategy
        # What passes have inserted, such as slices and casts: no rule of the plan says what it costs. Views copy where
        # strides do not let them show their argument.
        if operator is None or operator.rule.view:
            work = emitted_work(node)
            if work is None:
                return 0.0, 0.0
            if node.target in WRITES_PRODUCTS:
                return float(kernel_seconds(work, rate_of(node, device), device)[0]), 1.0
            dtypes = (str(v.dtype).removeprefix("torch.") for v in values_of(node) if v is not None)
            dtype = next((d for d in dtypes if d in device.flops), "float32")
            waits = host_wait_seconds(device) if node.target in HOST_WAITS else 0.0
            return float(kernel_seconds(work, dtype, device)[0]) + waits, 1.0
        added = info(node).added
        seconds, launches = self._of_operator(operator, names)
        # On CPUs the addition is a pass of its own within the kernel; what GPUs gain by it was not measured.
        return (seconds + self._of_operator(added.operator, added.strategy)[0] if added else seconds), launches

    def _of_operator(self, operator: Any, names: tuple[str, ...]) -> tuple[float, float]:
        device = self.machine.device
        if (operator, names) not in self._known:
            chosen = candidates(operator, self.machine.sizes, allowed=[[n] for n in names])
            # Copies of its inputs have nodes of their own.
            kernel = operator_work(operator, chosen, self.machine.sizes, self.machine.load)
            seconds = float(kernel_seconds(kernel, arithmetic_dtype(operator, device), device)[0])
            self._known[operator, names] = seconds, float(kernel.launches[0])
        return self._known[operator, names]
