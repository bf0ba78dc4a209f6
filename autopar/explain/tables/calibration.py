"""A calibration: measured against fitted times, as plain data, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.calibrate import Sample
from autopar.costs.cluster import Cluster
from autopar.ir.plan_table import figures, format_seconds, render

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
SIDE, MARGIN = 560, 70


def calibration_dict(cluster: Cluster, samples: Sequence[Sample], fitted: Sequence[float]) -> dict[str, Any]:
    """The cluster as TOML, errors by kind, and every sample with its fitted seconds."""
    rows = [
        {
            "kind": s.kind,
            "dtype": s.dtype,
            "sizes": list(s.sizes),
            "level": s.level,
            "stride": s.stride,
            "seconds": s.seconds,
            "fitted": f,
        }
        for s, f in zip(samples, map(float, fitted), strict=True)
    ]
    errors = {kind: {"count": n, "median": m, "worst": w} for kind, n, m, w in _errors(samples, fitted)}
    return {"cluster": cluster.to_toml(), "errors": errors, "samples": rows}


def calibration_table(cluster: Cluster, samples: Sequence[Sample], fitted: Sequence[float], width: int = 100) -> str:
    """The fitted figures of the cluster, and how far the fit is from the measurements."""
    device = cluster.device
    rates = ", ".join(f"{rate / 1e9:.4g} GFLOP/s in {dtype}" for dtype, rate in device.flops.items())
    rows = [
        ("device", device.name),
        ("arithmetic", rates + (f", {device.alone:.2g} times as fast alone" if device.alone > 1 else "")),
        ("memory", f"{device.bandwidth / 1e9:.4g} GB/s"),
        ("launch", format_seconds(device.launch)),
        *(
            (
                f"link {link.name}",
                f"{link.bandwidth / 1e9:.4g} GB/s, {format_seconds(link.latency)} a message"
                + (f", contention {link.contention:.2g}" if link.contention else "")
                + (f", {format_seconds(link.wait)} until all are there" if link.wait else "")
                + (f", occupies the device for {link.occupies:.0%} of it" if link.occupies else "")
                + "".join(f", {kind} x {factor:.2g}" for kind, factor in link.factors.items()),
            )
            for link in cluster.links
        ),
    ]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("measured", "samples", "median error", "worst error"):
        table.add_column(title, justify="left" if title == "measured" else "right", no_wrap=True)
    for kind, count, median, worst in _errors(samples, fitted):
        table.add_row(*map(Text, (kind, str(count), f"{100 * median:.3g}%", f"{100 * worst:.3g}%")))
    return render([figures(rows), table], width)


def calibration_plot(samples: Sequence[Sample], fitted: Sequence[float]) -> str:
    """An SVG picture: measured seconds to the right, fitted ones upwards, both logarithmic; equal ones on the line."""
    every = [s.seconds for s in samples] + [float(f) for f in fitted]
    # Whole decades, so that the labels are round numbers.
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    kinds = list(dict.fromkeys(s.kind for s in samples))
    color = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(kinds)}

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / max(1, high - low) * SIDE

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + 2 * MARGIN + 110} {SIDE + 2 * MARGIN}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({MARGIN},{MARGIN})">',
        f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        f'<line x1="0" y1="{SIDE}" x2="{SIDE}" y2="0" stroke="#888" stroke-dasharray="4 4"/>',
    ]
    # SVG's y axis points down: what is large has a small y.
    for power in range(low, high + 1):
        where, text = at(10.0**power), format_seconds(10.0**power)
        lines.append(f'<text x="{where:.1f}" y="{SIDE + 20}" text-anchor="middle">{text}</text>')
        lines.append(f'<text x="-8" y="{SIDE - where + 4:.1f}" text-anchor="end">{text}</text>')
    for sample, seconds in zip(samples, map(float, fitted), strict=True):
        # Hovering over a point shows its sizes and seconds.
        title = escape(f"{sample.kind} {sample.dtype} {'x'.join(map(str, sample.sizes))}")
        numbers = f"measured {format_seconds(sample.seconds)}, fitted {format_seconds(seconds)}"
        lines.append(
            f'<circle cx="{at(sample.seconds):.1f}" cy="{SIDE - at(seconds):.1f}" r="4" fill="{color[sample.kind]}" '
            f'fill-opacity="0.7"><title>{title}: {numbers}</title></circle>'
        )
    for i, kind in enumerate(kinds):
        lines.append(f'<circle cx="{SIDE + 18}" cy="{20 * i + 10}" r="5" fill="{color[kind]}"/>')
        lines.append(f'<text x="{SIDE + 30}" y="{20 * i + 15}">{escape(kind)}</text>')
    lines += [
        f'<text x="{SIDE / 2}" y="{SIDE + 45}" text-anchor="middle">measured</text>',
        f'<text transform="translate(-52,{SIDE / 2}) rotate(-90)" text-anchor="middle">fitted</text>',
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _errors(samples: Sequence[Sample], fitted: Sequence[float]) -> Iterable[tuple[str, int, float, float]]:
    """Kind, how many, median and largest relative error."""
    for kind in dict.fromkeys(s.kind for s in samples):
        pairs = [(s.seconds, float(f)) for s, f in zip(samples, fitted, strict=True) if s.kind == kind]
        # Relative errors: kernels of microseconds and milliseconds are in one row.
        errors = np.array([abs(f / s - 1) for s, f in pairs])
        yield kind, len(pairs), float(np.median(errors)), float(errors.max())
