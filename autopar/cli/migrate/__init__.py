"""``autopar migrate``: what a configuration of DeepSpeed, accelerate or torchtitan is in autopar's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.migrate.accelerate_fsdp import SECTIONS as OF_ACCELERATE
from autopar.cli.migrate.accelerate_fsdp import of_accelerate
from autopar.cli.migrate.deepspeed import SECTIONS as OF_DEEPSPEED
from autopar.cli.migrate.deepspeed import of_deepspeed
from autopar.cli.migrate.keys import LISTS, Keys, shown
from autopar.cli.migrate.read import ACCELERATE, DEEPSPEED, TORCHTITAN, read
from autopar.cli.migrate.setup import Setup
from autopar.cli.migrate.torchtitan import SECTIONS as OF_TORCHTITAN
from autopar.cli.migrate.torchtitan import of_torchtitan
from autopar.cli.options import Debug, Json, clear_errors

_READERS = {
    DEEPSPEED: (of_deepspeed, OF_DEEPSPEED),
    ACCELERATE: (of_accelerate, OF_ACCELERATE),
    TORCHTITAN: (of_torchtitan, OF_TORCHTITAN),
}


@dataclass(frozen=True)
class Migration:
    """A configuration file in autopar's terms.

    Attributes:
        kind: whose file it is.
        file: its name.
        setup: what it asks for.
        keys: each of its keys, in one of three lists.
    """

    kind: str
    file: Path
    setup: Setup
    keys: Keys

    @property
    def script(self) -> str:
        """A Python module that distributes a model like this."""
        return self.setup.script(self.file.name)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        lists = {
            name: [{"key": key, "value": shown(self.keys.value(key)), "says": says} for key, says in rows.items()]
            for name, rows in self.keys.lists.items()
        }
        found = {"format": self.kind, "file": str(self.file), **self.setup.to_dict(), "python": self.script}
        return {**found, "defaults": self.keys.assumed, "keys": lists}


def migrate(file: Path, devices: int | None = None) -> Migration:
    """Read a configuration and say what it is in autopar's terms.

    Args:
        file: DeepSpeed's ``.json``, accelerate's ``.yaml`` or torchtitan's ``.toml``.
        devices: of the run; None: those that the file names, or any number.

    Raises:
        ValueError: a fault of the file, with its key and what to write there.
        OSError: it cannot be read.
    """
    kind, tree = read(file)
    reader, sections = _READERS[kind]
    keys = Keys(file, tree, sections)
    setup = reader(keys, devices)
    if keys.unknown and len(keys.unknown) == len([*keys]):
        raise ValueError(
            f"{file}: {', '.join(keys.unknown[:3])}{', ...' if len(keys.unknown) > 3 else ''}: no key is one of "
            f"{kind}'s; give the file that says how the run is distributed"
        )
    # Refused here, not where the printed Python runs.
    if setup.compute == "fp16" and setup.parallelism.stages != 1:
        raise ValueError(f"{file} asks for pipeline stages in float16, which have no loss scaling here; take bfloat16")
    _ = setup.search
    return Migration(kind, file, setup, keys)


def migrate_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="DeepSpeed's .json, accelerate's .yaml, torchtitan's .toml.")
    ],
    devices: Annotated[
        int | None, typer.Option(metavar="N", help="Of the run; default: as many as the file says, or any.", min=1)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a configuration of DeepSpeed, accelerate or torchtitan is here, as Python, and what is lost."""
    with clear_errors(debug):
        found = migrate(file, devices)
        typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else _text(found))


def _text(found: Migration) -> str:
    """The Python module, whose last lines are comments: the lists of keys."""
    lines = [found.script]
    if found.keys.assumed:
        lines += [f"# {found.kind}'s own defaults, which the file leaves out:", *_comments(found.keys.assumed)]
    for name in LISTS:
        rows: Mapping[str, str] = found.keys.lists[name]
        lines += [f"# {name}: {len(rows)} of the file's keys"]
        lines += _comments([f"{key} = {shown(found.keys.value(key))}: {says}" for key, says in rows.items()])
    return "\n".join(lines)


def _comments(texts: list[str]) -> list[str]:
    return [f"#   {' '.join(text.split())}" for text in texts]
