"""A parallelized model on one device, without a process group."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, PlanError
from autopar.parallelize import parallelize


class Block(nn.Module):
    """Tied weights, a buffer that changes, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.config = "forwarded"
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(8), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.norm(self.embed(ids).mean(1))) * self.scale)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make() -> Block:
    torch.manual_seed(0)
    return Block().double()


BATCH = {"ids": torch.arange(24).reshape(8, 3) % 16, "labels": torch.arange(8)}


def test_steps_equal_the_plain_model() -> None:
    plain, model = make(), parallelize(make(), None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(**BATCH)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), (other, found) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(found, expected)
    plain.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(BATCH["ids"])["logits"], plain(BATCH["ids"])["logits"])
    assert model.backward_graph is None
    assert not model.norm.training


def test_it_looks_like_the_original() -> None:
    original = make()
    names = [n for n, _ in original.named_parameters()]
    hook = []
    model = parallelize(original, None, BATCH)
    model.register_forward_hook(lambda *_: hook.append(1))
    model(**BATCH)
    assert model.config == "forwarded"
    assert [n for n, _ in model.named_parameters()] == names
    assert hook == [1]
    assert (model.data_rank, model.data_world_size) == (0, 1)
    assert "embed.weight" in model.explain("head.weight")
    assert model.full_state_dict().keys() == original.state_dict().keys()
    assert "logits" in model(**BATCH)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = model.nothing_like_this
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, None)


def test_gradients_through_other_outputs_are_refused() -> None:
    model = parallelize(make(), None)
    out = model(**BATCH)
    with pytest.raises(AutoparError, match="loss_fn"):
        (out["loss"] + out["logits"].mean()).backward()


def test_outputs_without_a_loss_carry_gradients() -> None:
    plain, model = make(), parallelize(make(), None)
    for m in (plain, model):
        m(BATCH["ids"])["logits"].pow(2).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, p.grad)


def test_a_loss_function_and_autocast() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    torch.manual_seed(0)
    model = parallelize(nn.Linear(8, 4), None, loss_fn=lambda output, batch: output.float().square().mean())
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x)
        expected = linear(x).float().square().mean()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)  # one rounding to bfloat16 more: x @ w + b
    torch.testing.assert_close(model.weight.grad, linear.weight.grad, rtol=1e-2, atol=1e-3)
    assert "bfloat16" in str([n.meta.get("val") for n in model.forward_graph.graph.nodes])
    torch.testing.assert_close(model(x), linear(x).square().mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "both"}, "expected"),
        ({"precision": "int8"}, "precision="),
        ({"cluster": "no such cluster"}, "neither a file nor a preset"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(nn.Linear(2, 2), None, **options)


def test_an_optimizer_made_before_is_found() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="after parallelize"):
        parallelize(model, None)
    del optimizer
    gc.collect()
    parallelize(model, None)


def test_what_needs_a_plan_says_so() -> None:
    model = parallelize(nn.Linear(2, 2), None, inputs="local")
    with pytest.raises(PlanError, match="batch="):
        _ = model.data_world_size
    with pytest.raises(ValueError, match="no parameters"):
        parallelize(nn.ReLU(), None)


def test_a_plan_for_other_axes_or_another_graph_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    model = parallelize(nn.Linear(4, 4), None, (torch.zeros(2, 4),))
    model.plan.save(tmp_path / "plan.json")
    again = parallelize(nn.Linear(4, 4), None, (torch.zeros(2, 4),), plan=tmp_path / "plan.json")
    assert again.plan.fingerprint == model.plan.fingerprint
    with pytest.raises(PlanError, match="another graph"):
        parallelize(nn.Linear(4, 4), None, (torch.zeros(3, 4),), plan=model.plan)
    with pytest.raises(PlanError, match="axes"):
        parallelize(nn.Linear(4, 4), None, plan=replace(model.plan, axes=(("gpu", 1),)))


