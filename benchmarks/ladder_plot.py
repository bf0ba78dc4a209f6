"""A picture of ladders: for each the step's time above, and below what a device holds at its peak, by category."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

COLOURS = {
    "parameters": "#4c78a8",
    "optimizer": "#9ecae9",
    "gradients": "#72b7b2",
    "activations": "#f58518",
    "transient": "#ffbf79",
    "communication": "#b279a2",
    "other": "#bab0ac",
}
WIDTH, HEIGHT, LEFT, TIMES, BARS = 470, 345, 50, 90, 150
"""Of a panel, of its margin, and of its two parts, in pixels."""

ABOVE = 62
"""Pixels above both parts, for the title."""


def svg(ladders: Sequence[dict[str, Any]], columns: int = 2) -> str:
    """The ladders side by side."""
    rows = -(-len(ladders) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT + 50}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    for i, found in enumerate(ladders):
        lines.append(f'<g transform="translate({i % columns * WIDTH},{i // columns * HEIGHT})">')
        lines += [*panel(found), "</g>"]
    for i, (name, color) in enumerate(COLOURS.items()):
        x, y = LEFT + 105 * (i % 4), rows * HEIGHT + 5 + 18 * (i // 4)
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 16}" y="{y + 10}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def panel(found: dict[str, Any]) -> Iterator[str]:
    """One ladder; a rung is as wide as any other, and its budget is the line over its bar."""
    rungs = found["rungs"]
    fitting = [r for r in rungs if "step_s" in r]
    slow, most = max(r["step_s"] for r in fitting), max(r["budget"] for r in rungs)
    step, top = (WIDTH - LEFT - 20) / len(rungs), ABOVE + TIMES
    yield f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{found["ladder"]}</text>'
    yield f'<text x="{LEFT}" y="38" fill="#555">predicted ms of a step; MiB at the peak, the budget as a line</text>'
    points = []
    for i, row in enumerate(rungs):
        x, width = LEFT + i * step, 0.7 * step
        limit = top + 20 + BARS * (1 - row["budget"] / most)
        yield f'<path d="M{x - 2:.1f} {limit:.1f}h{width + 4:.1f}" stroke="black" stroke-width="1.5"/>'
        yield f'<text x="{x:.1f}" y="{top + BARS + 34}">{row["budget"] / 2**20:.0f}</text>'
        if "step_s" not in row:
            yield f'<text x="{x:.1f}" y="{top + BARS + 16}" fill="#c00">none</text>'
            continue
        y = ABOVE + TIMES * (1 - 0.9 * row["step_s"] / slow)
        points.append((x + width / 2, y))
        yield f'<text x="{x:.1f}" y="{y - 6:.1f}">{1e3 * row["step_s"]:.0f}</text>'
        yield from bar(row["held"], x, width, top + 20 + BARS, BARS / most)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="#e45756" stroke-width="2"/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#e45756"/>' for x, y in points)


def bar(held: dict[str, float], x: float, width: float, bottom: float, scale: float) -> Iterator[str]:
    """Categories on top of each other; what has no color of its own together."""
    sizes = {name: held.get(name, 0.0) for name in COLOURS if name != "other"}
    sizes["other"] = sum(size for name, size in held.items() if name not in COLOURS)
    for name, size in sizes.items():
        bottom -= size * scale
        place = f'x="{x:.1f}" y="{bottom:.1f}" width="{width:.1f}" height="{size * scale:.1f}"'
        yield f'<rect {place} fill="{COLOURS[name]}"/>'
