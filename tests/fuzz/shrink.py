"""Make a failing case small: fewer calls, blocks and pieces, plain boundaries, small sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.case import OPTIMIZERS, Block, Call, Case, sizes_behind
from tests.fuzz.piece import At

TRIES = 60


def shrunk(case: Case, fails: Callable[[Case], bool], tries: int = TRIES) -> Case:
    """The smallest case found that still fails: one feature alone if that does, then by one change at a time."""
    for alone in _alone(case):
        tries -= 1
        if fails(alone):
            case = alone
            break
    changed = True
    while changed and tries > 0:
        changed = False
        for smaller in smaller_than(case):
            tries -= 1
            if tries < 0:
                break
            if fails(smaller):
                case, changed = smaller, True
                break
    return case


def _alone(case: Case) -> Iterator[Case]:
    """Each feature of a case without the others."""
    plain = replace(case, signature="positional", output="scalar")
    for i, block in enumerate(case.blocks):
        for j in range(len(block.pieces)):
            alone = plain
            for a in reversed(range(len(case.blocks))):
                for b in reversed(range(len(case.blocks[a].pieces))):
                    alone = alone if (a, b) == (i, j) else _without(alone, a, b if a == i else None)
                    if a != i:
                        break
            if alone != case and _valid(alone):
                yield alone
    without = [replace(c, changes=()) for c in case.calls]
    for kept in (replace(plain, signature=case.signature), replace(plain, output=case.output)):
        bare = replace(kept, blocks=(), calls=tuple(without))
        if kept != plain and bare != case:
            yield bare


def smaller_than(case: Case) -> Iterator[Case]:
    """Valid cases with one thing less each, the largest steps first."""
    for smaller in _smaller(case):
        if smaller != case and _valid(smaller):
            yield smaller


def _valid(case: Case) -> bool:
    at = At(case.length, case.channels)
    for block in case.blocks:
        behind = sizes_behind(block, at)
        if behind is None or (block.place == "twice" and behind != at):
            return False
        at = behind
    return bool(case.calls)


def _smaller(case: Case) -> Iterator[Case]:
    blocks, calls = case.blocks, case.calls
    for i in range(len(blocks)):
        yield _without(case, i, None)
    for i in range(len(calls) - 1, -1, -1):
        yield replace(case, calls=calls[:i] + calls[i + 1 :])
    for i, block in enumerate(blocks):
        for j in range(len(block.pieces)):
            if len(block.pieces) > 1:
                yield _without(case, i, j)
    yield replace(case, signature="positional")
    yield replace(case, output="scalar")
    for place in ("root", "child"):
        for i, block in enumerate(blocks):
            if block.place != place and not (place == "child" and block.place == "root"):
                yield replace(case, blocks=(*blocks[:i], replace(block, place=place), *blocks[i + 1 :]))
    yield replace(case, optimizer=OPTIMIZERS[0])
    yield replace(case, original=False)
    for i, call in enumerate(calls):
        plain = Call(call.rows)
        options = [replace(call, training=plain.training), replace(call, gradient=True), replace(call, step=False)]
        options += [replace(call, changes=call.changes[:k] + call.changes[k + 1 :]) for k in range(len(call.changes))]
        options += [replace(call, rows=rows) for rows in (calls[0].rows, 2) if rows != call.rows]
        for option in options:
            if option != call:
                yield replace(case, calls=(*calls[:i], option, *calls[i + 1 :]))
    for length in (2, 4):
        yield replace(case, length=min(length, case.length))
    for channels in (2, 4):
        yield replace(case, channels=min(channels, case.channels))


def _without(case: Case, i: int, j: int | None) -> Case:
    """A case without a block or one of its pieces; positions of changes move along."""
    flat = [(a, b) for a, block in enumerate(case.blocks) for b in range(len(block.pieces))]
    gone = {k for k, (a, b) in enumerate(flat) if a == i and (j is None or b == j)}
    where = {k: n for n, k in enumerate(k for k in range(len(flat)) if k not in gone)}
    blocks: list[Block] = list(case.blocks)
    if j is None:
        del blocks[i]
    else:
        blocks[i] = replace(blocks[i], pieces=blocks[i].pieces[:j] + blocks[i].pieces[j + 1 :])
    calls = tuple(replace(c, changes=tuple(where[k] for k in c.changes if k in where)) for c in case.calls)
    return replace(case, blocks=tuple(blocks), calls=calls)
