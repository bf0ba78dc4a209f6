"""`shorten`: a model with fewer of its alike blocks, which is captured as fast however deep the model is."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

MOST_TURNS = 8
"""Blocks of at most so many kinds may take turns, such as seven with a window and one without."""

COUNT = 2
"""Blocks that are captured: the first may make what all share, such as a mask; the second stands for the others."""


STORE = "transformers.cache_utils"
"""The module of caches, whose code may read a block's number: it stores keys and values by it, and no more."""


class UnreadableNumber:
    """In place of a block's own number: the model passes it along, and only a cache of keys and values may read it."""

    def __init__(self, number: int) -> None:
        self._number = number


def _reader(name: str) -> Callable[..., Any]:
    def read(self: UnreadableNumber, *arguments: Any) -> Any:
        reader = sys._getframe(1).f_locals.get("self")
        if not any(kind.__module__ == STORE for kind in type(reader).__mro__):
            raise TypeError("a block's own number decides what it computes")
        return getattr(self._number, name)(*arguments)

    return read


for _name in (
    "__bool__ __int__ __index__ __float__ __hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ "
    "__rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ "
    "__neg__ __abs__ __str__ __format__"
).split():
    setattr(UnreadableNumber, _name, _reader(_name))


class Shortened(NamedTuple):
    """A model and how much was left out.

    Attributes:
        model: shares its parameters with the whole one.
        layers: blocks that the whole model has; None: nothing was left out.
        reason: why nothing was left out.
        path: name of the list of blocks.
        lead: how many blocks at the beginning are others than the rest, and are all there.
        period: how many take turns after them, over and over; 1: all are alike.
    """

    model: nn.Module
    layers: int | None
    reason: str = ""
    path: str = ""
    lead: int = 0
    period: int = 1


def shorten(model: nn.Module, count: int = COUNT) -> Shortened:
    """The model with some blocks of its list of blocks, if these are proven alike.

    Blocks are alike if their modules are of the same classes with the same settings, and their parameters and buffers
    of the same shapes and dtypes, and none is shared. Only a block's own number may differ: in its place they get what
    cannot be read (`UnreadableNumber`). Any other setting that differs may change what the block computes. Blocks at
    the beginning may be others, such as the dense layers before mixtures of experts: they all stay, and so many of
    those alike. Where blocks take turns, such as one with a sliding window and one without, so many turns stay. Else
    nothing is left out, and the reason says so.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > count]
    # A list of leaves, such as linear layers, is no list of blocks.
    lists = [(name, m) for name, m in lists if any(True for _ in m[0].children())]
    if len(lists) != 1:
        return Shortened(model, None, f"it has {len(lists)} lists of more than {count} blocks, not one")
    name, blocks = lists[0]
    if len({id(block) for block in blocks}) < len(blocks):
        return Shortened(model, None, f"{name} has the same block several times")
    if (other := _numbered_elsewhere(model, name)) is not None:
        return Shortened(model, None, f"{other} is a block, too, outside {name}")
    # Shared by two blocks, a parameter's gradient is a sum over both: a block more would not just add its own.
    if len({id(p) for p in blocks.parameters()}) < sum(len(list(block.parameters())) for block in blocks):
        return Shortened(model, None, f"blocks of {name} share parameters")
    # All blocks, not only those that are captured: one odd layer in the middle would be lost.
    described = [_description(block) for block in blocks]
    turns = _turns(described, count)
    if turns is None:
        number, setting = _odd_one(described, 1) or (0, "")
        return Shortened(model, None, f"{name}.{number}.{setting} differs from that of {name}.0".replace("..", "."))
    lead, period = turns
    numbers = [_block_numbers(described[lead + i :: period]) for i in range(period)]
    end = lead + count * period
    few = [_without_numbers(blocks[i], numbers[(i - lead) % period]) for i in range(lead, end)]
    shorter = nn.ModuleList([*list(blocks)[:lead], *few])
    return Shortened(_with(model, name.split("."), shorter), len(blocks), path=name, lead=lead, period=period)


def _block_numbers(described: Sequence[dict[str, Any]]) -> set[str]:
    """The settings that count up with the blocks (``layer_idx``): a block's own number."""
    return {key for key in described[0] if _is_block_number([d.get(key) for d in described])}


def _turns(described: Sequence[dict[str, Any]], count: int) -> tuple[int, int] | None:
    """How many blocks at the beginning are others, and how many of those after them take turns, over and over.

    Of all ways that leave blocks out with ``count`` turns captured, that which captures fewest; None: there is none.
    """
    found = []
    for period in range(1, min(MOST_TURNS, len(described) // (count + 1)) + 1):
        alike = _alike_at_the_end(described, period) // period
        lead = len(described) - alike * period
        if alike > count:
            found.append((lead + count * period, period, lead))
    return min(found)[:0:-1] if found else None


def _odd_one(described: Sequence[dict[str, Any]], period: int) -> tuple[int, str] | None:
    """The first block that is unlike the one whose turn it is, and in which setting; None: there is none."""
    numbers = [_block_numbers(described[i::period]) for i in range(period)]
    for number, description in enumerate(described):
        i = number % period
        found = next((k for k in _differences(described[i], description) if k not in numbers[i]), None)
        if found is not None:
            return number, found
    return None


def _alike_at_the_end(described: Sequence[dict[str, Any]], period: int) -> int:
    """How many blocks at the end are alike, turn by turn: settings of neighbors tell which are not."""
    count = period
    while count < len(described) and _odd_one(described[-count - 1 :: period][:2], 1) is None:
        count += 1
    # Neighbors may be alike by a setting that counts up here and stays the same there.
    while count >= period and _odd_one(described[-count:], period) is not None:
        count -= 1
    return count


def _is_block_number(values: Sequence[Any]) -> bool:
    """Whether a setting is the number of the block, counted from anything, in steps of its turns."""
    if not all(type(v) is int for v in values) or len(values) < 2 or values[1] <= values[0]:
        return False
    return all(v == values[0] + i * (values[1] - values[0]) for i, v in enumerate(values))


def _without_numbers(block: nn.Module, numbers: Collection[str]) -> nn.Module:
    """The block, its own numbers replaced; it is copied, but for its tensors."""
    return _changed(block, "", numbers) if numbers else block


def _changed(module: nn.Module, path: str, numbers: Collection[str]) -> nn.Module:
    changed = copy.copy(module)
    changed.__dict__.update({k: UnreadableNumber(v) for k, v in vars(module).items() if f"{path}.{k}" in numbers})
    # Shallow copies all the way down: tensors stay the model's own.
    inner = ((name, child, f"{path}.{name}".lstrip(".")) for name, child in module._modules.items())
    changed._modules = {n: None if c is None else _changed(c, p, numbers) for n, c, p in inner}
    return changed


def _numbered_elsewhere(model: nn.Module, name: str) -> str | None:
    """A parameter of a numbered block outside the list: it would be taken for one of the list's."""
    inside = f"{name}." if name else ""
    outside = (n for n, _ in model.named_parameters() if not n.startswith(inside))
    return next((n for n in outside if any(part.isdigit() for part in n.split(".")[:-2])), None)


_OWN = {"_parameters", "_buffers", "_modules"}
# Hooks of state dicts, such as those of a wrapper that checkpoints a block, have no part in what it computes.
_OWN |= {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}


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
    if isinstance(value, functools.partial):
        return value.func, value.args, _plain(value.keywords)
    return value


def _differences(first: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for key in {**first, **other}:
        if key not in first or key not in other or not _same(first[key], other[key]):
            yield key


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
