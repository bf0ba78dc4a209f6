"""`autopar.checkpoint.torch_save`: the file that one device would write, under any plan; outputs as whole tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import checkpoint
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make

pytestmark = pytest.mark.distributed

STRIDED = {"*.c_attn.weight": ("S(1.1)",), "*.c_attn.bias": ("S(0.1)",), "*.c_fc.weight": ("S(0)",)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [[p for n, p in named if ("bias" in n) == biases] for biases in (True, False)]
    return torch.optim.AdamW([{"params": g, "weight_decay": 0.1 * i} for i, g in enumerate(groups)], lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(**batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(rank: int, file: str, search: autopar.Search, sizes: tuple[int, ...]) -> float:
    model, batch = make("gpt2")
    parallel: Any = autopar.parallelize(model, mesh_of(*sizes), batch(0), search=search, timeout=WAIT)
    optimizer = adamw(parallel)
    plain, _ = make("gpt2")
    own = adamw(plain)
    for i in range(2):
        step(parallel, optimizer, batch(i))
        step(plain, own, batch(i))
    average = {n: p.detach() * 0.5 for n, p in parallel.named_parameters()}
    made = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict(), "at": [1, ("x", average)]}
    checkpoint.torch_save(made, file, parallel)
    found = torch.load(file)  # without pickled classes of anybody's: torch's default allows none
    worst, expected = 0.0, {"model": plain.state_dict(), "optimizer": own.state_dict()}
    assert list(found["model"]) == list(expected["model"]) and type(found["model"]) is type(expected["model"])
    assert found["model"]._metadata == expected["model"]._metadata
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"] and found["at"][0] == 1
    for name, value in expected["model"].items():
        worst = max(worst, float((found["model"][name] - value).abs().max()))
    for name, value in found["at"][1][1].items():
        worst = max(worst, float((value - 0.5 * plain.get_parameter(name)).abs().max()))
    for number, values in expected["optimizer"]["state"].items():
        for key, value in values.items():
            worst = max(worst, float((found["optimizer"]["state"][number][key] - value).abs().max()))
    # Loaded as on one device: into the plain model, and into a parallel one before it has layouts.
    (again, _), mesh = make("gpt2"), mesh_of(math.prod(sizes))
    other: Any = autopar.parallelize(again, mesh, search=autopar.Search(recipe="fsdp"), timeout=WAIT)
    other.load_state_dict(found["model"])
    third = adamw(other)
    third.load_state_dict(found["optimizer"])
    step(other, third, batch(2))
    step(plain, own, batch(2))
    after = other.full_state_dict()
    return max(worst, *(float((after[n] - v).abs().max()) for n, v in plain.state_dict().items()))


@pytest.mark.slow
def test_the_file_of_one_device(two_ranks: Ranks, tmp_path: Path) -> None:
    assert max(two_ranks.run(saved, str(tmp_path / "x.pt"), autopar.Search(recipe="ddp", pins=STRIDED), (2,))) < 1e-9
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.deep
def test_the_file_under_other_plans(ranks: Ranks, tmp_path: Path) -> None:
    pipeline = autopar.Search(pins={"stages": 2, "microbatches": 2})
    assert max(ranks.run(saved, str(tmp_path / "p.pt"), pipeline, (2, 2))) < 1e-9
    for seed in range(2):
        random = autopar.Search(recipe="random", seed=seed)
        assert max(ranks.run(saved, str(tmp_path / f"{seed}.pt"), random, (2, 2))) < 1e-9


def unwritable(rank: int, folder: str) -> str:
    model, batch = make("gpt2")
    parallel: Any = autopar.parallelize(model, mesh_of(4), batch(0), search=autopar.Search(recipe="ddp"), timeout=WAIT)
    try:
        checkpoint.torch_save(parallel.state_dict(), f"{folder}/none/x.pt", parallel)
    except OSError as e:
        return type(e).__name__
    return ""


@pytest.mark.deep
def test_every_rank_says_that_the_file_cannot_be_written(ranks: Ranks, tmp_path: Path) -> None:
    assert set(ranks.run(unwritable, str(tmp_path))) == {"FileNotFoundError"}


class Scores(nn.Module):
    """Logits, and a mapping of further ones: the loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.up(x).relu()
        return {"scores": self.down(h), "more": [h.sum(-1)]}


def loss_outside(rank: int, seed: int | None, sizes: tuple[int, ...]) -> float:
    torch.manual_seed(0)
    plain, x = Scores().double(), torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.arange(8) % 6
    torch.manual_seed(0)
    search = autopar.Search() if seed is None else autopar.Search(recipe="random", seed=seed)
    model: Any = autopar.parallelize(Scores().double(), mesh_of(*sizes), search=search, outputs="whole", timeout=WAIT)
    both = []
    for each in (model, plain):
        found = each(x)
        loss = nn.functional.cross_entropy(found["scores"], labels) + 0.1 * found["more"][0].square().mean()
        loss.backward()
        both.append(loss)
    gradients = model.full_gradients()
    worst = max(float((gradients[n] - p.grad).abs().max()) for n, p in plain.named_parameters())  # type: ignore[operator]
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    after = model.full_state_dict()
    worst = max(worst, *(float((after[n] - v).abs().max()) for n, v in plain.state_dict().items()))
    return max(worst, abs(float(both[0]) - float(both[1])))


@pytest.mark.parametrize("seed", [None, *(pytest.param(s, marks=pytest.mark.deep) for s in range(3))])
def test_a_loss_outside_of_the_model(ranks: Ranks, seed: int | None) -> None:
    assert max(ranks.run(loss_outside, seed, (4,) if seed is None else (2, 2))) < 1e-10
