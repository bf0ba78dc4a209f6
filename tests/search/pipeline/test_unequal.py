"""Pipelines over several kinds of devices: what the search finds, against every cut in every order of the kinds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Between, Cluster, DeviceGroup, Link
from autopar.costs.kernels import kernel_seconds, product, stream
from autopar.costs.mixed.figures import pooled_device, slower
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan, Stage
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.pipeline.schedules import SCHEDULES, device_of, order, order_of
from autopar.pipeline.stage_graphs import StageGraphs
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.pipeline.cuts import ForwardOrder, balanced_cuts
from autopar.search.pipeline.space import least_idle_factor
from autopar.search.pipeline.stage_devices import devices_along
from autopar.search.pipeline.stage_memory import memory_of_stages, peaks
from autopar.search.pipeline.stage_peak import cut_again
from autopar.search.pipeline.stage_times import plan_tasks
from autopar.search.recost import differences, recosted
from autopar.simulate import pipeline, simulate
from autopar.verify.verify import compare, global_values

LAYERS, WIDTH, ROWS = 6, 128, 64


class Layers(nn.Module):
    """Layers of which the last ones are wider."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [WIDTH] * (LAYERS - 1) + [2 * WIDTH, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def captured() -> tuple[Program, nn.Module, tuple[torch.Tensor, ...]]:
    model, batch = Layers(), (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)),)
    return program_of(model, batch), model, batch


def mixed(counts: tuple[int, ...], per_node: int = 1, slow: float = 1e9, memory: float = 1e9) -> Cluster:
    """Groups of devices of which the second computes three times as fast, and the third moves data fast."""
    base = replace(Cluster.preset("cpu").device, memory=memory, launch=1e-7)
    devices = [
        replace(base, name="a", flops={"float32": 1e10, "float64": 1e10}),
        replace(base, name="b", flops={"float32": 3e10, "float64": 3e10}, memory=memory / 2),
        replace(base, name="c", flops={"float32": 1.5e10, "float64": 1e10}, bandwidth=3 * base.bandwidth),
    ]
    near, far = Link("near", 1e10, 1e-7), Link("far", 3e9, 1e-6)
    groups = [
        DeviceGroup(device.name, device, count // per_node, per_node, (near, far))
        for device, count in zip(devices, counts, strict=False)
    ]
    return Cluster.of_groups("mixed", groups, [Between(Link("between", slow, 1e-6))])


def planned(cluster: Cluster, axes: dict[str, int], memory: float | None = None, **pins: Any) -> Plan:
    return solve(captured()[0], axes, cluster, memory=memory, search=Search(pins=pins))


@pytest.mark.deep
def test_every_cut_in_every_order() -> None:
    """No assignment of layers to stages and kinds of devices is faster than what is found, nor than its bound."""
    cluster, axes = mixed((1, 1, 1)), {"gpu": 3}
    found = planned(cluster, axes, stages=3, microbatches=8, schedule="1f1b")
    assert found.pipeline is not None and {s.group for s in found.stages} == {"a", "b", "c"}
    part = microbatch_program(captured()[0], 8, deterministic=False)
    devices, seconds = devices_along(cluster, axes, "gpu"), []
    for cuts in itertools.combinations(range(1, LAYERS), 2):
        ends = zip((0, *cuts), (*cuts, LAYERS), strict=True)
        stages = tuple(Stage(tuple(f"layers.{i}" for i in range(a, b))) for a, b in ends)
        for places in itertools.permutations(range(3)):
            plan = replace(found, stages=stages, pipeline=replace(found.pipeline, places=places))
            cut, _, actions = cut_again(plan, part, devices)
            seconds.append(cut.seconds(actions))
    assert found.predicted.step_seconds == pytest.approx(min(seconds))
    assert found.certificate.lower_bound <= min(seconds)
    assert max(seconds) > 1.5 * min(seconds)


@pytest.mark.deep
@pytest.mark.parametrize(("counts", "axes"), [((2, 2), {"node": 4, "gpu": 2}), ((2, 1, 1), {"node": 2, "gpu": 4})])
def test_no_pinned_pipeline_beats_the_bound(counts: tuple[int, ...], axes: dict[str, int]) -> None:
    """Of any stages, order, schedule and number of microbatches; two of four nodes make a stage of two kinds."""
    cluster = mixed(tuple(2 * n for n in counts), per_node=2)
    found = planned(cluster, axes, stages="search")
    for stages, virtual, schedule in ((2, 1, "gpipe"), (2, 2, "zbv"), (4, 1, "1f1b"), (2, 2, "interleaved")):
        for count, places in itertools.product((4, 8), (list(range(stages)), list(range(stages))[::-1])):
            pins = {"stages": stages, "virtual": virtual, "schedule": schedule, "microbatches": count}
            with suppress(InfeasibleError):
                plan = planned(cluster, axes, stage_order=places, **pins)
                assert plan.predicted.step_seconds >= found.certificate.lower_bound
                assert plan.predicted.step_seconds >= found.predicted.step_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual", "axes"),
    [
        ("1f1b", 1, {"gpu": 3}),
        *(
            pytest.param(schedule, 1 + SCHEDULES[schedule].interleaved, {"node": 3, "gpu": 2}, marks=pytest.mark.deep)
            for schedule in SCHEDULES
        ),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep), pytest.param(2, marks=pytest.mark.deep)])
