"""What `autopar simulate` prints: a pipelined step, device by device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.report.table import figures, format_seconds, format_share, render

COLUMNS = ("device", "computes", "bubble", "exposed communication", "microbatches held")


def pipeline_table(facts: Mapping[str, Any], width: int = 100) -> str:
    """A simulated pipeline as plain text.

    Args:
        facts: what was simulated (``schedule``, ``stages``, ``microbatches``, ``virtual``), and what was found:
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
    virtual = f" of {facts['virtual']} virtual ones each" if facts["virtual"] > 1 else ""
    rows = [
        ("schedule", f"{facts['schedule']}: {facts['stages']} stages{virtual}, {facts['microbatches']} microbatches"),
        ("step", format_seconds(facts["step_seconds"])),
        ("bubble", f"{format_share(facts['bubble'])} of the step, mean of the devices: nothing is computed"),
        ("held", "most microbatches whose activations a device keeps at a time"),
    ]
    return render([table, figures(rows)], width)
