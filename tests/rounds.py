"""How thoroughly tests search: once, but where the search is what they are about.

A search tries up to nine weights of kernels and communication. The first lets all be hidden that can be, and its plan
has the same kinds of collectives as later ones; those take nine tenths of the time. Random plans are not priced, which
takes a quarter of the time of `verify`.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search import padding, rounds
from autopar.search.budget.cutoff import Cutoff
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

THOROUGH = (
    *(f"tests/search/test_{name}" for name in ("find", "known_answers", "module_pins", "offload", "padding")),
    *(f"tests/search/budget/test_{name}" for name in ("cutoff", "layer_groups", "live_ranges", "pareto", "use_slack")),
    "tests/search/budget/test_within_budget", "tests/search/overlap/", "tests/search/pipeline/",
    "tests/search/microbatch/test_kernel_floor.py", "tests/benchmarks/", "tests/costs/", "tests/explain/tables/",
    "tests/pipeline/test_custom_schedule", "tests/pipeline/test_pipelines", "tests/simulate/",
)  # fmt: skip
"""Tests of what is found; others need not find the best, and those that must are marked `thorough`."""

_thorough, _priced = rounds.Rounds.rest, padding.predict


def _once(own: rounds.Rounds, cutoff: Cutoff | None) -> Plan:
    own.job = replace(own.job, rough=True)
    return _thorough(own, cutoff)


def _unpriced(program: Program, dims: Dims, plan: Plan, classes: LayerClasses | None = None) -> Plan:
    # Of random plans the classes are not known.
    return plan if classes is None else _priced(program, dims, plan, classes)


def search_thoroughly(thoroughly: bool) -> None:
    """From here on, in this process."""
    rounds.Rounds.rest = _thorough if thoroughly else _once  # type: ignore[method-assign]
    padding.predict = _priced if thoroughly else _unpriced


def searches_thoroughly() -> bool:
    """Whether searches of this process try all weights."""
    return rounds.Rounds.rest is _thorough
