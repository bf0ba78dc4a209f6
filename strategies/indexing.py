"""Reading and writing at indices that a tensor holds.

A dim that is indexed can be split: each device takes the indices within its block, reads zeros for the others, and
the sum over devices is the result; on writing, the others go to one element too many, which is cut off.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.rule import Lowering, Padding, Rule, Spec, dims, letters, rule

aten = torch.ops.aten


def _localize(context: Any, index: Any, letter: str) -> tuple[Any, Any]:
    """Indices within this device's block of the indexed dim, and which are outside it; negative ones count back."""
    size = context.local_size(letter)
    # A comparison times the size: without branches on values.
    wrapped = aten.add.Tensor(index, aten.mul.Tensor(aten.lt.Scalar(index, 0), context.global_size(letter)))
    local = aten.sub.Tensor(wrapped, context.axis_index() * size)
    return local, aten.logical_or.default(aten.lt.Scalar(local, 0), aten.ge.Scalar(local, size))


def _unsqueeze(x: Any, count: int) -> Any:
    for _ in range(count):
        x = aten.unsqueeze.default(x, -1)
    return x


def _read(context: Any, letter: str, index: Any, trailing: int, get: Callable[[Any], Any]) -> Any:
    """``get`` at the indices of this device, zeros elsewhere; the result has ``trailing`` dims after the index's."""
    local, outside = _localize(context, index, letter)
    # Index 0 is there on every device; what it reads is zeroed below.
    values = get(aten.masked_fill.Scalar(local, outside, 0))
    return aten.masked_fill.Scalar(values, _unsqueeze(outside, trailing), 0)


def _write(context: Any, letter: str, x: Any, index: Any, trailing: int, put: Callable[[Any, Any], Any]) -> Any:
    """``put`` at the indices of this device; the dim has ``trailing`` dims after it."""
    local, outside = _localize(context, index, letter)
    size = context.local_size(letter)
    # One element more: writes meant for other devices need a place to go.
    padded = aten.constant_pad_nd.default(x, [0, 0] * trailing + [0, 1])
    written = put(padded, aten.masked_fill.Scalar(local, outside, size))
    return aten.slice.Tensor(written, -1 - trailing, 0, size)


def _read_rule(x: Spec, equation: str, letter: str, build: Callable[..., Any], blocked: str = "") -> Rule:
    if x.dtype == torch.bool:  # a sum of booleans is no boolean
        return Rule(equation, blocked=blocked + letter)
    return Rule(equation, reduce=letter, blocked=blocked, linear=((0,),), lower={letter: Lowering(build)})


def _aligned(x: Spec, index: Spec, dim: int) -> tuple[str, str, str, str]:
    """Letters of ``x`` and of an index with as many dims, the index's own, and the blocked ones.

    Dims other than ``dim`` share a letter where they are equally long.
    """
    names, others = letters(x.ndim), letters(x.ndim, x.ndim)
    shared = [
        a if d != dim and n == m else b
        for d, (a, b, n, m) in enumerate(zip(names, others, x.shape, index.shape, strict=True))
    ]
    # Of a dim that is longer than the index only the first elements are read: blocks of both do not match.
    unequal = [d for d in range(x.ndim) if d != dim and shared[d] != names[d]]
    return names, "".join(shared), shared[dim] if shared else "", "".join(names[d] + shared[d] for d in unequal)


def _unsplit(*tensors: Spec, result: int) -> Rule:
    """Scalars among the tensors, which torch takes for one element each: nothing is split."""
    left = ",".join("1" * t.ndim or "." for t in tensors)
    return Rule(f"{left}->{'1' * result or '.'}")


@rule(aten.gather.default)
def gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> Rule:
    """One element for each index, along ``dim``."""
    if x.ndim == 0 or index.ndim == 0:
        return _unsplit(x, index, result=index.ndim)
    dim %= x.ndim
    names, index_names, _, blocked = _aligned(x, index, dim)
    letter = names[dim]

    def build(context: Any, x: Any, dim: int, index: Any, **_: Any) -> Any:
        return _read(context, letter, index, 0, lambda i: aten.gather.default(x, dim, i))

    found = _read_rule(x, f"{names},{index_names}->{index_names}", letter, build, blocked)
    return replace(found, padded={letter: Padding()})  # no index names an element there


