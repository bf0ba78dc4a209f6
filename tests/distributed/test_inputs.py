"""What goes in and comes out: local batches, short batches, accumulation, outputs with gradients, meta models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, mlp, mlp_batch, slow_devices

pytestmark = pytest.mark.distributed

SHARDED = {"batch.*": ("S(0)", "S(0)"), "*.weight": ("S(0)", "S(0)")}

REPLICATED = {"batch.*": ("S(0)", "S(0)"), "*.weight": ("R", "R"), "*.bias": ("R", "R")}


def parallel_mlp(**options: Any) -> Any:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    pins = options.pop("pins", SHARDED)
    return parallelize(mlp(), mesh_of(2, 2), search=Search(pins=pins), cluster=slow_devices(), timeout=WAIT, **options)


def gradients(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    for batch in batches:
        model(**batch)["loss"].backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - v).abs().max()) for n, v in expected.items())


def local_inputs(rank: int) -> float:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    model = parallel_mlp(inputs="local", batch=mlp_batch(0))
    assert (model.data_world_size, model.data_rank) == (4, rank)
    whole = mlp_batch(7, 32)
    data = TensorDataset(whole["x"], whole["y"])
    sampler = DistributedSampler(data, model.data_world_size, model.data_rank, shuffle=False)
    reference = mlp()
    for step, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=sampler)):
        model(x, y)["loss"].backward()  # ranks take every fourth row: the global batch is rows 8 step to 8 step + 8
        rows = torch.arange(8 * step, 8 * step + 8).reshape(2, 4).T.reshape(-1)
        reference(whole["x"][rows], whole["y"][rows])["loss"].backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    return error(model.full_gradients(), expected)


def short_last_batch(rank: int) -> float:
    worst = 0.0
    model, reference = parallel_mlp(), mlp()
    for rows in (8, 3, 8):
        model.zero_grad()
        reference.zero_grad()
        batch = mlp_batch(rows, rows)
        expected = gradients(reference, [batch])
        model(**batch)["loss"].backward()
        worst = max(worst, error(model.full_gradients(), expected))
    local = parallel_mlp(inputs="local", batch=mlp_batch(0))
    batch = mlp_batch(3, 4)
    mine = {k: v[rank : rank + 1] for k, v in batch.items()}
    local(**mine)["loss"].backward()
    return max(worst, error(local.full_gradients(), gradients(mlp(), [batch])))


class Collectives(TorchDispatchMode):
    """Counts them."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += any(name in str(func) for name in ("reduce_scatter", "all_reduce", "all_gather"))
        return func(*args, **(kwargs or {}))


def accumulation(rank: int, microbatches: int) -> tuple[list[float], list[int]]:
    """How far gradients are off in three ways to add them up, and the collectives of each batch."""
    batches = [mlp_batch(i) for i in range(3)]
    expected = gradients(mlp(), batches)
    pins = SHARDED if microbatches == 1 else {**REPLICATED, "microbatches": microbatches}
    model, made, errors = parallel_mlp(pins=pins), [], []
    for batch in batches:
        with Collectives() as counted:
            gradients(model, [batch])
        made.append(counted.made)
    errors.append(error(model.full_gradients(), expected))
    model.zero_grad()
    sum(model(**b)["loss"] for b in batches).backward()
    errors.append(error(model.full_gradients(), expected))
    model.zero_grad()
    with model.no_sync():
        for batch in batches[:2]:
            with Collectives() as counted:
                gradients(model, [batch])
            made.append(counted.made)
        assert all(p.grad is None for p in model.parameters())
    with Collectives() as counted:
        gradients(model, batches[2:])
    made.append(counted.made)
    return [*errors, error(model.full_gradients(), expected)], made


class Plain(nn.Module):
    """No loss: the output carries gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.norm(self.linear(x))
        return out, out * 2


def outputs_with_gradients(rank: int) -> float:
    from torch.distributed.tensor import DTensor

    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    reference = Plain().double()
    torch.manual_seed(0)
    pins = {"batch.0": "S(0)", "linear.weight": "S(0)", "result.0": "S(0)", "result.1": "S(1)"}
    search = Search(pins={k: (v,) for k, v in pins.items()})
    model = parallelize(Plain().double(), mesh_of(4), search=search, cluster=slow_devices(), timeout=WAIT)
    x = mlp_batch(0)["x"]
    first, second = reference(x)
    (first.pow(3).sum() + second.sum()).backward()
    a, b = model(x)
    assert isinstance(a, DTensor)
    assert a.shape == first.shape
    (a.pow(3).sum().full_tensor() + b.full_tensor().sum()).backward()
    assert torch.allclose(model.norm.running_mean, reference.norm.running_mean, atol=1e-12)
    assert model.norm.num_batches_tracked == 1
    worst = error(model.full_gradients(), {n: p.grad for n, p in reference.named_parameters()})
    model.eval()
    reference.eval()
    with torch.no_grad():
        whole = model(x)[0]
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        return max(worst, float((whole - reference(x)[0]).abs().max()))


def meta_model(rank: int, folder: str, ways: tuple[str, ...]) -> list[float]:
    from autopar.errors import AutoparError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    reference, batch = make("tied")
    state = reference.state_dict()
    found = []
    pins = {"*.weight": ("S(0)", "R"), "*.[qk]_proj.weight": ("S(0.1)", "S(1)")}
    inits: dict[str, Any] = {"function": lambda name, tensor: tensor.copy_(state[name]), "file": folder, "none": None}
    for init in (inits[way] for way in ways):
        with torch.device("meta"):
            blank, _ = make("tied")
        model = parallelize(blank, mesh_of(2, 2), init=init, search=Search(recipe="ddp", pins=pins), timeout=WAIT)
        if init is None:
            with pytest.raises(AutoparError, match=r"embed_tokens.weight.*init="):
                model(**batch(0))
            continue
        loss = model(**batch(0))["loss"]
        full = model.full_state_dict()
        found.append(max(float((full[k] - v).abs().max()) for k, v in state.items()))
        assert abs(float(loss - reference(**batch(0))["loss"])) < 1e-5  # transformers takes its loss in float32
        model.load_full_state_dict({k: v + 1 for k, v in state.items()})
        full = model.full_state_dict()
        found.append(max(float((full[k] - v - 1).abs().max()) for k, v in state.items()))
    return found


def test_local_inputs_of_a_distributed_sampler(ranks: Ranks) -> None:
    assert max(ranks.run(local_inputs)) < 1e-12


@pytest.mark.slow
def test_short_batches(ranks: Ranks) -> None:
    assert max(ranks.run(short_last_batch)) < 1e-12


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_accumulated_gradients(ranks: Ranks, microbatches: int) -> None:
    """Under `no_sync`, three batches are reduced as one is, with the last of them."""
    for errors, (_, *ordinary, within, also, last) in ranks.run(
        accumulation, microbatches
    ):  # the first compares batches
        assert max(errors) < 1e-12
        assert ordinary == [last, last]
        assert within == also < last  # the loss is added up in each call


def test_outputs_carry_gradients_without_a_loss(ranks: Ranks) -> None:
    assert max(ranks.run(outputs_with_gradients)) < 1e-10


@pytest.mark.parametrize("ways", [("file",), pytest.param(("function", "none"), marks=pytest.mark.deep)], ids=",".join)
def test_models_on_the_meta_device(ranks: Ranks, tmp_path: Path, ways: tuple[str, ...]) -> None:
    from safetensors.torch import save_file

    state = make("tied")[0].state_dict()
    save_file({k: v for k, v in state.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    assert max(map(max, ranks.run(meta_model, str(tmp_path), ways))) < 1e-12
