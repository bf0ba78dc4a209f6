"""Attention with dropout on four ranks: as on one device, or drawn by kernels, block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed


class Attending(nn.Module):
    """Attention with dropout; its sum is linear in the weight that makes values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, n, bias=False) for n in (32, 16, 16))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True, enable_gqa=True).sum()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def as_one_device(rank: int) -> float:
    from autopar.parallelize import parallelize

    plain, model = Attending(), Attending()
    parallel = parallelize(model, mesh_of(2, 2), deterministic=True, cluster=slow_devices(), timeout=WAIT)
    for each in (plain, parallel):
        torch.manual_seed(7)
        for _ in range(2):
            each(**batch()).backward()
    gradients = parallel.full_gradients()
    return max(float((gradients[n] - p.grad).abs().max()) for n, p in plain.named_parameters())


def drawn_in_kernels(rank: int, seed: int) -> dict[str, Any]:
    from autopar.parallelize import parallelize
    from autopar.rules.shapes.kernel_shapes import called

    slow = slow_devices()
    gpus = replace(slow, device=replace(slow.device, units=2))
    model = Attending()
    torch.manual_seed(seed)
    parallel = parallelize(model, mesh_of(2, 2), cluster=gpus, timeout=WAIT)
    losses = []
    for _ in range(2):
        loss = parallel(**batch())
        loss.backward()
        losses.append(float(loss.detach()))
    weight = parallel.full_state_dict()["v.weight"]
    names = [str(called(n)) for n in parallel.forward_graph.graph.nodes if n.op == "call_function"]
    return {
        "losses": losses,
        "of_gradient": float((parallel.full_gradients()["v.weight"] * weight).sum()),
        "local": [tuple(n.meta["val"][0].shape) for n in parallel.forward_graph.graph.nodes
                  if n.op == "call_function" and "attention_drawing" in str(called(n))],
        "names": names,
    }  # fmt: skip


def test_all_devices_together_draw_what_one_draws(ranks: Ranks) -> None:
    assert max(ranks.run(as_one_device)) < 1e-10


def test_kernels_draw_blocks_of_their_own(ranks: Ranks) -> None:
    results, others = ranks.run(drawn_in_kernels, 1), ranks.run(drawn_in_kernels, 2)
    for found in results:
        assert not any("draw.default" in name for name in found["names"])
        assert found["local"] and all(shape != (8, 4, 6, 8) for shape in found["local"])  # split
        assert found["losses"] == results[0]["losses"]
        assert found["losses"][0] != found["losses"][1]  # another step, other numbers
        # The loss is linear in the values: a backward that dropped other elements would not give it.
        assert found["of_gradient"] == pytest.approx(sum(found["losses"]), rel=1e-10)
    assert results[0]["losses"] != others[0]["losses"]
