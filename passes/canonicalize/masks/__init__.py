"""masks_by_function: attention gets what makes its mask, not the mask.

Before (``at`` and ``of`` are the positions of queries and keys, ``ids`` the documents of tokens)::

    mask = aten.bitwise_and(aten.ge(at, of), aten.eq(aten.unsqueeze(ids, 2), aten.unsqueeze(ids, 1)))
    bias = aten.where(mask, 0.0, -inf); out, logsumexp = autopar.attention(q, k, v, bias, None, 0.0, False, None)

After::

    out, logsumexp = autopar.attention_masked(
        q, k, v, [ids_of_queries, ids_of_keys], '[["aten.eq.Tensor", "%0", "%1"]]', False, 8192, 0, 0, 0, 8192, None
    )

A mask is walked back, operator by operator, as long as each element depends on the same elements of what makes it. What
is left are *leaves*, tensors of queries or of keys; what compares positions alone is a window, and no formula. A mask
that is nothing else becomes a window, or causal, or goes, however long the sequence: no mask is computed to be looked
at. A bias that is looked up by queries and keys in a table, which may be learned, is a formula of this table
(`autopar.passes.canonicalize.masks.learned`). Masks that others read too are still made for them; one with another
gradient, or with a part of queries times keys that no formula makes, stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import computed, copy_graph
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.formula.attention_rows import attention_rows, attention_rows_backward
from autopar.ir.ops.sequence.masked_attention import (
    INFINITY,
    NUMBERS,
    PLACES,
    ROWS,
    attention_masked,
    attention_masked_backward,
    has_table_gradient,
)
from autopar.ir.program import Program
from autopar.passes.canonicalize.masks.by_distance import look_up_by_distance
from autopar.passes.canonicalize.masks.constants import SAME, VIEWS, Constants, value_of
from autopar.passes.canonicalize.masks.learned import Sums, end_of, give_gradients, gradient_of_bias, sums_of
from autopar.passes.canonicalize.masks.lookups import Lookup
from autopar.passes.canonicalize.masks.positions import Window
from autopar.passes.canonicalize.masks.walk import Opaque, Walk

aten = torch.ops.aten

_MOST = 64
"""Calls of a formula, beyond which a mask is rather made once."""


def masks_by_function(program: Program) -> Program:
    """Give attention the functions of its masks; computes the same."""
    found = [n for n in program.graph.graph.nodes if _bias(n) is not None or _is_unmasked(n)]
    if not found:
        return program
    graph = copy_graph(program.graph)
    known = Constants(graph)
    look_up_by_distance(graph.graph, known)
    masked = [n for n in graph.graph.nodes if _bias(n) is not None]
    told = {_bias(n) for n in masked if n.target is attention_rows and _gives_logarithm(n)}
    nodes = [n for n in masked if _bias(n) not in told]
    given = _given(graph.graph, known, nodes)
    gradients = {n: g for n in nodes if n.target in _BACKWARD and n.args[-1] and (g := gradient_of_bias(n)) is not None}
    learned = _learned(graph.graph, known, given, gradients)
    # A bias whose gradient is wanted stays, for all that read it, where its function's is not known.
    staying = {_bias(n) for n in gradients if not any(gradients[n] in sums.biases for sums in learned)}
    for node, mask in given.items():
        if _bias(node) not in staying:
            _rewrite(graph.graph, node, mask, _shape(node))
    for node in graph.graph.nodes:
        if _is_unmasked(node):
            _rewrite(graph.graph, node, _Mask((), "", None, False, Window(), True, ()), _shape(node))
    lookups = {g: given[n].lookups for n, g in gradients.items() if n in given}
    for sums in learned:
        give_gradients(graph.graph, sums, lookups)
    return program.with_graph(graph)


def _given(graph: fx.Graph, known: Constants, nodes: Sequence[fx.Node]) -> dict[fx.Node, _Mask]:
    """The functions of masks, of attention operators whose masks have one."""
    made: dict[tuple[_Root, tuple[int, ...]], _Mask | None] = {}
    found: dict[fx.Node, _Mask] = {}
    for node in nodes:
        bias = _bias(node)
        if bias is None or _has_more(node):
            continue
        root, shape = _root(bias, known), _shape(node)
        if root.shown is None and 1 in value_of(bias).shape[-2:]:
            continue  # what is added is no tensor of queries times keys
        # Equal masks of all layers are made in each of them from the same one.
        key = root.of_all_layers, shape
        if key not in made:
            made[key] = _mask(graph, known, root, shape)
        mask = made[key]
        if mask is not None:
            found[node] = mask
    return found


def _learned(
    graph: fx.Graph, known: Constants, given: Mapping[fx.Node, _Mask], gradients: Mapping[fx.Node, fx.Node]
) -> list[Sums]:
    """Sums of gradients of biases that can be those of tables."""
    of = {g: given[n].lookups if n in given and given[n].has_gradient else () for n, g in gradients.items()}
    found = sums_of(graph, gradients.values(), known)
    while True:
        # A bias that stays for one attention does for all of its readers, and with these for all of their sums.
        covered = {g for sums in found for g in sums.biases}
        staying = {_bias(n) for n, g in gradients.items() if g not in covered}
        biases = {g: _bias(n) for n, g in gradients.items()}
        kept = [
            sums
            for sums in found
            if all(of[g] and biases[g] not in staying for g in sums.biases)
            and all(any(end_of(of[g], *end) is not None for g in sums.biases) for end in sums.ends)
        ]
        if len(kept) == len(found):
            return kept
        found = kept


def _gives_logarithm(node: fx.Node) -> bool:
    """Whether more than gradients read the logarithm of attention, which is not the same of all operators."""
    logs = [user for user in node.users if user.args[1] == 1]
    return any(reader.target is not attention_rows_backward for log in logs for reader in log.users)


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of the scores of an attention operator."""
    queries, keys = (value_of(a).shape for a in node.args[0 if node.target in _FORWARD else 1 :][:2])
    return (*queries[:3], keys[2])


