"""Everything in float64: models hide casts and constants of lower precision, which would mask wrong layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.program import Program, copy_graph

aten = torch.ops.aten

_HALF_TO_FLOAT = {aten._softmax.default: 2, aten._log_softmax.default: 2}


def as_dtype(program: Program, dtype: torch.dtype = torch.float64) -> Program:
    """A copy of the program whose every floating cast, constant and creation is in ``dtype``."""
    module = copy_graph(program.graph)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = _cast(node.args, dtype)
            node.kwargs = _cast(node.kwargs, dtype)
            if node.target in _HALF_TO_FLOAT:
                node.update_arg(_HALF_TO_FLOAT[node.target], False)
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            if isinstance(constant, torch.Tensor) and constant.is_floating_point():
                setattr(module, str(node.target), constant.to(dtype))
            if isinstance(constant, torch.Tensor) and constant.is_complex():
                setattr(module, str(node.target), constant.to(dtype.to_complex()))
    module.recompile()
    return replace(program, graph=module)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else dtype.to_complex() if value.is_complex else value
    if isinstance(value, tuple):
        return tuple(_cast(v, dtype) for v in value)
    if isinstance(value, list):
        return [_cast(v, dtype) for v in value]
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value
