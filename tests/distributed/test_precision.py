"""Precision policies and autocast on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices

pytestmark = pytest.mark.distributed


def train(module: torch.nn.Module, batch: Any, steps: int = 3) -> list[torch.Tensor]:
    """Losses of some steps of AdamW with clipping."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = module(**batch(step))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def with_master_weights(rank: int) -> dict[str, float]:
    """float32 over float64, so that what is lost by adding in the wrong dtype would show."""
    from autopar import Precision, Search, parallelize

    policy = Precision(compute=torch.float32, reduce=torch.float64, master=torch.float64)
    model, batch = make("mlp")
    whole = parallelize(model, None, precision=policy)
    expected = train(whole, batch)
    found = {}
    searches = [Search(recipe="random", seed=1), Search(pins={"stages": 2, "microbatches": 4})]
    for number, search in enumerate(searches):
        model, batch = make("mlp")
        parts = parallelize(model, mesh_of(2, 2), precision=policy, search=search, timeout=WAIT)
        losses = train(parts, batch)
        state = whole.full_state_dict()
        errors = [float((v - state[k]).abs().max()) for k, v in parts.full_state_dict().items()]
        errors += [float((a - b).abs()) for a, b in zip(losses, expected, strict=True)]
        found[str(number)] = max(errors)
        assert all(v.dtype == torch.float64 for v in parts.full_state_dict().values())
    return found


@pytest.mark.slow
def test_master_weights(ranks: Ranks) -> None:
    for found in ranks.run(with_master_weights):
        assert max(found.values()) < 1e-5, found


def with_autocast(rank: int) -> tuple[float, list[str]]:
    from autopar import parallelize

    model, batch = make("mlp")
    model.float()
    inputs = {k: v.float() for k, v in batch(0).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**inputs)["loss"]
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    parts = parallelize(model, mesh_of(4), cluster=slow_devices(), timeout=WAIT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = parts(**inputs)["loss"]
    loss.backward()
    products = [n.meta["val"].dtype for n in parts.forward_graph.graph.nodes if "mm" in str(n.target)]
    plain = parts(**inputs)["loss"]  # without autocast: another specialization
    assert {str(n.meta["val"].dtype) for n in parts.forward_graph.graph.nodes if "mm" in str(n.target)} == {
        "torch.float32"
    }
    assert abs(float(plain) - float(expected)) > 0
    scale = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    full = parts.full_gradients()
    errors = [float((full[n] - g).abs().max()) / scale for n, g in gradients.items() if g is not None]
    return max(*errors, abs(float(loss) - float(expected))), sorted({str(d) for d in products})


@pytest.mark.deep
def test_autocast_around_the_call_is_honored(ranks: Ranks) -> None:
    for error, products in ranks.run(with_autocast):
        assert products == ["torch.bfloat16"]
        assert error < 2e-2


def with_overflow_on_one_rank(rank: int) -> float:
    """The first gradient is replicated and finite; the second is split, and not finite in the last rank's part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from autopar import parallelize

    mesh = mesh_of(4)
    parallelize(torch.nn.Linear(4, 4), mesh, timeout=WAIT)
    parameters = []
    for placement, value in ((Replicate(), 1.0), (Shard(0), float("inf") if rank == 3 else 1.0)):
        p = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [placement]))
        p.grad = DTensor.from_local(torch.full((2, 2), value), mesh, [placement])
        parameters.append(p)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return float(parameters[0].to_local()[0, 0])


def test_every_rank_skips_the_step_if_one_overflows(ranks: Ranks) -> None:
    assert ranks.run(with_overflow_on_one_rank) == [1.0] * 4


def scaled(module: torch.nn.Module, batch: Any, steps: int) -> list[float]:
    """The scale after each step of SGD in float16."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    scales = []
    for step in range(steps):
        loss = module(**{k: v.float() for k, v in batch(step).items()})["loss"]
        scaler.scale(loss.float()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def with_gradient_scaling(rank: int) -> tuple[list[float], list[float], float]:
    from autopar import Precision, Search, parallelize

    policy = Precision(compute=torch.float16, reduce=torch.float32, master=torch.float32)
    model, batch = make("mlp")
    whole = parallelize(model, None, precision=policy)
    before = {k: v.clone() for k, v in whole.full_state_dict().items()}
    expected = scaled(whole, batch, steps=14)
    model, batch = make("mlp")
    pins = {"batch.*": ("S(0)", "R"), "up.weight": ("R", "S(0)"), "down.weight": ("S(1)", "R"), "*.bias": ("R", "R")}
    parts = parallelize(model, mesh_of(2, 2), precision=policy, search=Search(pins=pins), timeout=WAIT)
    found = scaled(parts, batch, steps=14)
    state = whole.full_state_dict()
    moved = max(float((v - before[k]).abs().max()) for k, v in state.items())
    error = max(float((v - state[k]).abs().max()) for k, v in parts.full_state_dict().items())
    return expected, found, error / moved


@pytest.mark.slow
def test_gradient_scaling(ranks: Ranks) -> None:
    for expected, found, error in ranks.run(with_gradient_scaling):
        assert found == expected
        assert len(set(expected)) > 2, "the scale falls after overflows, and some steps are taken"
        assert error < 2e-2
