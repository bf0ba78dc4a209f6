"""Seconds of the nodes of a rewritten graph: kernels by their operators and strategies, collectives by their bytes."""

from __future__ import annotations

from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.kernels import Work, kernel_seconds, stream
from autopar.ir.graph import tensor_arguments, values_of
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import Collective
from autopar.sharding.candidates import candidates
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work
from autopar.sharding.redistribute import Machine


class NodeSeconds:
    """What nodes take on one device of a mesh; repeated layers have equal operators, and are worked out once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[tuple[object, tuple[str, ...]], tuple[float, bool]] = {}

    def collective(self, made: Collective) -> float:
        """Seconds of a collective, its launch included."""
        axis = self.machine.names.index(made.axis)
        ring = COLLECTIVES[made.kind](made.bytes, self.machine.sizes[axis], self.machine.links[axis])
        return float(ring) + self.machine.device.launch

    def kernel(self, node: fx.Node) -> tuple[float, bool]:
        """Seconds of a node's kernel, and whether it has one."""
        device = self.machine.device
        if info(node).operator is None:
            # What passes have inserted, such as slices and casts: no rule says what it costs. It streams its memory,
            # unless its results are views.
            inputs = [v for a in tensor_arguments(node) for v in values_of(a)]
            results = [v for v in values_of(node) if v is not None]
            input_storages = {storage_id(v) for v in inputs if v is not None}
            if not results or all(storage_id(v) in input_storages for v in results):
                return 0.0, False
            work = stream(sum(v.nbytes for v in (*inputs, *results) if v is not None))
            dtype = str(results[0].dtype).removeprefix("torch.")
            return float(kernel_seconds(work, dtype if dtype in device.flops else "float32", device)[0]), True
        operator, names = info(node).operator, info(node).strategy
        if (operator, names) not in self._known:
            chosen = candidates(operator, self.machine.sizes, allowed=[[n] for n in names])
            # Copies of its inputs have nodes of their own.
            kernel: Work = operator_work(operator, chosen, self.machine.sizes, with_copies=False)
            seconds = float(kernel_seconds(kernel, arithmetic_dtype(operator, device), device)[0])
            self._known[operator, names] = seconds, bool(kernel.launches[0])
        return self._known[operator, names]
