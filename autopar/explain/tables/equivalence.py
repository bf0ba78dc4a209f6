"""The outcome of `autopar.verify` as a table and as plain data."""

from __future__ import annotations

import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.ir.plan_table import figures, render
from autopar.verify.verify import EquivalenceReport

LONGEST = 30
"""Rows of the table: the largest errors; the others are counted."""


def agrees(report: EquivalenceReport, tolerance: float) -> bool:
    """Whether all errors are within the tolerance; NaN never is."""
    return all(error <= tolerance for error in report.errors.values())


def equivalence_dict(report: EquivalenceReport, tolerance: float) -> dict[str, Any]:
    """Plain data; an error that is not finite becomes text, since JSON has no such numbers."""
    errors = {name: error if math.isfinite(error) else str(error) for name, error in _sorted(report)}
    equal = agrees(report, tolerance)
    return {
        "equal": equal,
        "tolerance": tolerance,
        "max_error": next(iter(errors.values()), 0.0),
        "loss": None if report.loss is None else float(report.loss),
        "reference_loss": None if report.reference_loss is None else float(report.reference_loss),
        "reference": report.reference,
        "note": report.note,
        "first_difference": None if equal or report.first_difference is None else str(report.first_difference),
        "axes": dict(report.plan.axes),
        "few_bits": list(map(str, report.plan.quantized)),
        "lost": dict(report.lost),
        "errors": errors,
    }


def equivalence_table(report: EquivalenceReport, tolerance: float, width: int = 100) -> str:
    """The largest errors and the verdict as plain text, at most ``width`` columns wide."""
    found = _sorted(report)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tensor: a parameter's gradient, or a result", overflow="fold")
    table.add_column("error", justify="right", no_wrap=True)
    for name, error in found[:LONGEST]:
        table.add_row(Text(name), Text(f"{error:.1e}"))
    # No processes were started, which the report says.
    axes = ", ".join(f"{name}={size}" for name, size in report.plan.axes)
    rows = [("axes", f"{axes}, emulated in one process")]
    if report.loss is not None and report.reference_loss is not None:
        rows.append(("loss", f"{float(report.loss):.15g}; plain model {float(report.reference_loss):.15g}"))
    rows.append(("against", f"{report.reference}; {report.note}" if report.note else report.reference))
    rows += [("few bits", f"{each}: sent whole, and a second time so") for each in report.plan.quantized]
    if report.lost:
        name = max(report.lost, key=lambda n: report.lost[n])
        rows.append(("lost by them", f"at most {report.lost[name]:.1e} of a gradient ({name}), which is no error"))
    rows.append(("compared", f"{len(found)} tensors; error: largest difference over the tensor's largest entry"))
    if len(found) > LONGEST:
        rows.append(("", f"{len(found) - LONGEST} tensors with smaller errors are not shown; --json has all"))
    worst = f"largest error {found[0][1]:.1e} ({found[0][0]})" if found else "nothing to compare"
    equal = agrees(report, tolerance)
    rows.append(("verdict", f"{'equal' if equal else 'DIFFERENT'}: {worst}, tolerance {tolerance:.1e}"))
    if not equal and report.first_difference is not None:
        rows.append(("first", str(report.first_difference)))
    return render([table, figures(rows)], width)


def _sorted(report: EquivalenceReport) -> list[tuple[str, float]]:
    """Names and errors, the worst first; NaN is worse than any number."""
    return sorted(report.errors.items(), key=lambda item: (not math.isnan(item[1]), -item[1], item[0]))
