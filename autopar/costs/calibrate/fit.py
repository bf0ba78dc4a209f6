"""Fit a device and its links to samples: the figures under which the cost model's own formulas say what was timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autopar.costs.calibrate.sample import ALONE, ATTENTION, BEHIND, BESIDE, LAUNCH, Sample
from autopar.costs.calibrate.several_starts import Floats, fit_within, require_scipy, scattered
from autopar.costs.cluster import Cluster, Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.flops import attention_backward_flops, attention_flops
from autopar.costs.kernels import Work, kernel_seconds, product, stream

STARTS = 4
"""From what the samples show, and from up to five times and a fifth of it."""


def fit_device(samples: Sequence[Sample], *, name: str, memory: float, units: int = 1) -> Device:
    """The device whose kernels take the times of the samples, as nearly as may be.

    Rates, bandwidth and launch are fitted as they are reached, so that efficiency and streaming are 1. The share that
    attention reaches is fitted where there are samples of it, and so is the ramp.
    What counts is the ratio of predicted to measured seconds; outliers count less (least squares with a soft absolute
    loss, from the fastest of each kind and from around it).

    Args:
        samples: kernels; a dtype without matrix products gets no rate.
        name: of the device.
        memory: its bytes.
        units: processors that work on a tile each, such as streaming multiprocessors; 1 on a CPU.

    Raises:
        ValueError: there are no products or no copies, or scipy is missing.
    """
    products = [s for s in samples if s.kind == "matmul"]
    copies = [s for s in samples if s.kind == "copy"]
    if not products or not copies:
        raise ValueError("a device is fitted to matrix products and copies; measure both")
    dtypes = tuple(dict.fromkeys(s.dtype for s in products))
    # The start of the fit: each figure as the one sample shows it that depends on it most.
    fastest = {d: max(_flops(s) / s.seconds for s in products if s.dtype == d) for d in dtypes}
    bandwidth = max(s.sizes[0] / s.seconds for s in copies)
    launch = min(s.seconds for s in samples)
    start = Device(name, fastest, memory, bandwidth, launch, units=units, ramp=64.0 if units > 1 else 8.0)

    has_attention = any(s.kind in ATTENTION and s.dtype in dtypes for s in samples)

    def device(logs: Floats) -> Device:
        # Logarithms keep the figures positive, and make a step of the fit relative to their size.
        values = [float(v) for v in np.exp(logs)]
        ramp = values.pop()
        fused = min(values.pop(), 1.0) if has_attention else 1.0
        return replace(
            start, bandwidth=values[0], launch=values[1], flops=dict(zip(dtypes, values[2:], strict=True)), ramp=ramp,
            fused=fused,
        )  # fmt: skip

    first = [
        bandwidth,
        launch,
        *fastest.values(),
        *([0.5] if has_attention else []),
        start.ramp,
    ]
    used = [s for s in samples if s.dtype in dtypes or s.kind == "copy"]
    return device(_least_squares(lambda logs: _ratios(used, kernels_seconds(used, device(logs))), first))


def fit_link(
    samples: Sequence[Sample],
    *,
    name: str,
    launch: float = 0.0,
    algorithms: tuple[str, ...] = ("ring",),
    copies: float = 0.0,
) -> Link:
    """The link whose collectives take the times of the samples.

    The first kind of the samples has a factor of 1, see `Link.factors`; those of the others are fitted.

    Args:
        samples: collectives of one level.
        name: of the link.
        launch: seconds that each costs besides, as `Device.launch` says.
        algorithms: that the library has.
        copies: that it makes.

    Raises:
        ValueError: there are no samples, or scipy is missing.
    """
    if not samples:
        raise ValueError("a link is fitted to collectives; there are none")
    # The largest message tells the bandwidth, the shortest time a member tells the latency.
    largest = max(samples, key=lambda s: s.sizes[0])
    _, *others = dict.fromkeys(s.kind for s in samples)
    first = [largest.sizes[0] / largest.seconds, min(s.seconds / s.sizes[1] for s in samples), *(1.0 for _ in others)]

    def link(logs: Floats) -> Link:
        bandwidth, latency, *factors = (float(v) for v in np.exp(logs))
        return Link(name, bandwidth, latency, algorithms, copies, factors=dict(zip(others, factors, strict=True)))

    return link(_least_squares(lambda logs: _ratios(samples, collectives_seconds(samples, link(logs), launch)), first))


def fit_contention(samples: Sequence[Sample], cluster: Cluster) -> float:
    """How much groups that share the cards of a node get in each other's way, see `Link.contention`.

    Args:
        samples: collectives of such groups.
        cluster: with everything else fitted.

    Raises:
        ValueError: scipy is missing.
    """
    require_scipy()
    from scipy.optimize import minimize_scalar

    def loss(contention: float) -> float:
        near, far, *others = cluster.links
        links = (near, replace(far, contention=contention), *others)
        seconds = predicted_seconds(samples, cluster.device, links, cluster.group_sizes)
        # The absolute loss: a few samples on shared machines are far off.
        return float(np.abs(_ratios(samples, seconds)).sum())

    return float(minimize_scalar(loss, bounds=(0.0, 4.0), method="bounded").x)


def fit_alone(samples: Sequence[Sample], device: Device) -> float:
    """How many times as fast a device is while the others do nothing, see `Device.alone`: the median of the samples.

    Args:
        samples: of kernels of one process alone.
        device: fitted to what all do at once.
    """
    together = kernels_seconds([replace(s, kind="matmul") for s in samples], device)
    return max(1.0, float(np.median(together / [s.seconds for s in samples])))


def fit_occupies(samples: Sequence[Sample], link: Link, launch: float) -> float:
    """The share of a reduction's seconds that kernels beside it lose, see `Link.occupies`: the median of the samples.

    Args:
        samples: of kernels beside reductions over the link.
        link: with everything else fitted.
        launch: see `fit_link`.
    """
    shares = [s.seconds for s in samples] / collectives_seconds(_reductions(samples), link, launch)
    return float(np.clip(np.median(shares), 0.0, 1.0))


def fit_wait(samples: Sequence[Sample]) -> float:
    """What kernels wait for a collective besides, see `Link.wait`: the median of the samples.

    Args:
        samples: of small reductions behind kernels over the link.
    """
    return float(np.median([s.seconds for s in samples]))


def predicted_seconds(
    samples: Sequence[Sample], device: Device, links: Sequence[Link], groups: Sequence[int] = ()
) -> Floats:
    """What the cost model says of each sample.

    Args:
        samples: kernels and collectives.
        device: that runs them.
        links: of each level.
        groups: as `Cluster.group_sizes`, where samples have a stride.
    """
    found = np.zeros(len(samples))
    for i, sample in enumerate(samples):
        if sample.stride:
            axes = {"members": sample.sizes[1], "between": sample.stride}
            link = Cluster("measured", device, tuple(links), tuple(groups)).link_for(axes)[0]
            found[i] = collectives_seconds([sample], link, device.launch)[0]
        elif sample.kind == LAUNCH:
            found[i] = device.host
        elif sample.kind == ALONE:
            found[i] = kernels_seconds([replace(sample, kind="matmul")], device)[0] / device.alone
        elif sample.kind == BEHIND:
            found[i] = links[sample.level].wait
        elif sample.kind == BESIDE:
            link = links[sample.level]
            found[i] = link.occupies * collectives_seconds(_reductions([sample]), link, device.launch)[0]
        elif sample.kind in COLLECTIVES:
            found[i] = collectives_seconds([sample], links[sample.level], device.launch)[0]
        else:
            found[i] = kernels_seconds([sample], device)[0]
    return found


def kernels_seconds(samples: Sequence[Sample], device: Device) -> Floats:
    """What the cost model says of kernels."""
    some = next(iter(device.flops))  # a copy computes nothing, at any rate
    dtypes = [some if s.kind == "copy" else s.dtype for s in samples]
    found = np.zeros(len(samples))
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, d in enumerate(dtypes) if d == dtype]
        work = Work.join([_work(samples[i]) for i in chosen])
        found[chosen] = kernel_seconds(work, dtype, device)
    return found


def collectives_seconds(samples: Sequence[Sample], link: Link, launch: float) -> Floats:
    """What the cost model says of collectives over one link."""
    return np.array([launch + float(COLLECTIVES[s.kind](s.sizes[0], s.sizes[1], link)) for s in samples])


def _reductions(samples: Sequence[Sample]) -> list[Sample]:
    """What ran beside the kernels."""
    return [replace(s, kind="all_reduce") for s in samples]


def _work(sample: Sample) -> Work:
    if sample.kind == "copy":
        return stream(sample.sizes[0])
    item = getattr(torch, sample.dtype).itemsize
    if sample.kind == "matmul":
        batch, rows, columns, depth = sample.sizes
        return product(rows, columns, depth, batch, item)
    batch, heads, positions, head = sample.sizes
    # The search counts it as one kernel, which is no product, of four tensors, and its backward as one of eight.
    is_trained, sizes = sample.kind == ATTENTION[2], (batch, heads, positions, positions, head)
    flops = attention_flops(*sizes, sample.kind != ATTENTION[0])
    flops += attention_backward_flops(*sizes, True) if is_trained else 0
    fused = stream((12 if is_trained else 4) * item * batch * heads * positions * head)
    return replace(fused, flops=np.array([float(flops)]))


def _flops(sample: Sample) -> float:
    return float(_work(sample).flops[0])


def _ratios(samples: Sequence[Sample], seconds: Floats) -> Floats:
    # Logarithms of ratios: kernels of microseconds count as much as those of milliseconds.
    return np.asarray(np.log(seconds) - np.log([s.seconds for s in samples]), dtype=np.float64)


def _least_squares(residuals: Callable[[Floats], Floats], first: Sequence[float]) -> Any:
    """Logarithms of the parameters that make the residuals least, of fits from around ``first``."""
    require_scipy()
    middle = np.log(np.array(first))
    # Within a factor of 1000: a figure that no sample depends on must not run away.
    limit = np.full(len(first), np.log(1e3))
    fits = [
        fit_within(lambda z: residuals(middle + z), z, -limit, limit, loss="soft_l1", scale=0.1, difference=1e-3)
        for z in scattered(len(first), STARTS, limit, spread=np.log(5.0))
    ]
    return middle + min(fits, key=lambda fit: fit.cost).x
