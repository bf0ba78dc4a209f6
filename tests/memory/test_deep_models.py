"""The peak of a deep model from three of its blocks and two: never below that of the whole model's graph."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from autopar.compiler import peak_of, program_of, program_to_plan, solve
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program, RepeatedLayers
from autopar.memory.deep_models import peak_of_blocks
from autopar.memory.liveness import MemoryPoint
from autopar.memory.recompute import class_of
from autopar.search.options import Search
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from tests import models
from tests.capture.test_repeat import AXES, EAGER, deep

LARGEST = 8


@cache
def whole(name: str, blocks: int) -> Program:
    return program_of(*(deep(blocks) if name == "deep" else models.MODELS[name](layers=blocks, seq=4)))


@cache
def short(name: str) -> Program:
    return program_to_plan(*(deep(LARGEST) if name == "deep" else models.MODELS[name](layers=LARGEST, seq=4)))


def some_plan(name: str, seed: int) -> Plan:
    """Of parameters that lie in some random way."""
    program, choose = short(name), random.Random(seed)
    names = sorted({i.name for i in program.inputs if i.kind == "parameter" and ".0." not in i.name})
    alike = [n.replace(".1.", ".*.") for n in names if ".2." not in n]
    while True:
        pins = {n: {a: choose.choice(["R", "S(0)"]) for a in AXES} for n in alike if choose.random() < 0.5}
        try:
            # Buckets of tiny blocks reach over several, of which three blocks show too little: see the next test.
            return replace(solve(program, AXES, EAGER, search=Search(pins=pins, padding=False)), overlap=False)
        except (InfeasibleError, ValueError):  # what does not divide
            continue


def partly_again(plan: Plan, program: Program, choose: random.Random) -> Iterator[Plan]:
    """What no, all, the first, the last and some random blocks make and move again."""
    classes = layer_classes(program, analyze(program))
    names = [k for k, (node, *_) in classes.members.items() if node.op == "call_function" and not is_backward(node)]
    names += [f"consumer {r}" for r in plan.consumer_layouts if class_of(f"consumer {r}") in classes.count]
    share = choose.random()
    cut = {n: math.ceil(share * classes.count[class_of(n)]) for n in names}
    first, last = ({n: ((0, cut[n]),) for n in names}, {n: ((cut[n], EVERY[0][1]),) for n in names})
    every = {n: EVERY for n in names}
    mixed = {n: choose.choice([every, first, last])[n] for n in names if choose.random() < 0.7}
    for recompute in ({}, every, first, last, mixed):
        yield replace(plan, recompute=recompute)


def assert_never_below(name: str, seed: int, blocks: int) -> None:
    program, deep = replace(short(name)), whole(name, blocks)
    assert program.repeat is not None
    program = replace(program, repeat=replace(program.repeat, blocks=blocks))
    plan = replace(some_plan(name, seed), fingerprint=deep.fingerprint)
    for each in partly_again(plan, program, random.Random(seed + blocks)):
        found, expected = (sum(peak_of(p, each).values()) for p in (program, deep))
        uniform = all(r == EVERY for r in each.recompute.values())
        # Blocks of several kinds are neighbors of others than in the short programs: by what moves between them.
        assert found >= expected * (1 if uniform else 1 - 1e-3) - 1e-6
        assert found <= expected * (1.0 if uniform else 1.2) + 1e-6


@pytest.mark.deep
@pytest.mark.parametrize(("seed", "blocks"), [(1, 6)])
def test_never_below_the_whole_model(seed: int, blocks: int) -> None:
    assert_never_below("deep", seed, blocks)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["deep", "llama", "gpt2"])
@pytest.mark.parametrize("blocks", [4, 5, 8])
@pytest.mark.parametrize("seed", range(2, 6))
def test_never_below_the_whole_model_at_any_depth(name: str, seed: int, blocks: int) -> None:
    assert_never_below(name, seed, blocks)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_in_flight_is_counted_nearly_in_full(name: str) -> None:
    program, deep = replace(short(name)), whole(name, 8)
    assert program.repeat is not None
    program = replace(program, repeat=replace(program.repeat, blocks=8))
    plan = solve(program, AXES, EAGER, search=Search(recipe="fsdp", padding=False))
    assert plan.overlap
    plan = replace(plan, fingerprint=deep.fingerprint)
    found, expected = (sum(peak_of(p, plan).values()) for p in (program, deep))
    assert found == pytest.approx(expected, rel=0.05)


def moments(*blocks: float, backward: float, tail: float) -> list[MemoryPoint]:
    """Each block's forward and backward, and what is made at the end of gradients of all blocks."""
    found = [MemoryPoint({"activations": 0.0}, "", False)]
    for i in range(len(blocks)):
        found.append(MemoryPoint({"activations": sum(blocks[: i + 1])}, f"h.{i}.up", False, "mm"))
    for i in reversed(range(len(blocks))):
        found.append(MemoryPoint({"activations": sum(blocks[: i + 1]), "transient": backward}, f"h.{i}.up", True, "mm"))
    return [*found, MemoryPoint({"transient": tail * len(blocks)}, "h.0.up", True, "cat")]


def test_the_largest_moment_may_be_another_in_the_deep_model() -> None:
    three, two = (moments(*[10.0] * n, backward=30.0, tail=15.0) for n in (3, 2))
    assert max(three, key=lambda m: m.total).total == 60.0  # the backward of a block; the tail has 45
    for blocks in (4, 7, 20):
        expected = max(m.total for m in moments(*[10.0] * blocks, backward=30.0, tail=15.0))
        repeat = RepeatedLayers("h", blocks, None)  # type: ignore[arg-type]
        assert sum(peak_of_blocks([(1.0, three, two)], repeat).values()) == expected


