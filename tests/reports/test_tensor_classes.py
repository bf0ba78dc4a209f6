"""Tensors of classes that change torch's functions: a graph was of plain tensors in their place, silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import autopar
from autopar.errors import CaptureError

D = torch.float64


def doubling(kind: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Twice what linear layers give."""
    with torch._C.DisableTorchFunctionSubclass():
        found = function(*args, **(kwargs or {}))
    return found * 2 if function is nn.functional.linear else found


class Doubling(torch.Tensor):
    __torch_function__ = classmethod(doubling)


class DoublingWeight(nn.Parameter):
    __torch_function__ = classmethod(doubling)


class Named(torch.Tensor):
    """A class that changes nothing."""


class NamedWeight(nn.Parameter):
    """A class that changes nothing."""


def ones() -> torch.Tensor:
    return torch.ones(4, 4, dtype=D)


CLASSES: dict[str, tuple[Any, Any, str]] = {
    "weight": (lambda: DoublingWeight(ones()), ones, "'weight' is a .*DoublingWeight, whose __torch_function__"),
    "batch": (lambda: nn.Parameter(ones()), lambda: ones().as_subclass(Doubling), r"batch\['input'\] is a .*Doubling"),
    "wrapper": (lambda: nn.Parameter(ones()), lambda: TwoTensor(ones(), ones()), "whose __torch_dispatch__"),
    "wrapped weight": (lambda: nn.Parameter(TwoTensor(ones(), ones())), ones, "'weight' is a .*TwoTensor"),
    "names": (lambda: NamedWeight(ones()), lambda: ones().as_subclass(Named), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    weight, batch, error = CLASSES[name]
    model: Any = nn.Linear(4, 4, bias=False, dtype=D)
    model.weight = weight()
    if not error:
        assert torch.equal(model(batch()), autopar.parallelize(model, None)(batch()))
        return
    with pytest.raises(CaptureError, match=error):
        autopar.parallelize(model, None)(batch())
