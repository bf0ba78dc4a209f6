"""Python values as JSON and back, their types included; never pickle, which runs what a file says."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from autopar.costs.read_file import brief
from autopar.runtime.state.stage_tensor import StageTensor

LARGEST = 2**20
"""Bytes of a tensor among values: large ones belong to the model or the optimizer."""

DEEPEST = 64
"""Levels of containers."""

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def dumps(value: Any, what: str) -> str:
    """The text of a value.

    Raises:
        ValueError: it holds something of another type; names where.
    """
    return json.dumps(_encoded(value, what, 0), allow_nan=False)


def loads(text: str, what: str) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is no such text; names what it is of.
    """
    try:
        return _decoded(json.loads(text), 0)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, RuntimeError) as e:
        raise ValueError(f"{what} is damaged: {type(e).__name__}: {brief(str(e))}") from None


def _encoded(value: Any, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested more than {DEEPEST} deep")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return {"tensor": _tensor(value, where)}
    for name, kind in _SEQUENCES.items():
        if type(value) is kind or (name == "tuple" and type(value) is torch.Size):
            return {name: [_encoded(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]}
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            return {name: [[_encoded(k, f"a key of {where}", depth + 1), _encoded(v, f"{where}[{k!r}]", depth + 1)]
                           for k, v in value.items()]}  # fmt: skip
    raise ValueError(
        f"{where} is a {type(value).__name__}, which cannot be saved without pickle: numbers, texts, tensors and "
        "containers of them can"
    )


def _tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    if isinstance(value, StageTensor) or (
        isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)
    ):
        raise ValueError(
            f"{where} is a tensor of which each rank has a part, and what is neither of the model nor of optimizer= is "
            "saved as rank 0 has it: put all parameters into groups of one optimizer, or give its "
            "checkpoint.full_optimizer_state_dict(), or another module's full_state_dict(), as extra="
        )
    plain = value.detach().cpu().contiguous()
    if plain.nbytes > LARGEST:
        raise ValueError(f"{where} is a tensor of {plain.nbytes} bytes, and values have at most {LARGEST}")
    data = plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
    return {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape),
            "data": base64.b64encode(data.numpy().tobytes()).decode()}  # fmt: skip


def _decoded(value: Any, depth: int) -> Any:
    if depth > 2 * DEEPEST:
        raise ValueError("it is nested too deep")
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("there is a list without a type")
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "dtype":
        return _dtype(inner)
    if kind == "tensor":
        dtype, shape = _dtype(inner["dtype"]), [int(n) for n in inner["shape"]]
        data = bytearray(base64.b64decode(inner["data"], validate=True))
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decoded(v, depth + 1) for v in inner)
    return _MAPPINGS[kind]({_decoded(k, depth + 1): _decoded(v, depth + 1) for k, v in inner})


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
