"""The command, called as a shell would."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from autopar import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def plan(model: str, *more: str) -> Result:
    return run("plan", "--model", model, "--cluster", "cpu", "--axes", "a=2,b=2", *more)
