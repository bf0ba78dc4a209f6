"""Floats that change from call to call: one graph where that is the same, and eager's result always."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from autopar.ir.signature import floats
from autopar.parallelize import parallelize
from autopar.search.options import Search
from autopar.verify.verify import verify

Use = Callable[[torch.Tensor, Any], torch.Tensor]


class Scaled(nn.Module):
    """Uses a float as a test says."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
        return self.use(self.f(x), alpha).float().square().mean()


def branch(h: torch.Tensor, alpha: Any) -> torch.Tensor:
    return h * alpha if alpha > 0.5 else h - 2


class Reverse(torch.autograd.Function):
    """A function that hands the float on to its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: Any) -> torch.Tensor:
        ctx.alpha = alpha
        return x * (1 + alpha)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * (1 + ctx.alpha), None


VALUES = (0.25, 0.7, 0.9, 0.3)

ONE_GRAPH: dict[str, Use] = {
    "mul": lambda h, a: h * a,
    "reversed": lambda h, a: (1 - a) * h + a / 2 + (a - 1) - (3 - h * a),
    "div": lambda h, a: h / a + 2 / (h.abs() + a),
    "functions": lambda h, a: torch.add(h, torch.mul(h, a)).sub(a).div(1 + a),
    "in place": lambda h, a: (h + 0).mul_(a).add_(1 - a),
    "lerp": lambda h, a: torch.lerp(h, h.sin(), a),
    "where": lambda h, a: torch.where(h > a, h, a) + torch.where(h > 0, a, -h),
    "clamp": lambda h, a: h.clamp(-a, a) + h.clamp(min=a) + torch.clamp(h, max=a),
    "masked": lambda h, a: h.masked_fill(h > a, a),
    "pow": lambda h, a: (h.abs() + 1) ** a + h * a**2,
    "scalar": lambda h, a: h + a * h.mean() + h.sum() / a,
    "integers": lambda h, a: h + torch.arange(4) * a + torch.arange(4).sum() * a,
    "full": lambda h, a: h + torch.full_like(h, a) + torch.full((4,), a, dtype=h.dtype),
    "softmax": lambda h, a: F.softmax(h / a, -1),
    "gumbel": lambda h, a: F.softmax(h, -1) * F.gumbel_softmax(h, tau=a).detach().sum(-1, keepdim=True),
    "abs": lambda h, a: h * abs(-a) + (+a) * h,
    "function": lambda h, a: Reverse.apply(h, a),
    "numbers": lambda h, a: h * (a if isinstance(a, float) else 7),
}
GUARDED: dict[str, tuple[Use, int]] = {
    "branch": (branch, 2),
    "bool": (lambda h, a: h * a if a else h, 1),
    "exp": (lambda h, a: h * math.exp(a), 4),
    "float": (lambda h, a: h * float(a), 4),
    "round": (lambda h, a: h * round(a), 2),
    "int": (lambda h, a: h * int(a * 10 // 5), 2),
    "power": (lambda h, a: h * a**0.5 + h * (1 + a % 0.2), 4),
    "root": (lambda h, a: h if a**0.5 > 0.6 else -h, 2),
    "max": (lambda h, a: h * max(a, 0.4), 2),
    "dropout": (lambda h, a: h + F.dropout(h, p=a).detach() * 0, 4),
    "tensor": (lambda h, a: h * torch.tensor(a, dtype=torch.float64), 4),
    "leaky": (lambda h, a: F.leaky_relu(h, a), 4),
    "shape": (lambda h, a: h[: int(a * 4) + 1] * 2, 3),
    "text": (lambda h, a: h * len(f"{a:.2f}") * float(str(a)), 4),
    "key": (lambda h, a: h * {0.25: 1, 0.7: 2, 0.9: 3, 0.3: 4}[a], 4),
}

x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def made(use: Use, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    plain = Scaled(use).to(dtype)
    return plain, parallelize(copy.deepcopy(plain), None)


def check(plain: nn.Module, model: Any, *args: Any, **tolerance: float) -> None:
    found = []
    for m in (plain, model):
        m.zero_grad()
        torch.manual_seed(3)
        loss = m(*args)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in m.parameters())])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, equal_nan=True, **tolerance)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph_serves_every_value(name: str) -> None:
    plain, model = made(ONE_GRAPH[name])
    for alpha in VALUES:
        check(plain, model, x, alpha)
    assert len(model._autopar.cache) == 1


@pytest.mark.some(2)
@pytest.mark.parametrize("name", GUARDED)
def test_what_asks_for_the_value_gets_it(name: str) -> None:
    use, graphs = GUARDED[name]
    plain, model = made(use)
    for alpha in (*VALUES, *VALUES):
        check(plain, model, x, alpha)
    assert len(model._autopar.cache) == graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["mul", "reversed", "div", "functions", "where", "clamp", "masked", "scalar", "full"])
def test_torch_computes_with_a_tensor_as_with_a_float(name: str, dtype: torch.dtype) -> None:
    """Bit by bit, without a graph: dtypes and rounding of scalars, vectors and integers."""
    h = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    for alpha in (0.1, 1 / 3, 2.7, -1.3):
        recorder = floats.FloatRecorder([alpha])
        (stand_in,) = recorder.stand_ins([torch.tensor(alpha, dtype=torch.float64)])
        use = ONE_GRAPH[name]
        expected, found = use(h, alpha), use(h, stand_in)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_bfloat16_stays() -> None:
    plain, model = made(lambda h, a: h * a + h.mean() * a, torch.bfloat16)
    for alpha in VALUES:
        check(plain, model, x.bfloat16(), alpha, rtol=2e-2, atol=1e-3)
    assert len(model._autopar.cache) == 1


def test_zero_infinity_and_nan() -> None:
    plain, model = made(lambda h, a: h * a + a)
    for alpha in (0.0, -0.0, math.inf):
        check(plain, model, x, alpha)
    assert len(model._autopar.cache) == 1
    assert model(x, math.nan).isnan()
    plain, model = made(lambda h, a: h * (1 / a))
    check(plain, model, x, 0.5)
    for m in (plain, model):
        with pytest.raises(Exception, match="division by zero"):
            m(x, 0.0)


def test_floats_of_a_nested_batch_and_of_the_output() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, weights: dict[str, Any]) -> dict[str, Any]:
            h = self.f(x)
            loss = h.square().mean() * weights["a"] + h.abs().mean() * weights["b"][0]
            return {"loss": loss, "a": weights["a"], "rest": 1 - weights["a"], "n": 3}

    plain = Weighted().double()
    model = parallelize(copy.deepcopy(plain), None)
    for a in VALUES:
        expected, found = plain(x, {"a": a, "b": [2 * a, 1]}), model(x, {"a": a, "b": [2 * a, 1]})
        torch.testing.assert_close(found["loss"], expected["loss"])
        assert [found[k] for k in ("a", "rest", "n")] == [expected[k] for k in ("a", "rest", "n")]
    assert len(model._autopar.cache) == 1


def test_emulated() -> None:
    use: Use = lambda h, a: torch.where(h > a, h * a, h / (1 + a)) + h.mean() * a  # noqa: E731
    report = verify(Scaled(use).double(), {"x": x, "alpha": 0.3}, {"a": 2}, plan="random")
    assert report.max_error < 1e-9
    assert report.capture_error < 1e-9
    pins = {"microbatches": 3}
    loss = verify(Scaled(ONE_GRAPH["mul"]).double(), (x, 0.3), {"a": 1}, pins=pins)
    assert loss.max_error < 1e-9
    assert loss.plan.microbatches == 3
    assert Search(pins=pins).microbatches == 3
