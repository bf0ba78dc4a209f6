"""The devices that are there: which preset is theirs, and what of their memory a plan may use by default."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from autopar.costs.budget import DeviceReserve, reserve_of
from autopar.costs.cluster import Cluster
from autopar.costs.known_devices import preset_for, with_node_of


def cluster_of_device(device: torch.device) -> Cluster:
    """The preset of a device, with as many of them a node as there are.

    Raises:
        ValueError: none is of this device.
    """
    if device.type != "cuda":
        return Cluster.preset("cpu")
    found = torch.cuda.get_device_properties(device)
    # torchrun tells how many processes a node has; each has a device of its own.
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    return with_node_of(preset_for(found.name, found.total_memory), devices)


def reserve_of_device(device: torch.device, axes: Mapping[str, int], processes: int) -> DeviceReserve:
    """What is set aside of a device's memory; of a machine without GPUs, of this process's share.

    Args:
        device: of this process.
        axes: name and size of each mesh axis.
        processes: that share the machine's memory, where it has no devices.
    """
    # Of all memory, not of what is free: the model's own parameters, which the plan counts, may take some already.
    if device.type == "cuda":
        kind = "rocm" if torch.version.hip else "cuda"
        return reserve_of(kind, torch.cuda.get_device_properties(device).total_memory, axes)
    share = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES") / processes
    # Half for everything else on the machine, of which the process itself is a part.
    return DeviceReserve(share, "cpu", 0.0, others=share / 2)
