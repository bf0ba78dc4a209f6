"""Instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, solved through the search's own core.

The format is that of https://github.com/google/iopddl: nodes with costs, usages and an interval of program points each,
edges with a cost for each pair of labels, and a limit of usage at each point. Best known values, if a file
``best_known.json`` beside an instance names it, are shown beside what is found.

    python -m benchmarks.contest FILE... [--seconds 120] [--json]
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.solve import solve

FORBIDDEN = 1e18
"""Costs from here on forbid a label or a pair."""

GAP = 1e-6


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON, also .gz; one that is absent is skipped"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for each, without reading it (default 120)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args()
    for path in given.files:
        if not path.exists():
            row: dict[str, Any] = {"name": path.name, "skipped": "no such file"}
        else:
            try:
                row = measured(path, given.seconds)
            except ValueError as error:
                parser.exit(1, f"{error}\n")
        print(json.dumps(row) if given.json else ", ".join(f"{k} {_shown(v)}" for k, v in row.items()), flush=True)


def measured(path: Path, seconds: float) -> dict[str, Any]:
    """What is found of one file: `value` is None where nothing was, and `bound` where nothing fits."""
    name, instance = read(path)
    begin = time.monotonic()
    found = solve(instance, seconds, GAP)
    took = time.monotonic() - begin
    feasible = (
        found.labels is not None and bool(np.isfinite(instance.value(found.labels))) and instance.fits(found.labels)
    )
    row: dict[str, Any] = {
        "name": name,
        "value": found.value if feasible else None,
        "bound": found.bound if np.isfinite(found.bound) else None,
        "seconds": round(took, 1),
        "feasible": feasible,
        "method": found.method,
    }
    beside = path.parent / "best_known.json"
    if beside.exists():
        known = json.loads(beside.read_text(encoding="utf-8")).get(name.rsplit("-", 1)[-1], {})
        row["best_known"] = known.get("best_known")
    return row


def read(path: Path) -> tuple[str, Instance]:
    """An instance of the contest's format.

    Raises:
        ValueError: the file is not one; says which field, and why.
    """
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not JSON{' in gzip' if path.suffix == '.gz' else ''}: {error}") from None

    def field(*names: str) -> Any:
        at = found
        for name in names:
            if not isinstance(at, dict) or name not in at:
                raise ValueError(f"{path}: field {'.'.join(names)} is missing")
            at = at[name]
        return at

    def numbers(values: Any, what: str, integer: bool = False) -> Any:
        try:
            array = np.array(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {what} must be a list of numbers") from None
        if array.ndim != 1 or not np.isfinite(array).all() or (integer and (array != np.floor(array)).any()):
            raise ValueError(f"{path}: {what} must be a list of {'integers' if integer else 'finite numbers'}")
        return array.astype(np.int64) if integer else array

    def lists(*names: str) -> list[Any]:
        value = field(*names)
        if not isinstance(value, list):
            raise ValueError(f"{path}: field {'.'.join(names)} must be a list")
        return value

    node_costs, usages, intervals = (lists("problem", "nodes", x) for x in ("costs", "usages", "intervals"))
    pairs, tables = (lists("problem", "edges", x) for x in ("nodes", "costs"))
    count = len(node_costs)
    for what, values, length in (
        ("problem.nodes.usages", usages, count),
        ("problem.nodes.intervals", intervals, count),
        ("problem.edges.costs", tables, len(pairs)),
    ):
        if len(values) != length:
            raise ValueError(f"{path}: {what} has {len(values)} entries, expected {length}")
    costs = [numbers(x, f"problem.nodes.costs[{i}]") for i, x in enumerate(node_costs)]
    memory = [numbers(x, f"problem.nodes.usages[{i}]") for i, x in enumerate(usages)]
    lives = [numbers(x, f"problem.nodes.intervals[{i}]", True) for i, x in enumerate(intervals)]
    for i, (cost, use, life) in enumerate(zip(costs, memory, lives, strict=True)):
        if not len(cost) or len(use) != len(cost):
            raise ValueError(f"{path}: problem.nodes.usages[{i}] has {len(use)} entries for {len(cost)} costs")
        if len(life) != 2:
            raise ValueError(f"{path}: problem.nodes.intervals[{i}] must be [begin, end]")
    u: list[int] = []
    v: list[int] = []
    kept: list[Any] = []
    for i, (pair, values) in enumerate(zip(pairs, tables, strict=True)):
        ends = numbers(pair, f"problem.edges.nodes[{i}]", True).tolist()
        if len(ends) != 2 or not all(0 <= n < count for n in ends):
            raise ValueError(f"{path}: problem.edges.nodes[{i}] must be two nodes of 0 to {count - 1}")
        table, (a, b) = numbers(values, f"problem.edges.costs[{i}]"), ends
        if len(table) != len(costs[a]) * len(costs[b]):
            raise ValueError(
                f"{path}: problem.edges.costs[{i}] has {len(table)} entries, expected {len(costs[a])} x {len(costs[b])}"
            )
        if a == b:
            costs[a] = costs[a] + table[:: len(costs[a]) + 1]
        else:
            u.append(a)
            v.append(b)
            kept.append(table)
    limit = numbers([field("problem", "usage_limit")], "problem.usage_limit")
    if limit[0] < 0:
        raise ValueError(f"{path}: problem.usage_limit must not be negative")
    try:
        instance = Instance(
            np.concatenate([[0], np.cumsum([len(c) for c in costs])]).astype(np.int64),
            _allowed(np.concatenate([np.zeros(0), *costs])),
            np.concatenate([np.zeros(0), *memory]),
            np.array([x[0] for x in lives], dtype=np.int64),
            np.array([x[1] for x in lives], dtype=np.int64),
            np.full(max([1, *(x[1] for x in lives)]), limit[0]),
            np.array(u, dtype=np.int64),
            np.array(v, dtype=np.int64),
            _allowed(np.concatenate([np.zeros(0), *kept])),
        )
    except ValueError as error:
        raise ValueError(f"{path}: problem: {error}") from None
    return str(field("name")) if "name" in found else path.name.removesuffix(".gz").removesuffix(".json"), instance


def _allowed(costs: Any) -> Any:
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _shown(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
