"""The benchmark of measured steps has no cost model of its own."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.costs.cluster import Cluster
from autopar.explain.hybrid.predict import predict_hybrid
from benchmarks import cost_model
from benchmarks.gpt import GPT, batch_of


@pytest.mark.parametrize("several", [False, True])
def test_rows_are_predicted_as_the_command_line_does(several: bool) -> None:
    row = cost_model.Row(
        gpus=8, global_batch=16, microbatch=2, hidden=64, heads=4, layers=6, sequence=32, tensor=2, data=2, pipeline=2,
        seconds=1.0, several_nodes=several,
    )  # fmt: skip
    cluster = Cluster.preset(cost_model.BASE)
    steps = cost_model._capture((row.shape, [row.tensor]))
    (found,) = cost_model.predict([row], steps, cluster, simulate=True)
    model = GPT(row.hidden, row.heads, row.layers, row.sequence, 51200, fused=several)
    axes = {"pp": row.pipeline, "dp": row.data, "tp": row.tensor}
    same = predict_hybrid(
        model, batch_of(row.global_batch, row.sequence), cluster=cluster, axes=axes, microbatch=row.microbatch,
        recompute=row.training.recompute,
    )  # fmt: skip
    assert found == pytest.approx(same.step_seconds, rel=1e-9)


def test_regret_and_order() -> None:
    measured, found = np.array([1.0, 1.02, 2.0]), np.array([3.0, 2.0, 1.0])
    assert cost_model.regret(measured, found) == 1.0
    assert cost_model.ordered(measured, found) == 0.0  # of the two pairs that are apart
    assert cost_model.ordered(measured, measured) == 1.0