def _scatter(target: Any, linear: Callable[[Any], tuple[tuple[int, ...], ...]]) -> Callable[..., Rule]:
    def scatter(x: Spec, dim: int, index: Spec, source: Any, **_: Any) -> Rule:
        sources = [source] if isinstance(source, Spec) else []
        if not all(t.ndim for t in (x, index, *sources)):
            return _unsplit(x, index, *sources, result=x.ndim)
        dim %= x.ndim
        names, index_names, own, blocked = _aligned(x, index, dim)
        inputs = [names, index_names]
        for s in sources:
            # The source may be longer than the index, too.
            pairs = zip(index_names, letters(x.ndim, 2 * x.ndim), index.shape, s.shape, strict=True)
            inputs.append("".join(a if n == m else b for a, b, n, m in pairs))
            blocked += "".join(a + b for a, b in zip(index_names, inputs[-1], strict=True) if a != b)
        letter, trailing = names[dim], x.ndim - 1 - dim

        def build(context: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
            return _write(context, letter, x, index, trailing, lambda t, i: target(t, dim, i, source))

        return Rule(
            f"{','.join(inputs)}->{names}",
            blocked="".join(dict.fromkeys(blocked + own)),
            linear=linear(source),
            lower={letter: Lowering(build)},
            padded={letter: Padding((0.0,), 0.0)},
        )

    return scatter


rule(aten.scatter.value)(_scatter(aten.scatter.value, lambda value: ((0,),) if value == 0 else ()))
for _op in (aten.scatter.src, aten.scatter_add.default):
    rule(_op)(_scatter(_op, lambda _: ((0, 2),)))


@rule(aten.index_select.default)
def index_select(x: Spec, dim: int, index: Spec) -> Rule:
    """Elements of ``dim`` in the order of ``index``."""
    if x.ndim == 0 or index.ndim == 0:
        return _unsplit(x, index, result=x.ndim)
    names = list(letters(x.ndim))
    dim %= x.ndim
    letter, own = names[dim], letters(1, x.ndim)
    right = [own if d == dim else c for d, c in enumerate(names)]
    trailing = x.ndim - 1 - dim

    def build(context: Any, x: Any, dim: int, index: Any) -> Any:
        return _read(context, letter, index, trailing, lambda i: aten.index_select.default(x, dim, i))

    return _read_rule(x, f"{dims(names)},{own}->{dims(right)}", letter, build)


def _index_write(target: Any) -> Callable[..., Rule]:
    def index_write(x: Spec, dim: int, index: Spec, source: Spec, **_: Any) -> Rule:
        if not all(t.ndim for t in (x, index, source)):
            return _unsplit(x, index, source, result=x.ndim)
        names = list(letters(x.ndim))
        dim %= x.ndim
        letter, own = names[dim], letters(1, x.ndim)
        source_names = [own if d == dim else c for d, c in enumerate(names)]
        trailing = x.ndim - 1 - dim

        def build(context: Any, x: Any, dim: int, index: Any, source: Any, **options: Any) -> Any:
            return _write(context, letter, x, index, trailing, lambda t, i: target(t, dim, i, source, **options))

        return Rule(
            f"{dims(names)},{own},{dims(source_names)}->{dims(names)}",
            blocked=own,
            linear=((0, 2),),
            lower={letter: Lowering(build)},
        )

    return index_write


for _op in (aten.index_add.default, aten.index_copy.default):
    rule(_op)(_index_write(_op))


def _letters_of(x: Spec, indices: Sequence[Spec | None]) -> tuple[str, list[str], list[str], str, tuple[int, ...]]:
    """Letters of ``x``, of each index, of the result, of the indexed dims, and the result's shape."""
    names = letters(x.ndim)
    used = [d for d, t in enumerate(indices) if t is not None]
    tensors = [t for t in indices if t is not None]
    padded = itertools.zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1)
    shape = [next((n for n in column if n != 1), 1) for column in padded][::-1]
    own = [c if n != 1 else "" for c, n in zip(letters(len(shape), x.ndim), shape, strict=True)]
    index_texts = [
        dims([c if n != 1 else "" for c, n in zip(own[len(shape) - t.ndim :], t.shape, strict=True)]) or "."
        for t in tensors
    ]
    free = [d for d in range(x.ndim) if d not in used]
    # As numpy: the index's dims come where the indexed ones were if these are adjacent, else in front.
    adjacent = used == list(range(used[0], used[0] + len(used)))
    before = [d for d in free if adjacent and d < used[0]]
    after = [d for d in free if d not in before]
    result = [*(names[d] for d in before), *own, *(names[d] for d in after)]
    sizes = (*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in after))
    return names, index_texts, result, "".join(names[d] for d in used), sizes


def _is_mask(indices: Sequence[Spec | None]) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Spec, indices: Sequence[Spec | None]) -> Rule:
    """Elements at the indices that one or several tensors name together."""
    if _is_mask(indices):
        # How many elements a mask selects depends on data: nothing can be split.
        masks = ["1" * t.ndim for t in indices if t is not None]
        ndim = 1 + x.ndim - sum(t.ndim for t in indices if t is not None)
        return Rule(f"{','.join(['1' * x.ndim, *masks])}->{'1' * ndim}")
    names, texts, result, indexed, _ = _letters_of(x, indices)
    equation = f"{','.join([names, *texts])}->{dims(result) or '.'}"
    if len(texts) > 1:
        return Rule(equation, blocked=indexed, linear=((0,),))
    trailing = x.ndim - 1 - names.index(indexed)

    def build(context: Any, x: Any, indices: Sequence[Any]) -> Any:
        # The one index is the last of the list; dims before it are read whole.
        blank = [None] * (len(indices) - 1)
        return _read(context, indexed, indices[-1], trailing, lambda i: aten.index.Tensor(x, [*blank, i]))

    return _read_rule(x, equation, indexed, build)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False) -> Rule:
    """``values`` written, or added, at the indices that tensors name."""
    if _is_mask(indices):
        masks = ["1" * t.ndim or "." for t in (*indices, values) if t is not None]
        return Rule(f"{','.join(['1' * x.ndim, *masks])}->{'1' * x.ndim}")
    names, texts, result, indexed, sizes = _letters_of(x, indices)
    # Values broadcast to the result, aligned at the last dim.
    skipped = len(result) - values.ndim
    aligned = zip(result[skipped:], values.shape, sizes[skipped:], strict=True)
    source = dims([c if n == m else "" for c, n, m in aligned]) or "."
    own = "".join(c for c in result if c not in names)
    equation = f"{','.join([names, *texts, source])}->{names}"
    linear = ((0, 1 + len(texts)),)
    if len(texts) > 1:
        return Rule(equation, blocked=indexed + own, linear=linear)
    trailing = x.ndim - 1 - names.index(indexed)

    def build(context: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        def put(t: Any, i: Any) -> Any:
            return aten.index_put.default(t, [*[None] * (len(indices) - 1), i], values, accumulate)

        return _write(context, indexed, x, indices[-1], trailing, put)

    return Rule(equation, blocked=own, linear=linear, lower={indexed: Lowering(build)})
