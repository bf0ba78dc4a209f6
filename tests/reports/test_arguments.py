"""Arguments reach the model as Python binds them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.signature import binding
from autopar.parallelize import parallelize
from autopar.verify.verify import verify


class Mixed(nn.Module):
    """Every kind of parameter, told apart by factors."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Any, /, y: Any = None, *rest: Any, scale: Any = 2, **more: Any) -> torch.Tensor:
        out = self.f(x) * scale
        if y is not None:
            out = out + 3 * y
        for i, z in enumerate(rest):
            out = out + (5 + i) * z
        for name, z in more.items():
            out = out + len(name) * z
        return out.square().mean()


class Named(nn.Module):
    """Names only."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = self.f(x) - y
        return (out if mask is None else out * mask).square().mean()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, twice: bool = False, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) * (2 if twice else 1)

    return call


class Wrapped(Named):
    """A decorator takes an argument that the signature does not have."""

    @doubled
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.f(x) - y).square().mean()


def tensors(count: int) -> list[torch.Tensor]:
    torch.manual_seed(count)
    return list(torch.randn(count, 6, 4, dtype=torch.float64))


def pair(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = kind().double()
    return plain, parallelize(copy.deepcopy(plain), None)


def check(plain: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    for m in (plain, model):
        m.zero_grad()
    expected, found = plain(*args, **kwargs), model(*args, **kwargs)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


a, b, c, d = tensors(4)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((a, b), {"extra": c}),
        ((a, b, c, d), {"scale": d, "w": c}),
        ((a,), {"x": b}),
        ((a, None, c), {"scale": 3}),
        ((a,), {"zz": {"deep": [b]}["deep"][0], "y": c, "scale": 4}),
    ],
)
def test_every_kind_of_parameter(args: Any, kwargs: Any) -> None:
    check(*pair(Mixed), *args, **kwargs)


def test_one_call_in_two_forms_is_one_graph() -> None:
    plain, model = pair(Named)
    model.specialize((a, b))
    check(plain, model, a, b)
    check(plain, model, y=b, x=a)
    check(plain, model, a, y=b)
    assert len(model._autopar.cache) == 1
    check(plain, model, a, b, c)
    check(plain, model, mask=c, y=b, x=a)
    assert len(model._autopar.cache) == 2


def test_a_decorator_takes_an_argument_of_its_own() -> None:
    plain, model = pair(Wrapped)
    check(plain, model, a, b)
    check(plain, model, a, b, twice=True)


@pytest.mark.parametrize(
    ("kind", "args", "kwargs"),
    [
        (Named, (a,), {}),
        (Named, (a, b, c, d), {}),
        (Named, (a, b), {"x": a}),
        (Named, (a, b), {"masc": c}),
        (Mixed, (), {"x": a}),
        (nn.Linear, (), {}),
    ],
)
def test_wrong_arguments_give_the_error_of_python(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    plain = nn.Linear(4, 4) if kind is nn.Linear else kind()
    with pytest.raises(TypeError) as expected:
        plain(*args, **kwargs)
    with pytest.raises(TypeError) as found:
        parallelize(plain, None)(*args, **kwargs)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("batch", "seen"),
    [((a, b), (a, b)), ([a, b], [a, b]), ({"y": b, "x": a}, {"x": a, "y": b})],
)
def test_loss_fn_gets_the_batch_as_it_was_passed(batch: Any, seen: Any) -> None:
    given: list[Any] = []

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        given.append(batch)
        return output

    verify(Named().double(), batch, {}, loss_fn=loss_fn)
    assert type(given[0]) is type(seen)
    assert len(given[0]) == 2
    assert not isinstance(seen, dict) or set(given[0]) == set(seen)


def test_loss_fn_gets_all_names_of_a_mixed_call() -> None:
    given: list[Any] = []

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        given.append(batch)
        return output + batch["w"].mean() + batch["y"].mean()

    plain = Mixed().double()
    model = parallelize(copy.deepcopy(plain), None, loss_fn=loss_fn)
    torch.testing.assert_close(model(a, b, w=c), plain(a, b, w=c) + c.mean() + b.mean())
    assert list(given[0]) == ["x", "y", "w"]


def test_a_batch_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"the batch is a Tensor; pass a tuple"):
        parallelize(Named(), None, a)  # type: ignore[arg-type]


def test_a_hook_tells_forms_apart() -> None:
    plain, model = pair(Named)
    plain.register_forward_pre_hook(lambda module, args: None)
    assert repr(binding.flatten(plain, (a, b))[1]) != repr(binding.flatten(plain, {"x": a, "y": b})[1])
    bare = model._autopar.original
    assert repr(binding.flatten(bare, (a, b))[1]) == repr(binding.flatten(bare, {"x": a, "y": b})[1])


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (torch.view_as_real(x.resolve_conj() @ self.weight).sum(-1) * shift).square().sum()


def test_lazy_conjugates_and_negatives() -> None:
    """Their memory holds other values, which a hash of the batch and `view_as_real` cannot read."""
    torch.manual_seed(0)
    plain = Spectrum()
    z = torch.randn(8, 4, dtype=torch.complex128, requires_grad=True)
    batch = (z.conj(), z.detach().conj().imag)
    expected, found = (
        torch.autograd.grad(m(*batch), [m.weight, z]) for m in (plain, parallelize(copy.deepcopy(plain), None))
    )
    torch.testing.assert_close(found, expected)
    assert verify(plain, tuple(t.detach() for t in batch), {"a": 2}, plan="random").max_error < 1e-12


class Marked(nn.Module):
    """Reads what a script has set on the tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() * getattr(x, "gain", 1.0) * (2 if hasattr(x, "twice") else 1)


@pytest.mark.slow
def test_attributes_of_tensors() -> None:
    plain, parallel = Marked(), parallelize(Marked(), None)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    marks: list[dict[str, Any]] = [{}, {"gain": 3.0}, {"gain": 4.0}, {"twice": True}, {"unread": {}}, {}]
    for mark in marks:
        given = x.clone()
        vars(given).update(mark)
        assert parallel(given).item() == pytest.approx(plain(given).item(), rel=1e-12)
        assert verify(Marked(), (given,), {"a": 2}, plan="random").max_error < 1e-12
    given.gain = torch.ones(2)  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="'gain' that is set on a tensor of its batch, a Tensor"):
        parallel(given)
