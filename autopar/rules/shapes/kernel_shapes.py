"""What an operator makes of its arguments: shapes, strides and dtypes, on the meta device, remembered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload, storage_id
from autopar.ir.ops.random import replayed, seeded
from autopar.rules.rule import Rule, required_strides
from autopar.rules.strides import meet

MOST_KNOWN = 50_000

_made: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
"""By operator and arguments what it makes: list, tuple or None for one; shape, stride and dtype of each tensor."""


def called(node: fx.Node) -> Any:
    """The operator that a node calls; looks through what draws from a seed."""
    return node.args[0] if node.target in (seeded, replayed) else node.target


def make(target: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator makes of its arguments; remembered where all of it is new memory.

    A search rewrites the graph for many plans, and most nodes are the same each time.
    """
    key = (target, _described(args), _described(kwargs))
    # Blank tensors of the known shapes: even on the meta device an operator takes tens of microseconds.
    known = _made.get(key)
    if known is not None:
        return known[0](map(_blank, known[1])) if known[0] else _blank(known[1][0])
    result = _shapes_of(target, args, kwargs)
    # Emptied as a whole: bookkeeping of which are used would cost more than computing them again.
    if len(_made) >= MOST_KNOWN:
        _made.clear()
    several = type(result) if isinstance(result, list | tuple) else None
    made = list(result) if several else [result]
    # A view must be made anew: it shares memory with its argument, which liveness counts by.
    if several in (None, list, tuple) and _all_new(_tensors([args, kwargs]), made):
        _made[key] = (several, tuple(map(_described, made)))
    return result


def _shapes_of(target: OpOverload, args: Any, kwargs: Any) -> Any:
    """What a call returns, also of operators that cannot be called on the meta device.

    Batch norm of one value a channel has no unbiased variance, and the operator refuses it. A device may hold one value
    of many: what is emitted in the operator's place computes the variance of the whole batch.
    """
    try:
        return target(*args, **kwargs)
    except ZeroDivisionError:
        x = args[0]
        # Twice the batch: the shapes of statistics do not depend on it.
        result = target(torch.cat([x, x]), *args[1:], **kwargs)
        return (torch.empty_like(x), *result[1:])
    except NotImplementedError:  # histograms, QR by reflectors: of these torch has kernels alone
        return _like_each(target(*_like_each(args, "cpu"), **_like_each(kwargs, "cpu")), "meta")


def _like_each(value: Any, device: str) -> Any:
    """Tensors of zeros on a device in place of all in a value: what fake tensors call kernels on, too."""
    if isinstance(value, torch.Tensor):
        shape, stride, dtype = _described(value)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if isinstance(value, dict):
        return {name: _like_each(v, device) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_like_each(v, device) for v in value)  # type: ignore[call-arg, unused-ignore]
    return value


def with_required_strides(target: Any, rule: Rule, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's arguments as its kernel asks for them, copied where they have other strides.

    Args:
        target: the operator overload.
        rule: of the call.
        args: positional arguments; tensors that come before those of the equation (a state) stay as they are.
        kwargs: keyword arguments.
    """
    needs = required_strides(target, rule)
    if not any(needs):
        return args, dict(kwargs)
    remaining = list(needs)
    # A draw that is replayed takes the generator's state before its own arguments.
    before = len(_tensors([args, dict(kwargs)])) - len(remaining)

    def met(value: Any) -> Any:
        nonlocal before
        if not isinstance(value, torch.Tensor):
            return value
        if before > 0:
            before -= 1
            return value
        return meet(value, remaining.pop(0))

    found, named = fx.node.map_aggregate((tuple(args), dict(kwargs)), met)
    return found, named


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


def _all_new(arguments: list[torch.Tensor], made: list[Any]) -> bool:
    """Whether all results are tensors with storages of their own, which they fill."""
    if not all(isinstance(x, torch.Tensor) and x.is_meta for x in made):
        return False
    own = {storage_id(x) for x in made}
    whole = all(_blank(_described(x)).untyped_storage().nbytes() == x.untyped_storage().nbytes() for x in made)
    return whole and len(own) == len(made) and not own & {storage_id(x) for x in arguments}
