"""Attention under a mask that is given by its function: no tensor of queries times keys is ever whole.

A mask is a window, which queries see so many keys before and after their own position, and a formula of *leaves*:
tensors that have queries or keys, not both, such as the document of each token. The operator computes as many rows at
a time as there is room for, of the keys that the window leaves these; so what a window hides costs nothing.

Before::

    mask = (at >= of) & (at - of < 4096) & (ids[:, :, None] == ids[:, None])
    out, logsumexp = autopar.attention(q, k, v, where(mask, 0, -inf), None, 0.0, False, None)

After::

    out, logsumexp = autopar.attention_masked(
        q, k, v, [ids_of_queries, ids_of_keys], '[["aten.eq.Tensor", "%0", "%1"]]', False, 4095, 0, 0, 0, 8192, None
    )

A device that has some of the queries, or of the keys, is told where they begin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.attention_kernels import NOTHING
from autopar.ir.ops.formula import of_tables
from autopar.ir.ops.formula.attention_block import shift_of
from autopar.ir.ops.formula.look_up import look_up
from autopar.ir.ops.formula.of_tables import Of

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor[] leaves"
_MASK = (
    "str formula, bool added, int before, int after, int first_query, int first_key, int positions, float? scale, "
    "Tensor? table=None, float? cap=None, str hides='numbers'"
)
_library.define(f"attention_masked({_TENSORS}, {_MASK}, Tensor? shift=None) -> (Tensor, Tensor)")
_library.define(
    f"attention_masked_backward(Tensor grad, {_TENSORS}, Tensor out, Tensor logsumexp, {_MASK}, "
    "bool table_gradient=False, Tensor? shift=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_masked_shift(Tensor query, Tensor[] leaves, str formula, bool added, int before, int after, "
    "int first_query, int positions, Tensor? table) -> Tensor"
)

attention_masked = torch.ops.autopar.attention_masked.default
"""Scaled dot-product attention under a mask.

Args:
    query: ``[batch, heads, queries, head]``.
    key: ``[batch, kv_heads, keys, head]``; each serves ``heads / kv_heads`` consecutive heads of the queries.
    value: ``[batch, kv_heads, keys, value_head]``.
    leaves: what the formula reads; each broadcasts to ``[batch, heads, queries, keys]``, with 1 query or 1 key.
    formula: see `evaluate`; empty: there is none.
    added: it gives what is added to the scores, not which keys are seen.
    before: a query at position ``p`` sees keys from ``p - before`` on.
    after: and up to ``p + after``.
    first_query: position of the first query.
    first_key: position of the first key; keys at negative positions, and from ``positions`` on, are seen by none.
    positions: how many there are.
    scale: of the scores; None: ``head ** -0.5``.
    table: ``[rows, heads]`` or ``[rows, 1]``, the formula's last leaf, which it looks up and which may be learned.
    cap: scores are ``cap * tanh(scores / cap)`` before the mask; None: as they are.
    hides: what hides keys: `INFINITY`, `NUMBERS`, `ROWS` or `PLACES`.
    shift: of the last two, where these are some of the keys: `attention_masked_shift` of all keys.

Returns:
    The result ``[batch, heads, queries, value_head]``, and the logarithm of each query's sum of exponentials; `NOTHING`
    for a query that sees no key, whose result is zero. Of `ROWS` and `PLACES` it is that of scores less the shift, see
    `autopar.ir.ops.formula.attention_block`.
"""

attention_masked_backward = torch.ops.autopar.attention_masked_backward.default
"""Gradients of query, key, value and table; that of the table is empty where it is not asked for."""

attention_masked_shift = torch.ops.autopar.attention_masked_shift.default
"""The largest number that is added to any score of each query, ``[batch, heads, queries, 1]``; 0 where it sees no key.

Leaves are of all keys; a dim that all of them lack is 1 here, too.
"""

INFINITY, NUMBERS, ROWS, PLACES = "infinity", "numbers", "rows", "places"
"""Minus infinity alone; large numbers, too; and these maybe hide all keys of a query.

Of the last two, large numbers are added to scores, whose gradients are those of the sum, or stand in their places.
"""

LARGEST = 2**25
"""Elements of a mask's rows that are computed at a time, of one sample and one head."""

