"""Shape propagation: what every node of a rewritten graph computes on one device, on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, FakeTensorMode
from autopar.layout import local_shape
from autopar.plan import Plan
from autopar.program import Program


def propagate(program: Program, plan: Plan) -> None:
    """Refresh ``meta["val"]`` of every node to the local fake tensor.

    Raises:
        RuntimeError: a node does not accept its local arguments; names the node.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}
    with mode, torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op == "output":
                continue
            values[node] = _run(program.graph, node, values, plan, mode)
            node.meta["val"] = values[node]


def _run(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], plan: Plan, mode: FakeTensorMode) -> Any:
    if node.op == "placeholder":
        known = node.meta["val"]
        shape = local_shape(node.meta["types"][0], node.meta["layouts"][0], plan.axis_sizes)
        return torch.empty(shape, dtype=known.dtype, device=known.device)
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        if isinstance(constant, FakeTensor):
            return torch.empty(constant.shape, dtype=constant.dtype, device=constant.device)
        return mode.from_tensor(constant)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as e:
        raise RuntimeError(f"node {node.name} ({node.target}) does not accept its local arguments: {e}") from e
