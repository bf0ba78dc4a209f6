"""Whether a query may see no key at all, which kernels of attention and a softmax of numbers take differently.

Models hide a key with a large number, beside which no score counts. A softmax of a query that sees none is the mean of
all keys then. A kernel's backward pass has the logarithm of the sum, which is as large as the number, and has lost how
many keys there are: its gradients are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar._torch_compat import traced_node, without_modes

HIDDEN = -1e38
"""What is at most this is put in a score's place to hide a key: beside it no score counts."""

_LARGE = -1e30


@dataclass(frozen=True)
class Part:
    """A part of what is added to scores.

    Attributes:
        tensor: what is added, or a mask.
        number: what is in a score's place where the mask says so; None: there is no mask.
        inverted: the mask says where a score stays.
    """

    tensor: Tensor
    number: float | None = None
    inverted: bool = False


def may_hide_rows(
    parts: Iterable[Part],
    known: Callable[[fx.Node], Tensor | None],
    learned: Callable[[], Iterable[Tensor]],
    queries: int,
    keys: int,
) -> bool:
    """Whether numbers may hide all keys from a query.

    Args:
        parts: of what is added to the scores; each broadcasts to ``[..., queries, keys]``.
        known: the value of a node that depends on no input; None if it does.
        learned: the model's parameters, which are of moderate size.
        queries: their number.
        keys: their number.
    """
    nodes = [(part, traced_node(part.tensor)) for part in parts]
    values = [(part, node, None if node is None else known(node)) for part, node in nodes]
    for part, node, value in values:
        of_batch = part.number != -math.inf if part.number is not None else _may_be_large(node, learned)
        if value is None and of_batch:
            return True
    with without_modes(), torch.no_grad():
        seen, is_large = torch.ones(queries, keys, dtype=torch.bool), False
        for part, _, value in values:
            if value is None:
                continue
            if part.number is None:
                hides = value <= _LARGE
                is_large = is_large or bool((hides & (value != -math.inf)).any())
            else:
                hides = ~value if part.inverted else value
                is_large = is_large or part.number != -math.inf
            while hides.ndim > 2:
                hides = hides[0] if hides.stride(0) == 0 else hides.any(0)
            seen &= ~hides
        return is_large and not bool(seen.any(1).all())


def places(
    parts: Iterable[Part], known: Callable[[fx.Node], Tensor | None], learned: Callable[[], Iterable[Tensor]]
) -> bool | None:
    """Whether large numbers are in the places of scores, which have no gradients then; None: some are added, too.

    The same arguments as of `may_hide_rows`.
    """
    found = {part.number is not None for part in parts if _hides_by_number(part, known, learned)}
    return found.pop() if len(found) == 1 else None


def _hides_by_number(
    part: Part, known: Callable[[fx.Node], Tensor | None], learned: Callable[[], Iterable[Tensor]]
) -> bool:
    if part.number is not None:
        return part.number != -math.inf
    node = traced_node(part.tensor)
    value = None if node is None else known(node)
    if value is None:
        return _may_be_large(node, learned)
    with without_modes(), torch.no_grad():
        return bool(((value <= _LARGE) & (value != -math.inf)).any())


def _may_be_large(node: fx.Node | None, learned: Callable[[], Iterable[Tensor]]) -> bool:
    """Whether a large number may be in a tensor: the trace has one, or it comes with the batch."""
    pending, met = [node], set[fx.Node | None]()
    while pending:
        current = pending.pop()
        if current is None:
            return True
        if current in met:
            continue
        met.add(current)
        if any(isinstance(a, float) and -math.inf < a <= _LARGE for a in (*current.args, *current.kwargs.values())):
            return True
        if current.op == "placeholder":
            value = current.meta.get("val")
            whole = isinstance(value, Tensor) and not value.is_floating_point()
            if not whole and not any(traced_node(p) is current for p in learned()):
                return True
        pending += current.all_input_nodes
    return False