FEWEST = 128
"""Rows below which they are not divided further: kernels of fewer are slow."""


def band_rows(queries: int, keys: int, before: int, after: int, positions: int, at_once: int = 1) -> int:
    """How many queries are computed at a time: about a quarter of the window, or an eighth of them under half a mask.

    Args:
        queries: of this device.
        keys: of this device.
        before: of the window.
        after: of the window.
        positions: of the sequence.
        at_once: in how many samples and heads scores of a band are in memory at a time.
    """
    rows = queries
    limits = [n < positions - 1 for n in (before, after)]
    if all(limits):
        rows = max(FEWEST, -(-(before + after + 1) // 4))
    elif any(limits):
        rows = max(FEWEST, -(-queries // 8))
    return max(1, min(rows, queries, LARGEST // max(keys * at_once, 1)))


def pairs(queries: int, keys: int, before: int, after: int, positions: int, at_once: int = 1) -> float:
    """How many scores are computed, at most: those of the rows that are computed at a time, and of their keys."""
    rows = band_rows(queries, keys, before, after, positions, at_once)
    wide = [n if n < positions - 1 else None for n in (before, after)]
    if None not in wide:
        return float(queries * max(min(keys, before + after + rows), 1))
    # Half a mask of a whole sequence: each band sees a part of the keys. Of a part the last device's sees all.
    half = any(n is not None for n in wide) and queries == keys == positions
    return queries * (keys + rows) / 2.0 if half else float(queries * keys)


def bands(
    queries: int, keys: int, before: int, after: int, first_query: int, first_key: int, positions: int, at_once: int = 1
) -> Iterator[tuple[int, int, int, int]]:
    """First and last of some queries, and of the keys that any of them may see, the last excluded."""
    rows = band_rows(queries, keys, before, after, positions, at_once)
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        low = max(first_query + start - before, 0, first_key)
        high = min(first_query + end - 1 + after, positions - 1, first_key + keys - 1)
        yield start, end, low - first_key, max(high + 1, low) - first_key


def evaluate(formula: str, leaves: Sequence[Any]) -> Any:
    """The value of a formula: a list of calls in JSON, ``["aten.eq.Tensor", "%0", "%1"]``.

    ``%i`` is leaf ``i``, or what a call before gave, counted on from the leaves; a mapping at the end has arguments by
    name. The last one's is the value.
    """
    return _values(formula, leaves)[-1]


def _values(formula: str, leaves: Sequence[Any]) -> list[Any]:
    """Of leaves and of all calls."""
    found = list(leaves)
    for target, args, kwargs in _calls(formula):
        found.append(target(*(found[a.number] if isinstance(a, Of) else a for a in args), **kwargs))
    return found


def has_table_gradient(formula: str, leaves: int) -> bool:
    """Whether there is a gradient of the table that a formula looks up, of which that is the last of its leaves."""
    return of_tables.has_gradient([call[:2] for call in _calls(formula)], leaves - 1)


_OWN = {str(look_up): look_up}


@lru_cache(256)
def _calls(formula: str) -> tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]:
    found = []
    for name, *args in json.loads(formula):
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        named = {k: getattr(torch, v) if k == "dtype" else v for k, v in kwargs.items()}
        namespace, operator, overload = name.split(".")
        target = _OWN[name] if name in _OWN else getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        read = tuple(Of(int(a[1:])) if isinstance(a, str) else a for a in args)
        found.append((target, read, named))
    return tuple(found)


def _bias(
    query: Tensor, leaves: Sequence[Tensor], table: Tensor | None, ends: tuple[int, int, int, int], mask: _Mask
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to some queries' scores, and which of these see no key; None: nothing, and none."""
    start, end, low, high = ends
    shown, bias = None, None
    at = torch.arange(start + mask.first_query, end + mask.first_query, device=query.device).unsqueeze(1)
    of = torch.arange(low + mask.first_key, high + mask.first_key, device=query.device)
    # Of a band that the window leaves whole nothing is computed.
    if end - 1 + mask.first_query - mask.before > low + mask.first_key:
        shown = of >= at - mask.before
    if start + mask.first_query + mask.after < high - 1 + mask.first_key:
        seen = of <= at + mask.after
        shown = seen if shown is None else shown & seen
    if mask.formula:
        value = evaluate(mask.formula, _read(leaves, table, ends))
        if mask.added:
            bias = value.to(query.dtype)
        else:
            shown = value if shown is None else shown & value
    if shown is not None:
        shown = shown.reshape((1,) * (4 - shown.ndim) + shown.shape)
        whole = query.new_zeros(()) if bias is None else bias
        bias = torch.where(shown, whole, query.new_full((), -math.inf))
    if bias is None:
        return None, None
    bias = bias.expand(*bias.shape[:2], end - start, high - low)
    return bias, (bias == -math.inf).all(-1)


def _read(leaves: Sequence[Tensor], table: Tensor | None, ends: tuple[int, int, int, int]) -> list[Tensor]:
    """What a formula reads for some queries and keys."""
    return [*(_part(t, ends) for t in leaves), *([] if table is None else [table])]


def _of_table(
    leaves: Sequence[Tensor], table: Tensor, ends: tuple[int, int, int, int], mask: _Mask, of_bias: Tensor
) -> Tensor:
    """The gradient of a table, from that of what some queries and keys make of it."""
    values = _values(mask.formula, _read(leaves, table, ends))
    of_bias = of_bias.to(values[-1].dtype).sum_to_size(values[-1].shape)
    return of_tables.gradient([call[:2] for call in _calls(mask.formula)], values, len(leaves), of_bias)


def _part(leaf: Tensor, ends: tuple[int, int, int, int]) -> Tensor:
    start, end, low, high = ends
    leaf = leaf if leaf.shape[2] == 1 else leaf[:, :, start:end]
    return leaf if leaf.shape[3] == 1 else leaf[:, :, :, low:high]


@dataclass(frozen=True)
class _Mask:
    """A mask's formula, where its window is, and how scores become weights."""

    formula: str
    added: bool
    before: int
    after: int
    first_query: int
    first_key: int
    positions: int
    scale: float | None
    cap: float | None
    hides: str

    def bands(self, query: Tensor, key: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """See `bands`."""
        at_once = query.shape[0] * query.shape[1] if self.by_formula else 1
        place = (self.before, self.after, self.first_query, self.first_key, self.positions, at_once)
        return bands(query.shape[2], key.shape[2], *place)

    @property
    def by_formula(self) -> bool:
        """Whether no kernel computes it."""
        return self.cap is not None or self.has_rows

    @property
    def has_rows(self) -> bool:
        """Whether large numbers may hide all keys of a query."""
        return self.hides in (ROWS, PLACES)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Result and logarithm of some queries."""
        if self.by_formula:
            numbers = (0.0, False, self.scale, self.cap, self.hides == PLACES)
            return kernels.math(query, key, value, bias, None, *numbers, self._shift(query, bias, shift))
        return kernels.forward(query, key, value, bias, 0.0, False, self.scale)[:2]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, log: Tensor,
        learned: bool, shift: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of query, key, value and bias."""
        tensors = grad, query, key, value, bias
        if self.by_formula:
            return kernels.math_backward(
                *tensors, None, out, log, 0.0, False, self.scale, learned, self.cap, self.hides == PLACES,
                self._shift(query, bias, shift),
            )  # fmt: skip
        return kernels.backward(*tensors, out, log, None, None, 0.0, False, self.scale, learned)

    def _shift(self, query: Tensor, bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
        return shift_of(query, bias) if self.has_rows and shift is None else shift


def _attention_masked(
    query: Tensor, key: Tensor, value: Tensor, leaves: Sequence[Tensor], formula: str, added: bool, before: int,
    after: int, first_query: int, first_key: int, positions: int, scale: float | None, table: Tensor | None = None,
    cap: float | None = None, hides: str = NUMBERS, shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = _Mask(formula, added, before, after, first_query, first_key, positions, scale, cap, hides)
    wide = kernels.wide_dtype(query)
    outs, logs = [], []
    for start, end, low, high in mask.bands(query, key):
        some = query[:, :, start:end]
        if low >= high:
            outs.append(query.new_zeros((*some.shape[:3], value.shape[3])))
            logs.append(query.new_full(some.shape[:3], NOTHING, dtype=wide))
            continue
        bias, unseeing = _bias(query, leaves, table, (start, end, low, high), mask)
        own = None if shift is None else shift[:, :, start:end]
        out, log = mask.forward(some, key[:, :, low:high], value[:, :, low:high], bias, own)
        if unseeing is not None:
            out, log = out.masked_fill(unseeing.unsqueeze(-1), 0.0), log.masked_fill(unseeing, NOTHING)
        outs.append(out)
        logs.append(log)
    out = torch.cat(outs, 2).transpose(1, 2).contiguous().transpose(1, 2)
    return out, torch.cat(logs, 2).to(wide).contiguous()


def _attention_masked_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, leaves: Sequence[Tensor], out: Tensor, logsumexp: Tensor,
    formula: str, added: bool, before: int, after: int, first_query: int, first_key: int, positions: int,
    scale: float | None, table: Tensor | None = None, cap: float | None = None, hides: str = NUMBERS,
    table_gradient: bool = False, shift: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    mask = _Mask(formula, added, before, after, first_query, first_key, positions, scale, cap, hides)
    wide = kernels.wide_dtype(query)
    of_query = torch.zeros_like(query)
    of_key, of_value = (torch.zeros_like(t, dtype=wide) for t in (key, value))
    learned = table if table_gradient else None
    of_table = query.new_empty(0) if learned is None else torch.zeros_like(learned)
    for start, end, low, high in mask.bands(query, key):
        if low >= high:
            continue
        bias, _ = _bias(query, leaves, table, (start, end, low, high), mask)
        rows, columns = slice(start, end), slice(low, high)
        found = mask.backward(
            grad[:, :, rows], query[:, :, rows], key[:, :, columns], value[:, :, columns], bias, out[:, :, rows],
            logsumexp[:, :, rows].contiguous(), learned is not None, None if shift is None else shift[:, :, rows],
        )  # fmt: skip
        of_query[:, :, rows] = found[0]
        of_key[:, :, columns] += found[1]
        of_value[:, :, columns] += found[2]
        if learned is not None:
            of_table += _of_table(leaves, learned, (start, end, low, high), mask, found[3])
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_table


def _attention_masked_shift(
    query: Tensor, leaves: Sequence[Tensor], formula: str, added: bool, before: int, after: int, first_query: int,
    positions: int, table: Tensor | None,
) -> Tensor:  # fmt: skip
    mask = _Mask(formula, added, before, after, first_query, 0, positions, None, None, ROWS)
    found = query.new_zeros(_shift_shape(query, leaves, table), dtype=kernels.wide_dtype(query))
    at_once = found.shape[0] * found.shape[1]
    for start, end, low, high in bands(query.shape[2], positions, before, after, first_query, 0, positions, at_once):
        if low < high:
            bias, _ = _bias(query, leaves, table, (start, end, low, high), mask)
            found[:, :, start:end] = shift_of(query, bias)
    return found


def _shift_shape(query: Tensor, leaves: Sequence[Tensor], table: Tensor | None) -> list[int]:
    heads = [1 if table is None else table.shape[1], *(t.shape[1] for t in leaves)]
    return [max((t.shape[0] for t in leaves), default=1), max(heads), query.shape[2], 1]


def _fake_shift(query: Tensor, leaves: Sequence[Tensor], *rest: Any) -> Tensor:
    return query.new_empty(_shift_shape(query, leaves, rest[-1]), dtype=kernels.wide_dtype(query))


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries = query.shape[:3]
    out = query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, queries), dtype=kernels.wide_dtype(query))


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    # Of arguments that are left out a call has none; the table is the one after three tensors and eight of the mask.
    table, learned = (rest[i] if len(rest) > i else None for i in (11, 14))
    of_table = torch.empty_like(table) if learned and table is not None else query.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_table


for _name, _kernel, _shapes in (
    ("attention_masked", _attention_masked, _fake),
    ("attention_masked_backward", _attention_masked_backward, _fake_backward),
    ("attention_masked_shift", _attention_masked_shift, _fake_shift),
):
    kernels.register(_library, _name, _kernel, _shapes)
