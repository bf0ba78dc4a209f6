"""Optimizer state that lies on the host is there but for the optimizer's step, and changes nothing."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.plan import EVERY, Plan
from autopar.memory.liveness import memory_points, peak_memory
from autopar.parallelize import parallelize
from autopar.runtime.state.optimizer_offload import OffloadedStates, offload_states
from autopar.search.predict import predict
from autopar.sharding.dims import analyze
from tests import models as zoo
from tests.search.test_offload import FAST

STEPS = 3


def planned(model: nn.Module, batch: Any, *names: str) -> Plan:
    """A plan of one device that keeps the optimizer state of some parameters on the host."""
    program = program_of(model, batch)
    plan = solve(program, {"device": 1}, FAST)
    keys = {f"parameter {name}" for name in names}
    found = quotient_keys(program)
    chosen = {key: EVERY for key in found if any(key.startswith(f"{k} ") for k in keys)}
    assert len(chosen) == len(names)
    return predict(program, analyze(program), replace(plan, offload=chosen))


def quotient_keys(program: Any) -> list[str]:
    from autopar.sharding.layer_classes import layer_classes

    return list(layer_classes(program, analyze(program)).members)


class Watching(torch.optim.AdamW):
    """Notes what lies on the host while it steps."""

    states: OffloadedStates
    during: list[int]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.during.append(len(self.states.on_host))
        return super().step(closure)


def train(model: Any, batch: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def pair() -> tuple[nn.Module, Any, Any]:
    """A model, the same with two parameters' state on the host, and a batch."""
    (plain, batch), (model, _) = zoo.mlp(), zoo.mlp()
    plan = planned(model, batch, "up.weight", "down.weight")
    return plain, parallelize(model, None, batch, plan=plan), batch


def test_state_is_on_the_host_between_steps_and_on_the_device_in_them() -> None:
    plain, model, batch = pair()
    optimizer = Watching(model.parameters(), lr=1e-2)
    optimizer.states, optimizer.during = model._autopar.offloaded, []
    train(model, batch, optimizer)
    train(plain, batch, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert optimizer.during == [0] * STEPS
    away = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    assert set(model._autopar.offloaded.on_host) == {
        (id(p), key) for p in away.values() for key in ("exp_avg", "exp_avg_sq")
    }
    for p in away.values():
        assert optimizer.state[p]["exp_avg"] is model._autopar.offloaded.on_host[id(p), "exp_avg"]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_state_dicts_are_right_and_leave_it_on_the_host() -> None:
    plain, model, batch = pair()
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    train(model, batch, optimizer)
    train(plain, batch, other)
    saved, expected = optimizer.state_dict(), other.state_dict()
    on_host = [id(t) for t in model._autopar.offloaded.on_host.values()]
    assert len(on_host) == 4
    for index, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(saved["state"][index][name], value)
            assert id(saved["state"][index][name]) not in on_host
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fresh.load_state_dict(saved)
    train(model, batch, fresh)
    train(plain, batch, other)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_hooks_go_with_the_module() -> None:
    from torch.optim import optimizer as hooks

    gc.collect()
    before = len(hooks._global_optimizer_pre_hooks)
    _, model, _ = pair()
    assert len(hooks._global_optimizer_pre_hooks) == before + 1
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()  # of other parameters
    assert not model._autopar.offloaded.on_host
    del model
    gc.collect()
    assert len(hooks._global_optimizer_pre_hooks) == before


def test_what_is_not_brought_back_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If copies were lost, the parameters would not be those of the plain model."""
    from autopar.runtime.state import optimizer_offload as module

    plain, model, batch = pair()
    monkeypatch.setattr(module, "bring", lambda tensor: torch.zeros_like(tensor))
    train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(plain, batch, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert not torch.allclose(model.get_parameter("up.weight"), plain.get_parameter("up.weight"))


def test_the_peak_is_that_of_the_pass_or_of_the_optimizers_step() -> None:
    model, batch = zoo.mlp(batch=256)
    program = program_of(model, batch)
    here = solve(program, {"device": 1}, FAST)
    away = planned(model, batch, "up.weight", "down.weight")
    local = rewrite(program, away)
    state = 2 * sum(p.nbytes for name, p in model.named_parameters() if name.endswith("weight"))
    peaks = [sum(peak_memory(rewrite(program, plan), plan).values()) for plan in (here, away)]
    assert peaks[0] - peaks[1] == state == away.predicted.host_bytes
    assert here.predicted.memory_bytes["optimizer"] - away.predicted.memory_bytes["optimizer"] == state
    assert away.predicted.step_seconds - here.predicted.step_seconds == pytest.approx(away.predicted.host_seconds)
    last, before = memory_points(local, away)[-1], memory_points(local, away)[-2]
    assert last.held["optimizer"] == before.held["optimizer"] + state  # for the optimizer's step all is there
    small = planned(*zoo.mlp(batch=8), "up.weight", "down.weight")
    held = peak_memory(rewrite(program_of(*zoo.mlp(batch=8)), small), small)
    assert held["optimizer"] == 2 * sum(p.nbytes for p in model.parameters())  # there, the step holds the most


def test_any_tensor_of_a_parameters_shape_is_state() -> None:
    parameter = nn.Parameter(torch.ones(3))
    states = offload_states([parameter])
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
        found += states.on_host.values()
    assert [t.tolist() for t in found] == [[1.0] * 3, [pytest.approx(1.9)] * 3]
