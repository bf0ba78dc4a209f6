"""Code that looks at values of constants and buffers; what depends on a batch or a parameter is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.parallelize import parallelize

D = torch.float64
ROWS, WIDTH, CALLS = 8, 4, 4


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=D, generator=torch.Generator().manual_seed(step))


class Looks(nn.Module):
    """Counts its calls, begins with its first batch's mean, selects by masks, and asks constants."""

    counts: Tensor
    calls: Tensor
    begun: Tensor
    mean: Tensor
    chosen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
        self.counts = torch.zeros(WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=D))
        self.register_buffer("chosen", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, WIDTH, dtype=D)
        steps = times[1:] - times[:-1]
        assert (steps > 0).all()
        if not self.begun and self.mean.grad is None:
            self.mean.copy_(x.mean(0))
            self.begun.fill_(True)
        self.calls += 1
        h = self.linear(x - self.mean)
        self.counts = self.counts + torch.bincount(h.argmax(-1), minlength=WIDTH)
        y = h[:, self.chosen] * float(steps[0])
        return (
            y.square().mean() + h.masked_select(h.detach() > 9 if self.calls > 99 else torch.ones(h.shape) > 0).mean()
        )


def train(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for step in range(CALLS):
        if step == CALLS - 1:
            model.chosen.logical_not_()
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {**found, **copy.deepcopy(state), "counts": model.counts.clone()}


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
def test_answers_choose_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="autopar")
    model = parallelize(Looks(), None)
    require_equal(train(model), train(Looks()))
    # The first call, those after it, and those with another mask; what counts them needs none.
    assert len(model._autopar.cache) == 3
    assert "recapturing the model: values of buffers 'begun', 'calls', 'chosen' that it looks at changed" in caplog.text
    assert autopar.verify(Looks(), (batch(0),), {"a": 2}).max_error < 1e-12


class Written(Looks):
    """Looks at what the batch has been written into."""

    def forward(self, x: Tensor) -> Tensor:
        bounds = torch.zeros(2, dtype=D)
        bounds[0] = x.sum()
        return self.linear(x).mean() * (1 if bounds.sum() > 0 else 2)


class Averaged(Looks):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.view(2, 2)[0].mul_(0.9).add_(x.mean())
        return self.linear(x).mean() * (1 if self.mean[-1] == 0 and self.mean[0] > 0 else 2)


class Normalized(Looks):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(self.linear(x), self.mean, torch.ones_like(self.mean), training=True)
        return y.square().mean() * (1 if self.mean.sum() > 0 else 2)


class Drawn(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean() * (1 if torch.rand(1) > 0.5 else 2)


class Weighed(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean() * (1 if self.linear.weight.detach().sum() > 0 else 2)


@pytest.mark.parametrize("kind", [Written, Averaged, Normalized, Drawn, Weighed])
def test_values_of_a_batch_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"control flow that depends on data at .*test_known\.py"):
        parallelize(kind(), None)(batch(0))


class Experts(Looks):
    """Lists of one expert and another."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.linear(x).argmax(-1)
        return sum((self.linear(x[chosen == e]).mean() for e in chosen.unique()), torch.zeros(()))


class ExpertsOfSizes(Looks):
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.linear(x).argmax(-1)
        parts = x[chosen.argsort()].split(torch.bincount(chosen, minlength=WIDTH).tolist())
        return sum((i * self.linear(part).sum() for i, part in enumerate(parts)), x.new_zeros(()))


@pytest.mark.parametrize("kind", [Experts, ExpertsOfSizes])
def test_loops_over_experts(kind: type[nn.Module]) -> None:
    remedy = r"one graph must serve every batch; stack the experts' weights and multiply tokens, sorted by expert"
    with pytest.raises(CaptureError, match=rf"data at .*test_known\.py.*: {remedy}"):
        parallelize(kind(), None)(batch(0))


class Graded(Looks):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.grad = x.detach().mean(0)
        return self.linear(x).mean()


def test_gradients_that_are_set() -> None:
    with pytest.raises(CaptureError, match=r"sets a tensor's gradient \(\.grad\) at .*test_known\.py"):
        parallelize(Graded(), None)(batch(0))


class Inner(Looks):
    """Takes a step of an optimizer of its own, on a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.detach().clone().requires_grad_()
        weight.grad = torch.autograd.grad((x @ weight).square().mean(), [weight])[0]
        torch.optim.SGD([weight], lr=0.1).step()
        return (self.linear(x) @ weight.detach()).mean()


def test_gradients_of_tensors_of_the_call_are_set() -> None:
    plain = Inner()
    model = parallelize(copy.deepcopy(plain), None)
    for step in range(2):
        expected, found = plain(batch(step)), model(batch(step))
        expected.backward(), found.backward()
        torch.testing.assert_close(found, expected)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


class Counted(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean() * torch.bincount(x.argmax(-1), weights=x[:, 0].detach(), minlength=2).sum()


def test_counts_beyond_their_length() -> None:
    with pytest.raises(ValueError, match=re.escape("torch.bincount was given numbers outside of 0 to 1")):
        parallelize(Counted(), None)(batch(0))


class Placed(Looks):
    """Rows in the places of a mask, of which there may be too few, or another number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        mask = x.new_ones(len(x), dtype=torch.bool) & (x == x)[:, 0]
        if self.how == "check":
            torch._check_tensor_all(x.sum() < x.sum())
        if self.how == "scatter":
            h = h.masked_scatter(mask[:, None], h[1:].tanh())
        if self.how == "assign":
            h[mask] = torch.cat([h, h])
        return h.sum()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("check", "a check (torch._check_tensor_all) was given a condition that does not hold"),
        ("scatter", "torch.masked_scatter was given"),
        ("assign", "tensor[mask] = values was given"),
    ],
)
def test_what_is_checked_after_the_step(how: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parallelize(Placed(how), None)(batch(0))


class Listed(Looks):
    """Has constants in a list: one whose values it looks at, and one that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [torch.ones(WIDTH, dtype=D), torch.ones(WIDTH, dtype=D)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.items[1]).mean() * (1 if (self.items[0] * 2).sum() > 1 else 2)


@pytest.mark.parametrize("number", [0, 1])
def test_constants_that_get_other_memory(number: int) -> None:
    found = []
    for model in (Listed(), parallelize(Listed(), None)):
        losses = [float(model(batch(0)))]
        model.items[number].data = torch.zeros(WIDTH, dtype=D)
        found.append([*losses, float(model(batch(0)))])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
