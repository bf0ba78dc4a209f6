"""Asynchronous SGD of one process, in random orders of arrivals, against a replay of what was recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.errors import AutoparError
from autopar.module.low_communication.stale.emulate import EmulatedStale
from tests.distributed.models import mlp, mlp_batch
from tests.module.low_communication.stale_reference import AdamW, Sgd, bounds, replay, require_bounded, vector

WORKERS, EVENTS = 3, 60
LR = {"SGD": 0.05, "momentum": 0.02, "AdamW": 1e-2}
KINDS: dict[str, tuple[Any, Any]] = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=LR["SGD"]), Sgd),
    "momentum": (
        lambda m: torch.optim.SGD(m.parameters(), lr=LR["momentum"], momentum=0.5, weight_decay=0.1),
        lambda size: Sgd(size, 0.5, 0.1),
    ),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=LR["AdamW"]), AdamW),
}


def batch(worker: int, step: int) -> dict[str, torch.Tensor]:
    return mlp_batch(WORKERS * step + worker, rows=4)


def rate(kind: str, step: int) -> float:
    return LR[kind] * (1 - step / 100)


def made(kind: str, **given: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer], EmulatedStale]:
    models = [mlp() for _ in range(WORKERS)]
    optimizers = [KINDS[kind][0](m) for m in models]
    return models, optimizers, EmulatedStale(models, optimizers, **given)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.integers(0, 3), st.sampled_from([0.0, 0.5]), st.sampled_from([1, 2, None]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_order_of_arrivals(kind: str, staleness: int, compensation: float, owners: int | None, draw: Any) -> None:
    models, optimizers, emulated = made(kind, staleness=staleness, compensation=compensation, owners=owners)
    steps = [0] * WORKERS
    for _ in range(EVENTS):
        ready = [("send", w, 0) for w in range(WORKERS) if emulated.is_ready(w)]
        what, worker, owner = draw.choice(ready + [("deliver", *pair) for pair in emulated.on_the_way()])
        if what == "deliver":
            emulated.deliver(worker, owner)
            continue
        optimizers[worker].param_groups[0]["lr"] = rate(kind, steps[worker])
        models[worker].zero_grad()
        models[worker](**batch(worker, steps[worker]))["loss"].backward()
        steps[worker] += 1
        emulated.send(worker)
    for pair in emulated.on_the_way():
        emulated.deliver(*pair)
    logs = [o.arrivals for o in emulated.owners]
    expected = replay(mlp(), batch, lambda step: rate(kind, step), logs, KINDS[kind][1], compensation)
    for log, owner, versions in zip(logs, emulated.owners, expected, strict=True):
        require_bounded(log, WORKERS, staleness)
        assert len(log) == sum(steps) == owner.version
        assert np.abs(owner.flat.numpy() - versions[-1]).max() < 1e-12
    total = len(vector(models[0]))
    for worker, model in enumerate(models):
        for (low, high), owner, versions in zip(bounds(total, len(logs)), emulated.owners, expected, strict=True):
            if emulated.is_ready(worker):
                assert np.abs(vector(model)[low:high] - versions[owner.read[worker]]).max() < 1e-12


def test_equal_paces_without_staleness_are_steps_with_the_sum_of_gradients() -> None:
    """SGD: all read the same version, and each step moves by the sum of what they computed there."""
    models, _, emulated = made("SGD", staleness=0)
    plain = mlp()
    own = torch.optim.SGD(plain.parameters(), lr=LR["SGD"])
    for step in range(3):
        own.zero_grad()
        for worker, model in enumerate(models):
            model.zero_grad()
            model(**batch(worker, step))["loss"].backward()
            plain(**batch(worker, step))["loss"].backward()
            emulated.step(worker)
            # The others' gradients have not come: it waits for them.
            assert emulated.is_ready(worker) == (worker == WORKERS - 1)
        own.step()
        assert all(np.abs(vector(m) - vector(plain)).max() < 1e-12 for m in models)


def test_compensation_is_nearer_to_the_gradient_at_the_new_values() -> None:
    """Of a loss whose second derivative is the square of its gradient, which compensation takes it for."""

    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((1,), 1.0, dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return -torch.log(self.w).sum()  # g = -1/w, and its derivative g * g

    apart = {}
    for compensation in (0.0, 1.0):
        models = [Log(), Log()]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        emulated = EmulatedStale(models, optimizers, staleness=3, compensation=compensation, owners=1)
        for model in models:
            model().backward()
        emulated.step(0)
        now = float(models[0].w.detach())  # type: ignore[union-attr,operator]
        emulated.step(1)
        moved = (now - float(models[1].w.detach())) / 0.1  # type: ignore[union-attr,operator]
        apart[compensation] = abs(moved - -1 / now)
    assert apart[1.0] < 0.15 * apart[0.0]


def test_parameters_without_gradients_and_other_dtypes() -> None:
    """No weight decay of what has no gradient; 16 bits are kept in float32 by owners, and not contiguous ones move."""
    models = [nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)}).bfloat16() for _ in range(2)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        weight = model["used"].weight  # type: ignore[index]
        weight.data = weight.data.t().contiguous().t()
    before = models[0]["unused"].weight.detach().clone()  # type: ignore[index]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5) for m in models]
    emulated = EmulatedStale(models, optimizers, staleness=1)
    for _ in range(2):
        for worker, model in enumerate(models):
            model["used"](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()  # type: ignore[index,operator]
            emulated.step(worker)
    assert all(torch.equal(m["unused"].weight, before) for m in models)  # type: ignore[index]
    assert emulated.owners[0].values[0].dtype == torch.float32
    shown = torch.cat([o.flat for o in emulated.owners])[:16].bfloat16()
    assert torch.equal(models[1]["used"].weight.reshape(-1), shown)  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "count", "message"),
    [
        ({"staleness": -1}, 2, "staleness=-1"),
        ({"staleness": 2, "owners": 0}, 2, r"staleness=2 without owners \(owners=0\)"),
        ({"staleness": 2}, 1, "staleness=2 without owners: there is one worker"),
        ({"staleness": 2, "owners": 3}, 2, "owners=3: there are 2 workers"),
        ({"staleness": 2, "compensation": -0.5}, 2, "compensation=-0.5"),
    ],
)
def test_bad_settings(given: dict[str, Any], count: int, message: str) -> None:
    models = [mlp() for _ in range(count)]
    with pytest.raises(ValueError, match=message):
        EmulatedStale(models, [torch.optim.SGD(m.parameters()) for m in models], **given)


def test_what_owners_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"optimizer= is Adagrad.*SGD, Adam, AdamW"):
        models = [mlp(), mlp()]
        EmulatedStale(models, [torch.optim.Adagrad(m.parameters()) for m in models], staleness=1)
    other = mlp()
    nn.init.zeros_(other.up.weight)  # type: ignore[union-attr,arg-type]
    with pytest.raises(ValueError, match="worker 1 does not begin"):
        EmulatedStale([mlp(), other], [torch.optim.SGD(mlp().parameters())] * 2, staleness=1)
    models, _, emulated = made("SGD", staleness=0)
    models[0](**batch(0, 0))["loss"].backward()
    emulated.step(0)
    with pytest.raises(AutoparError, match="worker 0 waits for the parameters of owners 0, 1, 2"):
        emulated.step(0)
