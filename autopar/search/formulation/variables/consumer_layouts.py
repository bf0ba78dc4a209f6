"""Variables of consumer layouts: a value is moved once for all its readers, and saved or re-gathered as moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.ir.graph import is_backward
from autopar.search.formulation.variables.activation_states import (
    has_states,
    host_copy_seconds,
    may_offload,
    states_of,
)
from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.tensors import tensor_variable
from autopar.search.formulation.variables.variable import HOISTED_FREED, NOT_SAVED, RECOMPUTED, Variable


def consumer_layout(context: BuildContext, key: str, out: int, users: Mapping[tuple[str, int], int]) -> Variable:
    """The variable of the layout in which all readers of a class's values take them.

    Args:
        context: of the problem.
        key: of the class.
        out: which of its outputs.
        users: the readers, and how many edges there are to each.
    """
    node, count = context.classes.members[key][0], context.classes.count[key]
    name = f"{key} {out}"
    found = tensor_variable(context, f"consumer {name}", count, context.dims.types[node, out], "consumer", (name,))
    backward = [context.is_backward_class(user) for user, _ in users]
    # What only the backward pass reads is moved there.
    invariant = node in context.program.microbatch_invariant and not all(backward)
    found = replace(found, invariant=invariant, backward=all(backward))
    if not has_states(context, found) or is_backward(node) or all(backward):
        return found
    states = [s for s in states_of(context, node) if not (s in (NOT_SAVED, HOISTED_FREED) and any(backward))]
    size = context.bytes(found, "in", 0) if context.memory.activations else np.zeros(len(found.cost))
    # What can be re-gathered, for nothing if it is not moved at all, is offloaded as produced.
    offloads = any(backward) and RECOMPUTED not in states and may_offload(context, found, node, states)
    copies = host_copy_seconds(context, node, size, count) if offloads else None
    saved = np.minimum(size, context.most_saved(key, out, consumer=True)) * context.share_of(found)
    if any(backward) and RECOMPUTED not in states:
        found, states = replace(found, alias_only=True), [*states, RECOMPUTED]
    # A consumer layout costs nothing but the moves to it, and copies.
    prices = context.kernel_prices(node) if copies is not None else (1.0, 1.0, 1.0)
    return found.in_states(states, 1, saved, copies, prices)
