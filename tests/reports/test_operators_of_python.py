"""Operators that a trace refuses or loses: right, or an error with the line and what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar import parallelize
from autopar.errors import CaptureError

D = torch.float64


def positive(h: torch.Tensor) -> torch.Tensor:
    return h.T @ h + torch.eye(4, dtype=D)


def penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
    own = x.detach().requires_grad_()
    y = m.f(own).tanh()
    (slope,) = torch.autograd.grad(y.sum(), own, create_graph=True)
    return slope.square().sum() + y.mean()


def branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The branch that is not taken has an infinite slope."""
    h = m.f(x)
    return torch.cond(x.sum() > -1e9, lambda h: h.sin(), lambda h: (h * 0).sqrt(), (h,)).square().sum()


def along(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a function that writes by weights within torch, and whose argument is printed."""

    def function(y: torch.Tensor) -> torch.Tensor:
        assert "tensor(" in f"{y}" and "tensor(" in str(y)
        return m.f(y).quantile(0.3, dim=0)

    derivative: torch.Tensor = torch.func.jvp(function, (x,), (x.cos(),))[1]
    return derivative.square().sum()


def quoted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.table['it\'s "a"\nb'](m.f(x)).square().sum()


FUNCTIONS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], dict[str, nn.Module]]] = {
    "inv": (lambda m, x: torch.linalg.inv(positive(m.f(x))).square().sum(), {}),
    "solve": (lambda m, x: torch.linalg.solve(positive(m.f(x)), m.f(x).T).square().sum(), {}),
    "cholesky": (lambda m, x: torch.linalg.cholesky(positive(m.f(x))).square().sum(), {}),
    "eigh": (lambda m, x: torch.linalg.eigvalsh(positive(m.f(x))).square().sum(), {}),
    "cond": (branches, {}),
    "gradient penalty": (penalty, {}),
    "func.grad": (lambda m, x: torch.func.grad(lambda y: m.f(y).tanh().sum())(x).square().sum(), {}),
    "vmap": (lambda m, x: torch.func.vmap(lambda y: m.f(y).tanh())(x).square().sum(), {}),
    "hessians of samples, and a parameter without a gradient": (
        lambda m, x: torch.func.vmap(torch.func.hessian(lambda y: m.f(y).tanh().sum()))(x).square().sum(),
        {"unused": nn.Linear(1, 1)},
    ),
    "jvp": (along, {}),
    "functional_call": (
        lambda m, x: torch.func.functional_call(m.f, {"weight": m.f.weight * 2}, (x,)).square().sum(),
        {},
    ),
    "max_norm": (
        lambda m, x: m.f(m.e(torch.arange(6) % 5)).square().sum(),
        {"e": nn.Embedding(5, 4, max_norm=0.5, dtype=D)},
    ),
    "normal": (
        lambda m, x: torch.distributions.Normal(m.f(x), functional.softplus(m.f(x)) + 0.1).log_prob(x).sum(),
        {},
    ),
    "categorical": (lambda m, x: torch.distributions.Categorical(logits=m.f(x)).entropy().sum(), {}),
    "lstm": (lambda m, x: m.rnn(m.f(x)[None])[0].square().sum(), {"rnn": nn.LSTM(4, 4, dtype=D)}),
    "quotes": (quoted, {"table": nn.ModuleDict({'it\'s "a"\nb': nn.Linear(4, 4, dtype=D)})}),
    "a parameter returned": (lambda m, x: (m.f(x).square().sum(), m.f.weight), {}),  # type: ignore[dict-item]
    "clipped weights": (lambda m, x: (m.f.weight.data.clamp_(-0.2, 0.2), m.f(x).square().sum())[1], {}),
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f = nn.Linear(4, 4, dtype=D)
        self.function, modules = FUNCTIONS[name]
        for key, module in modules.items():
            self.add_module(key, copy.deepcopy(module))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_eager(name: str) -> None:
    plain = Model(name)
    model = parallelize(copy.deepcopy(plain), None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(step))
        losses = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            output = m(x)
            loss = output[0] if isinstance(output, tuple) else output
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
            torch.testing.assert_close(a, b)


def test_a_singular_matrix_is_torchs_error() -> None:
    class Singular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4, dtype=D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(self.f(x) * 0).sum()

    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        parallelize(Singular(), None)(torch.ones(4, 4, dtype=D))


def model_of(function: Callable[[Any, torch.Tensor], torch.Tensor], **modules: nn.Module) -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4, dtype=D)
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self, x)

    return Own()


def test_sparse_gradients_are_refused() -> None:
    model = model_of(lambda m, x: m.e(torch.arange(3)).sum(), e=nn.Embedding(5, 4, sparse=True))
    with pytest.raises(CaptureError, match=r"'e\.weight' has layout torch\.sparse_coo.*leave sparse=True out"):
        parallelize(model, None)(torch.ones(2, 4, dtype=D))


def test_scripted_modules_are_named() -> None:
    with pytest.raises(CaptureError, match=r"module 's' is scripted .*use the module that was scripted"):
        parallelize(model_of(lambda m, x: m.s(m.f(x)).sum(), s=torch.jit.script(nn.ReLU())), None)


def test_shapes_that_depend_on_data() -> None:
    model = model_of(lambda m, x: m.f(x)[x > 0].unique().sum())
    with pytest.raises(CaptureError, match=r"depends on data at .*test_operators_of_python\.py:\d+.*torch\.where"):
        parallelize(model, None)(torch.ones(2, 4, dtype=D))


@torch.library.custom_op("autopar_tests::doubled_", mutates_args=("x",))
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("autopar_tests::nested", mutates_args=())
def nested(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x * 2, [x * 3]


@nested.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x)]


def linearized(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.linearize(torch.sin, m.f(x))[1](x).sum()  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "writes to its argument": (
        lambda m, x: m.f(x).add((h := x.clone(), doubled_(h))[0]).sum(),
        r"autopar_tests.doubled_.* writes to its argument 'x' .*return a new tensor.*x\.copy_\(doubled_",
    ),
    "returns a list": (
        lambda m, x: m.f(x).add(nested(x)[1][0]).sum(),
        r"autopar_tests\.nested.*test_operators_of_python\.py:\d+\) returns a list .*one by one",
    ),
    "linearize": (linearized, r"torch\.func\.linearize\) at .*python\.py:\d+: .*use torch\.func\.jvp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_are_refused(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        parallelize(model_of(function), None)(torch.ones(2, 4, dtype=D))
