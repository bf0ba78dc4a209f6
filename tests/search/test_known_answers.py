"""Layouts that the field found by hand, which the search has to find by itself. Planning only: nothing is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Cluster, InfeasibleError, Plan, Search
from autopar.costs.cluster import Link
from autopar.ir.layout import Replicate, Split

HIDDEN, FFN, BLOCKS = 4096, 16384, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def plan(
    rows: int,
    axes: dict[str, int],
    cluster: Cluster | str = "h100",
    memory: float | None = None,
    search: Search | None = None,
) -> Plan:
    with torch.device("meta"):
        model = Blocks().to(torch.bfloat16)
        batch = (torch.empty(rows, HIDDEN, dtype=torch.bfloat16),)
    return autopar.plan(model, batch, cluster=cluster, axes=axes, memory=memory, search=search)


def test_small_batch_gives_megatrons_pair() -> None:
    """Seven rows cannot be split: the first weight by columns, the second by rows, one all-reduce each way a block."""
    found = plan(7, {"gpu": 4})
    for i in range(BLOCKS):
        assert found.parameters[f"blocks.{i}.up.weight"] == (Split(0, 0),)
        assert found.parameters[f"blocks.{i}.down.weight"] == (Split(1, 0),)
    assert found.predicted.collectives["gpu"] == {"all_reduce": 2 * BLOCKS}
    assert found.certificate.gap < 3e-3


def test_small_batch_gives_megatrons_attention() -> None:
    """One all-reduce forward and one backward for the attention block: heads are split from projection to output."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=64, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=64,
        vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        attention = transformers.LlamaModel(config).to(torch.bfloat16)
        batch = {"inputs_embeds": torch.empty(1, 7, 8192, dtype=torch.bfloat16)}
    found = autopar.plan(
        attention, batch, cluster="h100", axes={"gpu": 4}, loss_fn=lambda out, _: out[0].float().square().mean(),
        search=Search(pins={"overlap": "none"}),  # else small collectives hide behind one another's kernels
    )  # fmt: skip
    prefix = "layers.0.self_attn"
    for name in ("q_proj", "k_proj", "v_proj"):
        assert found.parameters[f"{prefix}.{name}.weight"] == (Split(0, 0),), name
    assert found.parameters[f"{prefix}.o_proj.weight"] == (Split(1, 0),)
    # The backward sum over q, k and v is one all-reduce; nothing else in the block communicates.
    total = sum(found.predicted.collectives["gpu"].values())
    assert found.predicted.collectives["gpu"] == {"all_reduce": total}
    assert total == 2


def test_large_batch_gives_data_parallelism() -> None:
    found = plan(65536, {"gpu": 4})
    assert all(layout == (Replicate(),) for layout in found.parameters.values())
    assert found.batch["0"] == (Split(0, 0),)
    assert set(found.predicted.collectives["gpu"]) == {"all_reduce"}


@pytest.mark.slow
def test_less_memory_gives_zero_then_fsdp_with_recomputation() -> None:
    """Parameters are split and gathered once, and with less memory most of them twice; gradients are scattered."""
    whole = Search(pins={"microbatches": 1, "overlap": "none"})  # a second gather would be hidden
    everything, zero, fsdp = (plan(65536, {"gpu": 4}, memory=size, search=whole) for size in (8e9, 3.7e9, 3e9))
    weights = [n for n in everything.parameters if "down.weight" in n or "up.weight" in n]
    assert not everything.recompute
    for found, budget in ((zero, 3.7e9), (fsdp, 3e9)):
        assert all(isinstance(found.parameters[n][0], Split) for n in weights)
        assert sum(found.predicted.peak_bytes.values()) <= budget
        assert found.predicted.collectives["gpu"]["reduce_scatter"] == len(weights)
        assert found.batch["0"] == (Split(0, 0),)
    assert zero.predicted.collectives["gpu"]["all_gather"] == len(weights)
    assert 2 * len(weights) >= fsdp.predicted.collectives["gpu"]["all_gather"] > 1.5 * len(weights)
    assert everything.certificate.objective < zero.certificate.objective < fsdp.certificate.objective
    assert any("layer_norm" in name for name in fsdp.recompute)


def swapped(first: Link, second: Link) -> Cluster:
    device = Cluster.preset("h100").device
    return Cluster("two links", device, (first,), (), {"x": first, "y": second})


@pytest.mark.slow
@pytest.mark.parametrize("fast_axis", ["x", pytest.param("y", marks=pytest.mark.deep)])
def test_tensor_parallel_traffic_takes_the_fast_link(fast_axis: str) -> None:
    """Batch over the slow link and weights over the fast one, whichever axis that is."""
    fast, slow = Link("fast", 450e9, 2e-6), Link("slow", 5e9, 20e-6)
    cluster = swapped(fast, slow) if fast_axis == "x" else swapped(slow, fast)
    found = plan(516, {"x": 4, "y": 4}, cluster)  # 4 * 129 rows: one axis at most can split them
    sent = found.predicted.communication_bytes
    slow_axis = "y" if fast_axis == "x" else "x"
    assert sent[fast_axis] > sent[slow_axis]
    place = ["x", "y"].index(fast_axis)
    assert found.parameters["blocks.0.up.weight"][place] == Split(0, 0)


@pytest.mark.deep
def test_what_cannot_fit_says_how_much_is_missing() -> None:
    whole = sum(plan(7, {"gpu": 4}).predicted.memory_bytes.values()) * 4
    with pytest.raises(InfeasibleError, match=r"missing.*mesh of about") as caught:
        plan(7, {"gpu": 4}, memory=0.1 * whole)
    assert caught.value.needed is not None
    assert caught.value.needed >= 0.25 * whole * 0.99
    # The smallest budget that it names does work.
    plan(7, {"gpu": 4}, memory=caught.value.needed)


def test_an_axis_that_divides_nothing_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"axis 'gpu' of size 7.*4096"):
        plan(8, {"gpu": 7}, search=Search(padding=False))
    assert plan(8, {"gpu": 7}).padding  # 4096 becomes 4102
