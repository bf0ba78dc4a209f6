"""What Python says of traced tensors: what it says of those that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import parallelize
from autopar.errors import CaptureError


class Asks(nn.Module):
    """Writes down what its tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.said: Any = ()
        self.of_batch = False

    def forward(self, x: Tensor) -> Tensor:
        weight, y = self.linear.weight, self.linear(x)
        self.said = (
            type(x) is torch.Tensor, type(weight) is nn.Parameter, type(y).__name__, isinstance(weight, nn.Parameter),
            isinstance(y, nn.Parameter), isinstance(type(y), type), isinstance(self, type), weight.is_leaf, y.is_leaf,
            y.detach().is_leaf, type(self).__name__,
        )  # fmt: skip
        return y.square().mean() * (2 if self.of_batch and x.is_leaf else 1)


def test_kinds() -> None:
    plain, asked = Asks(), Asks()
    parallel, x = parallelize(asked, None), torch.ones(4, 3)
    for m in (plain, parallel):
        m(x)
    assert asked.said == plain.said
    assert asked.said[1]
    asked.of_batch = True
    parallel(x)  # which needs no gradient, and is a leaf as every such tensor
    with pytest.raises(CaptureError, match=r"whether it is one as it was made \(.is_leaf\) at .*test_kinds.py"):
        parallel(x.requires_grad_())
