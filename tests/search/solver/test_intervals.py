"""Limits at program points: the exact way equals brute force, multipliers bound it, labels fit; the contest's files."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.solver.intervals.exact import close
from autopar.search.solver.intervals.feasible import settled, squeezed
from autopar.search.solver.intervals.forests import grown, move
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.intervals.multipliers import Best, ascend, seconds_a_byte
from autopar.search.solver.intervals.restrict import Entries, restrict, without_separable
from autopar.search.solver.intervals.solve import _look, solve
from autopar.search.solver.intervals.tables import Tables
from autopar.search.solver.intervals.window import cheaper
from benchmarks import contest


def random_instance(seed: int, nodes: int, density: float, forbid: float, tight: float) -> Instance:
    """With ties, empty intervals, parallel edges, forbidden labels and pairs."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, nodes)
    first = np.concatenate([[0], np.cumsum(sizes)])

    def costs(count: int) -> np.ndarray:
        return np.where(rng.random(count) < forbid, np.inf, rng.integers(0, 9, count).astype(float))

    ends = [rng.choice(nodes, 2, replace=False) for _ in range(int(density * nodes) if nodes > 1 else 0)]
    u, v = (np.array([e[k] for e in ends], dtype=np.int64) for k in (0, 1))
    begin = rng.integers(0, 6, nodes)
    memory = rng.integers(0, 5, int(first[-1])).astype(float)
    return Instance(
        first, costs(int(first[-1])), memory, begin, begin + rng.integers(0, 4, nodes),
        np.full(9, float(int(tight * nodes))), u, v, costs(int((sizes[u] * sizes[v]).sum())),
    )  # fmt: skip


instances = st.builds(
    random_instance,
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 6),
    density=st.sampled_from([0.0, 1.0, 2.0]),
    forbid=st.sampled_from([0.0, 0.1, 0.3]),
    tight=st.sampled_from([0.3, 0.8, 2.0]),
)


def least_labels(instance: Instance) -> np.ndarray | None:
    """Labels of the least value within the limit, by trying all; None if there are none."""
    every = (np.array(x) for x in itertools.product(*(range(n) for n in instance.sizes)))
    return min((x for x in every if instance.fits(x)), key=instance.value, default=None)


def least(instance: Instance) -> float:
    """The least value within the limit; inf if no labels are."""
    found = least_labels(instance)
    return float("inf") if found is None else instance.value(found)


@given(instances)
def test_the_exact_way_equals_brute_force(instance: Instance) -> None:
    best, truth = Best(), least(instance)
    solved = close(instance, best, time.monotonic() + 20, 0.0)
    assert best.value == truth
    assert best.bound <= truth
    assert truth - best.bound <= 1e-6 * max(truth, 1.0) or (solved and truth == best.bound == np.inf)
    assert best.labels is None or (instance.fits(best.labels) and instance.value(best.labels) == best.value)


@given(instances, st.integers(0, 100), st.sampled_from([0.0, 0.5, 5.0]))
def test_no_multipliers_prove_more_than_is_true(instance: Instance, seed: int, size: float) -> None:
    draw, messages = np.random.default_rng(seed), Messages(instance)
    multiplier = size * draw.random(instance.points)
    seconds = [multiplier[a:b].sum() for a, b in zip(instance.begin, instance.end, strict=True)]
    np.testing.assert_allclose(seconds_a_byte(instance, multiplier), seconds, atol=1e-9)
    messages.price = instance.memory * np.repeat(seconds, instance.sizes)
    truth, rounding = least(instance), 1e-9 * float(messages.tables.cost.sum())
    for sweep in range(4):
        bound = messages.bound() - multiplier.sum() * instance.limit[0]
        assert bound <= truth + rounding
        if np.isfinite(truth):  # of the least labels, none is further from the bound than they are
            cheapest = least_labels(instance)
            assert cheapest is not None
            chosen = instance.first[:-1] + cheapest
            spent = messages.price[chosen].sum() - multiplier.sum() * instance.limit[0]
            assert messages.reduced()[chosen].max() <= truth + spent - bound + rounding
        messages.sweep(sweep % 2 == 0)


@given(instances)
def test_ascent_bounds_and_what_looks_for_labels_fits(instance: Instance) -> None:
    best, truth, messages = Best(), least(instance), Messages(instance)
    multiplier = ascend(instance, messages, best, time.monotonic() - 1)
    assert best.bound <= truth + 1e-6
    assert (multiplier >= 0).all()
    begin = time.monotonic()
    _look(instance, messages, multiplier, best, begin - 0.98, 1.0, 0.0)
    if best.labels is not None:
        assert instance.fits(best.labels) and truth <= instance.value(best.labels) == best.value


@given(instances, st.integers(0, 100))
def test_moves_over_forests_are_exact(instance: Instance, seed: int) -> None:
    draw, tables = np.random.default_rng(seed), Tables.of(instance)
    labels, cost = draw.integers(0, instance.sizes), tables.cost + draw.random(len(tables.cost))
    forest = grown(tables, len(labels), draw)
    inside = forest.depth >= 0
    assert inside.any()
    assert (forest.depth[forest.root[inside]] == 0).all()
    assert ((forest.edge >= 0) == (forest.depth > 0)).all()

    def total(labels: np.ndarray) -> float:
        row = tables.first[:-1] + labels[tables.target] * instance.sizes[tables.other]
        # Each edge is there from either end.
        return float(cost[instance.first[:-1] + labels].sum() + tables.entry[row + labels[tables.other]].sum() / 2)

    found = move(instance, tables, forest, labels, cost)
    assert (found[~inside] == labels[~inside]).all()
    free = (range(n) if i else [x] for n, i, x in zip(instance.sizes, inside, labels, strict=True))
    assert total(found) == pytest.approx(min(total(np.array(x)) for x in itertools.product(*free)), rel=1e-9)


