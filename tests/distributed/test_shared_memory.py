"""Parameters that a model holds in other places, too, under other names and in other tensors: on two ranks, split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from tests.distributed.launch import WAIT, Ranks, mesh_of

pytestmark = pytest.mark.distributed


class Holds(nn.Module):
    """Two layers, and something that holds a weight of theirs."""

    def __init__(self, hold: Callable[[Any], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        hold(self)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return (self.g(self.f(x)) @ self.read(self)).square().mean()


def _set(name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda m: vars(m).update({name: value(m)})


def _in_a_module(m: Any) -> list[nn.Module]:
    """A module in a list, so that it is no submodule, with a weight of a submodule."""
    layer = nn.Linear(8, 8, bias=False, device="meta")
    layer.weight = m.f.weight
    return [nn.Sequential(layer)]


def _shared_data(m: Any) -> None:
    m.g.weight.data = m.f.weight.data


def _one_buffer(m: Any) -> None:
    m.f.register_buffer("scale", torch.ones(8, 8, dtype=torch.float64))
    m.g.register_buffer("scale", m.f.scale)


def _sets_one(m: Any) -> Tensor:
    """The layers have one buffer until this has been called."""
    m.f.scale = 2 * m.f.scale
    return m.f.scale * m.f.weight + m.g.scale


EQUAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "attribute": (_set("other", lambda m: m.f.weight), lambda m: m.other),
    "dict of lists": (_set("other", lambda m: {"all": [m.f.weight]}), lambda m: m.other["all"][0]),
    "module in a list": (_set("other", _in_a_module), lambda m: m.other[0](m.f.bias[None] + m.g.weight)),
    "a buffer of two until one gets another": (_one_buffer, _sets_one),
    "view that is not read": (_set("other", lambda m: m.f.weight.data), lambda m: m.f.weight),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor], str]] = {
    "view": (_set("other", lambda m: m.f.weight.detach()), lambda m: m.other, "'other' is a view of parameter"),
    "list of views": (_set("other", lambda m: [m.f.weight.data]), lambda m: m.other[0], "is a view of parameter"),
    "memory of two": (_shared_data, lambda m: m.f.weight, "'f.weight' and 'g.weight' share their memory"),
}  # fmt: skip


def losses(model: nn.Module) -> list[Tensor]:
    """Of three steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        found.append(model(x))
        found[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in found]


def train(rank: int) -> tuple[dict[str, float], dict[str, str]]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    def parallel(model: nn.Module) -> list[Tensor]:
        return losses(parallelize(model, mesh_of(2), search=Search(recipe="fsdp"), timeout=WAIT))

    differences, errors = {}, {}
    for name, (hold, read) in EQUAL.items():
        expected, found = losses(Holds(hold, read)), parallel(Holds(hold, read))
        differences[name] = max(float((a - b).abs()) for a, b in zip(found, expected, strict=True))
    for name, (hold, read, _) in REFUSED.items():
        try:
            parallel(Holds(hold, read))
        except CaptureError as e:
            errors[name] = str(e)
    return differences, errors


@pytest.mark.slow
def test_steps_show_everywhere_or_are_refused(two_ranks: Ranks) -> None:
    for differences, errors in two_ranks.run(train):
        assert max(differences.values()) < 1e-12, differences
        assert all(REFUSED[name][2] in errors.get(name, "") for name in REFUSED), errors
