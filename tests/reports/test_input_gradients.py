"""Gradients of what goes in: generators in front of a discriminator, adversarial examples, embeddings outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.search.options import Search
from tests.crossed import seeds
from tests.distributed.steps import TOLERANCE, largest

ROWS, NOISE, PIXELS = 8, 4, 6


class Generator(nn.Module):
    """Noise to samples; batch norm is what it has in a step of its own and in one of the other network's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NOISE, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, PIXELS)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(functional.relu(self.norm(self.up(noise)))))


class Discriminator(nn.Module):
    """Samples to the loss of taking them for what they are said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(PIXELS, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        score = self.out(self.norm(functional.leaky_relu(self.down(x), 0.2)))[:, 0]
        return functional.binary_cross_entropy_with_logits(score, real)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Generator().double(), Discriminator().double()


def tensors(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    one = torch.ones(ROWS, dtype=torch.float64)
    made = {
        "noise": torch.randn(ROWS, NOISE, dtype=torch.float64, generator=g),
        "x": torch.randn(ROWS, PIXELS, dtype=torch.float64, generator=g),
    }
    return {**made, "real": one, "fake": 0 * one}


def train(generator: nn.Module, discriminator: nn.Module, steps: int = 3) -> dict[str, list[torch.Tensor]]:
    """The usual loop; losses and gradients of each step."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (generator, discriminator)]
    found: dict[str, list[torch.Tensor]] = {"losses": [], "gradients": []}
    for step in range(steps):
        batch = tensors(step)
        made = generator(batch["noise"])
        loss = discriminator(batch["x"], batch["real"]) + discriminator(made.detach(), batch["fake"])
        optimizers[1].zero_grad()
        loss.backward()
        found["gradients"] += gradients_of(discriminator)
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator.requires_grad_(step == 1)  # as some freeze it for this
        cheat = discriminator(made, batch["real"])
        cheat.backward()
        discriminator.requires_grad_(True)
        found["gradients"] += gradients_of(generator)
        optimizers[0].step()
        found["losses"] += [loss.detach(), cheat.detach()]
    return found


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    if hasattr(model, "full_gradients"):
        found = model.full_gradients()
        return [found[n] for n, _ in model.named_parameters() if n in found]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.full_state_dict() if hasattr(model, "full_gradients") else model.state_dict()


def adversarial(parallelize: Callable[[nn.Module], Any]) -> float:
    """How far two networks trained against each other are from eager ones."""
    plain = networks()
    parallel = tuple(parallelize(copy.deepcopy(m)) for m in plain)
    expected, found = train(*plain), train(*parallel)
    pairs = [*zip(found["losses"], expected["losses"], strict=True)]
    pairs += zip(found["gradients"], expected["gradients"], strict=True)
    for mine, eager in zip(parallel, plain, strict=True):
        state = state_of(mine)
        pairs += [(state[n], v) for n, v in eager.state_dict().items()]
    return largest([float((a - b).abs().max()) for a, b in pairs])


