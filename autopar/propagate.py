"""Shape propagation: what every node of a rewritten graph computes on one device, on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, FakeTensorMode
from autopar.layout import local_shape
from autopar.plan import Plan
from autopar.program import Program


def propagate(program: Program, plan: Plan, *, everything: bool = False) -> None:
    """Set ``meta["val"]`` to the local fake tensor: of every node, or of nodes that have none yet.

    Raises:
        RuntimeError: a node does not accept its local arguments; names the node.
    """
    if everything:
        program.graph.meta["fake_mode"] = FakeTensorMode(allow_non_fake_inputs=True)
    mode = program.graph.meta["fake_mode"]
    with mode, torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op != "output" and (everything or "val" not in node.meta):
                node.meta["val"] = _run(program.graph, node, plan, mode)


def _run(module: fx.GraphModule, node: fx.Node, plan: Plan, mode: FakeTensorMode) -> Any:
    if node.op == "placeholder":
        known = node.meta["val"]
        shape = local_shape(node.meta["types"][0], node.meta["layouts"][0], plan.axis_sizes)
        return torch.empty(shape, dtype=known.dtype, device=known.device)
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        if isinstance(constant, FakeTensor):
            return torch.empty(constant.shape, dtype=constant.dtype, device=constant.device)
        return mode.from_tensor(constant)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as e:
        raise RuntimeError(f"node {node.name} ({node.target}) does not accept its local arguments: {e}") from e
