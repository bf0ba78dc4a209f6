"""How thoroughly tests search: once, but where the search is what they are about.

A search tries up to nine weights of kernels and communication. The first lets all be hidden that can be, and its plan
has the same kinds of collectives as later ones; those take nine tenths of the time.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search import find
from autopar.search.options import Job
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

THOROUGH = (
    "tests/search/", "tests/explain/", "tests/benchmarks/", "tests/pipeline/", "tests/simulate/", "tests/costs/",
    "tests/memory/",
)  # fmt: skip
"""Tests of the search, of what it says, and of what it goes by."""

_thorough = find._overlapping


def _once(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Plan:
    return _thorough(program, dims, replace(job, rough=True), classes)


def search_thoroughly(thoroughly: bool) -> None:
    """From here on, in this process."""
    find._overlapping = _thorough if thoroughly else _once


def searches_thoroughly() -> bool:
    """Whether searches of this process try all weights."""
    return find._overlapping is _thorough
