"""Random numbers are drawn in the order of storage: strides decide which element gets which, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.crossed import crossed

Draw = Callable[[Tensor], Tensor]

IN_PLACE: dict[str, Draw] = {
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.3),
    "bernoulli_ of chances": lambda h: torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "bernoulli_ of integers": lambda h: torch.empty_like(h, dtype=torch.int64).bernoulli_(h.detach().sigmoid()) * 1.0,
    "bernoulli_ in a slice": lambda h: torch.zeros_like(h)[:, 1:].bernoulli_(0.3),
    "uniform_ of a slice": lambda h: torch.zeros_like(h)[:, 1:].uniform_(),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "normal_ in a slice": lambda h: torch.zeros_like(h)[:, 1:].normal_(),
    "normal_ in steps": lambda h: torch.zeros_like(h)[:, ::2].normal_(0.5, 2.0),
    "random_": lambda h: torch.empty_like(h).random_(0, 9),
    "dropout": lambda h: functional.dropout(h * 1.5, 0.5, inplace=True),
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.5, training=True),
    "feature alpha dropout": lambda h: functional.feature_alpha_dropout(h, 0.5, training=True),
}
FUNCTIONS: dict[str, Draw] = {
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()),
    "bernoulli of one chance": lambda h: torch.bernoulli(h.detach(), 0.3),
    "method": lambda h: h.detach().bernoulli(0.4),
    "bernoulli out=": lambda h: torch.bernoulli(h.detach().sigmoid(), out=torch.empty_like(h)),
    "normal out=": lambda h: torch.normal(h.detach(), 1.0, out=torch.empty_like(h)),
    "normal of deviations": lambda h: torch.rand_like(torch.normal(1.0, h.detach().abs())),
    "numbers like dropped": lambda h: torch.rand_like(functional.alpha_dropout(h, 0.5, training=True)),
    "numbers like coins": lambda h: torch.rand_like(torch.bernoulli(h.detach(), 0.4)),
    "numbers like a leaky relu": lambda h: torch.rand_like(functional.rrelu(h, training=True)),
    "numbers like counts": lambda h: torch.rand_like(torch.poisson(h.detach().abs())),
    "of no generator": lambda h: h * torch.randn(h.shape, generator=None) + torch.randint(9, h.shape, generator=None),
    "Gumbel": functional.gumbel_softmax,
    "channels of samples": lambda h: torch.vmap(
        lambda row: functional.dropout1d(row.T[None], 0.5)[0].T, randomness="different"
    )(h),
}
VIEWS: dict[str, Draw] = {
    "row-major": lambda h: h,
    "transposed": lambda h: h.transpose(1, 2),
    "permuted": lambda h: h.permute(2, 0, 1),
    "stepped": lambda h: h[:, ::2],
}


class Drawing(nn.Module):
    """Every draw on one view of an activation."""

    def __init__(self, draws: dict[str, Draw], view: Draw) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.draws, self.view = draws, view

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One tensor a draw."""
        h = self.view(self.linear(x))
        return tuple(draw(h) + 0 * h.mean() for draw in self.draws.values())


@pytest.mark.some(2)
@pytest.mark.parametrize(("view", "draws"), crossed(VIEWS, [IN_PLACE, FUNCTIONS]))
def test_draws_of_views_are_those_of_eager(draws: dict[str, Draw], view: str) -> None:
    torch.manual_seed(0)
    model, x = Drawing(draws, VIEWS[view]), torch.randn(4, 6, 8, dtype=torch.float64)
    torch.manual_seed(1)
    expected, after = model(x), torch.rand(3)
    parallel = autopar.parallelize(model, None)
    torch.manual_seed(1)
    found = parallel(x)
    for name, a, b in zip(draws, expected, found, strict=True):
        torch.testing.assert_close(b, a.detach() if not b.requires_grad else a, rtol=1e-10, atol=1e-10, msg=name)
    assert torch.equal(torch.rand(3), after), "the generator is elsewhere than after eager's step"


class Refused(nn.Module):
    """Draws what cannot be drawn as eager does."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        """The sum of an activation and numbers."""
        return self.linear(x) + self.draw(x)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.empty_like(x, dtype=torch.int64).random_(3, None), "give `to`"),
        (lambda x: torch.normal(x, 1.0, out=torch.empty(3)), r"torch.normal\(out=\) resizes .* leave out= out"),
    ],
    ids=["no upper end", "resized"],
)
def test_draws_that_are_refused(draw: Draw, message: str) -> None:
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.parallelize(Refused(draw), None)(torch.ones(4))


class Unused(nn.Module):
    """Draws that nothing uses, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the first and of the last draw."""
        h = self.linear(x)
        torch.rand(3)
        first = h + torch.rand_like(torch.poisson(h.detach().abs()))
        torch.randn(2)
        return first, torch.rand_like(h)


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "without gradients"])
def test_draws_that_nothing_uses_keep_their_place(gradients: bool) -> None:
    model, x = Unused(), torch.ones(3, 4)
    with torch.set_grad_enabled(gradients):
        torch.manual_seed(1)
        expected = [*model(x), torch.rand(3)]
        parallel = autopar.parallelize(model, None)
        torch.manual_seed(1)
        found = [*parallel(x), torch.rand(3)]
    torch.testing.assert_close(found, expected)
