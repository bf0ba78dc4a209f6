"""Shape propagation: shapes and dtypes that every node of a rewritten graph computes on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload
from autopar.ir.graph import map_nodes
from autopar.ir.layout import local_shape
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.kernel_shapes import called, make, with_required_strides


def propagate(program: Program, plan: Plan, *, everything: bool = False) -> None:
    """Set ``meta["val"]`` to the local tensor, on the meta device: of every node, or of nodes that have none yet.

    Raises:
        RuntimeError: a node does not accept its local arguments; names the node.
    """
    # Nothing here is differentiated, and meta tensors with history would hold the whole graph.
    with torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op != "output" and (everything or "val" not in node.meta):
                node.meta["val"] = _run(program.graph, node, plan)


def _run(module: fx.GraphModule, node: fx.Node, plan: Plan) -> Any:
    if node.op == "placeholder":
        shape = local_shape(info(node).type(), info(node).layout(), plan.axis_sizes)
        # The layout decides, not the traced value, which is global.
        return torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        return torch.empty(constant.shape, dtype=constant.dtype, device="meta")
    if _has_places(node):
        type_, layout = info(node).type(), info(node).layout()
        shape = local_shape(type_, layout, plan.axis_sizes)
        return torch.empty(shape, dtype=getattr(torch, type_.dtype), device="meta")
    return value_of_call(node)


def _has_places(node: fx.Node) -> bool:
    """Whether a node, in whose place other code is emitted, has numbers that are no places in local tensors."""
    known = info(node)
    if known.operator is None:
        return False
    lower = known.operator.rule.lower
    return any(c in lower and lower[c].places for c in (name.partition(".")[0] for name in known.strategy))


def value_of_call(node: fx.Node) -> Any:
    """What a call makes of the local tensors of its arguments, on the meta device.

    Raises:
        RuntimeError: the node does not accept its local arguments.
    """
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: n.meta["val"])
    # Creation operators name the real device; shapes are computed on meta.
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    target: Any = node.target
    if info(node).operator is not None:
        # As it will be when the graph runs: outputs of a kernel depend on its arguments' strides.
        args, kwargs = with_required_strides(called(node), info(node).operator.rule, args, kwargs)
    try:
        return make(target, args, kwargs) if isinstance(target, OpOverload) else target(*args, **kwargs)
    except Exception as e:
        raise RuntimeError(f"node {node.name} ({node.target}) does not accept its local arguments: {e}") from e
