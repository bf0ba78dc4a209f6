"""canonicalize_random: draws and arithmetic in place of random operators, number for number what eager draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of
from autopar.errors import CaptureError
from autopar.ir.ops.random import same_numbers
from autopar.ir.program import Program
from autopar.verify.emulate import run_whole
from autopar.verify.verify import global_values
from tests.plans import show


class Apply(nn.Module):
    """A function of ``x * w``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 0.9, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.w)


BATCH = (torch.linspace(0.1, 0.9, 192).view(4, 6, 8),)


def draws(program: Program) -> list[str]:
    found = [n for n in program.graph.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    return [str(n.args[0]) if "draw" in str(n.target) else str(n.target) for n in found]


def twice(x: Tensor) -> Tensor:
    return (
        F.dropout(x, 0.3)
        + F.dropout(x, 0.3)
        + torch.multinomial(torch.ones(6), 4) @ torch.multinomial(torch.ones(6), 4)
    )


def unused(x: Tensor) -> Tensor:
    torch.rand(3)
    F.dropout(x, 0.5)
    return x + torch.randn(8)


# A function, and what its graph draws.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), ["dropout"]),
    "all dropped": (lambda x: F.dropout(x, 1.0), []),
    "in another order": (lambda x: F.dropout(x.permute(2, 0, 1), 0.3), ["dropout"]),
    "in place": (lambda x: F.dropout(x * 2, 0.3, inplace=True), ["bernoulli"]),
    "channels": (lambda x: F.dropout1d(x, 0.3), ["bernoulli"]),
    "alpha": (lambda x: F.alpha_dropout(x, 0.3, True), ["bernoulli"]),
    "rrelu": (lambda x: F.rrelu(x - 0.4, training=True), ["aten.rrelu_with_noise_functional.default"]),
    "uniform": (
        lambda x: x * torch.rand(4, 6, 8) + torch.rand_like(x.permute(2, 1, 0)).permute(2, 1, 0),
        ["uniform"] * 2,
    ),
    "normal": (lambda x: x * torch.randn(8) + torch.randn_like(x) + torch.normal(2.0, 3.0, (8,)), ["normal"] * 3),
    "normal of tensors": (
        lambda x: x + torch.normal(x, 2.0) + torch.normal(1.0, x) + torch.normal(x, x),
        ["normal"] * 3,
    ),
    "integers": (lambda x: x * torch.randint(5, (8,)) + torch.randint_like(x.detach(), 2, 9), ["random"] * 2),
    "coins": (lambda x: x * torch.bernoulli(x) + torch.bernoulli(x.detach(), 0.3), ["uniform", "bernoulli"]),
    "gumbel": (lambda x: F.gumbel_softmax(x), ["exponential"]),
    "filled": (lambda x: x * torch.empty(8).uniform_(1, 2) * torch.empty(8).log_normal_(), ["uniform", "log_normal"]),
    "permutation": (lambda x: x[torch.randperm(4)], ["permutation"]),
    "poisson": (lambda x: x * torch.poisson(x * 9), ["aten.poisson.default"]),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), ["dropout"]),
    "equal calls": (twice, ["dropout"] * 2 + ["aten.multinomial.default"] * 2),
    "unused": (unused, ["uniform", "dropout", "normal"]),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_draw_what_eager_draws(name: str) -> None:
    function, expected = CASES[name]
    model = Apply(function)
    program = program_of(model, BATCH)
    assert draws(program) == expected
    with same_numbers(3):
        eager = model(*BATCH)
        state = torch.get_rng_state()
    with same_numbers(3):
        found = run_whole(program, global_values(program, model, BATCH))[0]
        assert torch.equal(torch.get_rng_state(), state)  # as many numbers, too
    torch.testing.assert_close(found, eager.detach(), rtol=1e-6, atol=1e-6)


def test_before_and_after() -> None:
    program = program_of(Apply(lambda x: F.dropout(x, 0.5)), (torch.ones(4, 8),), training=False)
    assert (
        show(program)
        == """\
w
batch0
mul.Tensor = mul.Tensor(batch0, w)
autopar.draw = autopar.draw('dropout', [0.5, 4], [4, 8], [0, 1], dtype=torch.bool)
native_dropout_backward = native_dropout_backward(mul.Tensor, autopar.draw, 2.0)
return [native_dropout_backward]"""
    )


def test_a_generator_of_its_own_is_refused() -> None:
    model = Apply(lambda x: x * torch.bernoulli(x.detach(), 0.5, generator=torch.Generator()))
    with pytest.raises(CaptureError, match=r"bernoulli.*generator of its own.*torch.manual_seed"):
        program_of(model, BATCH)
