"""Optimizers that have a model's parameters are found, and where nobody refers to these, no object is looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.parallelize import parallelize
from autopar.runtime.state import optimizer_layouts
from autopar.runtime.state.optimizer_layouts import optimizers_of_model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def scripted() -> nn.Module:
    return torch.jit.script(Whole())  # type: ignore[no-any-return]


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


@pytest.mark.parametrize("make", [tied, parametrized, scripted])
def test_found_of_any_one_parameter(make: Callable[[], nn.Module]) -> None:
    model = make()
    others = torch.optim.SGD(make().parameters())
    assert optimizers_of_model(model) == [] and others.param_groups
    model(torch.ones(3)).sum().backward()
    made = []
    for parameter in model.parameters():
        made.append(torch.optim.SGD([parameter]))
        assert set(optimizers_of_model(model)) == set(made)


@pytest.mark.parametrize("make", [tied, parametrized])
def test_no_object_is_looked_at_in_vain(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_layouts, "optimizers_of", None)
    assert optimizers_of_model(make()) == []


def test_one_made_before_is_refused() -> None:
    model = tied()
    optimizer = torch.optim.SGD(model.parameters())
    assert optimizer.param_groups
    with pytest.raises(ValueError, match=r"an optimizer \(SGD\) holds the model's parameters"):
        parallelize(model, None, (torch.ones(2, 3),), loss_fn=lambda out, _: out.sum())
    parallelize(tied(), None, (torch.ones(2, 3),), loss_fn=lambda out, _: out.sum())


def test_one_whose_constructor_has_failed_is_none() -> None:
    class Fails(torch.optim.SGD):
        def __init__(self) -> None:
            kept.append(self)
            raise ValueError

    kept: list[Fails] = []
    model = tied()
    others = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError):
        Fails()
    assert kept and optimizers_of_model(model) == [others]
