"""Results lie in memory as eager mode has them, whatever the graph's kernels make: strides, and what is a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import parallelize
from autopar.search.options import Search

LAST = torch.channels_last


class Net(nn.Module):
    """A linear layer and a convolution; a function makes results of what they give."""

    def __init__(self, results: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.conv, self.drop = nn.Linear(8, 4), nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.0)
        self.results = results

    def forward(self, x: Tensor, image: Tensor) -> Any:
        h, c = self.up(x), self.conv(image)
        return h.square().mean() + c.square().mean(), *self.results(self, h, c)


def transposed(net: Net, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    copied = h.t().clone(memory_format=torch.contiguous_format)
    return h.t(), h.t().contiguous(), copied, h[:, :2].contiguous(), h.t() * 2


def channels_last(net: Net, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    turned = c.to(memory_format=LAST)
    pooled, grown = functional.max_pool2d(turned, 2), functional.interpolate(turned, scale_factor=2)
    return turned, pooled, grown, c.permute(0, 2, 3, 1), c.permute(0, 2, 3, 1).contiguous()


def like(net: Net, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    net.last = h.t().contiguous()
    return torch.zeros_like(h.t()), torch.full_like(c.to(memory_format=LAST), 2.0), net.up.weight.t().contiguous()


def outcome(results: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What a model and the plain one return, and the latter's gradients."""
    plain = Net(results).double()
    batch = (torch.randn(4, 8).double(), torch.randn(4, 3, 4, 4).double())
    given = copy.deepcopy(plain)
    found, expected = list(parallelize(given, *args[:1], batch, *args[1:], **kwargs)(*batch)), list(plain(*batch))
    found[0].backward()
    expected[0].backward()
    for each, net in ((found, given), (expected, plain)):
        each += [net.last] if "last" in vars(net) else []
        each += [p.grad for p in net.parameters() if p.grad is not None]
    return found, expected


RESULTS = [transposed, channels_last, like]


@pytest.mark.parametrize("results", RESULTS)
def test_strides(results: Callable[..., Any]) -> None:
    for a, b in zip(*outcome(results, None), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_strides_of_microbatches() -> None:
    for a, b in zip(*outcome(channels_last, None, search=Search(pins={"microbatches": 2})), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_results_of_one_storage_stay_together() -> None:
    """Whatever else has the same values, and by which copies."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.up(x).t()
            return y.contiguous(), y.t().contiguous(), y, functional.dropout(y, 0.5, training=False)

    plain = Turned().double()
    x = torch.randn(4, 4).double()
    model = parallelize(copy.deepcopy(plain), None, (x,))
    for number in range(4):
        found, expected = model(x), plain(x)
        with torch.no_grad():
            for results in (found, expected):
                results[number].mul_(2)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("training", [True, False])
def test_what_is_written_to_dropout_that_drops_nothing(training: bool) -> None:
    """It is its argument itself."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.drop = nn.Linear(4, 4), nn.Dropout(0.0 if training else 0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            dropped = self.drop(h)
            dropped += 1.5
            return (h * dropped).sum()

    plain = Dropped().double().train(training)
    x = torch.randn(4, 4).double()
    model = parallelize(copy.deepcopy(plain), None, (x,))
    losses = [m(x) for m in (plain, model)]
    torch.testing.assert_close(*losses)
    if training:
        for loss in losses:
            loss.backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
