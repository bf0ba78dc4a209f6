"""``parallelize(..., check=True)``: a plan that does not compute what the model does stops before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import compiler
from autopar.errors import VerifyError
from autopar.module.call import check_first
from autopar.search.options import Search

X = torch.linspace(-1, 1, 64).view(8, 8).sin()


class Halved(torch.autograd.Function):
    """The same forward, half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Net(nn.Module):
    """Two layers; what is between them is chosen by whoever makes the model."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x))).square().mean()


def halved(h: Tensor) -> Tensor:
    return torch.relu(Halved.apply(h))  # type: ignore[no-untyped-call]


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures lose what is between the layers: a plain relu is traced."""
    original = compiler.capture
    monkeypatch.setattr(compiler, "capture", lambda model, batch, **options: original(Net(), batch, **options))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "autopar")
    return caplog


def test_a_right_plan_runs_and_the_log_says_what_was_compared(log: pytest.LogCaptureFixture) -> None:
    model = autopar.parallelize(Net(), None, check=True)
    reference = Net()
    loss = model(X)
    loss.backward()
    reference(X).backward()
    assert log.text.count("computes what the model does") == 1
    assert "against the eager model" in log.text
    for name, p in reference.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, p.grad)
    model(X)
    model(X[:4])
    assert log.text.count("computes what the model does") == 1
    with torch.no_grad():
        model.eval()(X)  # another graph
    assert log.text.count("computes what the model does") == 2


@pytest.mark.usefixtures("lossy")
def test_a_wrong_one_raises_before_the_first_step() -> None:
    unchecked = autopar.parallelize(Net(halved), None)
    unchecked(X).backward()  # silent
    model = autopar.parallelize(Net(halved), None, check=True)
    with pytest.raises(VerifyError, match=r"the gradient of 'a\..* module 'a'") as caught:
        model(X)
    assert "off by 1" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("lossy")
def test_an_example_with_values_is_checked_at_once_and_one_without_by_the_first_call() -> None:
    with pytest.raises(VerifyError, match=r"a\.weight"):
        autopar.parallelize(Net(halved), None, (X,), check=True)
    model = autopar.parallelize(Net(halved), None, (X.to("meta"),), check=True)
    with pytest.raises(VerifyError, match=r"a\.weight"):
        model(X)


@pytest.mark.slow
def test_where_memory_is_short_rows_are_cut_or_nothing_is_checked(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(256, 8)
    rows_that_fit = check_first.rows_that_fit
    found: list[tuple[int, float, float]] = []
    monkeypatch.setattr(check_first, "rows_that_fit", lambda *a: found.append(rows_that_fit(*a)) or found[-1])
    autopar.parallelize(Net(), None, (rows,), check=True)
    (fitting, needed, _), *_ = found
    assert fitting == 256
    for share, expected in ((0.5, 128), (0.25, 64)):
        monkeypatch.setattr(check_first, "free_bytes", lambda _, s=share: s * needed / check_first.SHARE)
        autopar.parallelize(Net(), None, (rows,), check=True)
        fitting, *_ = found[-1]
        assert 1 < fitting <= expected
        assert f"checked on {fitting} rows of 256" in log.text
    assert log.text.count("computes what the model does") == 3
    monkeypatch.setattr(check_first, "free_bytes", lambda _: 1e3)
    autopar.parallelize(Net(), None, (rows,), check=True)
    assert "the plan is not checked" in log.text
    assert log.text.count("computes what the model does") == 3


def test_microbatches_and_precision_are_checked_as_they_run(log: pytest.LogCaptureFixture) -> None:
    search = Search(pins={"microbatches": 2})
    model = autopar.parallelize(Net(), None, (X,), check=True, precision="bf16", search=search)
    assert model.plan.microbatches == 2
    assert log.text.count("computes what the model does") == 1


def test_what_cannot_be_checked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.verify import require_equal

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(require_equal, "verify", fails)
    with pytest.raises(VerifyError, match="cannot be checked: in float64 RuntimeError: no kernel"):
        autopar.parallelize(Net(), None, (X,), check=True)
