"""`shorten`: a model with fewer of its alike blocks, which is captured as fast however deep the model is."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

KEPT = 2
"""Blocks that stay: the first may make what all share, such as a mask; the second stands for the others."""


class Shortened(NamedTuple):
    """A model and how much was left out.

    Attributes:
        model: shares its parameters with the whole one.
        layers: blocks that the whole model has; None: nothing was left out.
        reason: why nothing was left out.
    """

    model: nn.Module
    layers: int | None
    reason: str = ""


def shorten(model: nn.Module) -> Shortened:
    """The model with two blocks of its list of blocks, if these are proven alike.

    Blocks are alike if their modules are of the same classes with the same settings, and their parameters and buffers
    of the same shapes and dtypes. A setting that differs, such as a block's own number, may change what the block
    computes: then the whole model is kept, and the reason said.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > KEPT]
    lists = [(name, m) for name, m in lists if any(True for _ in m[0].children())]
    if len(lists) != 1:
        return Shortened(model, None, f"it has {len(lists)} lists of more than {KEPT} blocks, not one")
    name, blocks = lists[0]
    if len({id(block) for block in blocks}) < len(blocks):
        return Shortened(model, None, f"{name} has the same block several times")
    if (other := _numbered_elsewhere(model, name)) is not None:
        return Shortened(model, None, f"{other} is a block, too, outside {name}")
    first = _description(blocks[0])
    for number, block in enumerate(blocks):
        if (found := _difference(first, _description(block))) is not None:
            return Shortened(model, None, f"{name}.{number}.{found} differs from that of {name}.0".replace("..", "."))
    return Shortened(_with(model, name.split("."), nn.ModuleList(list(blocks)[:KEPT])), len(blocks))


def _numbered_elsewhere(model: nn.Module, name: str) -> str | None:
    """A parameter of a numbered block outside the list: it would be taken for one of the list's."""
    inside = f"{name}." if name else ""
    outside = (n for n, _ in model.named_parameters() if not n.startswith(inside))
    return next((n for n in outside if any(part.isdigit() for part in n.split(".")[:-2])), None)


_OWN = ("_parameters", "_buffers", "_modules")


def _description(block: nn.Module) -> dict[str, Any]:
    """Everything of a block that decides what it computes, but for the values of its tensors."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[f"{path}.class"] = type(module)
        for key, value in vars(module).items():
            if key not in _OWN:
                found[f"{path}.{key}"] = _plain(value)
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                found[f"{path}.{key}"] = None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
    return found


def _plain(value: Any) -> Any:
    """A setting as something that can be compared; objects that cannot are only equal to themselves."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    for key in {**first, **other}:
        if key not in first or key not in other or not _same(first[key], other[key]):
            return key
    return None


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a is b or a == b)
    except (TypeError, ValueError, RuntimeError):  # such as arrays, whose comparison is one of elements
        return False


def _with(module: nn.Module, path: list[str], blocks: nn.ModuleList) -> nn.Module:
    """The module with another list of blocks; everything else is shared, nothing is changed in place."""
    if path == [""] or not path:
        return blocks
    changed = copy.copy(module)
    changed._modules = {**module._modules, path[0]: _with(module._modules[path[0]], path[1:], blocks)}  # type: ignore[arg-type]
    return changed
