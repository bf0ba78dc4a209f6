"""Results that are copies of state, and those that are in its memory: values, and what a script writes to them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import parallelize
from autopar.errors import AutoparError
from autopar.search.options import Search


class Copies(nn.Module):
    """What it returns and saves are views of copies; graphs have no copies, so that they are views of the buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.register_buffer("rate", torch.rand(4) + 1)
        self.register_buffer("table", torch.rand(4, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x) * self.rate.clone().view(1, 4) + x @ self.table.clone().t()
        found = (self.rate.clone().view(2, 2), self.table.t().contiguous(), self.table[1:].clone(), self.count.clone())
        self.last = self.rate.detach().clone().view(2, 2)
        self.rate.mul_(2)
        self.table.add_(1)
        self.count += 1
        return (h.square().sum(), *found)


def outcome(model: Any, plain: Copies) -> list[Tensor]:
    """Of two steps: losses, other results as they are after both, gradients, and buffers."""
    found: list[Tensor] = []
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
        loss, *others = model(x)
        loss.backward()
        found += [loss.detach(), *others]
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    assert len(gradients) == 2
    return [getattr(t, "full_tensor", lambda t=t: t)() for t in (*found, *gradients, *plain.buffers())]


@pytest.mark.parametrize("pins", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
def test_copies_have_the_values_before(pins: dict[str, Any]) -> None:
    plain = Copies().double()
    given = copy.deepcopy(plain)
    model = parallelize(given, None, (torch.randn(4, 4).double(),), search=Search(pins=pins))
    for a, b in zip(outcome(model, given), outcome(plain, plain), strict=True):
        torch.testing.assert_close(a, b)


class Results(nn.Module):
    """Some results are in the memory of others, and others only have the same values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        zeros = (torch.zeros(2, dtype=x.dtype), torch.zeros(2, dtype=x.dtype))
        return (h.square().sum(), h, h.clone(), h.view(-1), h[1:].detach().clone(), *zeros)


def written(model: Any) -> list[Tensor]:
    """Results after the step, the second, third and last but one of them written by the script."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    loss, *others = model(x)
    loss.backward()
    with torch.no_grad():
        for number in (0, 1, 4):
            others[number].add_(number + 1)
    return [getattr(t, "full_tensor", lambda t=t: t)().detach() for t in others]


def test_results_are_apart_where_the_model_has_them_apart() -> None:
    plain = Results().double()
    model = parallelize(copy.deepcopy(plain), None, (torch.randn(4, 4).double(),))
    for a, b in zip(written(model), written(plain), strict=True):
        torch.testing.assert_close(a, b)


class Shared(nn.Module):
    """Results, and an attribute, that are memory of what goes in, of what the call writes or of one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("rate", torch.rand(4))
        self.register_buffer("count", torch.zeros(2, 2))
        self.register_buffer("total", torch.zeros(2))
        self.last = torch.zeros(1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x) * self.scale
        self.count.add_(1)
        self.total = self.total + 1
        shown = h + 1
        self.last = shown.detach()[1:]
        state = (self.scale, self.up.weight.t(), self.rate, self.count, self.count.view(-1), self.total)
        return (h.square().sum(), y, y[1:], *state, shown, shown.view(-1), h.sum(0).view(2, 2))


def after_a_write(model: Any, plain: Shared, number: int) -> list[Tensor] | str:
    """All that there is after a script has written to one result, and after the next call; or autograd's error."""
    x, y = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, *others = model(x, y)
    with torch.no_grad():
        [*others, x, y, plain.scale, plain.count, plain.last][number].mul_(2)
    found = [t.detach().clone() for t in (*others, x, y, plain.last, *plain.state_dict().values())]
    try:
        loss.backward()
    except RuntimeError as e:
        return str(e)
    found += [p.grad for p in plain.parameters() if p.grad is not None]
    return [*found, *(t.detach() for t in (*model(x, y), *others, *plain.state_dict().values()))]


@pytest.mark.some(2)
@pytest.mark.parametrize("number", range(16))
def test_results_are_memory_of_what_they_are_in_eager_mode(number: int) -> None:
    plain = Shared().double()
    given = copy.deepcopy(plain)
    found, expected = after_a_write(parallelize(given, None), given, number), after_a_write(plain, plain, number)
    assert isinstance(found, str) == isinstance(expected, str)
    if not isinstance(found, str):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


class Rows(nn.Module):
    """Results that are memory of the batch and of one another, and one that is of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        shown = h + 1
        return (h.square().mean(), x, shown, shown.unsqueeze(1), h * 2)


@pytest.mark.parametrize(
    ("number", "said"),
    [(1, "1', which in eager mode is memory of batch tensor 0"), (2, "2'.* memory of output '3'"), (4, "")],
)
def test_results_of_microbatches_that_are_memory_of_others(number: int, said: str) -> None:
    """They are tensors of their own: a write to one is an error, in the backward pass and in the next call."""
    x = torch.rand(4, 4, dtype=torch.float64)
    model = parallelize(Rows().double(), None, (x,), search=Search(pins={"microbatches": 2}))
    for trained in (True, False):
        results = model(x)
        with torch.no_grad():
            results[number].mul_(2)
        with pytest.raises(AutoparError, match=f"written to output '{said}") if said else contextlib.nullcontext():
            results[0].backward() if trained else model(x)
        with contextlib.suppress(AutoparError):  # once more
            model(x)
