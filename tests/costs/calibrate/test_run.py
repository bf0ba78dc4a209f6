"""Measuring on this machine: a process alone, and two with Gloo."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autopar.costs.calibrate import Settings, calibrate, measure, measure_over_processes, predicted_seconds
from autopar.costs.calibrate.collectives import KINDS
from autopar.costs.calibrate.kernels import Kernels
from autopar.costs.cluster import Cluster
from autopar.errors import RankError

FEW = Settings(
    ("float32", "float64"),
    Kernels(((1, 32, 32, 32), (2, 16, 16, 16)), ((1, 1, 16, 8),), (64, 4096)),
    sizes=(1024, 65536),
    runs=2,
    enough=1e-4,
    timeout=500.0,
)


def test_kernels_of_this_process() -> None:
    seen: list[tuple[int, int, str]] = []
    found = measure(FEW, torch.device("cpu"), lambda *progress: seen.append(progress))
    assert [s.kind for s in found] == 2 * ["matmul", "matmul", "attention", "causal", "training"] + ["copy"] * 2
    assert {s.dtype for s in found} == {"float32", "float64"}
    assert all(s.seconds > 0 for s in found)
    assert found[-1].sizes == (8 * 4096,)
    assert [(done, total) for done, total, _ in seen] == [(i + 1, len(found)) for i in range(len(found))]
    assert seen[0][2] == "matmul float32 1x32x32x32"


@pytest.mark.distributed
@pytest.mark.deep
def test_two_processes_and_the_link_between_them() -> None:
    pytest.importorskip("scipy")
    found = calibrate(FEW, ranks=2, base=None, name="here")
    assert found is not None
    cluster, samples = found
    assert [s.kind for s in samples if s.kind in KINDS] == [kind for kind in KINDS for _ in FEW.sizes]
    assert all(s.sizes[1] == 2 and s.level == 0 and s.seconds > 0 for s in samples if s.kind in KINDS)
    assert set(cluster.device.flops) == {"float32", "float64"}
    assert cluster.links[0].name == Cluster.preset("cpu").links[0].name
    assert cluster.links[0] != Cluster.preset("cpu").links[0]
    assert all(predicted_seconds(samples, cluster.device, cluster.links) > 0)


@pytest.mark.deep
@pytest.mark.distributed
def test_levels_of_links_and_groups_that_share_them() -> None:
    pytest.importorskip("scipy")
    sizes = (1024, 1 << 20)
    found = calibrate(replace(FEW, groups=(4,), sizes=sizes), ranks=8, base=None, name="here")
    assert found is not None
    cluster, samples = found
    assert cluster.group_sizes == (4,) and len(cluster.links) == 2
    levels = [(s.level, s.stride, s.sizes[1]) for s in samples if s.kind == "all_reduce"]
    assert levels == [(0, 0, 2)] * 2 + [(0, 0, 4)] * 2 + [(1, 0, 2)] * 2 + [(1, 2, 4)]


def test_processes_that_take_too_long_are_ended() -> None:
    with pytest.raises(RankError, match="not measured within 0 s"):
        measure_over_processes(2, Settings(timeout=0.01))


def test_a_gpu_of_no_preset_needs_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not measured would be another device's."""
    pytest.importorskip("scipy")
    reported = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=24 << 30, multi_processor_count=128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: reported)
    with pytest.raises(ValueError, match=r"GeForce RTX 4090 with 24\.0 GiB: name one .* calibrate --base PRESET"):
        calibrate(FEW, ranks=1, base=None, name="here")
