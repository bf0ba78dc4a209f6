"""Asynchronous SGD on four ranks: in the order in which gradients came, each part is as a replay of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch
from tests.module.low_communication.stale_reference import bounds, replay, require_bounded, vector
from tests.module.low_communication.test_stale import KINDS, LR

pytestmark = pytest.mark.distributed

WORKERS, STEPS = 4, 8
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"staleness": 2, "compensation": 0.5},
    "momentum": {"staleness": 0},
    "AdamW": {"staleness": 5, "compensation": 0.1, "owners": 2},
}
SLOW = 3
"""The worker that others wait for."""

LATE = 0.5
"""Seconds by which another one is behind."""


def rows(worker: int, step: int) -> dict[str, torch.Tensor]:
    return mlp_batch(WORKERS * step + worker, rows=4)


def rate(kind: str, step: int) -> float:
    return LR[kind] * (1 - step / 100)


def made(kind: str, timeout: float = WAIT, plan: Any = None, **given: Any) -> tuple[Any, Any, Any]:
    import autopar

    search = autopar.Search(roles={"a": "stale"}, inexact=("stale",))
    model = autopar.parallelize(
        mlp(), mesh_of(4), mlp_batch(0, rows=16), search=search, inputs="local", timeout=timeout, plan=plan
    )
    optimizer = KINDS[kind][0](model)
    return model, optimizer, autopar.StaleGradients(model, optimizer, **given, record=True)


def trained(rank: int, kind: str, model: Any, optimizer: Any, steps: range, slow: float = 0.02) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = rate(kind, step)
        optimizer.zero_grad()
        model(**rows(rank, step))["loss"].backward()
        time.sleep(slow if rank == SLOW else 0.001 * (rank + step % 2))
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())


def own_part(model: Any, stale: Any, rank: int) -> np.ndarray[Any, Any]:
    low, high = bounds(len(vector(model)), stale._owner_count)[rank]
    return vector(model)[low:high]


def against_replay(rank: int, cases: list[str]) -> dict[str, float]:
    found = {}
    for kind in cases:
        given = CASES[kind]
        model, optimizer, stale = made(kind, **given)
        assert model.plan.worker_role == "stale" and "of parameters that others have changed" in model.plan.summary()
        trained(rank, kind, model, optimizer, range(STEPS))
        assert stale.steps == STEPS and stale.bytes_sent > 0
        stale.synchronize()
        parts = [high - low for low, high in bounds(len(vector(model)), given.get("owners", WORKERS))]
        parts += [0] * (WORKERS - len(parts))
        # Learning rate and count, and which of four parameters there are, beside numbers of eight bytes.
        most = STEPS * 8 * (sum(parts) - parts[rank] + (WORKERS - 1) * (parts[rank] + 1 + 2 + 4))
        assert 0 <= most - stale.bytes_sent < STEPS * 8 * 4 * WORKERS
        logs = [log for log in stale._workers.everyone.gather(stale.arrivals, "logs")][: given.get("owners", WORKERS)]
        reference = replay(
            mlp(), rows, lambda step, kind=kind: rate(kind, step), logs, KINDS[kind][1], given.get("compensation", 0.0)
        )
        for log in logs:
            require_bounded(log, WORKERS, given["staleness"])
            assert len(log) == WORKERS * STEPS
        expected = np.concatenate([versions[-1] for versions in reference])
        found[kind] = float(np.abs(vector(model) - expected).max())
        stale.detach()
        before = vector(model)
        optimizer.step()  # its own again
        assert np.abs(vector(model) - before).max() > 1e-6
    return found


@pytest.mark.parametrize("cases", [["SGD"], pytest.param(list(CASES), marks=pytest.mark.deep)])
def test_equals_the_replay_of_the_order_of_arrivals(ranks: Ranks, cases: list[str]) -> None:
    for own in ranks.run(against_replay, cases):
        assert list(own) == cases and max(own.values()) < 1e-12, own


def resumed(rank: int, folder: str) -> float:
    """A run that is saved, and goes on in another model: with no staleness its numbers are known whatever the order."""
    import autopar
    from autopar import checkpoint
    from autopar.errors import AutoparError

    kind, given = "momentum", {"staleness": 3, "compensation": 0.3}
    model, optimizer, stale = made(kind, **given)
    trained(rank, kind, model, optimizer, range(3))
    checkpoint.save(folder, model, optimizer, step=3, stale=stale)
    before, owned, counted = vector(model), stale._owner.flat.clone(), (stale._owner.version, list(stale._owner.clocks))
    buffers = [s["momentum_buffer"].clone() for s in stale._owner.optimizer.state.values()]
    stale.detach()
    other, own, others = made(kind, plan=model.plan, **given)
    found = checkpoint.load(folder, other, own, stale=others)
    assert found.step == others.steps == 3 and found.folder.parent.name == f"worker-{rank}"
    assert np.array_equal(vector(other), before) and torch.equal(others._owner.flat, owned)
    assert (others._owner.version, others._owner.clocks) == counted
    assert all(
        torch.equal(a, s["momentum_buffer"])
        for a, s in zip(buffers, others._owner.optimizer.state.values(), strict=True)
    )
    everyone = others._workers.everyone.gather(vector(other), "parameters")
    low, high = bounds(len(before), WORKERS)[rank]
    assert all(np.array_equal(others._owner._then[w].numpy(), v[low:high]) for w, v in enumerate(everyone))
    trained(rank, kind, other, own, range(3, 6))
    others.synchronize()
    # From where it was: the order of arrivals is another one, and so are the numbers, a little.
    assert others._owner.version == 6 * WORKERS and others.steps == 6
    others.detach()
    again = autopar.StaleGradients(other, own, staleness=1)
    with pytest.raises(AutoparError, match=r"have staleness=1.*and what is loaded has staleness=3"):
        checkpoint.load(folder, other, own, stale=again)
    again.detach()
    return float(np.abs(vector(other) - before).max())


@pytest.mark.deep
def test_resumes(ranks: Ranks, tmp_path: Any) -> None:
    for moved in ranks.run(resumed, str(tmp_path)):
        assert 1e-4 < moved < 1


def wrong(rank: int) -> str:
    """Bad input, workers that disagree, and at last one that stops while the others are as far ahead as they may be."""
    import autopar
    from autopar.errors import AutoparError, RankError

    model, optimizer, stale = made("SGD", staleness=1)
    with pytest.raises(ValueError, match="role 'stale', and LocalSteps is for 'local'"):
        autopar.LocalSteps(model, optimizer, every=2)
    stale.detach()
    with pytest.raises(ValueError, match="optimizer= is RMSprop"):
        autopar.StaleGradients(model, torch.optim.RMSprop(model.parameters()), staleness=1)
    with pytest.raises(ValueError, match=r"staleness=1 without owners \(owners=0\)"):
        autopar.StaleGradients(model, optimizer, staleness=1, owners=0)
    several = autopar.Search(roles={"a": "stale"}, inexact=("stale",))
    with pytest.raises(ValueError, match=r"its workers would have several devices each, {'b': 2}"):
        autopar.parallelize(mlp(), mesh_of(2, 2), search=several, timeout=WAIT)
    disagreeing = autopar.StaleGradients(model, optimizer, staleness=1 + rank // 2)
    model(**rows(rank, 0))["loss"].backward()
    with pytest.raises(RankError, match="settings of stale gradients differ: rank 2 has staleness=2"):
        optimizer.step()
    disagreeing.detach()
    model, optimizer, stale = made("SGD", staleness=1)
    trained(rank, "SGD", model, optimizer, range(1), slow=0.0)
    time.sleep(LATE if rank == 1 else 0.0)
    trained(rank, "SGD", model, optimizer, range(1, 2), slow=0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(AutoparError, match="option 'weight_decay' has changed since stale gradients began"):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0
    model.up.requires_grad_(False)  # nobody would own it when it is trained again
    with pytest.raises(AutoparError, match=r"'up\.bias' is no longer trained: freeze and unfreeze before"):
        optimizer.step()
    with pytest.raises(AutoparError, match=r"'up\.bias' is no longer trained"):
        stale.synchronize()
    model.up.requires_grad_(True)
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    with pytest.raises(AutoparError, match="optimizer's groups are others than when stale gradients began"):
        optimizer.step()
    time.sleep(2 * LATE)  # a gradient of rank 1 comes while the groups are others
    optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]
    if rank == SLOW:
        return "ended"  # its process is there, and takes what the others send
    model._autopar.context = replace(model._autopar.context, timeout=10)
    try:
        trained(rank, "SGD", model, optimizer, range(2, 6))
    except RankError as e:
        return f"{stale.steps} {e}"
    return "did not wait"


@pytest.mark.slow
def test_bad_input_and_a_worker_that_others_wait_for() -> None:
    ranks = Ranks()
    try:
        *ahead, behind = ranks.run(wrong)
    finally:
        ranks.close()
    assert behind == "ended"
    for said in ahead:
        # The step that ends in its waiting is not counted.
        assert said.startswith("3 no answer from every rank about step 4 of stale gradients of Mlp"), said
        assert "waiting for rank 3, which has made 2 steps, and this one 4 (staleness=1)" in said, said


def failing(rank: int, infinite: bool) -> tuple[str, float]:
    """A gradient of rank 1 is not finite; or its thread that takes those of rank 2 fails, which may be at its first."""
    model, optimizer, stale = made("SGD", timeout=300, staleness=1)
    begun = time.monotonic()
    try:
        trained(rank, "SGD", model, optimizer, range(2), slow=0.0)
        push = stale._owner.push

        def fails(worker: int, *given: Any) -> Any:
            if rank == 1 and worker == 2 and not infinite:
                raise MemoryError("no room for a gradient")
            return push(worker, *given)

        stale._owner.push = fails
        if rank == 1 and infinite:
            model.up.bias.register_hook(lambda gradient: gradient * torch.nan)
        trained(rank, "SGD", model, optimizer, range(2, 40), slow=0.0)
    except Exception as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - begun
    return "", 0.0


@pytest.mark.some(1)
@pytest.mark.parametrize("infinite", [False, True])
def test_a_worker_that_fails_is_heard_of(infinite: bool) -> None:
    ranks = Ranks()
    try:
        found = ranks.run(failing, infinite)
    finally:
        ranks.close()
    why = "stale gradients of Mlp, taking a gradient of worker 2: MemoryError: no room for a gradient"
    if infinite:
        why = "stale gradients of Mlp, whose gradient of 'up.bias' is not finite"
        assert "the gradient of 'up.bias' on rank 1 is not finite" in found[1][0], found[1]
    for rank, (said, seconds) in enumerate(found):
        assert said.startswith("RankError") and (why in said or rank == 1), (rank, said)
        assert rank == 1 or f"rank 1 failed at {why}" in said, (rank, said)
        assert seconds < 30, (rank, seconds)


def left_alone(rank: int) -> str:
    import os

    model, optimizer, _ = made("SGD", timeout=30, staleness=1)
    trained(rank, "SGD", model, optimizer, range(2))
    if rank == SLOW:
        os._exit(1)
    try:
        trained(rank, "SGD", model, optimizer, range(2, 8))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


@pytest.mark.deep
def test_a_dead_worker_ends_the_others() -> None:
    ranks = Ranks()
    try:
        *found, _ = ranks.run(left_alone, timeout=90, silent=(3,))
        assert all(said.startswith("RankError") and "rank 3 died" in said for said in found), found
    finally:
        ranks.close()


def scaled(rank: int) -> tuple[float, int]:
    """A scaled gradient of one worker is infinite in step 1: it is left out, and nobody waits for that worker."""
    model, optimizer, stale = made("SGD", staleness=0)
    plain, lr = mlp(), rate("SGD", 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = model(**rows(rank, step))["loss"] * (torch.inf if (step, rank) == (1, 2) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        for worker in range(WORKERS):
            if (step, worker) != (1, 2):
                plain(**rows(worker, step))["loss"].backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= lr * p.grad
    stale.synchronize()
    steps = stale.steps
    stale.detach()
    found = model.full_state_dict()
    return max(float((found[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()), steps


def test_a_scaled_gradient_that_is_infinite_is_left_out(ranks: Ranks) -> None:
    for error, steps in ranks.run(scaled):
        assert error < 1e-12 and steps == 3
