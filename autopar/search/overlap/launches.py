"""`least_launching`: seconds of a step in which the host launches kernels, whatever the plan is."""

from __future__ import annotations

from torch import fx

from autopar.costs.cluster import Device
from autopar.ir.graph import dependent_on
from autopar.ir.program import Program
from autopar.passes.kernels.add_bias_in_product import adds_bias
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses


def launches(node: fx.Node, operator: Operator) -> bool:
    """Whether an operator of a canonical program is a kernel of its own, and no view or part of another's."""
    fused = operator.fused is not None and not operator.fused.launches
    tensors = [t for t in (*operator.inputs, *operator.outputs) if t is not None]
    drawn, empty = any(t.drawn for t in operator.outputs if t is not None), not any(t.bytes for t in tensors)
    return not (operator.rule.view or fused or drawn or empty or adds_bias(node))


def least_launching(program: Program, dims: Dims, classes: LayerClasses, device: Device) -> float:
    """Seconds in which the host launches each operator once, and those of the batch once for each microbatch.

    Devices that are faster wait for it. What operators are lowered to are more kernels, and messages are launched, too.

    Args:
        program: canonical program of one microbatch; of a deep model all layers count.
        dims: its dimension analysis.
        classes: its layer classes, which say how often the whole model has each.
        device: of the cluster.
    """
    if not device.host:
        return 0.0
    of_batch = dependent_on(program.graph.graph, program.inputs_of("batch"))
    found = 0.0
    for key, members in classes.members.items():
        operator = dims.operators.get(members[0])
        if operator is None or not launches(members[0], operator):
            continue
        found += classes.count[key] * (program.runs(members[0]) if members[0] in of_batch else 1)
    return found * device.host
