"""`autopar.checkpoint.save` under one plan and mesh, `load` under another: the run goes on as it would have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make

pytestmark = pytest.mark.distributed

Pins = dict[str, tuple[str, ...]]


STRIDED: Pins = {"*.c_attn.weight": ("S(1.1)",), "*.c_attn.bias": ("S(0.1)",), "*.c_fc.weight": ("S(0)",)}
SQUARE: Pins = {"*.c_attn.weight": ("S(0)", "S(1.1)"), "*.wte.weight": ("S(1)", "S(0)")}
HOPS: tuple[Any, ...] = (
    ((4,), {"recipe": "ddp", "pins": STRIDED}), ((2, 2), {"recipe": "ddp", "pins": SQUARE}), ((4,), {"recipe": "fsdp"}),
)  # fmt: skip
"""Meshes and plans, one after another."""


def saved_and_loaded(rank: int, folder: str, hops: tuple[Any, ...], waits: tuple[bool, ...]) -> float:
    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    def made(sizes: tuple[int, ...], **search: Any) -> tuple[Any, Any, Any, Any]:
        model, batch = make("gpt2")
        parallel = parallelize(model, mesh_of(*sizes), batch(0), search=Search(**search), timeout=WAIT)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        return parallel, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), batch

    def train(model: Any, optimizer: Any, scheduler: Any, batch: Any, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            model(**batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return model.full_state_dict()

    worst, (first, *others) = 0.0, hops
    run = made(first[0], **first[1])
    train(*run, range(2))
    for i, (wait, (sizes, search)) in enumerate(zip(waits, others, strict=True)):
        step = 2 + 2 * i
        saving = checkpoint.save(folder, *run[:2], step=step, extra=[i], wait=wait, scheduler=run[2], keep=1 + i)
        expected = train(*run, range(step, step + 2))  # while files are written
        saving.wait()
        other = made(sizes, **search)
        found = checkpoint.load(folder, *other[:2], scheduler=other[2])
        assert (found.step, found.extra, found.same_random_numbers) == (step, [i], True)
        continued = train(*other, range(step, step + 2))
        worst = max(worst, *(float((continued[k] - v).abs().max()) for k, v in expected.items()))
        exported = checkpoint.export_safetensors(f"{folder}-{i}", other[0], max_shard_size=10_000)
        found_in_files = {n: t for path in exported.glob("*.safetensors") for n, t in load_file(path).items()}
        assert set(continued) - set(found_in_files) == {"lm_head.weight"}  # tied
        assert all(torch.equal(t, continued[n]) for n, t in found_in_files.items())
        run = other
    return worst


@pytest.mark.parametrize("waits", [(False,), pytest.param((True, False), marks=pytest.mark.deep)])
def test_a_run_goes_on_under_another_plan(ranks: Ranks, tmp_path: Path, waits: tuple[bool, ...]) -> None:
    hops = HOPS[: len(waits) + 1]
    assert max(ranks.run(saved_and_loaded, str(tmp_path / "saved"), hops, waits)) < 1e-9
    kept = [p for p in (tmp_path / "saved").iterdir() if p.is_dir()]
    assert len(kept) == len(waits)  # as many as the last save keeps


def on_one(rank: int, folder: str) -> tuple[int, bool, list[float]]:
    """Files of four ranks on one device, and what another model says."""
    from torch import nn

    from autopar import checkpoint
    from autopar.errors import AutoparError
    from autopar.parallelize import parallelize

    model, batch = make("mlp")
    parallel = parallelize(model, None, batch(0))
    found = checkpoint.load(folder, parallel, torch.optim.AdamW(parallel.parameters()))
    drawn = torch.rand(3).tolist()
    other = parallelize(nn.Linear(2, 2), mesh_of(4), loss_fn=lambda o, b: o.mean(), timeout=WAIT)
    with pytest.raises(AutoparError, match="is of another model"):
        checkpoint.load(folder, other)
    with pytest.raises(ValueError, match=r"step=.*whole number"):
        checkpoint.save(folder, other, step=-rank - 1)
    return found.step, found.same_random_numbers, drawn


def saved(rank: int, folder: str) -> list[float]:
    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    model, batch = make("mlp")
    search = Search(pins={"*.weight": ("S(0)", "S(1)")})
    parallel = parallelize(model, mesh_of(2, 2), batch(0), search=search, timeout=WAIT)
    torch.manual_seed(1)
    random.seed(rank)
    checkpoint.save(folder, parallel, torch.optim.AdamW(parallel.parameters()), step=7)
    return torch.rand(3).tolist()


@pytest.mark.slow
def test_one_device_reads_what_four_have_written(ranks: Ranks, tmp_path: Path) -> None:
    drawn = ranks.run(saved, str(tmp_path))
    # Python's generator was another one on each rank, and torch's was not.
    assert ranks.run(on_one, str(tmp_path)) == [(7, False, drawn[0])] * 4 and drawn == [drawn[0]] * 4


class Tied(torch.nn.Module):
    """The first stage's weight is the last one's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(ids)).tanh()).square().mean()


