"""Dropout of the weights of attention by its formula, so that what is kept is known at the last product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._torch_compat import traced_graph
from autopar.capture.functions.calls import Calls, OtherError, name_of

CASTS = frozenset(("to", "float", "double", "half", "bfloat16", "type_as", "type", "contiguous"))
"""Names of functions that give the same numbers, of another dtype or with other strides."""


@dataclass(frozen=True)
class Dropped:
    """A call of dropout: of weights, and which share of these goes."""

    weights: Tensor
    p: float

    @property
    def options(self) -> dict[str, Any]:
        """Of the draw of what is kept."""
        return {"dtype": torch.bool, "device": self.weights.device}


def dropped(calls: Calls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dropped | None:
    """A call of a function that is dropout of what a softmax gave; None: it is another one."""
    if name_of(func) != "dropout" or traced_graph() is None:
        return None
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    weights, p = named.get("input"), named.get("p", 0.5)
    if not isinstance(weights, Tensor) or not isinstance(p, float) or not 0.0 < p < 1.0:
        return None
    # Numbers are drawn in the order of the strides.
    if named.get("inplace") or named.get("training", True) is not True or not weights.is_contiguous():
        return None
    try:
        call = calls.of(weights)
        while call.name in CASTS:
            call = calls.of(call.args[0])
    except OtherError:
        return None
    return Dropped(weights, p) if call.name == "softmax" else None


class Kept(torch.autograd.Function):
    """What is left of weights."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, kept: Tensor, scale: float) -> Tensor:
        """As torch computes it: ``weights * kept * scale``."""
        ctx.save_for_backward(kept)
        ctx.scale = scale
        found: Tensor = torch.ops.aten.native_dropout_backward(weights, kept, scale)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The same of the gradient."""
        (kept,) = ctx.saved_tensors
        return Kept.apply(grad, kept, ctx.scale), None, None  # type: ignore[no-untyped-call]