def test_of_two_kinds_of_blocks_each_works_while_the_others_hold_theirs() -> None:
    """The blocks in front keep 1 and work on 50, those behind keep 10 and work on 5: neither peak is a mean."""
    kinds = [[moments(*[keeps] * n, backward=works, tail=0.0) for n in (3, 2)] for keeps, works in ((1, 50), (10, 5))]
    repeat = RepeatedLayers("h", 10, None)  # type: ignore[arg-type]
    parts = [(0.5, *kinds[0]), (0.5, *kinds[1])]
    # The fifth block's backward, behind those that keep 10; the last block's has 5 * 1 + 5 * 10 + 5.
    assert sum(peak_of_blocks(parts, repeat).values()) == max(5 * 1 + 50, 5 * 1 + 5 * 10 + 5)


def sequence(again: Sequence[bool]) -> list[MemoryPoint]:
    """Blocks that keep 1 and gather again, or keep 10; each leaves a gradient of 4 and is behind a sum of no module.

    The backward pass begins with a mask of each, when all that is kept is there.
    """
    keeps = [1.0 if a else 10.0 for a in again]
    found = [MemoryPoint({"activations": 0.0}, "", False)]
    found += [MemoryPoint({"activations": sum(keeps[: i + 1])}, f"h.{i}.up", False, "mm") for i in range(len(keeps))]
    found += [MemoryPoint({"activations": sum(keeps)}, f"h.{i}.mask", True, "where") for i in range(len(keeps))]
    for i in reversed(range(len(keeps))):
        held = {"activations": sum(keeps[: i + 1]), "gradients": 4.0 * (len(keeps) - 1 - i)}
        works = [("gather", 20.0, f"h.{i}.up")] * again[i] + [("mm", 5.0, f"h.{i}.up"), ("add", 7.0, "")]
        found += [MemoryPoint({**held, "transient": size}, path, True, operator) for operator, size, path in works]
    return found


@pytest.mark.parametrize("gathering", range(11))
def test_a_moment_that_only_some_blocks_have(gathering: int) -> None:
    """What the others hold then is what they hold just before and behind; not the most that they ever do."""
    parts = [(share / 10, sequence([again] * 3), sequence([again] * 2))
             for share, again in ((gathering, True), (10 - gathering, False)) if share]  # fmt: skip
    expected = max(m.total for m in sequence([True] * gathering + [False] * (10 - gathering)))
    repeat = RepeatedLayers("h", 10, None)  # type: ignore[arg-type]
    assert sum(peak_of_blocks(parts, repeat).values()) == expected


def prefetched(blocks: int) -> list[MemoryPoint]:
    """Blocks that save 1, and gather 10 for the next one, or in the backward pass the one before, while they run."""
    found = [MemoryPoint({"communication": 0.0, "activations": 0.0}, "", False)]
    for backward in (False, True):
        for i in reversed(range(blocks)) if backward else range(blocks):
            more = 10.0 * (i > 0 if backward else i < blocks - 1)
            held = {"communication": 10.0 + more, "activations": i + 1.0}
            # As what sums the gradients of two blocks, that the last one has not.
            for operator in ("mm", "sum") if i < blocks - 1 else ("mm",):
                found.append(MemoryPoint(held, f"h.{i}.up", backward, operator, in_flight={"communication": more}))
    return found


def test_what_is_gathered_ahead_does_not_grow_with_the_number_of_blocks() -> None:
    """The first block has none before it to gather in the backward pass, the last has none after it in the forward."""
    for blocks in (4, 32):
        repeat = RepeatedLayers("h", blocks, None)  # type: ignore[arg-type]
        expected = max(m.total for m in prefetched(blocks))
        assert sum(peak_of_blocks([(1.0, prefetched(3), prefetched(2))], repeat).values()) == expected


def reduced_late(blocks: int) -> list[MemoryPoint]:
    """Blocks that save 1 and work on 30; the gradients of one are reduced while the next but one works, or at the end.

    So the last of three blocks is reduced while another works, and the last of two when nothing else is live.
    """
    found = [MemoryPoint({"activations": 0.0}, "", False)]
    found += [MemoryPoint({"activations": i + 1.0}, f"h.{i}.up", False, "mm") for i in range(blocks)]

    def late(i: int, held: dict[str, float]) -> MemoryPoint:
        return MemoryPoint({**held, "communication": 2.0}, f"h.{i}.up", True, "reduce", in_place=False)

    for i in reversed(range(blocks)):
        held = {"activations": i + 1.0, "transient": 30.0}
        found.append(MemoryPoint(held, f"h.{i}.up", True, "mm"))
        found += [late(i + 2, held)] if i + 2 < blocks else []
    return [*found, MemoryPoint({}, "", True, "embedding"), *(late(i, {}) for i in (1, 0))]


def test_a_late_reduction_is_compared_with_one_that_runs_beside_the_same_block() -> None:
    for blocks in (4, 32):
        repeat = RepeatedLayers("h", blocks, None)  # type: ignore[arg-type]
        expected = max(m.total for m in reduced_late(blocks))
        assert sum(peak_of_blocks([(1.0, reduced_late(3), reduced_late(2))], repeat).values()) == expected
