"""canonicalize_strides: no operator looks at memory any more, and the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError
from autopar.ir.graph import is_operator
from autopar.passes.canonicalize.strides import canonicalize_strides
from autopar.verify.emulate import run_whole
from tests.models import X, raw

FORMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "in order": (lambda x, w: torch.as_strided(x, (8, 1, 4, 2), (8, 1, 2, 1)) + 1, False),
    "windows": (lambda x, w: torch.as_strided(x, (4, 4), (8, 1), 4) + 1, True),
    "overlapping": (lambda x, w: torch.as_strided(x, (3, 10, 2), (16, 2, 1), 1) * 2, True),
    "of a transposed tensor": (lambda x, w: torch.as_strided((x + 1).t(), (4, 4), (8, 1), 4) * 2, True),
    "one element": (lambda x, w: torch.as_strided(x, (), (), 7) + 1, True),
    "scatter of all": (lambda x, w: torch.as_strided_scatter(x, x.view(64), (64,), (1,)) + 1, False),
    "scatter": (lambda x, w: torch.as_strided_scatter(x, w, (8, 4), (8, 2), 1) + 1, True),
    "scatter into a transposed tensor": (lambda x, w: torch.as_strided_scatter(x.t() + 1, w, (8, 4), (8, 2)), True),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    function, gathers = FORMS[name]
    program = raw(function)
    assert any("as_strided" in str(n.target) for n in program.graph.graph.nodes)
    after = canonicalize_strides(program)
    targets = [str(n.target) for n in after.graph.graph.nodes if is_operator(n)]
    assert not any("as_strided" in t for t in targets)
    assert any("aten.index" in t for t in targets) == gathers
    values = [torch.randn(8, 4), X]
    one, other = (run_whole(p, values)[0] for p in (program, after))
    assert one is not None and other is not None
    assert torch.equal(one, other)


def test_others_stay() -> None:
    program = raw(lambda x, w: x @ w)
    assert canonicalize_strides(program) is program


def test_memory_beside_the_argument_is_refused() -> None:
    program = raw(
        lambda x, w: torch.as_strided(x[:, :4] + 0 * x[:, 4:], (4, 4), (4, 1)) + x[2:].as_strided((4,), (1,), 0).sum()
    )
    with pytest.raises(CaptureError, match=r"as_strided.*looks at memory beside its argument.*unfold"):
        canonicalize_strides(program)


class Windows(nn.Module):
    """Overlapping windows of a projected signal, as audio models and Longformer take them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        windows = torch.as_strided(y, (y.shape[0], 7, 4), (16, 2, 1))
        return self.last(windows).square().mean()


@pytest.mark.parametrize("seed", range(2))
def test_equivalence_in_float64(seed: int) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Windows(), (torch.randn(8, 8),), {"a": 2, "b": 2}, plan="random", seed=seed)
    assert report.max_error <= 1e-10, report.worst
    assert report.gradients
