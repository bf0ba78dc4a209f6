"""Random modules compute what eager PyTorch does, or say why they cannot: never something else, never a raw error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.fuzz.case import BY_NAME, GROUPS, PLACES, Block, Case, draw, from_json, sizes_behind
from tests.fuzz.judge import Outcome, judge
from tests.fuzz.piece import At
from tests.fuzz.render import script, source
from tests.fuzz.shrink import shrunk, smaller_than

BRIEF = {"one": 14, "plans": 6}
"""Modules in `make test`: on one device, and under random plans; those that have most features for what they take."""

POOL = 1000
"""Seeds of which they are chosen."""

CHUNK = 10

DEEP_ONE, DEEP_PLANS = 4000, 1000

OPEN: frozenset[str] = frozenset()
"""Features with bugs that are known and not fixed yet."""


def brief(mode: str) -> Iterator[Case]:
    """Cases of `make test`: each in turn brings most features that none before it has, for the size of its loop."""
    left = {seed: draw(seed, mode) for seed in range(POOL)}
    seen: set[str] = set()
    for _ in range(BRIEF[mode]):
        worth = {s: len({*c.features} - seen) / ((2 + len(c.features)) * (1 + len(c.calls))) for s, c in left.items()}
        case = left.pop(max(worth, key=worth.__getitem__))
        seen.update(case.features)
        yield case


def check(mode: str, cases: Iterable[Case]) -> None:
    kinds: Counter[str] = Counter()
    for case in cases:
        if OPEN & set(case.features):
            continue
        outcome = judge(case, mode)
        kinds[outcome.kind] += 1
        assert outcome.kind not in ("wrong", "crash"), told(case, mode, outcome)
    assert kinds["equal"] >= 0.5 * kinds.total(), kinds
    assert kinds["invalid"] <= 0.2 * kinds.total(), kinds  # in eager mode, too


def told(case: Case, mode: str, outcome: Outcome) -> str:
    """What a failing case says: the way to its small script, and what it is."""
    return f"{outcome.kind}: {outcome.text}\n{case.as_json()} in mode {mode}:\n{source(case)}"


@pytest.mark.some(1)
@pytest.mark.parametrize("mode", BRIEF)
def test_modules_of_many_features(mode: str) -> None:
    check(mode, brief(mode))


@pytest.mark.deep
@pytest.mark.parametrize("first", range(0, DEEP_ONE, CHUNK))
def test_modules_on_one_device(first: int) -> None:
    check("one", (draw(seed, "one") for seed in range(first, first + CHUNK)))


@pytest.mark.deep
@pytest.mark.parametrize("first", range(0, DEEP_PLANS, CHUNK))
def test_modules_under_random_plans(first: int) -> None:
    check("plans", (draw(seed, "plans") for seed in range(first, first + CHUNK)))


def test_a_case_is_given_by_its_seed_and_by_its_text() -> None:
    for seed in range(50):
        case = draw(seed)
        assert case == draw(seed) == from_json(case.as_json())
        assert source(case) == source(from_json(case.as_json()))


def test_every_feature_is_drawn_and_has_a_program() -> None:
    assert sum(len(group) for group in GROUPS.values()) == len(BY_NAME), "two pieces share a name"
    for name in BY_NAME:
        compile(script(draw(0, "one", (name,))), name, "exec")


@pytest.mark.deep
def test_a_wrong_module_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is off by a millionth in one feature of many is found, and the feature named."""
    from tests.fuzz import prelude

    record = prelude.record_state
    case = draw(0, "one", ("mlp", "layer norm", "softmax", "tied weights"))

    def off(log: dict[str, object], tag: str, model: object) -> None:
        record(log, tag, model)
        if hasattr(model, "full_gradients") and holds(case_now[0]):
            key = next(k for k in log if "gradient" in k)
            log[key] = log[key] + 1e-6  # type: ignore[operator]

    def holds(case: Case) -> bool:
        return "softmax" in case.features

    case_now = [case]
    monkeypatch.setattr(prelude, "record_state", off)

    def fails(smaller: Case) -> bool:
        case_now[0] = smaller
        return judge(smaller).kind == "wrong"

    assert fails(case)
    small = shrunk(case, fails)
    assert [n for b in small.blocks for n, _ in b.pieces] == ["softmax"]
    assert len(small.calls) == 1


def test_smaller_cases_are_valid() -> None:
    for seed in range(100):
        for smaller in smaller_than(draw(seed)):
            at: At | None = At(smaller.length, smaller.channels)
            for block in smaller.blocks:
                assert at is not None and block.place in PLACES and isinstance(block, Block)
                at = sizes_behind(block, at)
            assert at is not None
            source(smaller)