@pytest.mark.slow
def test_meta_models(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = make().state_dict()
    save_file({k: v for k, v in state.items() if k != "head.weight"}, tmp_path / "model.safetensors")

    def blank() -> Block:
        with torch.device("meta"):
            return Block().double()

    expected = make()(**BATCH)["loss"]
    for init in (tmp_path, tmp_path / "model.safetensors", lambda name, tensor: tensor.copy_(state[name])):
        model = parallelize(blank(), None, init=init)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**BATCH)["loss"]
        torch.testing.assert_close(loss, expected)
        loss.backward()
        before = model.embed.weight.clone()
        optimizer.step()
        assert not torch.equal(before, model.embed.weight)
        assert model.head.weight is model.embed.weight
    with pytest.raises(AutoparError, match=r"'embed.weight' is on the meta device .*init="):
        parallelize(blank(), None)(**BATCH)
    with pytest.raises(AutoparError, match="does not exist"):
        parallelize(blank(), None, init=tmp_path / "nowhere")(**BATCH)
    save_file({"embed.weight": torch.zeros(3, 3)}, tmp_path / "wrong.safetensors")
    with pytest.raises(AutoparError, match=r"shape \[3, 3\]"):
        parallelize(blank(), None, init=tmp_path / "wrong.safetensors")(**BATCH)
    model = parallelize(blank(), None)
    model.load_full_state_dict(state)
    torch.testing.assert_close(model(**BATCH)["loss"], expected)


def test_full_state_dicts_are_strict() -> None:
    model = parallelize(make(), None)
    state = model.full_state_dict()
    extra = {**state, "more": torch.zeros(1)}
    del extra["head.weight"], extra["norm.bias"]  # the first is tied to another
    with pytest.raises(AutoparError, match=r"missing norm.bias, unexpected more"):
        model.load_full_state_dict(extra)
    with pytest.raises(AutoparError, match=r"'norm.weight' has shape"):
        model.load_full_state_dict({**state, "norm.weight": torch.zeros(3)})


def test_postponed_reduction_and_freezing() -> None:
    plain, model = make(), parallelize(make(), None)
    for m in (plain, model):
        m.norm.weight.requires_grad_(False)
        m(**BATCH)["loss"].backward()
        m(**BATCH)["loss"].backward()
    assert model.norm.weight.grad is None
    torch.testing.assert_close(model.embed.weight.grad, plain.embed.weight.grad)
    model.zero_grad()
    with model.no_sync():
        model(**BATCH)["loss"].backward()
    assert model.embed.weight.grad is None
    model(**BATCH)["loss"].backward()
    assert model.embed.weight.grad is not None


class Noisy(torch.autograd.Function):
    """Draws in its backward pass, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = Noisy.apply(self.linear(x))
        return drawn.square().sum()


def test_numbers_that_a_backward_pass_draws() -> None:
    """They are drawn there, and once: those of later calls follow."""
    models, x = (parallelize(Draws(), None), Draws()), torch.ones(4, 3, dtype=torch.float64)
    for model in models:
        torch.manual_seed(1)
        for _ in range(2):
            model(x).backward()
    torch.testing.assert_close(models[0].linear.weight.grad, models[1].linear.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_parallel_model_in_another_one() -> None:
    inner = parallelize(Draws(), None)

    class Outer(Draws):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum() * inner(x)

    with pytest.raises(AutoparError, match="in the forward of another one that is captured"):
        parallelize(Outer(), None)(torch.ones(4, 3, dtype=torch.float64))


class Scaled(nn.Module):
    """Scales by a buffer, which it sets anew at each call if asked to."""

    def __init__(self, *, running: bool) -> None:
        super().__init__()
        self.running = running
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.running:
            self.scale = 0.5 * self.scale + x.detach().mean(0)
        return x * self.scale


class SameBuffer(nn.Module):
    """Two layers with one buffer, and a parameter of no elements."""

    def __init__(self, *, running: bool) -> None:
        super().__init__()
        self.linear, self.one, self.two = nn.Linear(4, 4), Scaled(running=running), Scaled(running=running)
        self.two.scale = self.one.scale
        self.extra = nn.Parameter(torch.randn(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(torch.cat([self.extra, self.linear(x)]))).square().mean()


@pytest.mark.parametrize("running", [True, False])
def test_a_buffer_that_two_modules_have_until_one_gets_another(running: bool) -> None:
    plain = SameBuffer(running=running)
    model, x = parallelize(copy.deepcopy(plain), None), torch.randn(4, 4)
    for call in range(4):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=0)
        if call == 1 and not running:
            for own in (model, plain):
                own.two.scale = 2 * own.two.scale
    assert torch.equal(model.two.scale, plain.two.scale) and not torch.equal(model.one.scale, model.two.scale)


def test_parameters_of_no_elements_in_training_and_evaluation() -> None:
    plain = SameBuffer(running=False)
    model, x = parallelize(copy.deepcopy(plain), None), torch.randn(4, 4)
    for own in (model, plain):
        own(x).backward()
        torch.optim.SGD(own.parameters(), lr=0.1).step()
        own.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=0)
