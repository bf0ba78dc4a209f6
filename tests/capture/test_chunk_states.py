"""States at the ends of chunks are a recurrence over the chunks, which is split as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import plan
from autopar.capture import capture
from autopar.ir.ops.sequence.linear_scan import linear_scan
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.strategies import sequence_models
from tests.strategies.sequence_models import MODELS, Chunks

BOUND = 1e-10


@pytest.mark.slow
def test_rows_of_states_are_sent() -> None:
    """Of 16 chunks no device has the states of all, nor pairs of chunks."""
    model, batch = Chunks().double(), (MODELS["chunks"][1],)
    search = Search(roles={"a": "context"}, cache=False)
    asked = plan(model, batch, axes={"a": 4}, cluster="h100", search=search)
    report = verify(model, batch, {"a": 4}, plan=asked)
    assert max(report.max_error, report.capture_error) < BOUND
    nodes = [n for n in report.program.graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert sum(n.target is linear_scan for n in nodes) == 4  # and one of the devices' ends beside each
    assert not [n for n in nodes if n.meta["val"].numel() >= 2 * 16 * 2 * 4 * 3]


@pytest.mark.parametrize("order", [pytest.param("bzch,bzhpn->bchpn", marks=pytest.mark.deep), "bhzc,bchpn->bzhpn"])
def test_both_orders_of_the_product(order: str) -> None:
    report = verify(Chunks().double(), {"x": MODELS["chunks"][1], "order": order}, {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < BOUND
    assert any(n.target is linear_scan for n in report.program.graph.graph.nodes)


@pytest.mark.slow
def test_other_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that do not begin at zero, another triangle, and a product along other chunks."""

    def scans(order: str = "bhzc,bchpn->bzhpn") -> int:
        program = capture(Chunks(), {"x": MODELS["chunks"][1].float(), "order": order})
        return sum(n.target is linear_scan for n in program.graph.graph.nodes)

    assert scans() == 2 and scans("bhzc,bzhpn->bchpn") == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", torch.ones_like)
        assert scans() == 0
    own: Any = sequence_models.segment_sum
    monkeypatch.setattr(sequence_models, "segment_sum", lambda x: own(x) * 1.0)
    assert scans() == 0
