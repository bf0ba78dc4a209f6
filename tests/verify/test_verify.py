"""Every model of the zoo, on every mesh: the searched plan and random ones compute what one device would."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import VerifyError
from autopar.search.random_plan import random_plan
from autopar.verify.verify import EquivalenceReport, compare, tensor_error
from tests import models as zoo

MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4})


def tiny_models_pay() -> Cluster:
    """Slow devices and links without latency: the search splits even the models of this file."""
    return Cluster.from_toml(
        """
        name = "slow devices"
        group_sizes = []
        [device]
        name = "slow"
        memory = 1e9
        bandwidth = 1e6
        launch = 1e-9
        efficiency = 1.0
        [device.flops]
        float32 = 1e6
        [[links]]
        name = "fast"
        bandwidth = 1e9
        latency = 1e-9
        """
    )


def after_adamw(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter after one step of AdamW."""
    made = {n: torch.nn.Parameter(parameters[n].detach().double().clone()) for n in gradients}
    for name, p in made.items():
        p.grad = gradients[name].clone()
    torch.optim.AdamW(made.values(), lr=1e-3).step()
    return {n: p.detach() for n, p in made.items()}


def check(name: str, report: EquivalenceReport) -> None:
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"
    assert report.gradients.keys() == report.reference_gradients.keys() != set()
    program, _, values = zoo.captured(name)
    named = {i.name: v for i, v in zip(program.inputs, values, strict=True) if i.kind == "parameter"}
    expected = after_adamw(named, report.reference_gradients)
    for parameter, value in after_adamw(named, report.gradients).items():
        assert float((value - expected[parameter]).abs().max()) <= 1e-9, parameter


def on_meshes(turn: int) -> list[object]:
    """Every model on every mesh; `make test` takes every second model on one, by turns."""
    cases: list[object] = []
    for i, name in enumerate(sorted(zoo.MODELS)):
        for k, axes in enumerate(MESHES):
            short = i % 2 == turn and k == (i // 2 + turn) % len(MESHES)
            short = short and (name, len(axes)) != ("llama", 3) and name != "bert"  # which take long
            size = "x".join(map(str, axes.values()))
            cases.append(pytest.param(name, axes, id=f"{name}-{size}", marks=[] if short else [pytest.mark.deep]))
    return cases


@pytest.mark.parametrize(("name", "axes"), on_meshes(0))
def test_searched_plan(name: str, axes: dict[str, int]) -> None:
    program, _, values = zoo.captured(name)
    plan = solve(program, axes, tiny_models_pay())
    local = rewrite(program, plan)
    check(name, compare(program, local, plan, values, torch.float64))
    # The search did split something: this is no test of replication.
    assert sum(map(len, plan.predicted.collectives.values())) > 0
    assert 0 <= plan.certificate.gap < 1


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "axes"), on_meshes(1))
def test_random_plan(name: str, axes: dict[str, int]) -> None:
    program, dims, values = zoo.captured(name)
    plan = random_plan(program, dims, axes, Cluster.preset("cpu"), 7)
    check(name, compare(program, rewrite(program, plan), plan, values, torch.float64))


def test_public_verify_reports_everything() -> None:
    model, batch = zoo.llama()
    report = autopar.verify(model, batch, {"x": 2}, plan="random", seed=3)
    assert report.max_error <= 1e-10
    assert report.capture_error < 1e-3
    assert report.loss is not None
    assert report.reference_loss is not None
    assert report.loss.dtype == torch.float64
    assert set(report.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(report.gradients[n].shape == p.shape for n, p in model.named_parameters())
    again = autopar.verify(model, batch, {"x": 2}, plan=report.plan)
    assert again.max_error <= 1e-10


@pytest.mark.slow
def test_model_without_a_loss_carries_gradients_through_its_outputs() -> None:
    model, batch = zoo.gpt2()
    del batch["labels"]
    report = autopar.verify(model, batch, {"x": 2, "y": 2}, plan="random", seed=1)
    assert report.loss is None
    assert report.gradients
    assert report.max_error <= 1e-10


def test_loss_fn() -> None:
    model, batch = zoo.gpt2()
    labels = batch.pop("labels")

    def loss_fn(output: dict[str, Tensor], _: object) -> Tensor:
        return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())

    report = autopar.verify(model, batch, {"x": 4}, loss_fn=loss_fn, plan="random")
    assert report.loss is not None
    assert report.max_error <= 1e-10