def test_random_plans_compute_what_one_device_does(
    schedule: str, virtual: int, axes: dict[str, int], seed: int
) -> None:
    """Plans of any layouts, cuts and order of kinds, with their figures derived again and simulated."""
    program, model, batch = captured()
    nodes = 3
    cluster = mixed((1,) * nodes, 1) if len(axes) == 1 else mixed((2,) * nodes, 2)
    pins = {
        "stages": nodes,
        "virtual": virtual,
        "microbatches": 8,
        "schedule": schedule,
        "stage_axis": next(iter(axes)),
    }
    search = Search(pins=pins, recipe="random", seed=seed)
    plan = solve(program, axes, cluster, search=search, deterministic=True)
    assert plan.pipeline is not None and plan.pipeline.places in {(), *itertools.permutations(range(nodes))}
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error < 1e-10, report.worst
    again = Plan.from_dict(plan.to_dict())
    assert (again.pipeline, again.stages, again.cluster) == (plan.pipeline, plan.stages, plan.cluster)
    assert not [*differences(again, recosted(program, again, deterministic=True))]
    # Where stages send in parts, the search rewrites without that and then adds it, which may cut a copy or two.
    close = 0.05 if plan.scatter else 1e-6
    assert simulate(plan_tasks(local, again)).step_seconds == pytest.approx(plan.predicted.step_seconds, rel=close)


def test_the_faster_devices_get_more() -> None:
    """Twice as fast, with nothing else that counts: twice the layers; a slow node is a factor on its group."""
    device = replace(Cluster.preset("cpu").device, flops={"float32": 1e9}, launch=1e-9, bandwidth=1e15)
    link = Link("near", 1e15, 1e-9)
    groups = [DeviceGroup("slow", device, 1, 1, (link,), speed=0.5), DeviceGroup("fast", device, 1, 1, (link,))]
    cluster = Cluster.of_groups("half", groups, [Between(link)])
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), (torch.zeros(64, 32),)
    program = program_of(model, batch, loss_fn=lambda out, _: out.square().mean())
    pins = {"stages": 2, "microbatches": 16, "schedule": "1f1b"}
    plan = solve(program, {"gpu": 2}, cluster, search=Search(pins=pins))
    assert {s.group: len(s.modules) for s in plan.stages} == {"slow": 2, "fast": 4}
    even = solve(program, {"gpu": 2}, replace(cluster, groups=(), between=()), search=Search(pins=pins))
    assert even.predicted.step_seconds > 1.4 * plan.predicted.step_seconds
    assert "slow" in plan.summary() and "1 of " in plan.certificate.space
    assert plan.certificate.gap < 0.15  # the bubble: one of sixteen, twice


@pytest.mark.slow
def test_each_kind_of_devices_keeps_to_its_memory() -> None:
    """The fast devices have half the memory: layers that would be theirs by time go to the slow ones."""
    cluster, axes = mixed((1, 1)), {"gpu": 2}
    pins = {"stages": 2, "microbatches": 8, "schedule": "1f1b", "recompute": "none"}
    free = planned(cluster, axes, **pins)
    fast = next(s for s in free.stages if s.group == "b")
    devices = devices_along(cluster, axes, "gpu")
    assert devices.room == (2.0, 1.0) and free.predicted.room == 1.0
    budget = 0.7 * sum(free.predicted.peak_bytes.values())
    plan = planned(cluster, axes, memory=budget, **pins)
    assert len(next(s for s in plan.stages if s.group == "b").modules) < len(fast.modules)
    held = {s.group: sum(peak.values()) for s, peak in zip(plan.stages, peaks_of(plan), strict=True)}
    assert held["b"] <= budget and held["a"] <= 2 * budget
    assert plan.predicted.step_seconds > free.predicted.step_seconds
    with pytest.raises(InfeasibleError, match="more than the budget"):
        planned(cluster, axes, memory=budget / 20, **pins)


