"""What code that knows of no mesh does to a model: copies, averages, loading, assignments, on ranks; against eager."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import Ranks, mesh_of
from tests.reports.changes import CHANGES, EARLY, Pair, batch, outcome

LAYOUTS: dict[str, Any] = {
    "encoder.0.weight": ("S(0)", "R"), "encoder.2.weight": ("R", "S(1)"), "fc.weight": ("S(1)", "S(0)"),
    "fc.bias": ("R", "S(0)"),
}  # fmt: skip
ON_TWO = {"encoder.0.weight": "S(0)", "encoder.2.weight": "S(1)", "fc.weight": "S(0)", "fc.bias": "S(0)"}
STAGES: dict[str, Any] = {"stages": 2, "stage_axis": "a", "microbatches": 2}


def apart(rank: int, pins: dict[str, Any], cases: tuple[tuple[str, int], ...]) -> dict[str, float]:
    return {f"{name} {steps}": outcome(name, mesh_of(2, 2), pins, steps) for name, steps in cases}


@pytest.mark.slow
def test_changes_from_outside_are_eagers(ranks: Ranks) -> None:
    few = ("loads one name of two", "assigns gradients")
    for found in ranks.run(apart, LAYOUTS, tuple((n, int(n not in EARLY)) for n in few)):
        assert max(found.values()) < 1e-9, found


@pytest.mark.deep
@pytest.mark.parametrize("pins", [LAYOUTS, STAGES])
def test_changes_from_outside_at_any_time(ranks: Ranks, pins: dict[str, Any]) -> None:
    for found in ranks.run(apart, pins, tuple((n, s) for n in CHANGES for s in (0, 1))):
        assert max(found.values()) < 1e-9, found


def refused(rank: int) -> list[str]:
    """Errors of a parameter and of a module in place of others, of resizing, of another shape and of pickling."""
    from autopar.errors import AutoparError

    def replaces(model: Any) -> None:
        model.fc.weight = nn.Parameter(torch.randn(14, 8).double())
        model(**batch(1))

    def resizes(model: Any) -> None:
        model.encoder = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)).double()
        model(**batch(1))

    def assigns(model: Any) -> None:
        model.fc.weight.data = torch.randn(14, 8).double()

    def saves(model: Any) -> None:
        torch.save(model, "/dev/null")

    found = []
    for changes in ((assigns, saves, replaces), (resizes,)):  # what is replaced or resized is of no use any more
        model = Pair(mesh_of(2), ON_TWO, 1).parallel
        for change in changes:
            with pytest.raises(AutoparError) as raised:
                change(model)
            found.append(str(raised.value))
    return found


@pytest.mark.slow
def test_what_cannot_be_done_says_what_can(two_ranks: Ranks) -> None:
    for found in two_ranks.run(refused):
        assigns, saves, replaces, resizes = found
        assert "parameter 'fc.weight' was put into the model after parallelize(), as a plain tensor" in replaces
        assert "load_full_state_dict() what full_state_dict()" in resizes
        assert "has shape [14, 8]; assign the whole tensor" in assigns
        assert "cannot be pickled" in saves


def optimizer_state_of_a_checkpoint(rank: int, folder: str) -> tuple[bool, bool, float]:
    """Saved and loaded by torch's own functions, before layouts are decided: is it whole before, split after a call."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def state_of(pair: Pair) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(pair.parallel, pair.optimizers[0])
        return {"model": pair.parallel.state_dict(), "optimizer": optimizer}

    mesh = mesh_of(2)
    saved, fresh = Pair(mesh, ON_TWO, 2), Pair(mesh, ON_TWO, 0)
    dcp.save(state_of(saved), checkpoint_id=folder)
    state = state_of(fresh)
    dcp.load(state, checkpoint_id=folder)
    fresh.parallel.load_state_dict(state["model"])
    set_optimizer_state_dict(fresh.parallel, fresh.optimizers[0], state["optimizer"])
    states = fresh.optimizers[0].state
    before = all(s["exp_avg"]._local_tensor.shape == p.shape for p, s in states.items())
    fresh.parallel(**batch(0))
    after = all(
        s[name].placements == p.placements and s[name]._local_tensor.shape == p._local_tensor.shape
        for p, s in states.items()
        for name in ("exp_avg", "exp_avg_sq")
    )
    fresh.parallel.calls.copy_(saved.parallel.calls)
    fresh.plain, fresh.optimizers[1], fresh.steps = saved.plain, saved.optimizers[1], saved.steps
    fresh.train(1)
    return before, after, fresh.apart()


@pytest.mark.slow
def test_optimizer_state_that_is_loaded_before_the_first_batch_is_split(two_ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for before, after, error in two_ranks.run(optimizer_state_of_a_checkpoint, folder):
            assert before
            assert after
            assert error < 1e-9


def scales(rank: int) -> tuple[list[list[float]], float]:
    """The scale after each step, where one element of one rank's gradients overflows in the second one."""
    pair = Pair(mesh_of(2), ON_TWO, 1)
    found = []
    for model in pair.both:
        optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            scaler.scale(model(**batch(step))).backward()
            bias = model.encoder[0].bias.grad
            if step == 1 and (model is pair.plain or rank == 1):  # a replica of it, where it is on a mesh
                getattr(bias, "_local_tensor", bias)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kept.append(scaler.get_scale())
        found.append(kept)
    return found, pair.apart()


def test_an_overflow_in_one_replica_makes_every_rank_skip(two_ranks: Ranks) -> None:
    for (found, expected), error in two_ranks.run(scales):
        assert found == expected == [4.0, 2.0, 2.0, 4.0]
        assert error < 1e-9


def saves_as_pretrained(rank: int, folder: str) -> tuple[float, list[str]]:
    """Tied weights, a plan that splits them: what a plain model reads is what the ranks hold."""
    from transformers import AutoModelForCausalLM

    from autopar import AutoparError, Search, parallelize
    from tests.distributed.models import gpt2, token_batch

    pins = {"transformer.wte.weight": "S(0)", "transformer.h.0.mlp.c_fc.weight": "S(1)"}
    search = Search(recipe="ddp", pins=pins)
    model: Any = parallelize(gpt2(), mesh_of(2), search=search)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**token_batch(0)).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    state = model.full_state_dict()
    assert list(read) == list(state)
    refusals = []
    try:
        model.resize_token_embeddings(72)
    except AutoparError as e:
        refusals.append(str(e))
    return max(float((v - state[n]).abs().max()) for n, v in read.items()), refusals


@pytest.mark.slow
def test_a_pretrained_model_is_saved_whole(two_ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for error, (refusal,) in two_ranks.run(saves_as_pretrained, folder):
            assert error == 0
            assert "call it before parallelize()" in refusal
        assert (Path(folder) / "model.safetensors").exists()
