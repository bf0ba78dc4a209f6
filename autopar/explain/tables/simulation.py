"""What `autopar simulate` prints: a pipelined step, device by device, or the step of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.ir.plan_table import figures, format_seconds, format_share, render

COLUMNS = ("device", "computes", "bubble", "exposed communication", "saved microbatches")


def pipeline_table(facts: Mapping[str, Any], width: int = 100) -> str:
    """A simulated pipeline as plain text.

    Args:
        facts: what was simulated (``schedule``, ``stages``, ``microbatches``, ``virtual``), and the outcome:
            ``step_seconds``, ``bubble`` and a row for each of ``devices``.
        width: columns.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in facts["devices"]:
        cells = (
            str(row["device"]),
            format_seconds(row["busy_seconds"]),
            format_share(row["bubble"]),
            format_seconds(row["exposed_communication_seconds"]),
            f"{row['peak_microbatches']:.3g}",
        )
        table.add_row(*map(Text, cells))
    virtual = f" of {facts['virtual']} virtual stages each" if facts["virtual"] > 1 else ""
    rows = [
        ("schedule", f"{facts['schedule']}: {facts['stages']} stages{virtual}, {facts['microbatches']} microbatches"),
        ("step", format_seconds(facts["step_seconds"])),
        ("bubble", f"{format_share(facts['bubble'])} of the step, on average over the devices"),
        ("saved microbatches", "the most whose activations a device has saved at a time"),
    ]
    return render([table, figures(rows)], width)


def step_table(facts: Mapping[str, Any], width: int = 100) -> str:
    """A plan's simulated step as plain text.

    Args:
        facts: from `autopar.simulate.graph_tasks.step_facts`.
        width: columns.
    """
    sums = ", ".join(f"{format_seconds(s)} on {axis}" for axis, s in facts["communication_seconds"].items())
    peak, apart = facts["peak_memory_bytes"], "" if facts["overlap"] else ", nothing overlapped"
    rows = [
        ("step", f"{format_seconds(facts['step_seconds'])}, without the optimizer's"),
        ("planned as", f"{format_seconds(facts['predicted_step_seconds'])}{apart}"),
        ("computes", format_seconds(facts["busy_seconds"])),
        ("communicates", sums or "never"),
        ("exposed", f"{format_seconds(facts['exposed_communication_seconds'])} of it, not overlapped with compute"),
        ("waits", f"{format_seconds(facts['waiting_seconds'])} for the host, which launches kernels, and for copies"),
        ("peak memory", format_bytes(sum(peak.values()))),
        *((f"  {name}", format_bytes(size)) for name, size in sorted(peak.items(), key=lambda x: -x[1]) if size),
    ]
    return render([figures(rows)], width)
