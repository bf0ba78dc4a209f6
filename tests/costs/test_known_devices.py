"""Devices by the names that drivers give them, and by what they report."""

from __future__ import annotations

import pytest

from autopar.costs.cluster import PRESETS, Cluster
from autopar.costs.known_devices import PRODUCTS, preset_for, with_node_of

GIB = 2**30

# Name and GiB as torch reports them, rounded.
KNOWN = [
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
    ("A100-SXM4-40GB", 39.6, "a100-40gb"),  # older drivers
    ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
    ("NVIDIA A100-SXM-80GB", 79.2, "a100-80gb"),
    ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb-pcie"),
    ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb-pcie"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
    ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
    ("NVIDIA H100 NVL", 93.0, "h100-nvl"),
    ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA B200", 178.4, "b200"),
    ("NVIDIA L4", 22.0, "l4"),
    ("AMD Instinct MI300X", 192.0, "mi300x"),
    ("AMD Instinct MI300X VF", 191.5, "mi300x"),
]
UNKNOWN = [
    ("NVIDIA GH200 480GB", 94.5),
    ("NVIDIA GeForce RTX 4090", 23.5),
    ("NVIDIA H200 NVL", 139.8),  # on PCIe, with fewer operations per second
    ("NVIDIA H20", 95.1),
    ("NVIDIA A800-SXM4-80GB", 79.2),
    ("NVIDIA A100-SXM-64GB", 63.4),
    ("NVIDIA A100X", 79.2),
    ("NVIDIA H100 96GB HBM3", 94.0),
    ("NVIDIA L40S", 44.4),
    ("NVIDIA GB200", 184.0),
    ("NVIDIA B300 SXM6 AC", 268.0),
    ("Tesla V100-SXM2-32GB", 31.7),
    ("AMD Instinct MI300A", 128.0),
    ("AMD Instinct MI325X", 256.0),
    # A part of a device has its name, but not its memory.
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
    ("NVIDIA H100 80GB HBM3", 9.8),
    ("AMD Instinct MI300X", 24.0),
    ("", 1.0),
]


@pytest.mark.parametrize(("name", "memory", "preset"), KNOWN, ids=[row[0] for row in KNOWN])
def test_a_known_device_has_its_preset_with_the_memory_that_it_reports(name: str, memory: float, preset: str) -> None:
    found, stated = preset_for(name, memory * GIB), Cluster.preset(preset)
    assert found.name == preset
    assert found.device.memory == memory * GIB
    assert (found.device.flops, found.device.bandwidth, found.links) == (
        stated.device.flops,
        stated.device.bandwidth,
        stated.links,
    )


@pytest.mark.parametrize(("name", "memory"), UNKNOWN, ids=[f"{name} {memory}" for name, memory in UNKNOWN])
def test_an_unknown_device_is_an_error_that_names_it_and_what_to_do(name: str, memory: float) -> None:
    with pytest.raises(ValueError, match="no cluster preset describes the device") as error:
        preset_for(name, memory * GIB)
    said = str(error.value)
    assert f"{name} with {memory:.1f} GiB" in said
    assert "cluster=" in said and "autopar calibrate --base PRESET" in said and "h100-pcie" in said


def test_every_preset_of_a_gpu_is_of_a_product() -> None:
    assert {row.preset for row in PRODUCTS} == {*PRESETS} - {"cpu"}
    assert {row.preset for row in PRODUCTS} == {preset for _, _, preset in KNOWN}


@pytest.mark.parametrize(
    ("preset", "devices", "sizes", "links"),
    [
        ("h100", 8, (8,), ("NVLink 4", "InfiniBand NDR")),
        ("h100", 4, (4,), ("NVLink 4", "InfiniBand NDR")),
        ("h100", 1, (1,), ("NVLink 4", "InfiniBand NDR")),
        ("h100", 16, (16,), ("NVLink 4", "InfiniBand NDR")),
        ("h100-nvl", 8, (2, 8), ("NVLink 4 bridge", "PCIe 5 x16", "InfiniBand NDR")),
        ("h100-nvl", 4, (2, 4), ("NVLink 4 bridge", "PCIe 5 x16", "InfiniBand NDR")),
        ("h100-nvl", 2, (2,), ("NVLink 4 bridge", "InfiniBand NDR")),
        ("h100-nvl", 1, (1,), ("NVLink 4 bridge", "InfiniBand NDR")),
        ("h100-nvl", 3, (3,), ("PCIe 5 x16", "InfiniBand NDR")),  # no pairs
        ("cpu", 4, (), ("Gloo over loopback",)),
    ],
)
def test_devices_of_a_node(preset: str, devices: int, sizes: tuple[int, ...], links: tuple[str, ...]) -> None:
    found = with_node_of(Cluster.preset(preset), devices)
    assert found.group_sizes == sizes
    assert tuple(link.name for link in found.links) == links


def test_devices_of_two_small_nodes_are_joined_by_the_network() -> None:
    """Of a node of 8 they would count as neighbors."""
    axes = {"node": 2, "gpu": 4}
    assert [link.name for link in Cluster.preset("h100").link_for(axes)] == ["NVLink 4", "NVLink 4"]
    small = with_node_of(Cluster.preset("h100"), 4)
    assert [link.name for link in small.link_for(axes)] == ["InfiniBand NDR", "NVLink 4"]
    # Two pairs with bridges: what goes from one to the other crosses PCIe.
    pairs = with_node_of(Cluster.preset("h100-nvl"), 4).link_for({"pair": 2, "gpu": 2})
    assert [link.name for link in pairs] == ["PCIe 5 x16", "NVLink 4 bridge"]
