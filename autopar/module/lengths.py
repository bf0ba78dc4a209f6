"""`plan_ahead`: graphs for further lengths of the batch's sequences, before a batch of that length comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.costs.arguments import shown, whole
from autopar.ir.layout import TensorType
from autopar.ir.program import Program
from autopar.module.call.batch_rows import request_of_example
from autopar.sharding.dims import analyze
from autopar.sharding.factor_kinds import batch_factors, input_types

if TYPE_CHECKING:
    from autopar.module.session import Session
    from autopar.specialize import Request

Lengths = Sequence[int] | Mapping[tuple[str, int], Sequence[int]]
"""Lengths; or of which dim of which batch tensor, and its lengths: ``{("batch.0", 1): [512, 1024]}``."""

EXAMPLE = 'lengths such as [512, 1024], or which dim they are of: {("batch.0", 1): [512, 1024]}'

Shapes = list[tuple[int, ...]]


def lengths_kind(value: Any) -> str | None:
    """What is expected instead of a value of ``lengths``; None: nothing is wrong."""
    if isinstance(value, Mapping):
        if len(value) != 1:
            return f"{EXAMPLE}: one dim"
        (key, value) = next(iter(value.items()))
        named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and whole(0)(key[1]) is None
        if not named or _number(key[0]) is None:
            return f"{EXAMPLE}: {shown(key)} is no pair of a batch tensor, such as 'batch.0', and a dim of it"
    if not isinstance(value, list | tuple | range) or not value:
        return EXAMPLE
    wrong = next((n for n in value if whole(1, 2**40)(n) is not None), None)
    return None if wrong is None else f"{EXAMPLE}: {shown(wrong)} is no length; give whole numbers of at least 1"


def plan_ahead(session: Session, batch: Any, lengths: Lengths) -> None:
    """Capture, plan and rewrite for each length, under the layouts that parameters have; every rank calls it.

    Args:
        session: which has graphs for the batch.
        batch: the example.
        lengths: to which its sequences are brought.

    Raises:
        ValueError: it is not clear which dims of the batch have the length.
    """
    request, first = request_of_example(session, batch), session.latest
    wanted = next(iter(lengths.values())) if isinstance(lengths, Mapping) else lengths
    key = next(iter(lengths)) if isinstance(lengths, Mapping) else None
    shapes = [shape for shape, _ in request.shapes]
    chosen = length_dims(session.known(first).program, shapes, key)
    session.cache.limit += len(wanted)
    for length in dict.fromkeys(wanted):
        try:
            session.specialize_request(_at(request, chosen, length))
        except Exception as e:
            e.add_note(f"This was at length {length} of lengths=; dims of that length: {_described(chosen)}.")
            raise
    # The graphs that a user looks at are those of the example.
    session.latest = first


def length_dims(program: Program, shapes: Shapes, key: tuple[str, int] | None) -> list[tuple[int, int]]:
    """The dims of batch tensors that are as long as a sequence, as ``(tensor, dim)``.

    These are dims of one size that are no samples and belong to no parameter or buffer. Tensors whose dims the model
    does not relate, such as shifted labels, count by their size: a wrong guess plans in vain, and changes no number.

    Args:
        program: of the example.
        shapes: of its batch tensors.
        key: a batch tensor and a dim that has the length; None: there must be no doubt.

    Raises:
        ValueError: there is none, or there are several.
    """
    free = _free_dims(program, shapes)
    if key is not None:
        tensor, dim = _number(key[0]), key[1]
        if tensor is None or tensor >= len(shapes) or dim >= len(shapes[tensor]):
            raise ValueError(f"lengths={{{key!r}: ...}}: the batch has no such dim; there are {_every_dim(shapes)}")
        return sorted({(tensor, dim), *(at for at in free if _size(shapes, at) == shapes[tensor][dim])})
    sizes = dict.fromkeys(_size(shapes, at) for at in free)
    if not sizes:
        raise ValueError(
            f"lengths=: no dim of the batch is a sequence's: those of {_every_dim(shapes)} are samples, or of one size "
            'with a dim of a parameter or buffer; name a dim that may vary, as lengths={("batch.0", 1): [...]}'
        )
    if len(sizes) > 1:
        raise ValueError(
            f"lengths=: dims {_described(free, shapes)} of the batch may be the length; name one, as "
            f'lengths={{("batch.{free[0][0]}", {free[0][1]}): [...]}}'
        )
    return free


def _free_dims(program: Program, shapes: Shapes) -> list[tuple[int, int]]:
    """Dims that may vary: no samples, and in no parameter or buffer."""
    dims = analyze(program)
    taken = set(map(id, batch_factors(program, dims)))
    for kind in ("parameter", "buffer"):
        for type_ in input_types(program, dims, kind).values():
            taken |= {id(factor) for dim in type_.dims for factor in dim}
    types = {int(name): t for name, t in input_types(program, dims, "batch").items()}
    return [
        (i, d)
        for i, shape in enumerate(shapes)
        for d, size in enumerate(shape)
        if size > 1 and (d > 0 if i not in types else _is_free(types[i], d, taken))
    ]


def _is_free(type_: TensorType, dim: int, taken: set[int]) -> bool:
    return not any(id(factor) in taken for factor in type_.dims[dim])


def _at(request: Request, chosen: list[tuple[int, int]], length: int) -> Request:
    """The request with these dims of another size."""
    shapes = []
    for i, (shape, dtype) in enumerate(request.shapes):
        shapes.append((tuple(length if (i, d) in chosen else n for d, n in enumerate(shape)), dtype))
    return replace(request, shapes=tuple(shapes))


def _size(shapes: Shapes, at: tuple[int, int]) -> int:
    return shapes[at[0]][at[1]]


def _number(name: str) -> int | None:
    """Of a batch tensor, from its name.

    >>> _number("batch.12"), _number("input_ids")
    (12, None)
    """
    prefix, _, number = name.partition(".")
    return int(number) if prefix == "batch" and number.isascii() and number.isdigit() and len(number) < 9 else None


def _described(chosen: Sequence[tuple[int, int]], shapes: Shapes | None = None) -> str:
    sizes = ["" if shapes is None else f" (of size {_size(shapes, at)})" for at in chosen]
    return ", ".join(f"{d} of 'batch.{i}'{size}" for (i, d), size in zip(chosen, sizes, strict=True))


def _every_dim(shapes: Shapes) -> str:
    return ", ".join(f"'batch.{i}' {list(shape)}" for i, shape in enumerate(shapes))
