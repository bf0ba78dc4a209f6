"""Four ranks with parts of one sequence: rows of neighbors for convolutions and shifts, totals for running sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.distributed.test_compile import aot_eager

pytestmark = pytest.mark.distributed


def steps(
    rank: int, name: str, sizes: tuple[int, ...], roles: dict[str, str], pins: dict[str, Any], compile: Any = False
) -> tuple[float, int]:
    """Three steps of AdamW, and how often ranks send a block to another."""
    from autopar.ir.ops.sequence.send_block import send_block
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.capture.test_attention_formula import FORMULAS, ByFormula
    from tests.capture.test_attention_formula import batch as of_formulas
    from tests.strategies.sequence_models import MODELS

    # Ranks draw dropout in their own order.
    kinds = [f for n, f in FORMULAS.items() if "dropped" not in n]
    formulas = (partial(ByFormula, *kinds), of_formulas()["x"].double())
    model, batch = formulas if name == "formulas" else MODELS[name]
    search = Search(roles=roles, pins=pins) if roles else Search(recipe="random", seed=2, pins=pins)
    plain = model().double()
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT, "compile": compile}
    parallel: Any = parallelize(model().double(), mesh_of(*sizes), search=search, **options)
    argument = "tokens" if name in ("shifts", "pictures", "shorter") else "x"
    worst = follow(parallel, plain, [{argument: batch.roll(step, 0)} for step in range(3)])
    graphs = (parallel.forward_graph, parallel.backward_graph)
    return worst, sum(n.target is send_block for graph in graphs for n in graph.graph.nodes)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "sizes", "roles", "pins"),
    [
        ("recurrence", (4,), {"a": "context"}, {}),
        pytest.param(
            "shifts", (2, 2), {"a": "context", "b": "context"}, {"recompute": "search"}, marks=pytest.mark.deep
        ),
        pytest.param("selective", (4,), {"a": "context"}, {}, marks=pytest.mark.deep),
        pytest.param("chunks", (2, 2), {"a": "context", "b": "context"}, {}, marks=pytest.mark.deep),
        pytest.param("residual", (2, 2), {}, {}, marks=pytest.mark.deep),
        pytest.param("formulas", (2, 2), {}, {}, marks=pytest.mark.deep),
        pytest.param("formulas", (4,), {"a": "context"}, {}, marks=pytest.mark.deep),
        ("image", (4,), {"a": "context"}, {}),
        ("windows", (4,), {"a": "context"}, {}),
        pytest.param("patches", (4,), {"a": "context"}, {}, marks=pytest.mark.deep),
        ("pictures", (2, 2), {"a": "data", "b": "context"}, {}),
        pytest.param("shorter", (4,), {"a": "context"}, {}, marks=pytest.mark.deep),
        ("pooled", (4,), {"a": "context"}, {}),
        pytest.param("recurrence", (2, 2), {"a": "data", "b": "context"}, {}, marks=pytest.mark.deep),
    ],
)
def test_ranks_have_parts_of_a_sequence(
    ranks: Ranks, name: str, sizes: tuple[int, ...], roles: dict[str, str], pins: dict[str, Any]
) -> None:
    results = ranks.run(steps, name, sizes, roles, pins)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert min(sends for _, sends in results) > 0 or name == "formulas"


@pytest.mark.deep
@pytest.mark.parametrize("name", ["recurrence", "shifts"])
def test_compiled_regions_lie_between(ranks: Ranks, name: str) -> None:
    results = ranks.run(steps, name, (4,), {"a": "context"}, {}, aot_eager)
    assert max(worst for worst, _ in results) < TOLERANCE


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("recurrence", {"stages": 2, "microbatches": 2}),
        ("recurrence", {"microbatches": 2}),
        ("windows", {"microbatches": 2}),
    ],
)
def test_beside_stages_and_microbatches(ranks: Ranks, name: str, pins: dict[str, Any]) -> None:
    results = ranks.run(steps, name, (2, 2), {"b": "context"}, pins)
    assert max(worst for worst, _ in results) < TOLERANCE
    if "stages" not in pins:
        assert min(sends for _, sends in results) > 0