def _bias(node: fx.Node) -> fx.Node | None:
    """What is added to the scores of an attention operator."""
    if node.target not in (*_FORWARD, *_BACKWARD):
        return None
    found: Any = node.args[3 if node.target in _FORWARD else 4]
    return found if isinstance(found, fx.Node) else None


def _is_unmasked(node: fx.Node) -> bool:
    """Whether nothing but a cap keeps attention from a kernel."""
    forward = node.target is attention_rows
    rows = forward or node.target is attention_rows_backward
    return rows and all(a is None for a in (node.args[3:5] if forward else node.args[4:6]))


def _has_more(node: fx.Node) -> bool:
    """Whether attention has dropout, or a causal mask beside its bias."""
    kept = node.args[4 if node.target in _FORWARD else 5] is not None
    plain = node.target in (attention, attention_backward)
    return kept or (plain and bool(node.args[6 if node.target is attention else 9]))


@dataclass(frozen=True)
class _Root:
    """A mask: where its values come from, what is added to the scores, and what says which of these there are.

    Attributes:
        node: of which the mask is a function that is known.
        bias: what is added.
        shown: which scores there are.
        added: what is added to these.
        inverted: ``shown`` says which there are not.
        exact: minus infinity is added to these, not a number in its place.
    """

    node: fx.Node
    bias: fx.Node
    shown: fx.Node | None
    added: fx.Node | None
    inverted: bool = False
    exact: bool = True

    @property
    def of_all_layers(self) -> _Root:
        """The same of another bias that is made of the same mask."""
        return replace(self, bias=self.node)


def _root(bias: fx.Node, known: Constants) -> _Root:
    """What a mask's values say, and where from."""
    # Leading dims, copies and other floating dtypes change nothing of that.
    while bias.target in (*SAME, *VIEWS) and value_of(bias).is_floating_point():
        (source, *_) = bias.all_input_nodes
        before, after = (_without_leading_ones(value_of(n)) for n in (source, bias))
        if before != after or not value_of(source).is_floating_point():
            break
        bias = source
    args: Any = bias.args
    if bias.target is aten.where.self:
        hides = [_hides(known.number(a), bias) for a in args[1:]]
        if hides[0] != hides[1]:
            other, least = (args[1], args[2]) if hides[1] else (args[2], args[1])
            added = None if known.number(other) == 0 else other
            exact = known.number(least) == -math.inf
            return _Root(args[0] if added is None and exact else bias, bias, args[0], added, hides[0], exact)
    if bias.target is aten.masked_fill.Scalar and _hides(args[2], bias):
        added = None if known.number(args[0]) == 0 else args[0]
        return _Root(bias, bias, args[1], added, True, args[2] == -math.inf)
    return _Root(bias, bias, None, bias)


