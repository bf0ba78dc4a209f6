"""Figures that stand for several devices or links: of the slowest, and such that bound shared work from below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.costs.device import ALGORITHMS, Device, Link

_LEAST = 1e-15
"""Seconds per message of a link whose latency cannot be bounded."""


def slower(device: Device, speed: float) -> Device:
    """A device whose kernels take ``1 / speed`` times as long; its copies to the host take as long as they did."""
    if speed == 1.0:
        return device
    flops = {dtype: rate * speed for dtype, rate in device.flops.items()}
    return replace(device, flops=flops, bandwidth=device.bandwidth * speed, launch=device.launch / speed)


def slowest_device(devices: Sequence[Device]) -> Device:
    """A device that is in no figure better than any of some: what runs on all of them at once takes no longer.

    It counts as the slowest even where one is slower to compute and another to move data.
    """
    first = devices[0]
    if all(d == first for d in devices):
        return first
    together = dict.fromkeys(d.name for d in devices)
    dtypes = [d for d in first.flops if all(d in other.flops for other in devices)]
    if not dtypes:
        raise ValueError(f"devices {', '.join(together)} state flops of no common dtype: add one to each")
    rates = {dtype: min(d.flops[dtype] * d.efficiency for d in devices) for dtype in dtypes}
    # Shares are in the rates: one device's share must not count for another's peak.
    fused = min(d.flops[dtype] * d.efficiency * d.fused / rates[dtype] for d in devices for dtype in dtypes)
    return replace(
        first,
        name=f"slowest of {', '.join(together)}",
        flops=rates,
        efficiency=1.0,
        fused=min(1.0, fused),
        bandwidth=min(d.bandwidth * d.streaming for d in devices),
        host_bandwidth=min(d.host_bandwidth * d.streaming for d in devices),
        streaming=1.0,
        memory=min(d.memory for d in devices),
        # Whole waves of the one with the most units; what it loses in small products is more than others lose.
        units=max(d.units for d in devices),
        ramp=max(d.ramp for d in devices),
        launch=max(d.launch for d in devices),
        host=max(d.host for d in devices),
        copies=max(d.copies for d in devices),
        alone=min(d.alone for d in devices),
    )


def pooled_device(devices: Sequence[Device], weights: Sequence[float]) -> Device:
    """A device on which nothing takes longer than ``weight`` times what it takes on each of some devices.

    Work that is shared among them in any way takes the weighted sum of their times, so at least what all of it takes on
    this one. Devices that are alike in all but speed, with weights in proportion to it, are met exactly.

    Args:
        devices: at least one.
        weights: one each, positive.
    """
    first = devices[0]
    if all(d == first for d in devices) and all(w == 1.0 for w in weights):
        return first
    both = list(zip(devices, weights, strict=True))
    rates: dict[str, float] = {}
    for device, weight in both:
        for dtype, rate in device.flops.items():
            rates[dtype] = max(rates.get(dtype, 0.0), rate * device.efficiency / weight)
    fused = max(d.flops[t] * d.efficiency * d.fused / w / rates[t] for d, w in both for t in d.flops)
    # A multiple of whole waves of each device is one of waves of their greatest common divisor.
    units = math.gcd(*(d.units for d in devices))
    if units == 1 and first.units > 1:
        # Of two units at least: kernels of such devices draw dropout. Of u units and more one tile more is 1/u more.
        units, least = 2, min(d.units for d in devices)
        rates = {dtype: rate * (1 + 1 / least) for dtype, rate in rates.items()}
    return replace(
        first,
        name=f"average of {', '.join(dict.fromkeys(d.name for d in devices))}",
        flops=rates,
        efficiency=1.0,
        fused=min(1.0, fused),
        bandwidth=max(d.bandwidth * d.streaming / w for d, w in both),
        host_bandwidth=max(d.host_bandwidth * d.streaming / w for d, w in both),
        streaming=1.0,
        memory=min(d.memory for d in devices),
        units=units,
        ramp=min(d.ramp for d in devices),
        launch=min(d.launch * w for d, w in both),
        host=min(d.host * w for d, w in both),
        copies=max(d.copies for d in devices),
        alone=max(d.alone for d in devices),
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """A link that is in no figure better than any of some."""
    first = links[0]
    if all(link == first for link in links):
        return first
    return replace(
        first,
        name=f"slowest of {', '.join(dict.fromkeys(link.name for link in links))}",
        bandwidth=min(link.bandwidth for link in links),
        latency=max(link.latency for link in links),
        # Every library has rings.
        algorithms=tuple(a for a in ALGORITHMS if all(a in link.algorithms for link in links)) or ("ring",),
        copies=max(link.copies for link in links),
        contention=max(link.contention for link in links),
        wait=max(link.wait for link in links),
        occupies=max(link.occupies for link in links),
        factors={kind: max(link.factors.get(kind, 1.0) for link in links) for kind in _named(links)},
    )


def pooled_link(links: Sequence[Link], weights: Sequence[float]) -> Link:
    """A link on which nothing takes longer than ``weight`` times what it takes on each of some: `pooled_device`'s."""
    first = links[0]
    if all(link == first for link in links) and all(w == 1.0 for w in weights):
        return first
    both = list(zip(links, weights, strict=True))
    neighbors = {link.neighbors for link in links}
    # How many messages a tree sends in a row depends on the nodes, of which there are not as many everywhere.
    latency = min(link.latency * w for link, w in both) if len(neighbors) == 1 else _LEAST
    return replace(
        first,
        name=f"average of {', '.join(dict.fromkeys(link.name for link in links))}",
        bandwidth=max(link.bandwidth / w for link, w in both),
        latency=latency,
        algorithms=tuple(a for a in ALGORITHMS if any(a in link.algorithms for link in links)),
        copies=max(link.copies for link in links),
        wait=min(link.wait * w for link, w in both),
        occupies=min(link.occupies for link in links),
        factors={kind: min(link.factors.get(kind, 1.0) for link in links) for kind in _named(links)},
        neighbors=max(neighbors),
    )


def _named(links: Sequence[Link]) -> list[str]:
    """The collectives that some link has a factor of."""
    return list(dict.fromkeys(kind for link in links for kind in link.factors))
