"""What `parallelize` takes of the devices that are there, where the user names nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from autopar.costs.cluster import Cluster
from autopar.parallelize import _cluster
from autopar.runtime.mesh import MeshContext, one_device
from autopar.specialize import default_budget

GIB = 2**30


def context_of(monkeypatch: pytest.MonkeyPatch, name: str, memory: float) -> MeshContext:
    """One GPU that reports this."""
    reported = SimpleNamespace(name=name, total_memory=int(memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: reported)
    return MeshContext((("gpu", 4),), (0,), torch.device("cuda", 0))


def test_the_cluster_is_the_preset_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(monkeypatch, "NVIDIA A100-SXM4-40GB", 39.4 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = _cluster(context)
    assert (found.name, found.device.memory, found.group_sizes) == ("a100-40gb", int(39.4 * GIB), (4,))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _cluster(context).group_sizes == (2,)
    assert _cluster(one_device(torch.device("cpu"))).name == "cpu"


def test_a_device_of_no_preset_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(monkeypatch, "NVIDIA GeForce RTX 4090", 23.5 * GIB)
    with pytest.raises(
        ValueError, match=r"device NVIDIA GeForce RTX 4090 with 23\.5 GiB: name one .*`autopar calibrate"
    ):
        _cluster(context)


def test_the_default_budget_is_of_the_device_and_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(monkeypatch, "NVIDIA H100 80GB HBM3", 79.1 * GIB)
    budget = default_budget(context, Cluster.preset("cpu"))
    assert [t.name for t in budget.reserve.terms()] == ["process", "communicators", "workspace", "fragments"]
    assert budget.reserve.groups == 1 and 0.9 < budget / (79.1 * GIB) < 0.95
    # A process of a machine without GPUs has its share, and leaves half of that to everything else.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share = default_budget(one_device(torch.device("cpu")), Cluster.preset("cpu"))
    assert [t.name for t in share.reserve.terms()] == ["others"]
    assert share * 8 == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
