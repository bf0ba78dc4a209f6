"""Parameters that are added to a model on a mesh, and those that only generation reads; against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.errors import RankError
from autopar.module.generation.decode import _session_of
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, slow_devices, token_batch

pytestmark = pytest.mark.distributed

D = torch.float64
TOLERANCE = 1e-10


class Adapted(nn.Module):
    """A layer, and adapters beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapters = nn.Linear(8, 8, dtype=D), nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x)
        for adapter in self.adapters.values():
            h = h + adapter(x)
        return h.square().mean()


def x(step: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=D, generator=torch.Generator().manual_seed(step))


def trained(model: Any) -> list[torch.Tensor]:
    """With an adapter from the beginning, others after a step, which an optimizer has, and layers in others' places."""
    found, optimizers = [], []
    for step in range(5):
        if step < 3:
            torch.manual_seed(step)
            model.adapters[f"a{step}"] = nn.Linear(8, 8, dtype=D)
            trains = model.parameters() if step == 0 else model.adapters[f"a{step}"].parameters()
            optimizers.append(torch.optim.AdamW(trains, lr=0.01))
        if step == 3:
            model.base = nn.Linear(8, 8, dtype=D)
            nn.utils.parametrizations.weight_norm(model.adapters["a1"])
            # As adapters are mixed: torch would leave a plain parameter without memory.
            mixed = model.adapters["mixed"] = nn.Linear(8, 8, dtype=D)
            mixed.weight.data = 0.5 * (model.adapters["a0"].weight.detach() + model.adapters["a2"].weight.detach())
            optimizers[:] = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        loss = model(x(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.detach())
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return [*found, *state.values()]


def apart(rank: int) -> tuple[float, str]:
    options: dict[str, Any] = {"cluster": slow_devices(), "search": Search(recipe="fsdp"), "timeout": WAIT}
    found = trained(parallelize(Adapted(), mesh_of(2), **options))
    model, said = parallelize(Adapted(), mesh_of(2), **options), ""
    torch.manual_seed(rank)
    model.adapters["a"] = nn.Linear(8, 8, dtype=D)
    try:
        model(x(0))
    except RankError as e:
        said = str(e)
    return max(float((a - b).abs().max()) for a, b in zip(trained(Adapted()), found, strict=True)), said


@pytest.mark.slow
def test_adapters_that_are_added(two_ranks: Ranks) -> None:
    for difference, said in two_ranks.run(apart):
        assert difference < TOLERANCE
        assert "'adapters.a.weight' is the first of 2" in said
        assert "has other values, or other ones, than rank 0" in said


def generates(rank: int) -> list[float]:
    """Losses before and after generation by graphs and with the whole model, and parameters that it might lay out."""
    model = parallelize(
        gpt2(), mesh_of(2), cluster=slow_devices(), search=Search(recipe="ddp"), timeout=WAIT, outputs="whole"
    )
    found = []
    for beams in (1, 2):
        found.append(float(model(**token_batch(0)).loss))
        config = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        model.generate(torch.tensor([[3, 9, 27]]), **config)
    session = _session_of(model._autopar)
    return [*found, len(session.unread.names(session.original, session.context))]


@pytest.mark.slow
def test_generation_leaves_layouts_as_they_are(two_ranks: Ranks) -> None:
    for first, second, free in two_ranks.run(generates):
        assert first == second
        assert free == 0
