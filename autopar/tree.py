"""Nested batches and model outputs as flat lists of tensors, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import CaptureError


@dataclass(frozen=True)
class Leaf:
    """The place of tensor number ``index``."""

    index: int


def flatten(value: Any, what: str = "value") -> tuple[list[torch.Tensor], Any]:
    """Tensors of ``value`` in order, and its skeleton: the same structure with a `Leaf` for each tensor.

    Raises:
        CaptureError: ``value`` holds something that is no tensor, plain constant, sequence, mapping or dataclass.
    """
    tensors: list[torch.Tensor] = []

    def visit(v: Any, path: str) -> Any:
        if isinstance(v, torch.Tensor):
            tensors.append(v)
            return Leaf(len(tensors) - 1)
        if v is None or isinstance(v, bool | int | float | str | torch.dtype | torch.device):
            return v
        if isinstance(v, tuple) and hasattr(v, "_fields"):
            return type(v)(*(visit(x, f"{path}.{n}") for n, x in zip(v._fields, v, strict=True)))
        if isinstance(v, list | tuple):
            return type(v)(visit(x, f"{path}[{i}]") for i, x in enumerate(v))
        if isinstance(v, Mapping):
            return _Record(type(v), {k: visit(x, f"{path}[{k!r}]") for k, x in v.items()})
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            fields = {f.name: getattr(v, f.name) for f in dataclasses.fields(v)}
            return _Record(type(v), {k: visit(x, f"{path}.{k}") for k, x in fields.items()})
        raise CaptureError(
            f"{path} is a {type(v).__name__}, which is no tensor, constant, sequence, mapping or dataclass; "
            "return or pass one of those"
        )

    skeleton = visit(value, what)
    return tensors, skeleton


def unflatten(skeleton: Any, tensors: list[Any] | tuple[Any, ...]) -> Any:
    """The value whose skeleton and tensors are given."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.index]
    if isinstance(skeleton, _Record):
        return skeleton.rebuild({k: unflatten(v, tensors) for k, v in skeleton.items.items()})
    if isinstance(skeleton, tuple) and hasattr(skeleton, "_fields"):
        return type(skeleton)(*(unflatten(v, tensors) for v in skeleton))
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(unflatten(v, tensors) for v in skeleton)
    return skeleton


@dataclass(frozen=True)
class _Record:
    """A mapping or dataclass instance, field by field."""

    kind: type
    items: dict[Any, Any]

    def rebuild(self, items: dict[Any, Any]) -> Any:
        if self.kind is dict:
            return items
        if dataclasses.is_dataclass(self.kind):  # transformers' ModelOutput is a mapping and a dataclass
            return self.kind(**items)
        return self.kind(items)

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.items.items())
        return f"{self.kind.__module__}.{self.kind.__qualname__}({inner})"
