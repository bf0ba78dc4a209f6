"""What a script assigns to parametrized weights of a model on a mesh, before and after steps; against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from autopar import parallelize
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed

D = torch.float64
VALUE = torch.linalg.qr(torch.arange(24, dtype=D).view(6, 4).sin())[0]


class Doubled(nn.Module):
    """A parametrization with an inverse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, y: torch.Tensor) -> torch.Tensor:
        return y / 2


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "two tensors": parametrizations.weight_norm,
    "a buffer beside": parametrizations.spectral_norm,
    "an own one": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def trained(model: Any, kind: str) -> list[torch.Tensor]:
    """Weights after an assignment of a plain tensor, of one of the mesh, and after removal, and losses."""
    found = []
    for step in range(4):
        if step == 1:
            torch.manual_seed(3)
            KINDS[kind](model[0])
        if step in (1, 2):
            model[0].weight = VALUE.clone()  # eager mode would take its memory
        if step == 2:
            with torch.no_grad():
                model[0].weight = model[0].weight * 1.5
        if step == 3:
            parametrize.remove_parametrizations(model[0], "weight")
        found.append(model[0].weight.detach().clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = model(torch.arange(32, dtype=D).view(8, 4).cos()).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


def apart(rank: int) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        search = Search(recipe="fsdp")
        model = parallelize(net(), mesh_of(2), cluster=slow_devices(), search=search, timeout=WAIT, outputs="whole")
        pairs = zip(trained(model, kind), trained(net(), kind), strict=True)
        found[kind] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.slow
def test_what_is_assigned(two_ranks: Ranks) -> None:
    for found in two_ranks.run(apart):
        assert max(found.values()) < 1e-10, found


HELD: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda model: nn.utils.weight_norm(model[0]),  # its weight is computed, and has them in its graph
    "spectral_norm": lambda model: nn.utils.spectral_norm(model[0]),  # the parameter gets another name
    "a penalty": lambda model: sum(p.square().sum() for p in model.parameters()),
    "a new value": lambda model: None,
}


def converted(model: Any, case: str) -> list[Any]:
    """Losses and gradients of a step in each of two dtypes, and what the user has put on a parameter."""
    found: list[Any] = []
    x, called = torch.arange(32, dtype=D).view(8, 4).cos(), []
    weight = model[2].weight
    weight.register_post_accumulate_grad_hook(lambda p: called.append(p.dtype))
    weight.kind = "last"
    for dtype in (D, torch.float32):
        model.to(dtype)
        if case == "a new value":
            model[0].weight.data = VALUE.to(dtype)
        loss = model(x.to(dtype)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        if dtype == D:
            torch.manual_seed(3)
            held = HELD[case](model)
    del held
    return [*(t.full_tensor() if hasattr(t, "full_tensor") else t for t in found), called, model[2].weight.kind]


def apart_converted(rank: int) -> dict[str, float]:
    apart = {}
    for case in HELD:
        search = Search(recipe="fsdp")
        model = parallelize(net(), mesh_of(2), cluster=slow_devices(), search=search, timeout=WAIT, outputs="whole")
        (*found, calls, kind), (*expected, others, _) = converted(model, case), converted(net(), case)
        assert (calls, kind) == (others, "last")
        apart[case] = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return apart


@pytest.mark.slow
def test_conversion_keeps_what_is_on_a_parameter(two_ranks: Ranks) -> None:
    """And converts one that a graph holds, as it does plain ones."""
    for found in two_ranks.run(apart_converted):
        assert max(found.values()) < 1e-6, found