@given(instances, st.integers(0, 100), st.sampled_from([0.5, np.inf]))
def test_squeezed_and_settled_labels_fit(instance: Instance, seed: int, wall: float) -> None:
    draw, tables = np.random.default_rng(seed), Tables.of(instance)
    found = squeezed(
        instance, tables, draw.integers(0, instance.sizes), np.zeros(instance.points), 10.0, wall, np.inf, draw
    )
    if found is None:
        return
    assert instance.fits(found) and np.isfinite(instance.value(found))
    better = settled(instance, tables, found, np.zeros(len(instance.cost)), 4, time.monotonic() + 1, draw)
    assert instance.fits(better) and instance.value(better) <= instance.value(found)


@given(instances)
def test_a_window_of_all_labels_is_exact(instance: Instance) -> None:
    messages = Messages(instance)
    start = np.zeros(len(instance.begin), dtype=np.int64)
    found = cheaper(instance, Entries.of(instance), messages, start, time.monotonic() + 10)
    alone = min(instance.value(np.array(x)) for x in itertools.product(*(range(n) for n in instance.sizes)))
    assert instance.value(found) <= instance.value(start)
    assert instance.value(found) == pytest.approx(alone, rel=1e-4) or not np.isfinite(alone)


@given(instances, st.integers(0, 100))
def test_smaller_instances_have_the_same_values(instance: Instance, seed: int) -> None:
    draw = np.random.default_rng(seed)
    joined, labels = without_separable(instance), draw.integers(0, instance.sizes)
    assert joined.value(labels) == pytest.approx(instance.value(labels))
    allowed = draw.random(len(instance.cost)) < 0.5
    allowed[instance.first[:-1] + labels] = True
    left = restrict(instance, Entries.of(instance), allowed)
    if left is None:
        assert allowed.sum() == len(labels)
        return
    small = left.narrowed(instance, labels)
    np.testing.assert_array_equal(left.spread(instance, small), labels)
    assert left.instance.value(small) + left.constant == pytest.approx(instance.value(labels))
    np.testing.assert_array_equal(
        left.instance.limit - left.instance.usage(small), instance.limit - instance.usage(labels)
    )


def test_a_table_that_says_nothing_goes() -> None:
    table = np.array([1.0, 4.0, 3.0, 6.0])
    instance = Instance(
        np.array([0, 2, 4]), np.zeros(4), np.zeros(4), np.zeros(2, dtype=int), np.ones(2, dtype=int), np.zeros(1),
        np.array([0]), np.array([1]), table,
    )  # fmt: skip
    joined = without_separable(instance)
    assert not len(joined.table)
    assert [joined.value(np.array([a, b])) for a in (0, 1) for b in (0, 1)] == table.tolist()


def test_what_does_not_fit_is_proved() -> None:
    instance = Instance(*(np.array(x) for x in ([0, 1], [1.0], [3.0], [0], [1], [2.0])), *3 * [np.zeros(0, dtype=int)])
    found = solve(instance, 2.0, 0.0)
    assert found.labels is None and found.bound == np.inf


def tiny() -> dict[str, Any]:
    """Two nodes alive at once, whose cheap labels do not fit together; one pair is forbidden: 1 + 5 + 2."""
    nodes = {"intervals": [[0, 2], [1, 3]], "costs": [[1, 9], [0, 5]], "usages": [[6, 1], [6, 1]]}
    edges = {"nodes": [[0, 1]], "costs": [[0, 2, 10**18, 0]]}
    return {"name": "tiny-T", "problem": {"nodes": nodes, "edges": edges, "usage_limit": 10}}


def test_a_file_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps(tiny()).encode()))
    (tmp_path / "best_known.json").write_text(json.dumps({"T": {"best_known": 8}}))
    monkeypatch.setattr(sys, "argv", ["contest", str(path), str(tmp_path / "absent.json"), "--seconds", "2", "--json"])
    contest.main()
    row, absent = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["name"], row["value"], row["feasible"], row["best_known"]) == ("tiny-T", 8.0, True, 8)
    assert row["bound"] == pytest.approx(8.0, rel=1e-6)
    assert absent == {"name": "absent.json", "skipped": "no such file"}


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("nodes", "usages"), [[6, 1]], r"problem.nodes.usages has 1 entries, expected 2"),
        (("nodes", "usages"), [[6, 1], [6]], r"problem.nodes.usages\[1\] has 1 entries for 2 costs"),
        (("nodes", "costs"), [[1, "x"], [0, 5]], r"problem.nodes.costs\[0\] must be a list of numbers"),
        (("nodes", "intervals"), [[0], [1, 3]], r"problem.nodes.intervals\[0\] must be \[begin, end\]"),
        (("edges", "nodes"), [[0, 7]], r"problem.edges.nodes\[0\] must be two nodes of 0 to 1"),
        (("edges", "costs"), [[0, 2, 3]], r"problem.edges.costs\[0\] has 3 entries, expected 2 x 2"),
        (("usage_limit",), -1, r"problem.usage_limit must not be negative"),
        (("edges",), {}, r"field problem.edges.nodes is missing"),
    ],
)  # fmt: skip
def test_malformed_files_say_where(tmp_path: Path, where: tuple[str, ...], value: Any, message: str) -> None:
    data = tiny()
    at = data["problem"]
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        contest.read(path)
    assert str(path) in str(caught.value)


def test_what_is_not_json_is_said(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="not JSON in gzip"):
        contest.read(path)
