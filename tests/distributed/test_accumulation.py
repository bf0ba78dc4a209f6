"""Windows of accumulation on two ranks: what `tests.reports.test_no_sync` does on one device."""

from __future__ import annotations

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch, slow_devices

pytestmark = pytest.mark.distributed


def on_ranks(rank: int, recipe: str, microbatches: int) -> dict[str, float]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.reports.test_no_sync import CASES

    pins = {"microbatches": microbatches}
    search = Search(recipe=recipe, pins=pins)
    model = parallelize(mlp(), mesh_of(2), mlp_batch(0), search=search, cluster=slow_devices(), timeout=WAIT)
    found = {}
    for name, case in CASES.items():  # the last one changes the parameters
        model.zero_grad()
        found[name] = case(model, mlp())
    return found


@pytest.mark.parametrize(("recipe", "microbatches"), [("fsdp", 1), pytest.param("ddp", 2, marks=pytest.mark.deep)])
def test_on_ranks(two_ranks: Ranks, recipe: str, microbatches: int) -> None:
    for found in two_ranks.run(on_ranks, recipe, microbatches):
        assert max(found.values()) < 1e-12, found
