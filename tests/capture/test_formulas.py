"""Functions of torch that are traced by their formulas, and what graphs of single calls of torch have shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

TOLERANCE = 1e-9

ROWS, CLASSES = 8, 4


class Call(nn.Module):
    """A function of a batch [row, class] and of a linear layer of it."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(CLASSES, CLASSES, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), x, self.weight)


def _behind_the_end(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    named = torch.tensor([[2, -1, 0, 0]] * (ROWS - 1) + [[1, 3, 0, 2]])
    return functional.multilabel_margin_loss(y, named, reduction="none")


def _windows_written(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    z = y[:, :3].clone()
    z.unfold(1, 2, 2).mul_(2)
    z.unfold(1, 1, 2).add_(1)
    z.unfold(1, 2, 3).sub_(1)
    z.T.unfold(1, 2, 4).mul_(x[:3, :2].reshape(3, 2, 1).mT)
    z.T.fill_diagonal_(3.0)
    return z


def _bent(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradients of gradients of determinants, for which torch traces other determinants, of column-major matrices."""
    m = weight + 3
    (slope,) = torch.autograd.grad(torch.linalg.det(m) + torch.slogdet(m)[1], m, create_graph=True)
    return y @ slope


def _parts_written(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    z = x.clone()
    z.unsafe_chunk(2, 1)[1].mul_(2)
    (nothing,) = y[:, :0].split(3, 1)
    return y * z + nothing.sum() + (x.abs() + 1).polygamma_(2)


def _bag(y: Tensor, x: Tensor, weight: Tensor, mode: str, padding: int | None = None, weighs: bool = False) -> Tensor:
    """Sums or means of the rows that numbers of the batch name."""
    rows = (x.abs() * 3).long() % CLASSES
    return y + functional.embedding_bag(
        rows, weight, mode=mode, padding_idx=padding, per_sample_weights=y.softmax(-1) if weighs else None
    )


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "labels behind the first -1": _behind_the_end,
    "covariance": lambda y, x, weight: torch.cov(y.T),
    "weighted covariance": lambda y, x, weight: y.T.cov(aweights=x[:, 0].abs(), fweights=torch.arange(1, ROWS + 1)),
    "correlation": lambda y, x, weight: torch.corrcoef(y.T),
    "variances": lambda y, x, weight: functional.gaussian_nll_loss(y, x, x.square(), full=True, reduction="none"),
    "variance of a row": lambda y, x, weight: functional.gaussian_nll_loss(y, x, y[:, 0].square()),
    "one matrix, many right sides": lambda y, x, weight: torch.linalg.solve(weight + 3, y.unsqueeze(-1)),
    "determinant": lambda y, x, weight: y * torch.linalg.det(weight + 3) + torch.slogdet(weight.mT).logabsdet,
    "gradients of gradients of determinants": _bent,
    "parts of nothing, and parts that are written to": _parts_written,
    "determinants of other strides": lambda y, x, weight: y.T.reshape(2, 4, 4).mT.det(),
    "windows and diagonals of views, written to": _windows_written,
    "eigenvalues, whose gradient checks a matrix": lambda y, x, weight: y @ torch.linalg.eig(weight)[0].abs(),
    "mean of a scalar's dim": lambda y, x, weight: y * functional.cosine_similarity(weight[0, 0], weight[1, 0], dim=0),
    "dims of a scalar": lambda y, x, weight: y * weight[0, 0].transpose(0, -1).flip(0).mean(0, keepdim=True),
    "largest of a scalar": lambda y, x, weight: y * weight[0, 0].topk(1).values,
    "scalars at an index": lambda y, x, weight: y * weight[0, 0].gather(0, torch.zeros(1, dtype=torch.int64)),
    "bags": lambda y, x, weight: _bag(y, x, weight, "mean") * _bag(y, x, weight, "sum", weighs=True),
    "bags, padded": lambda y, x, weight: _bag(y, x, weight, "mean", -1) * _bag(y, x, weight, "sum", 1, weighs=True),
    # A gradient that is of parameters alone, and gathered.
    "linear in parameters": lambda y, x, weight: y.sum() * 0 + (weight * torch.arange(CLASSES)).sum().reshape(1),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CALLS)
def test_equal_to_eager(name: str) -> None:
    batch = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(output: Tensor, batch: object) -> Tensor:
        return (output * torch.arange(1, output.numel() + 1).view(output.shape)).sum()

    report = autopar.verify(Call(CALLS[name]), (batch,), {"a": 2, "b": 2}, plan="random", loss_fn=loss)
    assert report.max_error < TOLERANCE


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["bags", "bags, padded"])
def test_bags_of_one_size_are_split_along_samples(name: str) -> None:
    """In microbatches, too."""
    batch = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(output: Tensor, batch: object) -> Tensor:
        return output.square().mean()

    search = autopar.Search(recipe="ddp", pins={"microbatches": 2})
    model = Call(CALLS[name])
    found = autopar.plan(model, (batch,), cluster="h100", axes={"a": 2}, loss_fn=loss, search=search)
    assert "all_gather" not in found.predicted.collectives["a"]
    assert autopar.verify(model, (batch,), {"a": 2}, plan=found, loss_fn=loss).max_error < TOLERANCE


@pytest.mark.slow
def test_matrices_of_distributions_are_checked_without_a_look_at_them() -> None:
    def evidence(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        covariance = y @ y.T + torch.eye(ROWS, dtype=y.dtype)
        # Another test, or a library, may have turned the checks off.
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), covariance, validate_args=True)
        return -normal.log_prob(x[:, 0])

    batch = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = capture(Call(evidence), (batch,))
    assert len(program.state.checks) == 4, "the decomposition, the mean, the covariance, and what is looked for"
    report = autopar.verify(Call(evidence), (batch,), {"a": 2, "b": 2}, plan="random", loss_fn=lambda o, _: o)
    assert report.max_error < TOLERANCE


def test_negative_variances_are_refused() -> None:
    def negative(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(y, x, x)

    (check,) = capture(Call(negative), (torch.ones(ROWS, CLASSES, dtype=torch.float64),)).state.checks
    with pytest.raises(ValueError, match=r"gaussian_nll_loss was given negative variances, at .*formulas\.py:\d+;"):
        check([torch.tensor(1)] * 9)


def test_windows_whose_gaps_a_trace_loses_are_refused() -> None:
    def written(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.cat([y, y * 2], 1)
        y.unfold(1, 2, 3).mul_(2)
        return y

    with pytest.raises(
        CaptureError, match=r"unfold\(1, 2, 3\), .*formulas\.py:\d+\).* pad dim 1 from 8 to a multiple of 3"
    ):
        capture(Call(written), (torch.ones(ROWS, CLASSES, dtype=torch.float64),))
