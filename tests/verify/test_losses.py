"""Losses whose mean is over what counts: labels ignored, weighted, smoothed, spread unevenly over devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.ir.node_info import info
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.verify import capture_error, compare, global_values
from tests.crossed import seeds
from tests.plans import follow_plan

AXES = {"a": 2, "b": 2}
CLASSES = 8
WEIGHT = torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64)


def ragged(logits: Tensor, target: Tensor) -> Tensor:
    """A mean over as many elements as a row has, then over the rows that have any."""
    mask = target >= 0
    each = F.cross_entropy(logits.transpose(1, 2), target.clamp(min=0), reduction="none") * mask
    rows = mask.sum(1)
    return (each.sum(1) / rows.clamp(min=1)).sum() / (rows > 0).sum()


def entropy(**settings: object) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, **settings)


def with_z_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Besides, the square of each row's logarithm of its sum of exponentials."""
    return entropy()(logits, target) + 0.1 * logits.logsumexp(-1).square().mean()


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """Picked with `gather`, whose gradient is a sum of scattered numbers."""
    picked = F.log_softmax(logits, -1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (target >= 0)).sum() / 10


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored": entropy(),
    "sum": entropy(reduction="sum"),
    "per row": lambda logits, target: (entropy(reduction="none")(logits, target) * target.flatten()).sum(),
    "z-loss": with_z_loss,
    "by hand": by_hand,
    "smoothed": entropy(label_smoothing=0.1),
    "weighted": entropy(weight=WEIGHT),
    "weighted and smoothed": entropy(weight=WEIGHT, label_smoothing=0.2),
    "per position": lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target, ignore_index=-1),
    "ragged": ragged,
    "soft labels": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(target.clamp(min=0), CLASSES).double().flatten(0, 1) * 0.7 + 0.3 / CLASSES
    ),
}


class Head(nn.Module):
    """A projection to classes."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, CLASSES).double()
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target)


def batch_of() -> dict[str, Tensor]:
    """Of eight rows the first two count nothing, the third one position only: devices have 0, 5, 8 and 8."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(0, CLASSES, (8, 4), generator=g)
    target[:2], target[2, 1:] = -1, -1
    return {"x": torch.randn(8, 4, 4, generator=g, dtype=torch.float64), "target": target}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    model, batch = Head(LOSSES[name]), batch_of()
    program = program_of(model, batch)
    dims, values = analyze(program), global_values(program, model, batch)
    assert capture_error(program, model, batch, None, values) < 1e-10
    rows = {"0": "S(0) S(0)", "1": "S(0) S(0)"}
    classes = {"batch": {"0": "S(0) R", "1": "S(0) R"}, "parameters": {"head.weight": "R S(0)", "head.bias": "R S(0)"}}
    plans = {
        "rows": follow_plan(program, AXES, batch=rows),
        "classes": follow_plan(program, AXES, **classes),
        **{f"random {seed}": random_plan(program, dims, AXES, Cluster.preset("cpu"), seed) for seed in seeds(2)},
    }
    for label, plan in plans.items():
        report = compare(program, rewrite(program, plan), plan, values, torch.float64)
        assert report.max_error <= 1e-12, f"{label}: {report.worst}: {report.max_error}"
        assert set(report.gradients) == {"head.weight", "head.bias"}
        kinds = [info(n).collective.kind for n in report.program.graph.graph.nodes if info(n).collective]
        assert kinds, f"{label}: nothing is computed in parts"
