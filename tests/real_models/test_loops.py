"""Loops of two networks: an autoencoder against a discriminator, a student behind a teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.real_models.steps import error_of
from tests.real_models.zoo import EXAMPLES, towards

TOLERANCE = 1e-9
STEPS = 3

Parallelize = Callable[[nn.Module], Any]
Trace = dict[str, torch.Tensor]


def whole(tensor: Any) -> torch.Tensor:
    """A result of a network as a plain tensor, through which gradients flow."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def record(trace: Trace, name: str, model: Any) -> None:
    """Gradients, and parameters and buffers, as they are now."""
    parallel = hasattr(model, "full_gradients")
    plain = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = model.full_gradients() if parallel else plain
    state = model.full_state_dict() if parallel else model.state_dict()
    trace.update({f"{name} gradient of {n}": g.detach().clone() for n, g in gradients.items()})
    trace.update({f"{name} {n}": v.detach().clone() for n, v in state.items()})


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def adversarial(parallelize: Parallelize) -> Trace:
    """The loop of latent diffusion's autoencoder: pixels, and a discriminator that is trained in turn."""
    autoencoder, discriminator = EXAMPLES["diffusers AutoencoderKL"](), EXAMPLES["timm resnet v2"]()
    painter, critic = parallelize(autoencoder.model), parallelize(discriminator.model)
    optimizers = [optimizer_of(m) for m in (painter, critic)]
    trace: Trace = {}
    for step in range(STEPS):
        real = autoencoder.batch(step)["sample"]
        made = painter(real).sample
        optimizers[1].zero_grad()
        doubt = F.relu(1 - whole(critic(real))).mean() + F.relu(1 + whole(critic(made.detach()))).mean()
        doubt.backward()
        record(trace, f"{step} critic", critic)
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = F.mse_loss(whole(made), real) - 0.1 * whole(critic(made)).mean()
        loss.backward()
        record(trace, f"{step} painter", painter)
        optimizers[0].step()
        trace |= {f"{step} doubt": doubt.detach(), f"{step} loss": loss.detach()}
    return trace


class Student(nn.Module):
    """A network with the loss of what a teacher has said."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return towards(self.network(x), wanted)


def taught(parallelize: Parallelize) -> Trace:
    """A teacher outside, which is frozen and may be parallel, too; a moving average of the student joins it."""
    example = EXAMPLES["timm vit"]()
    teacher = parallelize(EXAMPLES["timm resnet, blurred"]().model.eval().requires_grad_(False))
    student = parallelize(Student(example.model))
    optimizer = optimizer_of(student)
    trace: Trace = {}
    for step in range(STEPS):
        x = example.batch(step)["x"]
        with torch.no_grad():
            wanted = teacher(x)
        loss = student(x, wanted)
        optimizer.zero_grad()
        loss.backward()
        record(trace, str(step), student)
        optimizer.step()
        trace[f"{step} loss"] = loss.detach()
    return trace


LOOPS = {"adversarial": adversarial, "taught": taught}


def error(name: str, parallelize: Parallelize) -> float:
    """Between a loop's networks parallelized, and as they are."""
    found, expected = LOOPS[name](lambda m: parallelize(copy.deepcopy(m))), LOOPS[name](lambda m: m)
    assert list(found) == list(expected)
    return error_of(found, expected)


@pytest.mark.parametrize("name", LOOPS)
def test_one_device(name: str) -> None:
    assert error(name, lambda m: autopar.parallelize(m, None)) < TOLERANCE


def on_ranks(rank: int, name: str, sizes: tuple[int, ...], recipe: str | None) -> float:
    from autopar.search.options import Search

    search = Search(recipe=recipe, seed=1, time_limit=30)
    options = {"search": search, "cluster": slow_devices(), "timeout": 5 * WAIT}
    return error(name, lambda m: autopar.parallelize(m, mesh_of(*sizes), **options))


@pytest.mark.distributed
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(("sizes", "recipe"), [((4,), None), ((2, 2), "random")], ids=["searched", "random"])
def test_on_ranks(ranks: Ranks, name: str, sizes: tuple[int, ...], recipe: str | None) -> None:
    assert max(ranks.run(on_ranks, name, sizes, recipe)) < TOLERANCE
