"""What is fitted is what the samples were made of."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.calibrate import Sample, cluster_of, fit_device, fit_link, predicted_seconds
from autopar.costs.calibrate.collectives import HIDDEN, KINDS, _levels
from autopar.costs.calibrate.kernels import ALONE_SIZES, LARGE, SMALL, Kernels
from autopar.costs.calibrate.sample import ALONE, ATTENTION, BEHIND, BESIDE, LAUNCH
from autopar.costs.cluster import Cluster, Device, Link
from autopar.errors import RankError
from autopar.explain.tables.calibration import calibration_dict, calibration_plot, calibration_table
from tests.costs.calibrate.samples import CPU, GPU, INNER, OUTER, collectives, kernels

pytest.importorskip("scipy")


@pytest.mark.parametrize(("device", "chosen"), [(CPU, SMALL), (GPU, LARGE)], ids=["CPU", "GPU"])
def test_a_device_is_found_again(device: Device, chosen: Kernels) -> None:
    found = fit_device(kernels(device, chosen), name=device.name, memory=device.memory, units=device.units)
    assert found.bandwidth == pytest.approx(device.bandwidth, rel=0.02)
    assert found.launch == pytest.approx(device.launch, rel=0.02)
    assert found.flops == pytest.approx(device.flops, rel=0.02)
    assert found.ramp == pytest.approx(device.ramp, rel=0.1)
    assert found.fused == pytest.approx(device.fused, rel=0.02)
    assert (found.name, found.memory, found.units) == (device.name, device.memory, device.units)


def test_an_outlier_does_not_move_the_fit() -> None:
    samples = kernels(CPU, SMALL)
    slow = [replace(s, seconds=s.seconds * (30 if i == 2 else 1)) for i, s in enumerate(samples)]
    found = fit_device(slow, name="noisy", memory=1e9)
    assert found.flops["float32"] == pytest.approx(CPU.flops["float32"], rel=0.1)
    assert found.bandwidth == pytest.approx(CPU.bandwidth, rel=0.1)


@pytest.mark.some(2)
@pytest.mark.parametrize("factors", [{}, {"reduce_scatter": 1.9, "all_reduce": 0.7, "broadcast": 0.5}])
@pytest.mark.parametrize("members", [2, 8])
def test_a_link_is_found_again(members: int, factors: dict[str, float]) -> None:
    true = replace(INNER, factors=factors)
    found = fit_link(collectives(true, 0, members, launch=3e-6), name="found", launch=3e-6)
    assert (found.bandwidth, found.latency) == pytest.approx((true.bandwidth, true.latency), rel=0.02)
    every = {kind: true.factors.get(kind, 1.0) for kind in found.factors}
    assert found.factors == pytest.approx(every, rel=0.02) and len(every) == len(KINDS) - 1


@pytest.mark.slow
def test_what_was_not_measured_is_the_bases() -> None:
    base, alone = Cluster.preset("h100"), kernels(GPU, LARGE)
    one = cluster_of(alone, base, name="one", groups=(1,), units=108)
    assert one.links == base.links and one.group_sizes == base.group_sizes
    assert (one.device.memory, one.device.host) == (base.device.memory, base.device.host)
    launched = cluster_of([*alone, Sample(LAUNCH, "float32", (64,), 7e-6)], base, name="one", groups=(1,), units=108)
    assert launched.device == replace(one.device, host=7e-6)
    node = cluster_of(alone + collectives(INNER, 0, 4), base, name="node", groups=(4,), units=108)
    assert node.links[1] == base.links[1] and node.group_sizes == base.group_sizes
    assert node.links[0].bandwidth == pytest.approx(INNER.bandwidth, rel=0.05)
    samples = alone + collectives(INNER, 0, 4) + collectives(OUTER, 1, 2)
    both = cluster_of(samples, Cluster.preset("cpu"), name="both", groups=(4,), units=108)
    assert both.group_sizes == (4,)
    assert [link.bandwidth for link in both.links] == pytest.approx([INNER.bandwidth, OUTER.bandwidth], rel=0.05)
    assert Cluster.from_toml(both.to_toml()) == both


@pytest.mark.slow
def test_racks_and_what_groups_lose_that_share_cards() -> None:
    near, far, racks = INNER, replace(OUTER, contention=0.7), Link("racks", 5e7, 1e-3)
    true = Cluster("true", GPU, (near, far, racks), (4, 8))
    crowded = [Sample("all_reduce", "float32", (size, 4), 1.0, 1, 2) for size in (1 << 20, 1 << 22, 1 << 24)]
    times = predicted_seconds(crowded, GPU, true.links, true.group_sizes)
    crowded = [replace(s, seconds=float(t)) for s, t in zip(crowded, times, strict=True)]
    plain = [s for level, link in enumerate(true.links) for s in collectives(link, level, 2, GPU.launch)]
    found = cluster_of(kernels(GPU, LARGE) + plain + crowded, true, name="found", groups=(4, 8), units=108)
    assert found.group_sizes == (4, 8)
    assert [link.bandwidth for link in found.links] == pytest.approx([k.bandwidth for k in true.links], rel=0.05)
    assert [link.contention for link in found.links] == pytest.approx([0, 0.7, 0], abs=0.05)
    assert "contention 0.7" in calibration_table(found, crowded, times.tolist(), width=100)


@pytest.mark.slow
def test_what_kernels_lose_to_collectives_and_each_other_is_found_again() -> None:
    true, device = replace(INNER, wait=3e-3, occupies=0.4), replace(CPU, alone=1.7)
    made = [Sample(ALONE, "float32", sizes, 1.0) for sizes in ALONE_SIZES]
    made += [Sample(BESIDE, "float32", (size, 4), 1.0) for size in HIDDEN] + [Sample(BEHIND, "float32", (4096, 4), 1.0)]
    times = predicted_seconds(made, device, [true])
    made = [replace(s, seconds=float(t)) for s, t in zip(made, times, strict=True)]
    samples = [*kernels(CPU, SMALL), *collectives(INNER, 0, 4, CPU.launch), *made]
    found = cluster_of(samples, Cluster.preset("cpu"), name="found", groups=(4,))
    assert (found.links[0].wait, found.links[0].occupies) == pytest.approx((3e-3, 0.4), rel=0.05)
    assert found.device.alone == pytest.approx(1.7, rel=0.05)
    assert Cluster.from_toml(found.to_toml()) == found
    table = calibration_table(found, made, times.tolist(), width=100)
    assert "until all are there" in table and "occupies the" in table and "1.7 times as fast alone" in table


def test_groups_of_processes_are_checked() -> None:
    assert _levels(16, (4, 8)) == (4, 2, 2)
    assert _levels(4, (4,)) == (4, 1)
    with pytest.raises(RankError, match="12 processes are not made of groups of 8"):
        _levels(12, (8,))


def test_too_few_samples_are_refused() -> None:
    copies = [s for s in kernels(CPU, SMALL) if s.kind == "copy"]
    with pytest.raises(ValueError, match="matrix products and copies"):
        fit_device(copies, name="no products", memory=1e9)
    with pytest.raises(ValueError, match="there are none"):
        fit_link([], name="nothing")


def test_the_report_says_how_far_off_the_fit_is() -> None:
    samples = kernels(CPU, SMALL) + collectives(INNER, 0, 2)
    cluster = Cluster("mine", CPU, (INNER,))
    fitted = np.array([s.seconds for s in samples])
    fitted[0] *= 1.5
    facts = calibration_dict(cluster, samples, fitted.tolist())
    assert facts["errors"]["matmul"]["worst"] == pytest.approx(0.5)
    assert facts["errors"]["matmul"]["median"] == facts["errors"]["copy"]["worst"] == 0
    assert Cluster.from_toml(facts["cluster"]) == cluster
    assert len(facts["samples"]) == len(samples)
    table = calibration_table(cluster, samples, fitted.tolist(), width=80)
    assert "40 GFLOP/s in float32" in table and "50%" in table and "link inner" in table
    assert max(map(len, table.splitlines())) <= 80


def test_the_picture_has_equal_times_on_its_diagonal() -> None:
    samples = kernels(CPU, SMALL)
    picture = ET.fromstring(calibration_plot(samples, [s.seconds for s in samples]))
    space = "{http://www.w3.org/2000/svg}"
    dots = [c for c in picture.iter(f"{space}circle") if c.find(f"{space}title") is not None]
    assert len(dots) == len(samples)
    side = float(picture.find(f"{space}g/{space}rect").get("width"))  # type: ignore[union-attr,arg-type]
    assert all(float(c.get("cx", 0)) + float(c.get("cy", 0)) == pytest.approx(side, abs=0.2) for c in dots)
    assert all(0 <= float(c.get("cx", 0)) <= side for c in dots)


@pytest.mark.slow
def test_a_device_is_found_again_from_subsets_of_the_samples() -> None:
    """Whichever samples there are; the fit's start is as far off as the fastest of them is from the peak."""
    samples = kernels(GPU, LARGE)
    products = [s for s in samples if s.kind == "matmul"]
    for own in (samples, [s for s in samples if s.kind not in ATTENTION], [*products[::2], *samples[len(products) :]]):
        found = fit_device(own, name="subset", memory=GPU.memory, units=GPU.units)
        assert (found.bandwidth, found.launch) == pytest.approx((GPU.bandwidth, GPU.launch), rel=0.05)
        assert found.flops == pytest.approx(GPU.flops, rel=0.05)