def test_inference() -> None:
    model, batch = zoo.bert()
    model.eval()
    with torch.no_grad():
        report = autopar.verify(model, batch, {"x": 2, "y": 2}, plan="random")
    assert not report.gradients
    assert report.results
    assert report.max_error <= 1e-10


def test_wrong_plan_argument_is_named() -> None:
    model, batch = zoo.mlp()
    with pytest.raises(ValueError, match="random"):
        autopar.verify(model, batch, {"x": 2}, plan="fastest")
    plan = autopar.plan(model, batch, cluster="cpu", axes={"x": 2})
    with pytest.raises(ValueError, match="axes"):
        autopar.verify(model, batch, {"x": 4}, plan=plan)


def test_meta_model_cannot_be_verified() -> None:
    with torch.device("meta"):
        model, _ = zoo.mlp()
    _, batch = zoo.mlp()
    with pytest.raises(VerifyError, match="meta"):
        autopar.verify(model, batch, {"x": 2})


def test_error_measure() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert tensor_error(one, one, 1.0) == 0.0
    assert tensor_error(one + 1e-3, one, 1.0) == pytest.approx(1e-3)
    assert tensor_error(one * 1e-12, one * 0, 1.0) == pytest.approx(1e-7)  # analytically zero: relative to the model
    assert tensor_error(one, one, 1.0, replicas=0.5) == 0.5
    assert tensor_error(one * float("nan"), one, 1.0) == float("inf")


class Holding(nn.Module):
    """A linear layer beside an attribute."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(4, 4), value

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        return self.linear(x).sum()


def test_models_with_a_lock_are_copied() -> None:
    report = autopar.verify(Holding(threading.Lock()), (torch.ones(2, 4),), {"data": 2}, plan="random")
    assert report.max_error < 1e-10


@pytest.mark.parametrize("value", [memoryview(b"1"), {"inner": [(i for i in range(2))]}])
def test_attributes_that_cannot_be_copied_are_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"cannot copy the \w+ in 'value' of the root \(Holding\)"):
        autopar.verify(Holding(value), (torch.ones(2, 4),), {"data": 2}, plan="random")


def test_an_operator_without_float64() -> None:
    """Verify computes in float64, and says where that cannot be."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x).float()
            h = torch.fake_quantize_per_channel_affine(h, torch.full((4,), 0.1), torch.zeros(4), 1, -128, 127)
            return h.square().mean()

    with pytest.raises(VerifyError, match=r"fake_quantize.*test_verify.py:\d+.* has no kernel for float64"):
        autopar.verify(Quantized(), (torch.ones(4, 4),), {"data": 2}, plan="random", seed=0)


class Running(nn.Module):
    """Keeps a running mean in a new tensor, or in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        new = 0.5 * self.mean + x.detach().mean(0)
        if self.in_place:
            self.mean.data.copy_(new)
        else:
            self.mean = new
        return x * self.mean


class Twice(nn.Module):
    """Two layers that share a module, or have the same buffer until one of them sets it anew."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.linear, self.one, self.two = nn.Linear(4, 4), Running(in_place=module), Running(in_place=module)
        if module:
            self.two = self.one
        else:
            self.two.mean = self.one.mean

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        return self.two(self.one(self.linear(x))).square().mean()


@pytest.mark.parametrize("module", [True, False])
def test_a_buffer_that_two_modules_have(module: bool) -> None:
    report = autopar.verify(Twice(module=module), (torch.randn(4, 4),), {"a": 2, "b": 2}, plan="random")
    assert report.reference == "eager" and report.max_error < 1e-10
