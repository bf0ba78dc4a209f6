"""Models with dropout: whatever the plan, the distributed model draws the masks of one device, and trains alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.ir.program import draws
from autopar.passes import DETERMINISTIC_PASSES
from autopar.verify.verify import EquivalenceReport, compare, global_values
from tests import models as zoo
from tests.verify.test_verify import after_adamw, tiny_models_pay

AXES = {"a": 2, "b": 2}


class Encoder(nn.Module):
    """torch's own encoder layer with its default dropout: in attention, after it, and in the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), target.flatten())


def encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return Encoder(), {"x": torch.randn(4, 4, 16, generator=g), "target": torch.randint(0, 8, (4, 4), generator=g)}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.gpt2(16, heads=2, batch=4, seq=4, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def check(model: nn.Module, report: EquivalenceReport) -> None:
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"
    expected = after_adamw(dict(model.named_parameters()), report.reference_gradients)
    for name, value in after_adamw(dict(model.named_parameters()), report.gradients).items():
        assert float((value - expected[name]).abs().max()) <= 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("build", [encoder, pytest.param(gpt2, marks=pytest.mark.deep)], ids=["encoder", "gpt2"])
def test_a_transformer_with_dropout(build) -> None:
    model, batch = build()
    plan = solve(program_of(model, batch), AXES, tiny_models_pay())
    assert sum(map(len, plan.predicted.collectives.values())) > 0
    report = autopar.verify(model, batch, AXES, plan=plan)
    check(model, report)
    assert report.capture_error < 1e-4  # eager drew the same masks
    check(model, autopar.verify(model, batch, AXES, plan="random", seed=1))
    drawn = [n for n in report.program.graph.graph.nodes if draws(n)]
    assert len(drawn) == 4  # attention and three more; nothing merged, nothing lost


@pytest.mark.slow
def test_another_mask_is_noticed() -> None:
    model, batch = encoder()
    program = program_of(model, batch)
    plan = solve(program, AXES, tiny_models_pay())
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    first = next(n for n in local.graph.graph.nodes if draws(n))
    first.update_arg(1, [0.2, 4])
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error > 1e-3


@pytest.mark.slow
def test_one_device_draws_as_the_plain_model() -> None:
    model, batch = encoder()
    plain, _ = encoder()
    parallel = autopar.parallelize(model, None, batch)
    for _ in range(2):
        torch.manual_seed(3)
        parallel(**batch).backward()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        plain(**batch).backward()
        assert torch.equal(torch.get_rng_state(), state)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6)
    model.eval()
    plain.eval()
    torch.testing.assert_close(parallel.eval()(**batch), plain(**batch).detach(), rtol=1e-5, atol=1e-6)


def test_an_unused_draw_stays_in_the_forward_graph() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return F.dropout(self.linear(x), 0.5).sum()

    parallel = autopar.parallelize(Wasteful(), None, (torch.ones(2, 4),))
    forward, backward = parallel.forward_graph, parallel.backward_graph
    assert backward is not None
    targets = [str(n.args[0]) for n in forward.graph.nodes if n.target is torch.ops.autopar.draw.default]
    assert targets == ["uniform", "dropout"]
    assert not [n for n in backward.graph.nodes if n.target is torch.ops.autopar.draw.default]
