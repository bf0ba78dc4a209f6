"""Cross-entropy of classes that are split, on four ranks: three steps of AdamW equal one device's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.plans import follow_plan
from tests.verify.test_losses import LOSSES, Head, batch_of

pytestmark = pytest.mark.distributed

STEPS = 3


def train(rank: int, name: str, split: bool) -> tuple[float, list[bool]]:
    """The largest difference of any loss, gradient or parameter, and whether each operator has some classes only."""
    from autopar.compiler import program_of
    from autopar.ir.ops.cross_entropy import cross_entropy, cross_entropy_backward
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    model, options = Head(LOSSES[name]), {}
    if split:
        parameters = {"head.weight": "S(0) S(0)", "head.bias": "S(0) S(0)"}
        options["plan"] = follow_plan(program_of(model, batch_of()), {"a": 2, "b": 2}, parameters=parameters)
    else:
        options["search"] = Search(recipe="random")
    parallel: Any = parallelize(model, mesh_of(2, 2), cluster=slow_devices(), timeout=WAIT, **options)
    batches = [{**batch_of(), "x": batch_of()["x"] + step} for step in range(STEPS)]
    worst = follow(parallel, Head(LOSSES[name]), batches)
    nodes = [n for graph in (parallel.forward_graph, parallel.backward_graph) for n in graph.graph.nodes]
    starts = [n.args[2] for n in nodes if n.target is cross_entropy]
    starts += [n.args[4] for n in nodes if n.target is cross_entropy_backward]
    return worst, [start is not None for start in starts]


@pytest.mark.parametrize("name", ["ignored", pytest.param("z-loss", marks=pytest.mark.deep)])
def test_classes_that_are_split(ranks: Ranks, name: str) -> None:
    """Each rank has two of eight classes."""
    results: list[Any] = ranks.run(train, name, True)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert [parts for _, parts in results] == [[True, True]] * 4


@pytest.mark.deep
@pytest.mark.parametrize("name", ["per row", "by hand"])
def test_random_plans(ranks: Ranks, name: str) -> None:
    assert max(worst for worst, _ in ranks.run(train, name, False)) < TOLERANCE
