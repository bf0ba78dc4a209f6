"""Under which names, and in which parts, a file has a model's tensors so that ``from_pretrained`` reads them.

Models of transformers may hold a tensor under two names, of which their files have one; and some hold several of a
file's tensors in one: all experts of Mixtral's layer, for example. transformers itself says what its files have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

Tensors = Mapping[str, torch.Tensor]

Conversion = Callable[[Tensors], Tensors]
"""From some of a model's tensors to those of the file."""


def file_tensors(model: nn.Module, tensors: Tensors) -> tuple[list[list[str]], Conversion]:
    """Groups of the model's tensors that are converted together, and how.

    Args:
        model: the user's own.
        tensors: its state, tied parameters the same object under each of their names.

    Returns:
        Names of groups, each tensor once; the conversion of such a group to what the file has of it.
    """
    meta: dict[int, torch.Tensor] = {}
    for t in tensors.values():
        meta.setdefault(id(t), torch.empty(t.shape, dtype=t.dtype, device="meta"))
    shapes = {name: meta[id(t)] for name, t in tensors.items()}
    # No import: a model of transformers has imported it.
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        first = {id(t): name for name, t in reversed(list(tensors.items()))}
        return [[name] for name in tensors if first[id(tensors[name])] == name], lambda found: found
    kept = _kept(library, model, shapes)
    reverting = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if reverting is None:  # before transformers 5 a model had the names of its file
        return [[name] for name in kept], lambda found: found

    def converted(found: Tensors) -> Tensors:
        return dict(reverting(model, dict(found)))

    return _groups(converted, kept, type(model).__name__), converted


def _kept(library: Any, model: Any, shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what files do not have: all but one name of a tied tensor, and what the model's class leaves out."""
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        shapes.pop(name, None)
    dropping = getattr(library.modeling_utils, "remove_tied_weights_from_state_dict", None)
    if dropping is None:
        tied = getattr(model, "_tied_weights_keys", None) or ()
        same: dict[int, list[str]] = {}
        for name, t in shapes.items():
            same.setdefault(id(t), []).append(name)
        kept = {min(names, key=lambda n: any(re.search(p, n) for p in tied)) for names in same.values()}
        return {n: t for n, t in shapes.items() if n in kept}
    try:
        return dict(dropping(dict(shapes), model))
    except RuntimeError as e:
        raise AutoparError(
            f"{type(model).__name__} has tied tensors that transformers does not know of, which from_pretrained would "
            f"not tie: {e}"
        ) from e


def _groups(converted: Conversion, kept: Tensors, kind: str) -> list[list[str]]:
    """The smallest groups whose conversions together give what that of all tensors gives.

    Raises:
        AutoparError: there are none but all of them.
    """
    whole = _described(converted(kept))
    by: tuple[Callable[[str], str], ...] = (lambda name: name, _layer)
    for key in by:
        groups: dict[str, list[str]] = {}
        for name in kept:
            groups.setdefault(key(name), []).append(name)
        found = [_described(_or_nothing(converted, {n: kept[n] for n in names})) for names in groups.values()]
        if sum(map(len, found)) == len(whole) and {k: v for each in found for k, v in each.items()} == whole:
            return list(groups.values())
    raise AutoparError(
        f"transformers makes the files of {kind} from tensors of several layers at once, which would have to be on one "
        "host together: use model.save_pretrained(), where rank 0 holds the whole model"
    )


def _or_nothing(converted: Conversion, some: Tensors) -> Tensors:
    """Some tensors converted; nothing where the conversion needs others beside them."""
    try:
        return converted(some)
    except Exception:
        return {}


def _layer(name: str) -> str:
    """``model.layers.3.`` of a name in it."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else name


def _described(tensors: Tensors) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def numbers(tensors: Iterable[torch.Tensor]) -> int:
    """How many a model has, tied ones once."""
    return sum({id(t): t.numel() for t in tensors}.values())
