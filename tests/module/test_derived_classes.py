"""Classes that libraries derive from the class of a parallelized model, and objects that they make of these."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from autopar.errors import AutoparError
from autopar.parallelize import parallelize


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Functional:
    """What a library adds to a class of modules, with arguments of its own, as higher does."""

    def __init__(self, weights: Any, root: Any) -> None:
        self.weights, self.root = weights, root


def test_an_object_of_a_derived_class_is_refused() -> None:
    model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), None)
    derived = type("Functional", (Functional, type(model)), {})
    with pytest.raises(AutoparError, match=r"Functional, .* \(Sequential\), is called.*functional_call"):
        derived(list(model.parameters()), root=None)
    # One that adds methods alone would lose them without a word.
    with pytest.raises(AutoparError, match="is called"):
        type("Named", (type(model),), {})()


def test_what_a_model_makes_of_its_own_class_is_a_plain_one() -> None:
    model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), None)
    assert type(model[:1]) is nn.Sequential


def test_a_model_is_parametrized_itself_before_parallelize() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(AutoparError, match=r"ParametrizedLinear.*is put on the model.*before parallelize\(\)"):
        parametrize.register_parametrization(parallelize(copy.deepcopy(layer), None), "weight", Doubled())
    parametrize.register_parametrization(layer, "weight", Doubled())
    expected = layer(x)
    model = parallelize(layer, None)
    assert torch.equal(model(x), expected) and torch.equal(copy.deepcopy(model)(x), expected)
