"""Gathers and reductions in few bits on four ranks, against the recurrence in numpy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.node_info import info
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch
from tests.distributed.steps import TOLERANCE, follow
from tests.ir.quantized.reference import Sharded

pytestmark = pytest.mark.distributed

STEPS = 3
CLIP = 0.05


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**batch)["loss"]
    return found


def parallel(sizes: tuple[int, ...], quantized: dict[str, Any], **more: Any) -> Any:
    import autopar

    search = autopar.Search(**{"recipe": "fsdp", **more}, quantized=quantized, inexact=("quantized", "float64"))
    return autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, timeout=WAIT)


def reference_of(model: Any, parts: int, inner: int, bits: dict[str, int], inner_gradients: int = 0) -> Sharded:
    dims, inside = (
        {n: getattr(p.placements[axis], "dim", None) for n, p in model.named_parameters()} for axis in (0, -1)
    )
    inner_dims = inside if inner > 1 else None
    return Sharded(
        mlp(), adamw, dims, parts, inner, inner_dims=inner_dims, inner_gradients=inner_gradients, **bits
    )  # fmt: skip


def rows_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    rows = len(batch["x"]) // 4
    return [{k: v[i * rows : (i + 1) * rows] for k, v in batch.items()} for i in range(4)]


def apart(model: Any, reference: Sharded) -> float:
    state, wanted = model.full_state_dict(), dict(reference.model.named_parameters())
    return max(float((state[n] - p.detach()).abs().max()) for n, p in wanted.items())


def trained(rank: int, sizes: tuple[int, ...], bits: dict[str, int], more: dict[str, Any]) -> float:
    """The largest difference of losses and parameters of any step."""
    inside = more.pop("inside", 0)
    model = parallel(sizes, {"a": bits, **({"b": {"gradients": inside}} if inside else {})}, **more)
    optimizer, error = adamw(model), 0.0
    reference = reference_of(model, sizes[0], 4 // sizes[0], bits, inside)
    for step in range(STEPS):
        batch = mlp_batch(step)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        expected = reference.step(rows_of(batch), loss_of)
        error = max(error, abs(float(loss.detach()) - expected), apart(model, reference))
    assert reference.reached == set(bits)
    return error


@pytest.mark.parametrize(
    ("sizes", "bits", "more"),
    [
        pytest.param((4,), {"weights": 8, "gradients": 4}, {}, marks=pytest.mark.deep),
        pytest.param((4,), {"weights": 4}, {"pins": {"overlap": "none"}}, marks=pytest.mark.deep),
        pytest.param((2, 2), {"weights": 8}, {}, marks=pytest.mark.deep),
        ((2, 2), {"weights": 8, "gradients": 8}, {}),
        pytest.param((2, 2), {"gradients": 8}, {"inside": 4}, marks=pytest.mark.deep),
    ],
)
def test_equals_the_recurrence(
    ranks: Ranks, sizes: tuple[int, ...], bits: dict[str, int], more: dict[str, Any]
) -> None:
    assert max(ranks.run(trained, sizes, bits, more)) < 1e-10


def deferred(rank: int) -> float:
    """Two backward passes, of which the first defers its reduction: their sum is reduced, not their bytes."""
    bits = {"gradients": 4}
    model = parallel((4,), {"a": bits})
    batch = mlp_batch(0)
    with model.no_sync():
        loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    found = model.full_gradients()
    reference = reference_of(model, 4, 1, bits)
    reference.step(rows_of(batch), lambda m, b: 2 * loss_of(m, b))
    wanted = {n: p.grad for n, p in reference.model.named_parameters()}
    return max(float((found[n] - g).abs().max()) for n, g in wanted.items() if g is not None)


def test_deferred_gradients_are_added_before_they_are_quantized(ranks: Ranks) -> None:
    assert max(ranks.run(deferred)) < 1e-10


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    found = adamw(model)
    found.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), CLIP) and None)
    return found


def as_scripts_do(rank: int) -> tuple[float, list[bool], bool]:
    """Two backward passes a step, scaled and clipped, and a frozen weight; once out of range; and NaN in one shard."""
    import autopar

    bits = {"weights": 8, "gradients": 4}
    search = autopar.Search(
        recipe="fsdp", quantized={"a": bits}, inexact=("quantized", "float64"), pins={"secondary": "b"}
    )
    model, whole = mlp(), mlp()
    for each in (model, whole):
        each.get_parameter("down.weight").requires_grad_(False)
    model = autopar.parallelize(model, mesh_of(2, 2), mlp_batch(0), search=search, timeout=WAIT)
    dims, inside = (
        {n: getattr(p.placements[axis], "dim", None) for n, p in model.named_parameters()} for axis in (0, 1)
    )
    reference = Sharded(whole, clipped, dims, 2, 2, inner_dims=inside, **bits)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    error, finite = 0.0, []
    for step, factor in enumerate((1.0, 1e60, 1.0)):  # 1e60 is none of float32's
        first, second = mlp_batch(2 * step), mlp_batch(2 * step + 1)
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(loss_of(model, first)).backward()
        scaler.scale(factor * loss_of(model, second)).backward()
        scaler.unscale_(optimizer)
        finite.append(bool(nn.utils.clip_grad_norm_(model.parameters(), CLIP).isfinite()))
        scaler.step(optimizer)
        scaler.update()
        if factor == 1:
            parts = list(zip(rows_of(first), rows_of(second), strict=True))
            reference.step(parts, lambda m, b: loss_of(m, b[0]) + loss_of(m, b[1]))
        error = max(error, apart(model, reference))
    if rank == 3:
        model.get_parameter("up.weight").to_local().data.view(-1)[0] = float("nan")
    return error, [*finite, scaler.get_scale() == 512], bool(loss_of(model, mlp_batch(0)).isnan())


def test_clipping_scaling_frozen_weights_and_nan(ranks: Ranks) -> None:
    for error, finite, is_nan in ranks.run(as_scripts_do):
        assert error < 1e-10 and finite == [True, False, True, True] and is_nan


def within(rank: int, more: dict[str, Any]) -> tuple[float, bool]:
    """The largest difference of any step from one device, and whether the backward pass reads copies."""
    import autopar

    search = autopar.Search(**{"recipe": "fsdp", **more}, pins={"secondary": "b"})
    model = autopar.parallelize(mlp(), mesh_of(2, 2), mlp_batch(0), search=search, timeout=WAIT, deterministic=True)
    error = follow(model, mlp(), [mlp_batch(i) for i in range(STEPS)])
    assert any(info(n).secondary for n in model.logical_graph.graph.nodes)
    return error, any(info(n).secondary for n in model.forward_graph.graph.nodes)


@pytest.mark.parametrize(
    "more", [{}, *(pytest.param({"recipe": "random", "seed": s}, marks=pytest.mark.deep) for s in range(3))]
)
def test_copies_for_the_backward_pass_are_exact(ranks: Ranks, more: dict[str, Any]) -> None:
    found = ranks.run(within, more)
    assert max(error for error, _ in found) < TOLERANCE
    assert more or all(copies for _, copies in found)


def compiled(rank: int) -> float:
    import autopar

    bits = {"weights": 8, "gradients": 8}
    search = autopar.Search(recipe="fsdp", quantized={"a": bits}, inexact=("quantized", "float64"))
    model = autopar.parallelize(
        mlp(), mesh_of(4), mlp_batch(0), search=search, timeout=WAIT, compile=lambda graph, inputs: graph
    )
    reference = reference_of(model, 4, 1, bits)
    optimizer = adamw(model)
    loss_of(model, mlp_batch(0)).backward()
    optimizer.step()
    reference.step(rows_of(mlp_batch(0)), loss_of)
    return apart(model, reference)


@pytest.mark.deep
def test_compiled_regions_have_the_operators(ranks: Ranks) -> None:
    assert max(ranks.run(compiled)) < 1e-10
