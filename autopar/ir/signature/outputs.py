"""What a model returns, as results of a graph: which of its scalars is the loss, and what carries gradients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.ir.signature import pytree

logger = logging.getLogger("autopar")

Loss = str | int | Callable[[Any], Any] | None
"""Which scalar of the output is the loss: a key, attribute or path (``losses.total``), an index, or a function."""

OUTSIDE = "outside"
"""As a `Loss`: none of the output's, but what a script computes from it; all tensors of the output carry gradients."""

_OUTPUT = "the model's output"

WHICH = 'loss="losses.total" (a key, attribute or index in the output, or a path of them, or a function of it)'


@dataclass(frozen=True)
class Total:
    """A loss that the user's function computes from results of the model.

    Attributes:
        function: of the output.
        parts: indices of the scalars that it is computed from.
    """

    function: Callable[[Any], Any]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Results:
    """Results of a call, as a graph returns them.

    Attributes:
        tensors: in order, then the loss where a function computes it; those that carry no gradients in the graph are
            detached.
        skeleton: of the output, see `autopar.ir.signature.pytree`.
        loss: index of the only result that carries gradients; None if several do, or none is a scalar.
        withheld: indices of results that carry gradients in the model and do not in the graph.
        total: how the loss is computed, if a function does.
    """

    tensors: tuple[torch.Tensor, ...]
    skeleton: Any
    loss: int | None
    withheld: frozenset[int]
    total: Total | None = None


