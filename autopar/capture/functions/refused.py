"""What a traced graph may not hold: results that no layout describes, and traces that are known to be wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.graph import user_line

ONLY_DENSE = (
    "only dense ones are laid out; compute with to_dense() of it, or with index_add, scatter_add or gather in its place"
)


def require_dense(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse sparse tensors that go into a call.

    Raises:
        CaptureError: there is one.
    """
    for name, tensor in named.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{name} has layout {tensor.layout}: {ONLY_DENSE}")


def require_plain(graph: fx.Graph) -> None:
    """Refuse what cannot be laid out, and what torch traces otherwise than it runs.

    Raises:
        CaptureError: there is some of it; with the user's line and what to write instead.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(f"a tensor of layout {value.layout} ({user_line(node)}): {ONLY_DENSE}")
        if "auto_functionalized" in str(node.target):
            _refuse_writing(node)
        if node.target is operator.getitem and isinstance(value, list | tuple):
            raise CaptureError(
                f"{node.all_input_nodes[0].target} ({user_line(node)}) returns a list of tensors among its results, "
                "which no layout describes; let the operator return them one by one: Tuple[Tensor, Tensor]"
            )
        if node.target is torch.ops.aten.unfold_backward.default:
            _refuse_gaps(node)


def _refuse_writing(node: fx.Node) -> None:
    target: Any = node.args[0]
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    raise CaptureError(
        f"the operator {target} ({user_line(node)}) writes to its argument {written[0]!r} (mutates_args), and rules "
        f"are of operators that write to nothing; let it return a new tensor (mutates_args=()), and copy that: "
        f"{written[0]}.copy_({target._schema.name.split('::')[-1]}(...))"
    )


def _refuse_gaps(node: fx.Node) -> None:
    """Windows with gaps that forward writes to: the trace has lost what is in the gaps."""
    arguments: Any = node.args
    sizes, dim, size, step = arguments[1:]
    if node.meta.get("partitioner_tag") == "is_backward" or not sizes or size >= min(step, sizes[dim]):
        return
    raise CaptureError(
        f"windows with gaps between them (unfold({dim}, {size}, {step}), {user_line(node)}) are written to, or their "
        "gradient is taken in forward, and the last has no gap behind it: the trace would lose what is in the gaps; "
        f"pad dim {dim} from {sizes[dim]} to a multiple of {step}, or write to slices"
    )
