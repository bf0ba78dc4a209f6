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
    for seed in (0, 1, 2):
        model, batch = make("mlp")
        search = Search(recipe="random", seed=seed)
        parts = parallelize(model, mesh_of(2, 2), precision=policy, search=search, timeout=WAIT)
        losses = train(parts, batch)
        state = whole.full_state_dict()
        errors = [float((v - state[k]).abs().max()) for k, v in parts.full_state_dict().items()]
        errors += [float((a - b).abs()) for a, b in zip(losses, expected, strict=True)]
        found[str(seed)] = max(errors)
        assert all(v.dtype == torch.float64 for v in parts.full_state_dict().values())
    return found


def test_master_weights(ranks: Ranks) -> None:
    for found in ranks.run(with_master_weights, timeout=600):
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
    plain = parts(**inputs)["loss"]  # without autocast: another specialisation
    assert {str(n.meta["val"].dtype) for n in parts.forward_graph.graph.nodes if "mm" in str(n.target)} == {
        "torch.float32"
    }
    assert abs(float(plain) - float(expected)) > 0
    scale = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    full = parts.full_gradients()
    errors = [float((full[n] - g).abs().max()) / scale for n, g in gradients.items() if g is not None]
    return max(*errors, abs(float(loss) - float(expected))), sorted({str(d) for d in products})


def test_autocast_around_the_call_is_honoured(ranks: Ranks) -> None:
    for error, products in ranks.run(with_autocast, timeout=600):
        assert products == ["torch.bfloat16"]
        assert error < 2e-2
