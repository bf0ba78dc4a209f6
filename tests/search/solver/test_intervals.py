"""Limits at program points: the exact way equals brute force, multipliers bound it, labels fit; and the contest's files."""

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
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.intervals.multipliers import Best, ascend
from autopar.search.solver.intervals.solve import solve
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
        first, costs(int(first[-1])), memory, begin, begin + rng.integers(0, 4, nodes), float(int(tight * nodes)),
        u, v, costs(int((sizes[u] * sizes[v]).sum())),
    )  # fmt: skip


instances = st.builds(
    random_instance,
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 6),
    density=st.sampled_from([0.0, 1.0, 2.0]),
    forbid=st.sampled_from([0.0, 0.1, 0.3]),
    tight=st.sampled_from([0.3, 0.8, 2.0]),
)


def least(instance: Instance) -> float:
    """The least value of labels within the limit, by trying all; inf if there are none."""
    every = (np.array(x) for x in itertools.product(*(range(n) for n in instance.sizes)))
    return min((instance.value(x) for x in every if instance.fits(x)), default=float("inf"))


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
    messages.price = instance.memory * np.repeat(seconds, instance.sizes)
    truth = least(instance)
    for sweep in range(4):
        assert messages.bound() - multiplier.sum() * instance.limit <= truth + 1e-9 * messages._forbidden
        messages.sweep(sweep % 2 == 0)


@given(instances)
def test_ascent_bounds_and_fits(instance: Instance) -> None:
    best, truth = Best(), least(instance)
    ascend(instance, best, time.monotonic() + 0.02, 0.0, lambda value, bound: None)
    assert best.bound <= truth + 1e-6
    if best.labels is not None:
        assert instance.fits(best.labels) and truth <= instance.value(best.labels) == best.value


def test_what_does_not_fit_is_proved() -> None:
    instance = Instance(*(np.array(x) for x in ([0, 1], [1.0], [3.0], [0], [1])), 2.0, *3 * [np.zeros(0, dtype=int)])  # type: ignore[arg-type]
    found = solve(instance, 2.0, 0.0, lambda value, bound: None)
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
        (("usage_limit",), -1, r"memory and its limit must be finite and not negative"),
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