def ways(parallelize: Callable[[nn.Module], Any]) -> dict[str, float]:
    """The largest error of each way to ask for a gradient of a batch tensor; a collective call on ranks."""
    _, plain = networks()
    model = parallelize(copy.deepcopy(plain))
    batch = tensors(5)
    found = {}

    def both(use: Callable[[nn.Module], torch.Tensor]) -> float:
        model.zero_grad(), plain.zero_grad()
        made, wanted = use(model), use(plain)
        pairs = [(made, wanted), *zip(gradients_of(model), gradients_of(plain), strict=True)]
        return largest([float((a - b).abs().max()) for a, b in pairs])

    def leaf(m: nn.Module) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        m(x, batch["real"]).backward()
        assert x.grad is not None
        return x.grad

    def keyword(m: nn.Module) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(m(real=batch["real"], x=x) * 3, x)  # and none of the parameters
        return gradient

    def twice(m: nn.Module) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        (m(x, batch["real"]) + 2 * m(x.flip(0) * 2, batch["fake"])).backward()
        assert x.grad is not None
        return x.grad

    def both_inputs(m: nn.Module) -> torch.Tensor:
        x, real = batch["x"].clone().requires_grad_(), batch["real"].clone().requires_grad_()
        m(x, real).backward()
        assert x.grad is not None and real.grad is not None
        return torch.cat([x.grad.flatten(), real.grad])

    def waiting(m: nn.Module) -> torch.Tensor:
        """Gradients of parameters wait, those of the batch do not."""
        x = batch["x"].clone().requires_grad_()
        if hasattr(m, "full_gradients"):
            with m.no_sync():
                m(x, batch["real"]).backward()
        else:
            m(x, batch["real"]).backward()
        assert x.grad is not None
        early = x.grad.clone()
        m(x, batch["fake"]).backward()
        return torch.cat([early, x.grad])

    def frozen(m: nn.Module) -> torch.Tensor:
        m.requires_grad_(False)
        try:
            return leaf(m)
        finally:
            m.requires_grad_(True)

    for use in (leaf, keyword, twice, both_inputs, waiting, frozen):
        found[use.__name__] = both(use)
    with torch.no_grad():
        x = batch["x"].clone().requires_grad_()
        found["no_grad"] = float((model(x, batch["real"]) - plain(x, batch["real"])).abs())
    return found


def on_one_device(model: nn.Module) -> Any:
    return autopar.parallelize(model, None)


@pytest.mark.slow
def test_adversarial_training_on_one_device() -> None:
    assert adversarial(on_one_device) < TOLERANCE


@pytest.mark.slow
def test_ways_to_ask_on_one_device() -> None:
    found = ways(on_one_device)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}])
def test_emulated(axes: dict[str, int]) -> None:
    _, model = networks()
    batch = tensors(0)
    example = (batch["x"].requires_grad_(), batch["real"])
    for plan, seed in ((None, 0), *(("random", seed) for seed in seeds(3))):
        report = autopar.verify(model, example, axes, plan=plan, seed=seed)
        assert "input_gradient 0" in report.errors
        assert report.max_error < TOLERANCE, report.worst
        assert report.capture_error < TOLERANCE


def test_an_embedding_outside() -> None:
    """Whose gradient is sparse in rows, through a plain network in front of the parallel one."""
    torch.manual_seed(0)
    table = nn.Embedding(10, PIXELS).double()
    _, plain = networks()
    model = on_one_device(copy.deepcopy(plain))
    ids = torch.arange(ROWS) % 3
    expected = torch.autograd.grad(plain(table(ids), tensors(0)["real"]), table.weight)
    found = torch.autograd.grad(model(table(ids), tensors(0)["real"]), table.weight)
    torch.testing.assert_close(found, expected)


def test_an_integer_beside_and_a_tensor_that_is_not_used() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor, unused: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return (x[at] * self.w).square().sum()

    x, unused = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    at = torch.tensor([0, 2, 2])
    plain = Picks()
    model = on_one_device(copy.deepcopy(plain))
    model(x, unused, at).backward()
    assert x.grad is not None and unused.grad is None
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain(x, unused, at), x)[0])


def test_the_check_before_the_first_step_has_them() -> None:
    _, plain = networks()
    model = autopar.parallelize(copy.deepcopy(plain), None, check=True)
    batch = tensors(0)
    x = batch["x"].requires_grad_()
    (found,) = torch.autograd.grad(model(x, batch["real"]), x)
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, batch["real"]), x)[0])


def test_microbatches_are_refused() -> None:
    _, plain = networks()
    model = autopar.parallelize(plain, None, search=Search(pins={"microbatches": 2}))
    batch = tensors(0)
    with pytest.raises(autopar.InfeasibleError, match=r"batch tensor 0 requires a gradient.*Detach it"):
        model(batch["x"].requires_grad_(), batch["real"])
