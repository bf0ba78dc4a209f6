"""Steps in microbatches on four ranks: three steps of AdamW equal one device's on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed

STEPS = 3


def train(rank: int, name: str, inputs: str, recipe: str, seed: int) -> float:
    """The largest difference of loss, logits, gradients' norm or parameters; samples have other numbers of tokens."""
    from autopar.parallelize import parallelize
    from autopar.search.find import Search
    from tests import models

    (plain, batch), (model, _) = (getattr(models, name)(batch=16) for _ in range(2))
    for row, labels in enumerate(batch.get("labels", ())):
        labels[: row // 2] = -100
    search = Search(pins={"microbatches": 4, "recompute": "search"}, recipe=recipe, seed=seed)
    parallel: Any = parallelize(
        model.double(), mesh_of(2, 2), batch, inputs=inputs, search=search, cluster=slow_devices(), timeout=WAIT
    )
    plain.double()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, plain)]
    own = batch if inputs == "global" else {k: v.chunk(4)[parallel.data_rank] for k, v in batch.items()}
    worst = 0.0
    for _ in range(STEPS):
        found, expected = parallel(**own), plain(**batch)
        found["loss"].backward()
        expected["loss"].backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (parallel, plain)]
        pairs = [(found["loss"], expected["loss"]), (norms[0].full_tensor(), norms[1])]
        pairs.append((found["logits"].full_tensor(), expected["logits"]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
        pairs += [(state[name], value) for name, value in plain.state_dict().items() if name in state]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


def test_each_rank_passes_its_rows_of_unequal_numbers_of_tokens(ranks: Ranks) -> None:
    assert max(ranks.run(train, "llama", "local", "fsdp", 0)) < 1e-6  # the model computes its loss in float32


def clip(rank: int, count: int) -> float:
    """The largest difference of a gradient after clipping, where one value is the gradient of two parameters."""
    from autopar.parallelize import parallelize
    from autopar.search.find import Search
    from tests.test_microbatch import Shared

    torch.manual_seed(0)
    x = torch.randn(16, 8, dtype=torch.float64)
    plain, worst = Shared().double(), 0.0
    model: Any = parallelize(
        Shared().double(), mesh_of(2, 2), (x,), search=Search(pins={"microbatches": count}), timeout=WAIT
    )
    for m in (model, plain):
        (3 * m(x)).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    found = model.full_gradients()
    for name, p in plain.named_parameters():
        worst = max(worst, float((found[name] - p.grad).abs().max()))
    return worst


@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_of_two_parameters_is_clipped_once(ranks: Ranks, count: int) -> None:
    assert max(ranks.run(clip, count)) < 1e-12


@pytest.mark.deep
def test_a_random_plan(ranks: Ranks) -> None:
    assert max(ranks.run(train, "encoder", "global", "random", 0)) < 1e-9
