"""Which preset describes a device, by the name and the memory that its driver reports."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from autopar.costs.cluster import PRESETS, Cluster
from autopar.costs.memory import format_bytes


class Product(NamedTuple):
    """A name of a product, whole, as a regular expression; and the preset with its figures."""

    name: str
    preset: str


PRODUCTS: tuple[Product, ...] = (
    Product(r"A100-SXM4?-40GB", "a100-40gb"),
    Product(r"A100-SXM4?-80GB", "a100-80gb"),
    Product(r"A100-PCIE-40GB", "a100-40gb-pcie"),
    Product(r"A100(-PCIE-80GB| 80GB PCIE)", "a100-80gb-pcie"),
    Product(r"H100( SXM5)? 80GB HBM3", "h100"),
    Product(r"H100 PCIE", "h100-pcie"),
    Product(r"H100 NVL", "h100-nvl"),
    Product(r"H200", "h200"),
    Product(r"B200", "b200"),
    Product(r"L4", "l4"),
    Product(r"INSTINCT MI300X( OAM| VF)?", "mi300x"),  # VF: a whole device, in a virtual machine
)
"""What drivers call the devices of the presets, without the vendor.

Variants with other figures (A800, H20, H100 with 96 GB, H200 NVL, GH200) are not among them: no preset is theirs.
"""

SHARES = (0.9, 1.12)
"""Of the datasheet's memory in decimal bytes, what drivers report: 0.98 (L4, without what ECC takes) to 1.07.

Those of HBM give a datasheet's 80 GB as nearly 80 GiB. Less is a part of a device: an instance of MIG, a partition.
"""


def preset_for(name: str, memory: float) -> Cluster:
    """The preset of a device, with the memory that it reports.

    Args:
        name: what `torch.cuda.get_device_properties` calls it, with or without its vendor.
        memory: bytes that it reports.

    Raises:
        ValueError: no preset is of this device; the remedies are to name one or to measure.

    >>> preset_for("NVIDIA A100 80GB PCIe", 85.0e9).name
    'a100-80gb-pcie'
    """
    product = re.sub(r"^(NVIDIA|AMD) ", "", name.strip().upper())
    for row in PRODUCTS:
        if re.fullmatch(row.name, product):
            known = Cluster.preset(row.preset)
            if SHARES[0] <= memory / known.device.memory <= SHARES[1]:
                return replace(known, device=replace(known.device, memory=float(memory)))
    raise ValueError(
        f"no cluster preset describes the device {name} with {format_bytes(memory)}: name one that is like it, or a "
        "TOML file of yours, with cluster= or --cluster; or measure it with `autopar calibrate --base PRESET --save "
        f"FILE.toml`, where PRESET has what is not measured (known: {', '.join(PRESETS)})"
    )


def with_node_of(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with so many devices a node, which is its outermost group.

    Args:
        cluster: of a preset.
        devices: in a node.

    >>> pair = with_node_of(Cluster.preset("h100"), 4)
    >>> pair.group_sizes, [link.name for link in pair.link_for({"node": 2, "gpu": 4})]
    ((4,), ['InfiniBand NDR', 'NVLink 4'])
    """
    if not cluster.group_sizes:
        return cluster
    *inside, near, far = cluster.links
    # Groups within a node: those that a node has several of, whole.
    kept = [(n, link) for n, link in zip(cluster.group_sizes, inside, strict=False) if n < devices and devices % n == 0]
    if inside and devices <= cluster.group_sizes[0]:  # a node within such a group
        near = inside[0]
    sizes = (*(n for n, _ in kept), devices)
    return replace(cluster, group_sizes=sizes, links=(*(link for _, link in kept), near, far))