def _hides(number: Any, bias: fx.Node) -> bool:
    """Whether a number that is added to scores is what models take for minus infinity."""
    least = max(torch.finfo(value_of(bias).dtype).min, torch.finfo(torch.float32).min)
    return isinstance(number, int | float) and number <= least


def _without_leading_ones(value: torch.Tensor) -> list[int]:
    shape = list(value.shape)
    while shape and shape[0] == 1:
        shape.pop(0)
    return shape


@dataclass(frozen=True)
class _Mask:
    """A mask's function: the leaves as nodes of the graph, and see `attention_masked`."""

    leaves: tuple[fx.Node, ...]
    formula: str
    table: fx.Node | None
    added: bool
    window: Window
    is_exact: bool
    lookups: tuple[Lookup, ...]

    @property
    def has_gradient(self) -> bool:
        """Whether the operator has a gradient of the table."""
        return self.table is not None and has_table_gradient(self.formula, len(self.leaves) + 1)


def _mask(graph: fx.Graph, known: Constants, root: _Root, shape: tuple[int, ...]) -> _Mask | None:
    """The function of a mask; None if it has none."""
    if min(shape[2:]) == 1:
        return None
    walk = Walk(known, shape)
    try:
        window, shown = Window(), None
        if root.shown is not None:
            walk.find_runs(root.shown, ())
            window, shown = walk.hidden(root.shown, ()) if root.inverted else walk.seen(root.shown, ())
        added = root.added is not None
        # A query that sees nothing sees everything where a number is in the place of minus infinity.
        sees_itself = shape[2] == shape[3] and (window.low or 0) <= 0 <= (window.high or 0)
        if not root.exact and (shown is not None or not sees_itself):
            window, shown, added = Window(), walk.formula(root.bias, ()), True
        elif root.added is not None:
            # Both in one: what is added is minus infinity where nothing is seen.
            shown = walk.formula(root.added if shown is None else root.bias, ())
    except Opaque:
        return None
    if len(walk.calls) > _MOST:
        return None
    exact = not added or walk.is_moderate
    return _Mask(*walk.placed(graph, root.node, shown), added, window, exact, tuple(walk.lookups))


def _rewrite(graph: fx.Graph, node: fx.Node, mask: _Mask, shape: tuple[int, ...]) -> None:
    """Give an attention operator, or its backward, the function of its mask."""
    forward, (queries, keys) = node.target in _FORWARD, shape[2:]
    by_rows = node.target in (attention_rows, attention_rows_backward)
    tensors, rest = (node.args[:3], node.args[5:]) if forward else (node.args[:4], node.args[6:])
    far = max(queries, keys)
    before = far if mask.window.low is None else min(-mask.window.low, far)
    after = far if mask.window.high is None else min(mask.window.high, far)
    is_all = before >= queries - 1 and after >= keys - 1
    is_causal = queries == keys and before >= queries - 1 and after == 0
    scale, cap, placed = (rest[-3:] if forward else rest[-4:-1]) if by_rows else (
        rest[-1 if forward else -2], None, False)  # fmt: skip
    saved = () if forward else rest[:2]
    if not mask.formula and (is_all or is_causal) and cap is None:
        numbers: tuple[Any, ...] = (None, None, *saved, 0.0, is_causal and not is_all, scale)
        node.target, node.args = (attention, (*tensors, *numbers)) if forward else (
            attention_backward, (*tensors, *numbers, False))  # fmt: skip
    else:
        hides = INFINITY if mask.is_exact else NUMBERS if not by_rows else PLACES if placed else ROWS
        numbers = (mask.formula, mask.added, before, after, 0, 0, keys, scale, mask.table, cap, hides)
        node.target = attention_masked if forward else attention_masked_backward
        wanted = () if forward else (bool(rest[-1]) and mask.table is not None,)
        node.args = (*tensors, list(mask.leaves), *saved, *numbers, *wanted)
    node.meta["val"] = computed(node)
    for user in list(node.users):
        index: Any = user.args[1]
        user.meta["val"] = node.meta["val"][index]
        if not user.users:  # of the bias, which nobody asks for
            graph.erase_node(user)


_FORWARD, _BACKWARD = (attention, attention_rows), (attention_backward, attention_rows_backward)