def peaks_of(plan: Plan) -> list[dict[str, float]]:
    """Bytes of the device of each stage, where each device has one."""
    local = rewrite(captured()[0], plan)
    held = peaks(memory_of_stages(StageGraphs(local, len(plan.stages)), plan.inner, False), order_of(plan))
    return [held[device] for device in device_of(order_of(plan))]


@given(
    st.lists(st.lists(st.floats(0.1, 10), min_size=6, max_size=6), min_size=2, max_size=4),
    st.lists(st.floats(1, 100), min_size=3, max_size=3),
    st.integers(0, 2**31),
)
def test_cuts_are_the_best(seconds: list[list[float]], bandwidths: list[float], seed: int) -> None:
    """Of six modules, each kind of devices with seconds of its own, over links of their own."""
    modules, stages = 6, len(seconds)
    sent = np.random.default_rng(seed).uniform(0, 10, modules)
    spans = {str(i): (i, i + 1) for i in range(modules)}
    begins = {i: str(i) for i in range(1, modules)}
    orders = [ForwardOrder(begins, spans, np.array(s), np.zeros(modules), sent) for s in seconds]
    links = [Link("x", bandwidth, 1e-3) for bandwidth in bandwidths][: stages - 1]

    def slowest(cuts: Sequence[int]) -> float:
        sends = [0.0, *(2 * (1e-3 + sent[c] / link.bandwidth) for c, link in zip(cuts, links, strict=True)), 0.0]
        ends = zip((0, *cuts), (*cuts, modules), strict=True)
        return max(sum(seconds[s][a:b]) + sends[s] + sends[s + 1] for s, (a, b) in enumerate(ends))

    best = min(map(slowest, itertools.combinations(range(1, modules), stages - 1)))
    assert slowest(balanced_cuts(orders, links)) == pytest.approx(best)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.2, 5)), min_size=2, max_size=5),
    st.integers(1, 12),
    st.sampled_from(["gpipe", "1f1b"]),
    st.floats(0.1, 0.9),
)
def test_devices_of_other_speeds_wait(
    stages: list[tuple[float, float]], count: int, schedule: str, ahead: float
) -> None:
    """Work by the speed of the devices that do it, in so many seconds, bounds the step."""
    devices, mean = len(stages), sum(speed for _, speed in stages) / len(stages)
    forward, backward = ([share * t for t, _ in stages] for share in (ahead, 1 - ahead))
    took = simulate(pipeline(order(schedule, devices, count), forward, backward, 0.0)).step_seconds
    work = count * sum(t * speed / mean for t, speed in stages) / devices
    assert took >= work * least_idle_factor([speed / mean for _, speed in stages], count) * (1 - 1e-9)


PRESET_DEVICES = [Cluster.preset(name).device for name in ("a100-80gb", "h100", "l4", "h200")]


@given(
    st.lists(st.sampled_from(PRESET_DEVICES), min_size=1, max_size=4),
    st.lists(st.floats(0.2, 5), min_size=4, max_size=4),
    st.tuples(*(st.integers(1, 5000) for _ in range(3)), st.integers(1, 3)),
)
def test_pooled_devices_bound_all(devices: list[Any], weights: list[float], sizes: tuple[int, int, int, int]) -> None:
    """No kernel takes longer on the pooled device than its weight says of each; alike but for speed, as long."""
    weights = weights[: len(devices)]
    mean = sum(weights) / len(weights)
    pooled = pooled_device(devices, weights)
    for work in (product(*sizes), stream(sizes[0] * sizes[1] * 1e3)):
        taken = kernel_seconds(work, "bfloat16", pooled)[0]
        assert all(
            taken <= w * kernel_seconds(work, "bfloat16", d)[0] * (1 + 1e-9)
            for d, w in zip(devices, weights, strict=True)
        )
        alike = pooled_device([slower(devices[0], w / mean) for w in weights], [w / mean for w in weights])
        assert kernel_seconds(work, "bfloat16", alike)[0] == pytest.approx(
            kernel_seconds(work, "bfloat16", devices[0])[0]
        )
