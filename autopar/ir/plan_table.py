"""A plan as text for people: layouts, what a step costs, and how far the plan is from the lower bound."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.costs.cluster import Cluster
from autopar.costs.device import FLOAT8
from autopar.costs.memory import format_bytes
from autopar.ir.plan import BY_AXES, MEMORY_REPAIR, PER_USE, ROUNDED, Certificate, ModuleRow, Plan

METHODS = {
    "elimination": "exact elimination of variables",
    "dual ascent": "dual ascent by message passing, then reduced-cost fixing",
    "ilp": "integer linear program",
    "multiplier": "Lagrange multiplier on memory",
    "time limit": "stopped by the time limit",
    "interrupted": "stopped by Ctrl-C",
    "Lagrangian": "Lagrangian of the memory constraint, exact at each multiplier; layers split between two of them",
    MEMORY_REPAIR: "minimum-memory plan, repaired until the peak of its graph fits",
    BY_AXES: "three axes, then two at a time, with a bound by blocks of axes",
}
"""How a search ended, in words; an unknown method is printed as it is."""

CATEGORIES = ("parameters", "gradients", "optimizer", "buffers")

LISTED = 4
"""Modules that are listed of a stage."""

PADDED = 4
"""Padded parameters that are listed."""

LEGEND = "{axis}: split over that axis; +sum{axis}: partial sums over it; xN: N repeated modules, added up"


def plan_table(plan: Plan, width: int = 100) -> str:
    """The plan as plain text, at most ``width`` columns wide.

    Args:
        plan: with or without a prediction; what was not predicted is left out.
        width: columns; from 60 on nothing is lost, long layouts are folded.
    """
    parts: list[RenderableType] = [_header(plan)]
    if plan.modules:
        parts.append(_modules(plan))
    if plan.predicted.step_seconds:
        parts.append(_totals(plan))
    parts.append(_certificate(plan.certificate))
    return render(parts, width)


def render(parts: Iterable[RenderableType], width: int) -> str:
    """Rich renderables as plain text without colors or trailing spaces."""
    buffer = io.StringIO()
    # No colors and no terminal: the text is the same in files, logs and tests.
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")


def format_seconds(seconds: float) -> str:
    """A duration for people, with three digits.

    >>> format_seconds(0.0123), format_seconds(4.2e-5), format_seconds(0)
    ('12.3 ms', '42 us', '0 s')
    """
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # Rounded to three digits 0.9996 ms is 1 ms, not 1000 us.
        if abs(seconds) >= 0.9995 * scale:
            return f"{float(f'{seconds / scale:.3g}'):g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_share(share: float) -> str:
    """A share in per cent; never rounded to zero.

    >>> format_share(0.0123), format_share(0.00001), format_share(0)
    ('1.23%', '0.001%', '0%')
    """
    return f"{float(f'{100 * share:.3g}'):g}%" if share >= 1e-7 or share == 0 else "less than 0.00001%"


def figures(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, a name and its value; long values are folded."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    return grid


_MEANING = {
    "local": "they train apart between exchanges",
    "compressed": "they exchange compressed gradients in each step (relative error: CompressedGradients.error)",
    "stale": "owners take their gradients as they come, of parameters that others have changed meanwhile",
}


def _header(plan: Plan) -> RenderableType:
    links = plan.cluster.link_for(dict(plan.axes))
    devices = math.prod(plan.axis_sizes)
    axes = ", ".join(f"{name}={size}" for name, size in plan.axes) or "none"
    over = ", ".join(f"{name} over {link.name}" for (name, _), link in zip(plan.axes, links, strict=True))
    rows = [
        ("axes", f"{axes} ({devices} device{'s' if devices != 1 else ''})"),
        ("cluster", f"{plan.cluster.name}: {_devices(plan.cluster)}" + (f"; {over}" if over else "")),
        ("optimizer", plan.optimizer),
    ]
    if plan.workers:
        (axis, count), all_axes = plan.workers[0], dict(plan.workers) | dict(plan.axes)
        over = plan.cluster.link_for(all_axes)[0].name
        role = plan.worker_role
        said = f"{count} along axis {axis} over {over} (role {role}), each on the axes above with its part of the batch"
        rows.append(("workers", f"{said}; {_MEANING[role]}: not equal to synchronous training"))
    for quantized in plan.quantized:
        rows.append(("quantized", f"{quantized}: not equal to exact training"))
    if plan.secondary:
        along = ", ".join(plan.secondary)
        rows.append(("secondary", f"the backward pass gathers copies of parameters, along {along} alone"))
    if plan.float8:
        device = plan.cluster.device
        emulated = FLOAT8 not in device.flops or plan.float8.startswith("mxfp8")
        slow = f"; on {device.name} values are multiplied in float32" if emulated else ""
        rows.append(("linear layers", f"{plan.float8}: {ROUNDED}{slow}"))
    if plan.pipeline is not None:
        parts = ", equal outputs are sent in parts" if plan.scatter else ""
        said = f"{len(plan.stages)} along axis {plan.pipeline.axis}, schedule {plan.pipeline.order}{parts}"
        rows.append(("stages", said))
        for number, stage in enumerate(plan.stages):
            first, others = ", ".join(m or "(model)" for m in stage.modules[:LISTED]), len(stage.modules) - LISTED
            on = f" on {stage.group}" if stage.group else ""
            rows.append((f"  stage {number}{on}", first + (f" and {others} more" if others > 0 else "")))
    if plan.padding:
        # The first few: a deep model may pad a parameter in every layer.
        some = [f"{name} to {'x'.join(map(str, shape))}" for name, shape in plan.padding.items()][:PADDED]
        more = len(plan.padding) - len(some)
        rows.append(("padded", ", ".join(some) + (f" and {more} more" if more else "")))
    return figures(rows)


def _devices(cluster: Cluster) -> str:
    """What the devices are, group by group."""
    if not cluster.groups:
        return cluster.device.name
    return ", ".join(
        f"{g.devices} of {g.name} ({g.device.name}" + (f" at {g.speed:g} of its speed" if g.speed != 1 else "") + ")"
        for g in cluster.groups
    )


def _modules(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption_justify="left")
    table.add_column("module and its layouts", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("sent per device", justify="right", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for row in plan.modules:
        layouts = Padding(figures(row.layouts.items()), (0, 0, 0, 2))
        name = Group(Text(_path(row), overflow="fold"), *([layouts] if row.layouts else []))
        sent = _traffic(row.communication_bytes, plan.axis_names)
        table.add_row(name, *map(Text, (format_seconds(row.seconds), sent, format_bytes(row.memory_bytes))))
    # A module may be in stages on several kinds.
    legend = f"{LEGEND}; times as on the slowest devices" if plan.cluster.groups else LEGEND
    table.caption = Text(legend, style="none")
    return table


def _path(row: ModuleRow) -> str:
    return (row.path or "(model)") + (f" x{row.instances}" if row.instances > 1 else "")


def _traffic(by_axis: Mapping[str, float], axes: Sequence[str]) -> str:
    return "\n".join(f"{axis} {format_bytes(by_axis[axis])}" for axis in axes if by_axis.get(axis)) or "-"


def _totals(plan: Plan) -> RenderableType:
    """Figures of a whole step on one device: seconds, traffic by axis, and memory by category."""
    predicted = plan.predicted
    exposed = format_seconds(max(0.0, predicted.device_seconds - predicted.compute_seconds - predicted.host_seconds))
    if plan.overlap:
        exposed = f"{format_seconds(predicted.communication_seconds)}, {exposed} of it not hidden"
    split = f"compute {format_seconds(predicted.compute_seconds)}, communication {exposed}"
    split += f", copies to the host and back {format_seconds(predicted.host_seconds)}" if predicted.host_seconds else ""
    waiting = predicted.waiting_seconds
    split += f", waiting for the host to launch kernels {format_seconds(waiting)}" if waiting else ""
    apart = "" if plan.overlap else ", nothing overlapped"
    rows = [("predicted step", f"{format_seconds(predicted.step_seconds)}: {split}{apart}")]
    for name, size in plan.axes:
        sent = format_bytes(predicted.communication_bytes.get(name, 0.0))
        counts = predicted.collectives.get(name, {})
        kinds = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in counts.items() if count)
        rows.append((f"axis {name} ({size})", f"{sent} sent per device; {kinds or 'no collectives'}"))
    if plan.overlap:
        rows.append(("overlap", "collectives of a block together, ahead of and beside kernels"))
    if plan.fused:
        rows.append(("kernels", "fused between collectives, as compile=True runs them"))
    if predicted.chunked_seconds:
        saved = format_seconds(predicted.chunked_seconds)
        rows.append(("chunks", f"products beside the collectives of their rows save {saved}"))
    memory = predicted.memory_bytes
    # Known categories first, in a fixed order.
    order = [name for name in CATEGORIES if name in memory] + [name for name in memory if name not in CATEGORIES]
    each = ", ".join(f"{name} {format_bytes(memory[name])}" for name in order)
    rows.append(("memory per device", f"{format_bytes(sum(memory.values()))}: {each}" if each else "not predicted"))
    peak = sorted(predicted.peak_bytes.items(), key=lambda item: -item[1])
    if peak:
        each = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak if size)
        rows.append(("peak in a step", f"{format_bytes(sum(size for _, size in peak))}: {each}"))
    if plan.certificate.memory_price > 0:
        rows.append(("shadow price of memory", price_text(plan)))
    if plan.microbatches > 1:
        rows.append(("microbatches", f"{plan.microbatches} parts of the batch in sequence; gradients accumulate"))
    if plan.shares is not None:
        said = f"{plan.shares} of these along axis {plan.shares.axis}; figures are of the devices that are done last"
        rows.append(("shares", said))
    if plan.offload:
        states = sum(name.startswith("parameter ") for name in plan.offload)
        kinds = f"{len(plan.offload) - states} kinds of saved values"
        kinds += f", optimizer state of {states} kinds of parameters" if states else ""
        rows.append(("offloaded", f"{format_bytes(predicted.host_bytes)} per device: {kinds}"))
    if plan.recompute:
        moved = sum(name.startswith("consumer ") for name in plan.recompute)
        per_use = sum(name.startswith(PER_USE) for name in plan.recompute)
        kinds = f"{len(plan.recompute) - moved - per_use} kinds of operators; re-gathered: {moved} kinds of values"
        kinds += f", {per_use} of them per use" if per_use else ""
        rows.append(("recomputed", kinds))
    return figures([("", ""), *rows])


def price_text(plan: Plan) -> str:
    """What a little more memory would save: of a GiB, or of less if a GiB is more than an eighth of the peak."""
    peak, size = sum(plan.predicted.peak_bytes.values()), 2.0**30
    # The price is a slope: it holds for changes that are small beside the peak.
    while size > peak / 8 and size > 1:
        size /= 8
    saved = plan.certificate.memory_price * size
    share = format_share(saved / max(plan.predicted.step_seconds, 1e-300))
    return f"{format_bytes(size)} more per device would save about {format_seconds(saved)} per step ({share})"


CLAIMED = "not here: these are the words of a file; `autopar check` derives them anew"


def _checked(certificate: Certificate) -> str:
    verified = certificate.checked or 0.0
    # Relative to the objective, as `Certificate.gap` is.
    distance = max(0.0, certificate.objective - verified) / max(certificate.objective, 1e-300)
    return (
        f"{format_seconds(verified)}: verified from duals, independently of the search; the objective is at most "
        f"{format_share(distance)} above"
    )


def _certificate(certificate: Certificate) -> RenderableType:
    gap, bound = certificate.gap, format_seconds(certificate.lower_bound)
    meaning = (
        f"no plan of the space below is predicted to take less than {bound} under the same costs"
        if certificate.lower_bound > 0
        else "no lower bound was proved"
    )
    return figures(
        [
            ("", ""),
            ("objective", f"{format_seconds(certificate.objective)} per step, as the search counts"),
            ("lower bound", f"{bound}: {meaning}"),
            ("gap", format_share(gap)),
            *([("checked", _checked(certificate))] if certificate.checked is not None else []),
            ("space", certificate.space),
            ("method", METHODS.get(certificate.method, certificate.method)),
            *([("verified", CLAIMED)] if certificate.claimed else []),
        ]
    )
