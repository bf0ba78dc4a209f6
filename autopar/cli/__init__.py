"""The ``autopar`` command.

Exit codes: 0 done; 1 `verify` or `diff` found a difference, or `ops --coverage` a wrong rule; 2 wrong input or a model
that cannot be planned; 3 nothing fits; 130 Ctrl-C. `run` has the exit code of its script.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Annotated

import typer

from autopar.cli.check import check_command
from autopar.cli.explain import diff_command, explain_command
from autopar.cli.machine import calibrate_command, doctor_command, ops_command
from autopar.cli.migrate import migrate_command
from autopar.cli.plan import plan_command
from autopar.cli.run import rendezvous_command, run_command
from autopar.cli.simulate import simulate_command
from autopar.cli.trace import trace_command
from autopar.cli.verify import verify_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Plain help: brackets in texts such as model[, loss] are no markup.
    rich_markup_mode=None,
    # A bug's traceback is printed as Python does it, so that it can be pasted into an issue.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., None]] = {
    "run": run_command,
    "rendezvous": rendezvous_command,
    "plan": plan_command,
    "explain": explain_command,
    "diff": diff_command,
    "check": check_command,
    "verify": verify_command,
    "simulate": simulate_command,
    "trace": trace_command,
    "migrate": migrate_command,
    "calibrate": calibrate_command,
    "doctor": doctor_command,
    "ops": ops_command,
}
for name, command in COMMANDS.items():
    # What follows the name of a script are options of the script.
    app.command(name, context_settings={"allow_interspersed_args": name != "run"})(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("autopar")
        except importlib.metadata.PackageNotFoundError:
            # A checkout on the path has no package metadata.
            version = "from its sources, not installed"
        typer.echo(f"autopar {version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan the layout of a PyTorch model on many devices, and check that the plan computes the same."""


def main() -> None:
    """Entry point of the ``autopar`` command."""
    app()