def tied_in_stages(rank: int, folder: str) -> float:
    """The largest difference of a run that goes on from its checkpoint."""
    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    ids = torch.arange(24).reshape(4, 6) % 12
    search = Search(pins={"stages": ["inner"], "stage_axis": "a", "microbatches": 2, "schedule": "1f1b"})

    def made() -> Any:
        model = parallelize(Tied().double(), mesh_of(2), (ids,), search=search, timeout=WAIT)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    first, other = made(), made()
    train(*first)
    checkpoint.save(folder, *first, step=1)
    checkpoint.load(folder, *other)
    train(*first)
    train(*other)
    state, wanted = other[0].full_state_dict(), first[0].full_state_dict()
    return max(float((state[n] - v).abs().max()) for n, v in wanted.items())


def test_a_tied_parameter_of_two_stages(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(tied_in_stages, str(tmp_path)) == [0.0, 0.0]


def saved_with_a_second_optimizer(rank: int, folder: str, search: dict[str, Any]) -> float:
    """Refused as an object of rank 0's, and taken whole, as the error says; the difference of parameters after it."""
    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    def made() -> tuple[Any, Any, Any, Any]:
        model, batch = make("mlp")
        parallel = parallelize(model, mesh_of(2, 2), batch(0), search=Search(**search), timeout=WAIT)
        first, *others = parallel.parameters()
        return parallel, torch.optim.AdamW([first]), torch.optim.SGD(others, lr=0.1, momentum=0.9), batch

    def train(model: Any, optimizer: Any, second: Any, batch: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            model(**batch(step))["loss"].backward()
            optimizer.step(), second.step(), model.zero_grad()
        return model.full_state_dict()

    run = made()
    train(*run)
    with pytest.raises(ValueError, match="is a tensor of which each rank has a part, and what is neither of"):
        checkpoint.save(folder, *run[:2], second=run[2])
    checkpoint.save(folder, *run[:2], extra=checkpoint.full_optimizer_state_dict(run[0], run[2]))
    expected, other = train(*run), made()
    found = checkpoint.load(folder, *other[:2])
    checkpoint.load_full_optimizer_state_dict(other[0], other[2], found.extra)
    return max(float((v - expected[n]).abs().max()) for n, v in train(*other).items())


@pytest.mark.slow
@pytest.mark.parametrize("search", [{"recipe": "fsdp"}, pytest.param({"pins": {"stages": 2}}, marks=pytest.mark.deep)])
def test_a_second_optimizer(ranks: Ranks, tmp_path: Path, search: dict[str, Any]) -> None:
    assert max(ranks.run(saved_with_a_second_optimizer, str(tmp_path), search)) < 1e-12
