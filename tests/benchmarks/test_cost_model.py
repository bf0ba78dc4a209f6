"""The benchmark of measured steps has no cost model of its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.cluster import Cluster
from autopar.costs.kernels import Work, product, stream
from autopar.explain.hybrid.layer_profile import AFTER, BEFORE, Activity, ChargedCollective, Part
from autopar.explain.hybrid.predict import predict_hybrid
from benchmarks import cost_model
from benchmarks.gpt import GPT, batch_of


@pytest.mark.deep
@pytest.mark.parametrize("several", [True, False])
def test_rows_are_predicted_as_the_command_line_does(several: bool) -> None:
    row = cost_model.Row(
        gpus=8, global_batch=16, microbatch=2, hidden=64, heads=4, layers=6, sequence=32, tensor=2, data=2, pipeline=2,
        seconds=1.0, several_nodes=several,
    )  # fmt: skip
    cluster = Cluster.preset(cost_model.BASE)
    steps = cost_model._capture((row.shape, [row.tensor]))
    (found,) = cost_model.predict([row], steps, cluster, simulate=True)
    model = GPT(row.hidden, row.heads, row.layers, row.sequence, 51200)
    axes = {"pp": row.pipeline, "dp": row.data, "tp": row.tensor}
    same = predict_hybrid(
        model, batch_of(row.global_batch, row.sequence), cluster=cluster, axes=axes, microbatch=row.microbatch,
        recompute=row.training.recompute, compile=several,
    )  # fmt: skip
    assert found == pytest.approx(same.step_seconds, rel=1e-9)


def test_regret_and_order() -> None:
    measured, found = np.array([1.0, 1.02, 2.0]), np.array([3.0, 2.0, 1.0])
    assert cost_model.regret(measured, found) == 1.0
    assert cost_model.ordered(measured, found) == 0.0  # of the two pairs that are apart
    assert cost_model.ordered(measured, measured) == 1.0


PLANTED = {
    "efficiency": 0.8, "ramp": 150.0, "streaming": 0.8, "host": 9e-5, "launch": 2e-5, "node bandwidth": 180e9,
    "node latency": 8e-6, "network bandwidth": 8e9, "network latency": 2e-5, "contention": 0.8,
}  # fmt: skip


def parts(shape: tuple[int, int, int, int, int, bool], ranks: int) -> tuple[Part, ...]:
    """Something like a block of a GPT on tensor ranks, without a graph: products, passes over memory, all-reduces."""
    hidden, _, sequence, microbatch, vocabulary, _ = shape
    tokens = sequence * microbatch
    size = 2.0 * tokens * hidden

    def activity(times: int, *kernels: Work) -> Activity:
        sums = (ChargedCollective("all_reduce", 0, size),) * (times if ranks > 1 else 0)
        return Activity({"bfloat16": Work.join(list(kernels) * times)}, sums)

    def part(name: str, parameters: float, *kernels: Work) -> Part:
        once, twice = activity(1, *kernels), activity(2, *kernels)
        return Part(name, once, twice, {2: parameters / ranks}, 0.0, size, replicated_bytes=(size,))

    up, down = product(tokens, 4 * hidden // ranks, hidden), product(tokens, hidden, 4 * hidden // ranks)
    head = product(tokens, vocabulary // ranks, hidden)
    return (
        part(BEFORE, vocabulary * hidden, stream(size)),
        part("layers.0", 8 * hidden**2, up, down, *[stream(4 * size)] * 6),
        part(AFTER, 0.0, head),
    )


def synthetic() -> tuple[list[cost_model.Row], cost_model.Steps]:
    """Rows of one node and of several, and what they run."""
    layouts = [(1, 1, False), (2, 1, False), (4, 2, False), (8, 1, False), (1, 1, True), (2, 4, True), (4, 2, True),
               (4, 8, True), (8, 2, True), (16, 1, True)]  # fmt: skip
    rows = []
    for (tensor, stages, several), hidden, microbatch in itertools.product(layouts, (512, 4096), (1, 4)):
        gpus = 128 if several else 8
        data = gpus // tensor // stages
        rows.append(cost_model.Row(gpus, 512, microbatch, hidden, 16, 16, 1024, tensor, data, stages, 1.0, several))
    return rows, {(*row.shape, row.tensor): parts(row.shape, row.tensor) for row in rows}


@pytest.mark.deep
@pytest.mark.parametrize("begin", [0, 1], ids=["first half", "second half"])
def test_planted_parameters_are_found_again(begin: int) -> None:
    """From either half of the rows, where what is expected counts little."""
    pytest.importorskip("scipy")
    rows, steps = synthetic()
    rows = rows[begin::2]
    seconds = cost_model.predict(rows, steps, cost_model.cluster_of(PLANTED))
    measured = [replace(row, seconds=s) for row, s in zip(rows, seconds, strict=True)]
    found = cost_model.fit(measured, steps, prior=0.05)
    assert cost_model.predict(rows, steps, found) == pytest.approx(seconds, rel=0.005)
    near, far = found.links
    assert found.device.host == pytest.approx(PLANTED["host"], rel=0.01)
    assert (found.device.efficiency, found.device.streaming) == pytest.approx((0.8, 0.8), rel=0.05)
    assert (far.bandwidth, far.contention) == pytest.approx((8e9, 0.8), rel=0.03)
    assert near.bandwidth == pytest.approx(180e9, rel=0.2)  # few rows depend on it
