"""``autopar calibrate``, ``doctor`` and ``ops``: what the machine and torch offer."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import (
    DIFFERENT,
    Debug,
    Json,
    check_target,
    clear_errors,
)
from autopar.cli.task import load_task


def calibrate_command(
    save: Annotated[Path, typer.Option(metavar="FILE.toml", help="Write the cluster to this file, for --cluster.")],
    ranks: Annotated[int, typer.Option(help="Processes to start, if torchrun started none.", min=1)] = 2,
    groups: Annotated[
        str, typer.Option(metavar="N,...", help="Processes per node, per rack, ...; default: per node, from torchrun.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(help="Threads per process; default: its share of the cores.", min=1)
    ] = None,
    dtypes: Annotated[str, typer.Option(metavar="NAME,...", help="To measure: float32, bfloat16, ...")] = "float32",
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.toml", help="Source of what is not measured; default: the device's preset."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw measured against fitted times.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.", min=1)] = 600.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure kernels and collectives on the devices at hand, and write the cluster that fits them."""
    with clear_errors(debug):
        # This module needs no torch, so that a wrong option is refused at once.
        from autopar.costs.cluster import FLOAT_DTYPES

        names = tuple(name.strip() for name in dtypes.split(","))
        for name in names:
            if name not in FLOAT_DTYPES:
                raise ValueError(f"--dtypes {dtypes!r}: {name!r} is none of {', '.join(FLOAT_DTYPES)}")
        # Before minutes of measurements, whose result could not be written.
        check_target("--save", save)
        check_target("--plot", plot)
        from autopar.costs.calibrate import Settings, calibrate
        from autopar.costs.calibrate.fit import predicted_seconds
        from autopar.explain.tables.calibration import calibration_dict, calibration_plot, calibration_table
        from autopar.explain.tables.progress import counted

        # More threads than cores would measure how they take turns.
        share = threads or max(1, (os.cpu_count() or 1) // ranks)
        settings = Settings(names, groups=_numbers("--groups", groups), threads=share, timeout=timeout)
        with counted("measured") as tick:
            found = calibrate(settings, ranks=ranks, base=base, name=save.stem, tick=tick)
        if found is None:  # another rank writes and prints it
            return
        cluster, samples = found
        fitted = predicted_seconds(samples, cluster.device, cluster.links, cluster.group_sizes).tolist()
        cluster.save(save)
        if plot is not None:
            plot.write_text(calibration_plot(samples, fitted), encoding="utf-8")
        for path in (save, plot):
            if path is not None:
                typer.echo(f"saved {path}", err=True)
        show = calibration_table(cluster, samples, fitted)
        typer.echo(json.dumps(calibration_dict(cluster, samples, fitted), indent=1) if as_json else show)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive integers, each a multiple of the one before."""
    if not text:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    # The 1 in front lets the first size be any.
    if any(size < 1 or size % inner for inner, size in pairwise((1, *found))):
        raise ValueError(f"{option} {text!r}: give positive integers, each a multiple of the one before, as 8,256")
    return found


def doctor_command(
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.toml", help="Also check and show this cluster, group by group.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which of autopar's requirements this machine has, what is missing, and how to get it."""
    with clear_errors(debug):
        from autopar.costs.cluster import Cluster
        from autopar.explain.tables.doctor import doctor_table, examine

        # Before the machine is looked at: a wrong file is an error at once.
        facts = examine(None if cluster is None else Cluster.resolve(cluster))
        typer.echo(json.dumps(facts, indent=1) if as_json else doctor_table(facts))


def ops_command(
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Also list the rules discovered for this model.")
    ] = None,
    coverage: Annotated[bool, typer.Option("--coverage", help="Measure on torch's operator samples.")] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only operators whose name contains this.")] = "",
    workers: Annotated[int, typer.Option(help="Processes for --coverage.", min=1)] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the rules of operators, or measure how many of torch's operators they cover."""
    with clear_errors(debug):
        if coverage:
            _print_coverage(only, workers, as_json)
            return
        from autopar.explain.rules import list_rules
        from autopar.explain.tables.rules import operators_table

        task = load_task(model) if model else None
        rows = list_rules(task, only)
        typer.echo(json.dumps(rows, indent=1) if as_json else operators_table(rows))


def _print_coverage(only: str, workers: int, as_json: bool) -> None:
    """Exit code 1 if the oracle refutes a rule."""
    from autopar.explain.tables.progress import counted
    from autopar.explain.tables.rules import coverage_table
    from autopar.verify.coverage.run import cover, figures_of

    with counted("operators") as tick:
        figures = figures_of(cover(only, workers=workers, tick=tick))
    typer.echo(json.dumps(figures, indent=1) if as_json else coverage_table(figures))
    # A rule that was refuted anywhere is wrong, however many calls it is right for.
    if any(counts["failures"] for counts in figures["by_dtype"].values()):
        raise typer.Exit(DIFFERENT)
