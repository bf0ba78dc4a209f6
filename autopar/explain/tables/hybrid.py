"""What `autopar plan` prints of a plan with predicted stages: times, stage by stage, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.ir.plan_table import figures, format_seconds, format_share, render


def hybrid_table(facts: Mapping[str, Any], width: int = 100) -> str:
    """A predicted step as plain text.

    Args:
        facts: `autopar.explain.hybrid.predict.Hybrid.to_dict`.
        width: columns.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("stage", "forward", "backward"):
        table.add_column(name, justify="right")
    for stage, (forward, backward) in enumerate(zip(facts["forward_seconds"], facts["backward_seconds"], strict=True)):
        table.add_row(*map(Text, (str(stage), format_seconds(forward), format_seconds(backward))))
    memory = facts["memory_bytes"]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items())
    rows = [
        ("predicted step", format_seconds(facts["step_seconds"])),
        ("pipeline", f"{format_seconds(facts['pipeline_seconds'])}, {facts['microbatches']} microbatches of one data "
                     f"rank; bubble {format_share(facts['bubble'])}"),
        ("gradients", f"{format_seconds(facts['reduce_seconds'])} to reduce them over the data ranks"),
        ("optimizer", f"{format_seconds(facts['update_seconds'])}, with the norm of the gradients"),
        ("memory per device", f"{format_bytes(sum(memory.values()))} on the fullest stage: {parts}"),
    ]  # fmt: skip
    return render([table, figures(rows)], width)
