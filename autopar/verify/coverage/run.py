"""All of torch's operator database, in as many processes as wanted; what the figures of the report are."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

import autopar.strategies  # noqa: F401  registers every rule
from autopar._torch_compat import dtensor_overloads, operator_database
from autopar.verify.coverage.examine import (
    DISCOVERED,
    MISSING,
    NOTHING,
    REPLICATED,
    SPLIT,
    UNTRACED,
    OperatorCoverage,
    examine,
)

DTYPES = ("float64", "float32")

Tick = Callable[[int, int, str], None]


def cover(
    only: str = "", dtypes: Sequence[str] = DTYPES, workers: int = 1, tick: Tick = lambda *_: None
) -> list[OperatorCoverage]:
    """Examine every operator whose name contains ``only``, in each dtype.

    Args:
        only: part of a name; empty for all.
        dtypes: of the samples.
        workers: processes.
        tick: called with how many are done, how many there are, and the last one's name.
    """
    names = sorted({op.formatted_name for op in operator_database() if only in op.formatted_name})
    tasks = [(name, dtype) for name in names for dtype in dtypes]
    found = []
    for i, (task, outcome) in enumerate(zip(tasks, _outcomes(tasks, workers), strict=True)):
        tick(i + 1, len(tasks), task[0])
        if outcome is not None:
            found.append(outcome)
    return found


def _outcomes(tasks: list[tuple[str, str]], workers: int) -> Iterator[OperatorCoverage | None]:
    if workers <= 1:
        yield from map(_task, tasks)
        return
    # Spawned: a forked process would inherit locks that torch's threads hold at that time.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(_task, tasks, chunksize=4)


def _task(task: tuple[str, str]) -> OperatorCoverage | None:
    # By name, since entries of the database hold lambdas, which cannot be sent to a process.
    name, dtype = task
    op = next(o for o in operator_database() if o.formatted_name == name)
    return examine(op, getattr(torch, dtype))


def figures_of(outcomes: Sequence[OperatorCoverage]) -> dict[str, Any]:
    """Counts by dtype, the overloads that can be split, what DTensor has for the same ones, and every operator."""
    overloads: dict[str, str] = {}
    for outcome in outcomes:
        for name, kind in outcome.overloads.items():
            order = (SPLIT, DISCOVERED, REPLICATED)
            overloads[name] = min(overloads.get(name, kind), kind, key=order.index)
    traced = sorted({t for o in outcomes for t in o.traced})
    # For scale: how many of the same overloads DTensor has a rule for.
    known = dtensor_overloads()
    return {
        "by_dtype": {
            d: _counts([o for o in outcomes if o.dtype == d]) for d in dict.fromkeys(o.dtype for o in outcomes)
        },
        "overloads": dict(sorted(overloads.items())),
        "traced_overloads": len(traced),
        "dtensor_overloads": sum(t in known for t in traced),
        "operators": [asdict(o) for o in outcomes],
    }


def _counts(outcomes: Sequence[OperatorCoverage]) -> dict[str, Any]:
    def by_status(chosen: Sequence[OperatorCoverage]) -> dict[str, int]:
        found = Counter(o.status for o in chosen)
        return {s: found[s] for s in (SPLIT, DISCOVERED, REPLICATED, NOTHING, MISSING, UNTRACED)}

    return {
        "operators": len(outcomes),
        "all": by_status(outcomes),
        "differentiable": by_status([o for o in outcomes if o.differentiable]),
        "checks": sum(o.checks for o in outcomes),
        "failures": {o.name: list(o.failures) for o in outcomes if o.failures},
        "blocking": dict(Counter(o.reason for o in outcomes if o.status in (REPLICATED, MISSING)).most_common()),
        "not_captured": dict(Counter(o.reason for o in outcomes if o.status == UNTRACED).most_common()),
    }
