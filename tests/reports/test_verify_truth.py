"""What a wrong capture loses is seen: outputs, gradients, buffers and attributes are held against eager mode.

Captures are wrong on purpose here: in place of the model, one that loses something is traced.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.verify.reference import CAPTURED, EAGER

module = importlib.import_module("autopar.verify.verify")  # `autopar.verify` is the function
X = torch.linspace(-1, 1, 32).view(4, 8).sin()
Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers with ``body`` in between, and state that bodies may write."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("center", torch.zeros(8))
        self.calls, self.last, self.log = 0, None, [1.0]
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(x))).square().mean()


class Reversal(torch.autograd.Function):
    """The same forward, the opposite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def plain(net: Any, h: Tensor) -> Tensor:
    return h


def hooked(net: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return h


def centered(net: Any, h: Tensor) -> Tensor:
    net.center = 0.9 * net.center + 0.1 * h.detach().mean(0)
    return h - net.center


def centered_in_data(net: Any, h: Tensor) -> Tensor:
    net.center.data = 0.9 * net.center + 0.1 * h.detach().mean(0)
    return h - net.center


def centered_unkept(net: Any, h: Tensor) -> Tensor:
    return h - (0.9 * net.center + 0.1 * h.detach().mean(0))


def averaged(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.b.weight.mul_(0.9).add_(net.a.weight, alpha=0.1)
    return h


def counting(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h


def remembering(net: Any, h: Tensor) -> Tensor:
    net.last = h.detach().mean()
    return h


def logging_(net: Any, h: Tensor) -> Tensor:
    net.log.append(2.0)
    return h


def tossed(net: Any, h: Tensor) -> Tensor:
    return h * random.choice([1.0, 2.0, 3.0, 4.0, 5.0])


LOST: dict[str, tuple[Body, Body, str]] = {
    "a backward pass of its own": (lambda net, h: Reversal.apply(h), plain, "a.weight"),
    "a hook on a tensor": (hooked, plain, "a.bias"),
    "a buffer assigned": (centered, centered_unkept, "buffer center"),
    "a buffer written through its data": (centered_in_data, centered_unkept, "buffer center"),
    "a parameter written": (averaged, plain, "parameter b.weight"),
    "a counter": (counting, plain, "attribute calls"),
    "a tensor in an attribute": (remembering, plain, "attribute last"),
    "a list that grows": (logging_, plain, "attribute log"),
    "numbers of Python's generator": (tossed, plain, "result 0"),
}


def traced_instead(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    """From now on another model is captured than the one that is called."""
    original = module.captured
    monkeypatch.setattr(module, "captured", lambda model, batch, **options: original(Net(body), batch, **options))


@pytest.mark.parametrize("name", LOST)
def test_what_a_capture_loses_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, lossy, tensor = LOST[name]
    traced_instead(monkeypatch, lossy)
    report = module.verify(Net(body), (X,), {"a": 2}, plan="random")
    assert report.reference == EAGER
    assert report.errors[tensor] > 1e-2
    first = report.first_difference
    assert first.stage == "capture"
    assert "captured graph" in str(first)


def test_a_lost_gradient_is_found_where_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer whose gradient is wrong, counted from the loss, is in front of the operator."""
    traced_instead(monkeypatch, plain)
    first = module.verify(Net(lambda net, h: Reversal.apply(h)), (X,), {"a": 2}, plan="random").first_difference
    assert first.module == "a"
    assert __file__ in first.line
    assert "gradient of 'a." in first.tensor


def test_what_goes_wrong_in_the_second_call_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(net: Any, h: Tensor) -> Tensor:
        net.center.copy_(0.1 * h.detach().mean(0))
        return h - net.center

    def kept(net: Any, h: Tensor) -> Tensor:
        net.center.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - net.center

    right = module.verify(Net(kept), (X,), {"a": 2}, plan="random")
    assert (right.reference, right.first_difference) == (EAGER, None)
    assert right.max_error < 1e-9
    traced_instead(monkeypatch, forgetful)
    report = module.verify(Net(kept), (X,), {"a": 2}, plan="random")
    assert max(e for n, e in report.errors.items() if "second" not in n) < 1e-9
    assert report.errors["result 0 of the second call"] > 1e-3


def test_nothing_of_the_user_s_is_changed() -> None:
    model = Net(counting)
    model.register_forward_hook(lambda *_: None)
    torch.manual_seed(3)
    random.seed(3)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        model.calls,
        {n: t.clone() for n, t in model.state_dict().items()},
    )
    report = module.verify(model, (X,), {"a": 2}, plan="random")
    assert report.gradients.keys() == report.reference_gradients.keys() == dict(model.named_parameters()).keys()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), model.calls, torch.get_default_dtype()) == (before[1], before[2], torch.float32)
    assert all(torch.equal(t, before[3][n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_number_is_equal_where_eager_has_none_either() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    x = X.clone()
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    report = module.verify(Rows(), (x,), {"a": 2}, plan="random")
    assert report.results["0"].isnan().any()
    assert report.max_error < 1e-9
    clean = torch.ones(3)
    one, two = torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, torch.nan, -torch.inf])
    assert module.tensor_error(one, one, 1.0) == 0.0
    assert module.tensor_error(one, two, 1.0) == module.tensor_error(clean, one, 1.0) == float("inf")


def test_gradients_that_all_vanish_are_rounding() -> None:
    def dead(net: Any, h: Tensor) -> Tensor:
        return torch.relu(h - 100)

    class Shares(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.b(self.a(x)), -1).sum()  # always 4, whatever the parameters

    for model in (Net(lambda net, h: dead(net, h) * net.b.weight.detach()[0]), Shares(plain)):
        report = module.verify(model, (X,), {"a": 2}, plan="random")
        assert report.max_error < 1e-9
    assert module.tensor_error(torch.ones(3) * 1e-3, torch.zeros(3), 1.0) > 1.0


def test_complex_parameters() -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.w).abs().square().mean()

    report = module.verify(Turn(), (X,), {"a": 2}, plan="random")
    assert report.gradients["w"].dtype == report.reference_gradients["w"].dtype == torch.complex128
    assert (report.reference, report.max_error < 1e-12) == (EAGER, True)
    turned = report.reference_gradients["w"] * 1j
    assert module.tensor_error(turned, report.reference_gradients["w"], 1.0) > 0.5


def test_random_numbers_are_those_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(net: Any, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.5) + torch.randn_like(h)

    report = module.verify(Net(noisy), (X,), {"a": 2}, plan="random")
    assert (report.reference, report.max_error < 1e-9) == (EAGER, True)
    # A capture that draws something else cannot be told from a model that draws something else.
    traced_instead(monkeypatch, lambda net, h: noisy(net, h) + torch.rand_like(h))
    report = module.verify(Net(noisy), (X,), {"a": 2}, plan="random")
    assert report.reference == CAPTURED
    assert "random numbers" in report.note
    assert report.capture_error > 1e-2
    # One that draws nothing where the model does is wrong.
    monkeypatch.undo()
    traced_instead(monkeypatch, plain)
    report = module.verify(Net(noisy), (X,), {"a": 2}, plan="random")
    assert (report.reference, report.first_difference.stage) == (EAGER, "capture")


def test_a_model_that_looks_at_its_precision_is_compared_in_it() -> None:
    def coarse(net: Any, h: Tensor) -> Tensor:
        return h * 2 if h.dtype is torch.float32 else h

    def only(net: Any, h: Tensor) -> Tensor:
        if h.dtype is not torch.float32:
            raise TypeError("float32 only")
        return h

    for body, reason in ((coarse, "own precision"), (only, "float32 only")):
        report = module.verify(Net(body), (X,), {"a": 2}, plan="random")
        assert report.reference == CAPTURED
        assert reason in report.note
        assert report.capture_error < 1e-5
        assert report.max_error < 1e-9


def test_an_epsilon_of_the_dtype_and_hidden_casts_are_eager_s_own() -> None:
    scale = torch.full((8,), 3.0)

    def normed(net: Any, h: Tensor) -> Tensor:
        return nn.functional.rms_norm(1e-3 * h, (8,)).float() * scale + torch.ones(8, dtype=torch.float32)

    report = module.verify(Net(normed), (X,), {"a": 2}, plan="random")
    assert (report.reference, report.max_error < 1e-9) == (EAGER, True)


def test_batch_norm_over_two_calls() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    loss: Any = lambda output, batch: output.square().mean()  # noqa: E731
    report = module.verify(model, (X,), {"a": 2}, loss_fn=loss, plan="random")
    assert (report.reference, report.max_error < 1e-9) == (EAGER, True)
    assert report.errors["buffer 1.running_mean"] < 1e-12
    assert report.errors["buffer 1.num_batches_tracked"] == 0.0


class Sized(nn.Module):
    """A table that is made for the first batch, in place of a registered one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(2.0 * x.shape[0]).reshape(-1, 2)
        return (self.linear(x) * self.table.sum()).square().mean()


@pytest.mark.parametrize("plan", [None, "random"])
def test_a_buffer_that_gets_another_shape(plan: str | None) -> None:
    """The graph does not read the old one, so that it is no input; its new value is compared all the same."""
    model = Sized().double()
    report = module.verify(model, (torch.randn(4, 4, dtype=torch.float64),), {"a": 2}, plan=plan)
    assert "buffer table" in report.errors
    assert report.max_error < 1e-12, report.worst
    assert model.table.shape == (1, 3)
