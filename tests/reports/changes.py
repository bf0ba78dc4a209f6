"""What code that knows of no mesh does to a model, beside the same done to the plain one: how far they are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.parallelize import parallelize
from autopar.search.options import Search
from tests.distributed.steps import adamw, largest

Pins = Mapping[str, Any]


class Net(nn.Module):
    """An encoder, a head, a table that is tied to it, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.fc = nn.Linear(8, 12)
        self.table = nn.Linear(8, 12, bias=False)
        self.table.weight = self.fc.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.encoder(x)
        return (self.fc(hidden) - y).square().mean() + 0.1 * self.table(hidden.tanh()).square().mean()


def batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(8, n, generator=g, dtype=torch.float64) for k, n in (("x", 8), ("y", 12))}


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Pair:
    """A model on a mesh, or on one device, and the plain one; each with AdamW."""

    def __init__(self, mesh: Any, pins: Pins, steps: int) -> None:
        self.parallel: Any = parallelize(Net().double(), mesh, search=Search(pins=pins))
        self.plain: Any = Net().double()
        self.optimizers: list[Any] = [adamw(m) for m in self.both]
        self.steps = 0
        self.train(steps)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.parallel, self.plain

    def train(self, steps: int, *, clear: bool = True) -> None:
        for _ in range(steps):
            for model, optimizer in zip(self.both, self.optimizers, strict=True):
                model(**batch(self.steps)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=clear)
            self.steps += 1

    def apart(self) -> float:
        return states_apart(self.parallel, self.plain)


def states_apart(parallel: Any, plain: nn.Module) -> float:
    found, expected = parallel.full_state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    return largest([float((found[n] - v).abs().max()) for n, v in expected.items()])


def copies(pair: Pair) -> float:
    """A copy goes its own way, and the original does, too."""
    copied = [copy.deepcopy(m) for m in pair.both]
    pair.train(1)
    first = states_apart(*copied)
    optimizers = [adamw(m) for m in copied]
    for step in (7, 8):
        for m, optimizer in zip(copied, optimizers, strict=True):
            m(**batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return largest([first, states_apart(*copied), pair.apart()])


def averages(pair: Pair, **options: Any) -> float:
    averaged: list[Any] = [AveragedModel(m, **options) for m in pair.both]
    for _ in range(3):
        pair.train(1)
        for average, model in zip(averaged, pair.both, strict=True):
            average.update_parameters(model)
    with torch.no_grad():
        losses = [float(a.eval()(**batch(9))) for a in averaged]
    lies = [
        getattr(p, "placements", None) == getattr(q, "placements", None)
        for p, q in zip(averaged[0].parameters(), pair.parallel.parameters(), strict=True)
    ]
    assert all(lies), "the average takes more memory than the model"
    return largest([losses[0] - losses[1], states_apart(averaged[0].module, averaged[1].module), pair.apart()])


def loads_a_module(pair: Pair, **options: Any) -> float:
    state = {"0.weight": noise(16, 8), "0.bias": noise(16), "2.weight": noise(8, 16), "2.bias": noise(8)}
    for model in pair.both:
        model.encoder.load_state_dict(copy.deepcopy(state), **options)
        model.table.load_state_dict({"weight": noise(12, 8)})
    pair.optimizers = [adamw(m) for m in pair.both]
    pair.train(2)
    return pair.apart()


def loads_one_name_of_two(pair: Pair) -> float:
    state = {n: noise(*v.shape) for n, v in pair.plain.state_dict().items() if n != "table.weight"}
    pair.parallel.load_full_state_dict(state)
    pair.plain.load_state_dict(state, strict=False)
    pair.train(1)
    return pair.apart()


def assigns_data(pair: Pair) -> float:
    for model in pair.both:
        model.encoder[0].weight.data = noise(16, 8)
        model.fc.weight.data = model.fc.weight.data * 0.5
        vector_to_parameters(noise(16 * 8 + 2 * 8 + 8 * 16 + 8, seed=6)[: 8 * 16 + 8], model.encoder[2].parameters())
    pair.train(2)
    return pair.apart()


def assigns_gradients(pair: Pair) -> float:
    """Before the backward pass, which adds to them, and after it."""
    for model, optimizer in zip(pair.both, pair.optimizers, strict=True):
        for i, p in enumerate(model.parameters()):
            p.grad = noise(*p.shape, seed=i)
        model(**batch(3)).backward()
        model.fc.bias.grad = noise(12)
        for p in model.parameters():
            p.grad = p.grad * 0.5
        model.encoder[0].weight.grad.data.add_(model.encoder[0].weight.data, alpha=0.1)
        optimizer.step()
    return pair.apart()


def clips(pair: Pair) -> float:
    found = []
    for order in (2.0, float("inf"), 1.0):
        norms = []
        for model, optimizer in zip(pair.both, pair.optimizers, strict=True):
            model(**batch(4)).backward()
            model(**batch(5)).backward()
            clip_grad_value_(model.parameters(), 0.05)
            norms.append(float(whole(clip_grad_norm_(model.parameters(), 0.01, norm_type=order))))
            optimizer.step()
            optimizer.zero_grad(set_to_none=order == 2.0)
        found.append(norms[0] - norms[1])
    vectors = [whole(parameters_to_vector(m.parameters())).detach() for m in pair.both]
    return largest([*map(abs, found), float((vectors[0] - vectors[1]).abs().max()), pair.apart()])


def freezes(pair: Pair) -> float:
    for step in range(3):
        for model, optimizer in zip(pair.both, pair.optimizers, strict=True):
            model.encoder.requires_grad_(step != 1)
            model.fc.bias.requires_grad_(step != 2)
            optimizer.zero_grad()
            model(**batch(step)).backward()
            optimizer.step()
        gradients = {n for n, p in pair.plain.named_parameters() if p.grad is not None}
        assert set(pair.parallel.full_gradients()) == gradients
    return pair.apart()


def loads_an_optimizer(pair: Pair) -> float:
    """A plain optimizer's state, and the plain model's: what a checkpoint of one device holds."""
    other = Pair(None, {}, 2)
    for model, optimizer in zip(pair.both, pair.optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.optimizers[1].state_dict()))
        for p, q in zip(model.parameters(), other.plain.parameters(), strict=True):
            p.data = q.detach().clone()
    pair.train(2)
    for p, state in pair.optimizers[0].state.items():
        assert getattr(state["exp_avg"], "placements", None) == getattr(p, "placements", None)
    return pair.apart()


CHANGES: dict[str, Callable[[Pair], float]] = {
    "copies": copies,
    "averages": averages,
    "moving averages": lambda pair: averages(pair, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "loads a module": loads_a_module,
    "loads a module by assignment": lambda pair: loads_a_module(pair, assign=True),
    "loads one name of two": loads_one_name_of_two,
    "assigns data": assigns_data,
    "assigns gradients": assigns_gradients,
    "clips": clips,
    "freezes": freezes,
    "loads an optimizer": loads_an_optimizer,
}


EARLY = ("moving averages", "assigns data", "loads a module by assignment", "loads an optimizer")
"""Those that are of interest before the first call, too."""

PLAIN = ("averages", "clips", "freezes", "loads a module")
"""Those that differ little from others."""


def outcome(name: str, mesh: Any, pins: Pins, steps: int) -> float:
    """How far the two models are apart after a change, made before the first call or behind ``steps`` of them."""
    return CHANGES[name](Pair(mesh, pins, steps))
