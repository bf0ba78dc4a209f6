"""The search sends to the host what is worth it where memory is short, and nothing where there is no way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.explain.activations import activations
from autopar.explain.tables.activations import activations_dict, activations_table
from autopar.ir.ops.host import to_host
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.search.options import Search
from autopar.verify.verify import compare, global_values
from tests.distributed.models import slow_devices

AXES = {"a": 2}


def linked(bandwidth: float) -> Cluster:
    """Devices that compute so slowly that sending pays, with a way to their host."""
    found = slow_devices()
    return replace(found, device=replace(found.device, host_bandwidth=bandwidth))


FAST, NONE = linked(1e12), linked(0.0)

LITTLE_LESS = 0.92
"""Share of the memory in which everything fits without sending, too."""


class Deep(nn.Module):
    """Linears and what is cheap to make again; the sums are handed from block to block."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
        return x.square().mean()


@cache
def captured() -> tuple[Program, list[Tensor]]:
    model, batch = Deep(4), (torch.randn(128, 16),)
    program = program_of(model, batch)
    return program, global_values(program, model, batch)


@cache
def most() -> float:
    """Bytes that the plan needs which nothing limits."""
    free = solve(captured()[0], AXES, FAST, memory="1GiB", optimizer="sgd")
    assert not free.offload
    return sum(free.predicted.peak_bytes.values())


@cache
def solved(machine: Cluster, share: float, *pins: tuple[str, str]) -> Plan:
    search = Search(pins={"microbatches": 1, **dict(pins)})
    return solve(captured()[0], AXES, machine, memory=share * most(), optimizer="sgd", search=search)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", pytest.param("search", marks=pytest.mark.deep)])
def test_what_is_sent_computes_the_same_and_fits(again: str, tmp_path: Path) -> None:
    program, values = captured()
    plan = solved(FAST, 0.6, ("recompute", again))
    assert plan.offload
    assert sum(plan.predicted.peak_bytes.values()) <= 0.6 * most()
    assert plan.certificate.objective == pytest.approx(plan.predicted.step_seconds)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    sent = [n.meta["val"].nbytes for n in local.graph.graph.nodes if n.target is to_host]
    assert sum(sent) == plan.predicted.host_bytes > 0
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-10
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "offloaded" in plan.summary()


@pytest.mark.slow
def test_only_what_is_sent_makes_it_fit() -> None:
    for machine, offload in ((NONE, "search"), (FAST, "none")):
        with pytest.raises(InfeasibleError):
            solved(machine, 0.6, ("recompute", "none"), ("offload", offload))
    assert solved(FAST, 0.6, ("recompute", "none")).offload


@pytest.mark.deep
@pytest.mark.parametrize(("machine", "pins"), [(NONE, ()), (FAST, (("offload", "none"),))])
def test_nothing_goes_where_there_is_no_way_or_a_pin_forbids_it(
    machine: Cluster, pins: tuple[tuple[str, str], ...]
) -> None:
    plan = solved(machine, LITTLE_LESS, *pins)
    assert not plan.offload
    assert plan.recompute
    assert plan.predicted.host_bytes == plan.predicted.host_seconds == 0
    assert "on the host" not in plan.certificate.space


@pytest.mark.deep
def test_what_is_sent_is_faster_than_what_is_recomputed() -> None:
    plan, sent = (solved(FAST, LITTLE_LESS, ("offload", choice)) for choice in ("none", "search"))
    assert sent.offload
    assert sent.certificate.objective < plan.certificate.objective


def test_a_pin_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="'offload' must be 'search' or 'none', got 'all'"):
        Search(pins={"offload": "all"})


@pytest.mark.deep
def test_explain_says_why_a_tensor_is_on_the_host() -> None:
    plan = solved(FAST, 0.6)
    tensors = activations(captured()[0], plan, "layers")
    sent = [t for t in tensors if t.state == "offloaded"]
    assert sent
    for tensor in sent:
        assert tensor.copied <= tensor.worth * 1.01
        assert tensor.copied < tensor.seconds or "recomputing it needs" in tensor.why
    text = " ".join(activations_table(plan, tensors).split())
    assert "offloaded: copying it to the host and back takes" in text
    facts = activations_dict("layers", plan, tensors)["tensors"]
    assert [t["copied"] for t in facts] == [t.copied for t in tensors]


@pytest.mark.slow
def test_optimizer_state_goes_where_it_pays() -> None:
    """What is kept has gone before; for the optimizer's step all of the state must be on the device."""
    with torch.device("meta"):
        model, batch = Deep(4, 512), (torch.empty(2048, 512),)
    program = program_of(model, batch)
    free = solve(program, {}, FAST, memory="1GiB")
    here = sum(free.predicted.memory_bytes.values())
    search = Search(pins={"microbatches": 1})
    budget = here + 0.3 * (sum(free.predicted.peak_bytes.values()) - here)
    plan = solve(program, {}, FAST, memory=budget, search=search)
    assert any(name.startswith("parameter ") for name in plan.offload)
    assert sum(plan.predicted.peak_bytes.values()) <= budget
    assert plan.predicted.memory_bytes["optimizer"] < free.predicted.memory_bytes["optimizer"]
    assert plan.certificate.objective == pytest.approx(plan.predicted.step_seconds)
    (state,) = (t for t in activations(program, plan, "layers.1.0.weight") if t.name.endswith("optimizer state"))
    assert state.size == 2 * 512 * 512 * 4
    assert "optimizer state of" in plan.summary()
    with pytest.raises(InfeasibleError):
        solve(program, {}, FAST, memory=0.99 * here, search=search)
