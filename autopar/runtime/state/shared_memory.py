"""Memory that a parameter shares with other tensors: a step of the optimizer shows there, but not once it is split."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from autopar._torch_compat import storage_id
from autopar.capture.intercepts import extent
from autopar.capture.state.slots import VIEW_OF, own_attributes, state_tensors
from autopar.capture.state.values import DEEPEST, children
from autopar.errors import CaptureError


def mark_views(model: nn.Module) -> None:
    """Note at buffers and attributes which trained parameter they are views of, before it is split.

    A call that reads one is refused; some are only there until a call sets them, as in `nn.utils.spectral_norm`.

    Raises:
        CaptureError: two parameters share memory, and one of them is trained.
    """
    parameters: dict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.is_meta:
            parameters[storage_id(p)].append((name, p))
    for group in parameters.values():
        for (name, p), (other, q) in itertools.combinations(group, 2):
            if (p.requires_grad or q.requires_grad) and _overlap(p, q):
                raise CaptureError(
                    f"parameters {name!r} and {other!r} share their memory, so that a step of one would show in the "
                    f"other, which a mesh cannot do; make them one parameter (the same object), or copy one (clone())"
                )
    for tensor in (*state_tensors(model).values(), *_held(model)):
        dense = tensor.layout is torch.strided and not tensor.is_meta
        own = parameters.get(storage_id(tensor), ()) if dense else ()
        of = [name for name, p in own if p.requires_grad and p is not tensor and _overlap(p, tensor)]
        if of:
            vars(tensor)[VIEW_OF] = of[0]


def _held(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in lists, dicts and objects among the attributes."""
    seen: set[int] = set()
    left = [(value, 0) for module in model.modules() for value in own_attributes(module).values()]
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and depth < DEEPEST and not isinstance(value, nn.Module):
            seen.add(id(value))
            left += [(inner, depth + 1) for _, inner in children(value) or ()]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    (first, last), (start, end) = extent(a), extent(b)
    if first >= end or start >= last or a.itemsize != b.itemsize:
        return first < end and start < last
    # Slices of one tensor may lie between one another's rows.
    room = torch.zeros(max(last, end) // a.itemsize, dtype=torch.bool)
    room.as_strided(a.shape, a.stride(), int(a.storage_offset())).fill_(True)
    return bool(room.as_strided(b.shape, b.stride(), int(b.storage_offset())).any())