def results_of(
    output: Any,
    loss: Loss,
    *,
    training: bool,
    required: bool = True,
    more: Callable[[list[torch.Tensor]], None] | None = None,
) -> Results:
    """Flatten an output, and find the loss in it.

    Of one floating scalar that requires a gradient, that is the loss. Of several all carry gradients, unless ``loss``
    says which one does, and if none is in the output, or the loss is `OUTSIDE`, all tensors do. Caches of keys and
    values are dropped.

    Args:
        output: of the model, or of ``loss_fn``.
        loss: which scalar is the loss.
        training: there is a backward pass.
        required: the loss that is named must be there.
        more: appends tensors that the call writes to the model's state.

    Raises:
        CaptureError: the output holds something that cannot be carried, or there is no such loss.
    """
    dropped: list[str] = []
    tensors, skeleton = pytree.flatten(output, _OUTPUT, shared=True, drop=partial(_is_dropped, dropped))
    if dropped:
        names = ", ".join(dropped)
        logger.info("dropped %s from the output of the parallelized model; set use_cache=False to be explicit", names)
    if not tensors:
        raise CaptureError("the model returns no tensor")
    # Counted before tensors of the state are added: a scalar buffer is no loss.
    own = sum(_is_scalar(t) and t.requires_grad for t in tensors)
    if more is not None:
        more(tensors)
    if not training:
        return Results(tuple(tensors), skeleton, None, frozenset())
    if loss == OUTSIDE:
        return Results(tuple(tensors), skeleton, None, frozenset())
    scalars = [i for i, t in enumerate(tensors) if _is_scalar(t) and t.requires_grad]
    named = None if loss is None else _named(output, tensors, loss, required)
    # A tensor that is none of the output's: the function has computed it.
    if isinstance(named, torch.Tensor):
        assert callable(loss)
        return _with_total(tensors, skeleton, loss, scalars)
    # One scalar in the output, and none in the state: there is nothing else that it could be.
    chosen = scalars[0] if named is None and own == len(scalars) == 1 else named
    differentiable = set(range(len(tensors)))
    if chosen is not None:
        differentiable = {chosen}
    elif own:
        differentiable = set(scalars)
    withheld = frozenset(i for i, t in enumerate(tensors) if t.requires_grad and i not in differentiable)
    return Results(
        tuple(t if i in differentiable else t.detach() for i, t in enumerate(tensors)), skeleton, chosen, withheld
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _with_total(
    tensors: list[torch.Tensor], skeleton: Any, function: Callable[[Any], Any], scalars: list[int]
) -> Results:
    """Results and the loss that a function makes of the scalars among them."""
    # Others are detached: only scalars carry gradients then.
    total = function(pytree.unflatten(skeleton, [t if i in scalars else t.detach() for i, t in enumerate(tensors)]))
    if not total.requires_grad:
        raise CaptureError(
            "the function loss= makes the loss of tensors that are no scalars of the output: pass "
            "loss_fn=lambda output, batch: ..., whose result is then what the model returns"
        )
    withheld = frozenset(i for i, t in enumerate(tensors) if t.requires_grad and i not in scalars)
    results = (*(t.detach() for t in tensors), total)
    return Results(results, skeleton, len(tensors), withheld, Total(function, tuple(scalars)))


def _named(output: Any, tensors: list[torch.Tensor], loss: Loss, required: bool) -> int | torch.Tensor | None:
    """The index of the loss, or itself if a function has made it; None if it is not there and need not be."""
    what = f"loss={loss!r}" if not callable(loss) else "the function loss="
    try:
        found = loss(output) if callable(loss) else at(output, loss)
    except (LookupError, AttributeError, TypeError) as e:
        if not required:
            return None
        raise CaptureError(f"{what}: the model's output has no such entry ({e}); {_scalars(output)}") from e
    if found is None and not required:
        return None
    if not _is_scalar(found):
        kind = f"tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise CaptureError(f"{what} gives a {kind}, which is no floating scalar; {_scalars(output)}")
    if not found.requires_grad:
        raise CaptureError(f"{what} gives a scalar that requires no gradient; {_scalars(output)}")
    index = next((i for i, t in enumerate(tensors) if t is found), None)
    return found if index is None else index


def at(output: Any, path: Any) -> Any:
    """The value at a key, attribute or index, or at a path of them.

    Raises:
        LookupError, AttributeError: there is nothing.

    >>> at({"losses": [1, {"a.b": 2}]}, "losses.1.a.b")
    2
    """
    if not isinstance(path, str):
        return output[path]
    if isinstance(output, Mapping) and path in output:
        return output[path]
    first, dot, rest = path.partition(".")
    # Keys may have dots in them.
    while dot and isinstance(output, Mapping) and first not in output and "." in rest:
        more, dot, rest = rest.partition(".")
        first = f"{first}.{more}"
    if isinstance(output, Mapping) and first in output:
        found = output[first]
    elif first.lstrip("-").isdigit():
        found = output[int(first)]
    else:
        found = getattr(output, first)
    return at(found, rest) if dot else found


def path_of(skeleton: Any, index: int) -> str | None:
    """Where a result of the graph is within the model's output, such as ``losses.fit``; None if it is not there."""
    numbered = pytree.unflatten(skeleton, _Numbers(), None)
    return next((path for path, value in _paths(numbered, "") if type(value) is _Number and value.index == index), None)


class _Number:
    """Stands for a result of the graph: an int could be one of the model's own."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Numbers(Sequence[_Number]):
    """One for each result, however many there are."""

    def __getitem__(self, index: Any) -> Any:
        return _Number(index)

    def __len__(self) -> int:
        return sys.maxsize


def _scalars(output: Any) -> str:
    """The paths of scalars that could be the loss."""
    found = [p for p, v in _paths(output, "") if _is_scalar(v) and v.requires_grad]
    return f"scalars that require a gradient are {', '.join(map(repr, found[:8]))}" if found else "it has no scalar"


def _paths(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, torch.Tensor):
        inner = [(n, getattr(value, n, None)) for n in value.__dataclass_fields__]
    else:
        return [(path, value)]
    return [found for name, v in inner for found in _paths(v, f"{path}.{name}".lstrip("."))]


def _is_dropped(dropped: list[str], value: Any, path: str) -> bool:
    """Caches are: they are for generation, and no gradient flows through them. None is left in their place."""
    # By name: such caches are plain tuples.
    old = value is not None and path.endswith("['past_key_values']")  # of transformers before 4.36: tuples of tensors
    if not (old or is_cache(value)):
        return False
    dropped.append(path.removeprefix(_OUTPUT).strip("[']") or "a cache")
    return True


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values or states, of transformers or like one: told by its class."""
    if isinstance(value, torch.Tensor | str | type) or value is None:
        return False
    kinds = [k for k in type(value).__mro__ if k is not object]
    if any(k.__module__.startswith("transformers.") and "Cache" in k.__name__ for k in kinds):
        return True
    # A container whose class is called so may hold outputs.
    holds = isinstance(value, Mapping | list | tuple | set) or hasattr(value, "__dataclass_fields__")
    return not holds and any("cache" in f"{k.__module__}.{k.__name__}".lower() for k in kinds)
