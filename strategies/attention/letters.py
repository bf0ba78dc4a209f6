"""What rules of attention have in common: letters of its tensors, sizes, operations, and what a causal mask hides."""

import math
from typing import Any

import torch

from autopar.rules.rule import LAST, Spec, dims

aten = torch.ops.aten

BHQD = "b(hg)qd"
BHKD = "bhkd"
BHKE = "bhke"
BHQE = "b(hg)qe"
BHQK = "b(hg)qk"

HEADS_LAST = (LAST,) * 3
"""Kernels read the elements of a query, a key or a value as contiguous."""


def mask_letters(mask: Spec) -> str:
    """Letters of a mask that broadcasts to ``b(hg)qk``; g is 1 where there is one."""
    # Masks align at the last dim.
    names = ["b", "hg", "q", "k"][4 - mask.ndim :]
    return dims([c if n != 1 else "" for c, n in zip(names, mask.shape, strict=True)])


def plain_letters(t: Any) -> list[str]:
    """A tensor argument without split dims, such as a random state; nothing if it is absent."""
    return ["1" * t.ndim or "."] if isinstance(t, Spec) else []


def head_sizes(query: Spec, key: Spec) -> dict[str, int]:
    """Sizes of letters that shapes do not tell apart: heads of keys, and queries' heads for each of them."""
    return {"h": key.shape[1], "g": query.shape[1] // key.shape[1]}


def blocked(dropout_p: float, queries: bool) -> str:
    """Letters that are not split; ``queries``: these neither."""
    if dropout_p > 0:
        return "bhgqkde"  # random numbers depend on the position in the local tensor
    return "kde" + ("q" if queries else "")


def count_flops(query: Spec, key: Spec, value: Spec, products: float, causal: bool) -> float:
    """Operations of some products of scores' size; a kernel skips what a causal mask hides."""
    (b, h, q, d), k, e = query.shape, key.shape[2], value.shape[3]
    # The lower triangle; causal masks of other shapes are counted in full.
    pairs = q * (q + 1) / 2 if causal and q == k else q * k
    return products * b * h * pairs * (d + e)


def hide_later_keys(context: Any, like: Any) -> Any:
    """What is added to the scores of this device's queries, so that they do not see later keys."""
    queries, keys = context.local_size("q"), context.global_size("k")
    # Row r of this device is query ``index * queries + r``, which sees the keys up to itself.
    hidden = aten.new_full.default(like, [queries, keys], -math.inf)
    return aten.triu.default(hidden, context.axis_index() * queries + 1)
