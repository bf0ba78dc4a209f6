"""Shape propagation: shapes and dtypes that every node of a rewritten graph computes on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload, storage_id
from autopar.layout import local_shape
from autopar.plan import Plan
from autopar.program import Program, map_nodes

MOST_KNOWN = 50_000

_made: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
"""By operator and arguments what it makes: list, tuple or None for one; shape, stride and dtype of each tensor."""


def propagate(program: Program, plan: Plan, *, everything: bool = False) -> None:
    """Set ``meta["val"]`` to the local tensor, on the meta device: of every node, or of nodes that have none yet.

    Raises:
        RuntimeError: a node does not accept its local arguments; names the node.
    """
    with torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op != "output" and (everything or "val" not in node.meta):
                node.meta["val"] = _run(program.graph, node, plan)


def _run(module: fx.GraphModule, node: fx.Node, plan: Plan) -> Any:
    if node.op == "placeholder":
        shape = local_shape(node.meta["types"][0], node.meta["layouts"][0], plan.axis_sizes)
        return torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        return torch.empty(constant.shape, dtype=constant.dtype, device="meta")
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: n.meta["val"])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    target: Any = node.target
    try:
        return _known(target, args, kwargs) if isinstance(target, OpOverload) else target(*args, **kwargs)
    except Exception as e:
        raise RuntimeError(f"node {node.name} ({node.target}) does not accept its local arguments: {e}") from e


def _known(target: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator makes of its arguments; not computed again where all of it is new memory.

    A search rewrites the graph for many plans, and most nodes are the same each time.
    """
    key = (target, _described(args), _described(kwargs))
    known = _made.get(key)
    if known is not None:
        return known[0](map(_blank, known[1])) if known[0] else _blank(known[1][0])
    result = target(*args, **kwargs)
    if len(_made) >= MOST_KNOWN:
        _made.clear()
    several = type(result) if isinstance(result, list | tuple) else None
    made = list(result) if several else [result]
    if several in (None, list, tuple) and _all_new(_tensors([args, kwargs]), made):
        _made[key] = (several, tuple(map(_described, made)))
    return result


def _described(value: Any) -> Any:
    """What an operator sees of an argument, as something to look it up by."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return (type(value), *map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(v)) for name, v in value.items())
    return (type(value), value)


def _blank(described: Any) -> torch.Tensor:
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in an argument."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def _all_new(taken: list[torch.Tensor], made: list[Any]) -> bool:
    """Whether all results are tensors in memory of their own, of which they take all."""
    if not all(isinstance(x, torch.Tensor) and x.is_meta for x in made):
        return False
    own = {storage_id(x) for x in made}
    whole = all(_blank(_described(x)).untyped_storage().nbytes() == x.untyped_storage().nbytes() for x in made)
    return whole and len(own) == len(made) and not own & {storage_id(x) for x in taken}
