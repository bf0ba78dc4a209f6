"""Samples that take just what the cost model says of a device or a link."""

from dataclasses import replace

from autopar.costs.calibrate import Sample, predicted_seconds
from autopar.costs.calibrate.collectives import KINDS, SIZES
from autopar.costs.calibrate.kernels import Kernels
from autopar.costs.calibrate.sample import ATTENTION
from autopar.costs.cluster import Device, Link

CPU = Device("a CPU", {"float32": 4e10, "float64": 2e10}, 4e9, 8e9, 3e-6, ramp=12.0)
GPU = Device("a GPU", {"bfloat16": 3e14}, 8e10, 2e12, 5e-6, units=108, ramp=200.0, fused=0.4)
INNER, OUTER = Link("inner", 3e9, 4e-5), Link("outer", 2e8, 3e-4)


def kernels(device: Device, chosen: Kernels) -> list[Sample]:
    """Samples that take just what the cost model says."""
    copies = [Sample("copy", "float32", (8 * n,), 1.0) for n in chosen.copies]
    found = [Sample("matmul", d, s, 1.0) for d in device.flops for s in chosen.products]
    found += [Sample(kind, d, s, 1.0) for d in device.flops for s in chosen.attentions for kind in ATTENTION]
    times = predicted_seconds(found + copies, device, ())
    return [replace(s, seconds=float(t)) for s, t in zip(found + copies, times, strict=True)]


def collectives(link: Link, level: int, members: int, launch: float = 0.0) -> list[Sample]:
    rows = [Sample(kind, "float32", (size, members), 1.0, level) for kind in KINDS for size in SIZES]
    times = predicted_seconds(rows, replace(CPU, launch=launch or 1e-300), (link,) * (level + 1))
    return [replace(s, seconds=float(t)) for s, t in zip(rows, times, strict=True)]
