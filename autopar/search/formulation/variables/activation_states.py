"""In which states the values of the forward pass may be, and what each state costs and needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.costs.host_copies import copy_seconds
from autopar.ir import checkpoint_regions
from autopar.ir.graph import is_backward
from autopar.ir.ops.accumulate import accumulate
from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.variable import (
    HOISTED_FREED,
    NOT_SAVED,
    RECOMPUTED,
    SAVED,
    Floats,
    Variable,
)


def has_states(context: BuildContext, variable: Variable) -> bool:
    """Whether there is a choice of states; for an invariant there is one even where nothing is recomputed."""
    return context.memory.decides_saving or (variable.invariant and context.memory.activations)


def states_of(context: BuildContext, node: fx.Node) -> tuple[int, ...]:
    """States that a forward value may have."""
    memory = context.memory
    pin = context.program.pins.get(node) if memory.regions else None
    if pin is not None:
        return (NOT_SAVED, SAVED) if pin == checkpoint_regions.SAVED else (NOT_SAVED, RECOMPUTED)
    if not memory.activations:
        return (SAVED,)  # it needs no memory that counts
    anything = memory.recompute == "search" and node not in context.block_boundaries
    # Recomputing a view costs nothing, and is always allowed.
    recomputable = anything or context.is_view(node) or node in context.regatherable
    states = (NOT_SAVED, SAVED, RECOMPUTED) if recomputable else (NOT_SAVED, SAVED)
    return (*states, HOISTED_FREED) if node in context.program.microbatch_invariant else states


def may_recompute(context: BuildContext, node: fx.Node) -> bool:
    """Whether a forward operator may be recomputed."""
    return RECOMPUTED in states_of(context, node)


def may_offload(context: BuildContext, variable: Variable, node: fx.Node, states: Sequence[int]) -> bool:
    """Whether the result of a forward operator may be offloaded until the backward pass reads it."""
    computed = node in context.program.sources and not context.is_view(node) and node not in context.module_outputs
    return context.memory.offload and SAVED in states and computed and not variable.invariant


def host_copy_seconds(context: BuildContext, node: fx.Node, size: Floats, copies: int) -> Floats:
    """Seconds per step of each label to copy so many bytes, in so many tensors, to the host and back."""
    device = context.tables.machine.device
    seconds: Floats = 2 * context.program.runs(node) * copy_seconds(size, device, copies)
    return seconds


def with_states(context: BuildContext, variable: Variable, node: fx.Node) -> Variable:
    """An operator's variable with its states, and with the memory that its results need."""
    memory = context.memory
    if node.target is accumulate and memory.activations:  # the sum over microbatches is held throughout the step
        return replace(
            variable,
            cost=context.kernel_prices(node)[0] * variable.cost,
            seconds=variable.cost,
            memory=context.bytes(variable, "out", 0) * memory.state_share,
        )
    prices = context.kernel_prices(node)
    # An invariant without states is hoisted; whatever else has none runs where it is.
    priced = replace(variable, cost=prices[2 if variable.invariant else 0] * variable.cost, seconds=variable.cost)
    if is_backward(node) or not (memory.activations or memory.decides_saving):
        return priced
    reads = context.reads[variable.key]
    # Where the backward pass reads some outputs, others, which only recomputation reads, are left out: the constraint
    # must not count more than an emitted graph holds.
    used = {out for out, backward in reads.items() if backward} or reads.keys()
    size, saved, tensors = _saved_bytes(context, variable, node, used)
    if not has_states(context, variable):
        return replace(priced, memory=variable.memory + saved)
    states = states_of(context, node)
    copies = host_copy_seconds(context, node, size, tensors * variable.count)
    if RECOMPUTED in states:
        # What is faster to recompute need not be offloaded: its arguments are there, or are offloaded themselves.
        copies = np.where(copies <= variable.cost, copies, np.inf)
    alone = any(not context.has_consumer_layout(variable.key, out) for out in used)  # else that is offloaded
    offloads = (RECOMPUTED in states or alone) and may_offload(context, variable, node, states)
    runs = context.program.runs(node) if variable.invariant else 1
    copies_or_none = copies if offloads and np.isfinite(copies).any() else None
    found = variable.in_states(states, runs, saved, copies_or_none, prices)
    others = [i for port, i in variable.types if port == "out" and i not in used]
    uncounted = _uncounted(context, variable, node, others)
    if uncounted is None:
        return found
    return replace(found, uncounted=np.where(found.state == SAVED, np.resize(uncounted, len(found.cost)), 0.0))


def _saved_bytes(
    context: BuildContext, variable: Variable, node: fx.Node, used: Collection[int]
) -> tuple[Floats, Floats, int]:
    """Bytes of the used outputs of each label, those that count where it is saved, and how many tensors they are."""
    none = np.zeros(len(variable.cost))
    size, saved, tensors = none, none, 0
    for port, i in variable.types if context.memory.activations else ():
        if port == "out" and i in used and (has_states(context, variable) or (node, i) in context.saved_for_backward):
            own = context.bytes(variable, "out", i)
            size, saved = size + own, saved + np.minimum(own, context.most_saved(variable.key, i))
            tensors += 1
    return size, saved * context.share_of(variable), tensors


def _uncounted(context: BuildContext, variable: Variable, node: fx.Node, others: Sequence[int]) -> Floats | None:
    """Bytes that emitted graphs hold besides the outputs that the backward pass itself reads.

    A saved view holds the whole tensor that it is a part of. Of the other outputs, those are held of which the backward
    pass reads a view.

    Args:
        context: of the problem.
        variable: of the operator.
        node: the operator.
        others: outputs that are not counted.
    """
    if not context.memory.activations or not context.memory.decides_saving:
        return None
    if context.dims.operators[node].rule.view:
        return context.bytes(variable, "out", 0) * max(
            _base_elements(context, node) / max(variable.types["out", 0].numel, 1) - 1, 0
        )
    read = [i for i in others if _backward_reads_view(context, variable.key, i)]
    none = np.zeros(len(variable.cost))
    sizes = [np.minimum(context.bytes(variable, "out", i), context.most_saved(variable.key, i)) for i in read]
    return sum(sizes, none) * context.share_of(variable) if read else None


def _base_elements(context: BuildContext, node: fx.Node) -> float:
    """Elements of the tensor that a view is a view of."""
    while context.is_view(node):
        node, out = context.program.sources[node][0]
    return float(context.dims.types[node, out].numel)


def _backward_reads_view(context: BuildContext, key: str, out: int) -> bool:
    """Whether the backward pass reads an output of a class, or a view of it."""
    if context.reads[key].get(out):
        return True
    users = dict.fromkeys(user for user, _ in context.classes.uses.get((key, out), ()))
    nodes = [(user, context.classes.members[user][0]) for user in users if user in context.classes.members]
    views = [user for user, n in nodes if context.is_view(n)]
    return any(_backward_reads_view(context, user, 0) for user in views)
