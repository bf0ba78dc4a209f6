"""What the commands share: options, how they are parsed, and errors as one line."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import AutoparError, InfeasibleError
from autopar.runtime.launch.environment import parse_axes as parse_axes

# torch takes a second to import: a command imports what needs it in its own body, so that --help is fast.

DIFFERENT, WRONG_INPUT, INFEASIBLE, STOPPED = 1, 2, 3, 130

# What is planned, and for which hardware.
Model = Annotated[
    str,
    typer.Option(metavar="FILE.py:FUNCTION", help="Function that returns (model, batch[, loss])."),
]
Machine = Annotated[str, typer.Option("--cluster", metavar="NAME|FILE.toml", help="A preset (see doctor) or a file.")]
Axes = Annotated[str, typer.Option(metavar="NAME=SIZE,...", help="Mesh axes, outermost first: node=32,gpu=8.")]
Memory = Annotated[str | None, typer.Option(help="Budget per device, such as 70GiB; default: see doctor.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer whose state counts: adamw, adam, sgd, sgd-momentum, adagrad.")]
Policy = Annotated[
    str | None,
    typer.Option(metavar="bf16|fp16|fp8|...", help="Compute in this dtype; parameters and reductions stay in fp32."),
]

# What the search may choose.
Recipe = Annotated[str | None, typer.Option(metavar="NAME", help="ddp, fsdp, hsdp, megatron, ...; default: search.")]
RolesOption = Annotated[
    str, typer.Option("--roles", metavar="AXIS=ROLE,...", help="What axes are used for: node=data,gpu=tensor.")
]
Inexact = Annotated[
    str,
    typer.Option(
        "--inexact", metavar="CHOICE,...", help="Allow what changes numbers: roles local, compressed; fp8, quantized."
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantized", metavar="AXIS=BITS[/BITS],...", help="Bits of gathered weights/reduced gradients: node=8/4."
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", metavar="NAME=PLACEMENT@AXIS,...", help="Fixes a layout: '*.mlp=S(0)@node'; may be repeated."
    ),
]
Limit = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of the search.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Search even if this search was cached; cache nothing.")]

# Pipelines.
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="N|search|MODULE,...",
        help="Pipeline of N devices; 'search': any pipeline or none; names: the modules at which stages begin.",
    ),
]
Schedule = Annotated[
    str | None, typer.Option(metavar="NAME|FILE.csv", help="Order of microbatches: 1f1b, zb-h1, ..., or a table.")
]
Virtual = Annotated[int | None, typer.Option(help="Stages on each device of the pipeline.", min=1)]
StageAxis = Annotated[
    str | None, typer.Option(metavar="NAME", help="Axis of the stages; default: the outermost of that size.")
]

Fuse = Annotated[
    bool, typer.Option("--compile", help="For parallelize(..., compile=True): costs of kernels that a compiler fuses.")
]

# What is printed.
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Target:
    """What a plan is for, from the options that say so.

    Attributes:
        cluster: preset or file.
        axes: sizes of the mesh axes by name.
        memory: budget per device; None: the device less what is set aside.
        optimizer: whose state counts.
        precision: dtype to compute in, by name.
        compile: whether kernels are fused.
    """

    cluster: str
    axes: Mapping[str, int]
    memory: str | None
    optimizer: str
    precision: str | None
    compile: bool = False


@contextlib.contextmanager
def clear_errors(debug: bool) -> Iterator[None]:
    """Print errors that a user can act on as one line and exit; others are bugs and keep their traceback."""
    try:
        yield
    # These say what to do: a wrong argument, a file that cannot be read, a plan that does not exist.
    except (AutoparError, ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        raise typer.Exit(INFEASIBLE if isinstance(error, InfeasibleError) else WRONG_INPUT) from error
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(STOPPED) from error


def pipeline_pins(
    stages: str | None, schedule: str | None, virtual: int | None, stage_axis: str | None
) -> dict[str, Any]:
    """Pins of `autopar.Search` from ``--stages`` and the options that go with it.

    Raises:
        ValueError: an option of pipelines is given without ``--stages``.

    >>> pipeline_pins("2", "1f1b", None, None)
    {'stages': 2, 'schedule': '1f1b'}
    >>> pipeline_pins("layers.1, layers.2", None, None, None)
    {'stages': ['layers.1', 'layers.2']}
    >>> pipeline_pins("search", None, None, None)
    {'stages': 'search'}
    """
    given = {"schedule": schedule, "virtual": virtual, "stage_axis": stage_axis}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if stages is None:
        if found:
            raise ValueError(f"--{next(iter(found)).replace('_', '-')} belongs to a pipeline: add --stages")
        return {}
    if stages.strip() == "search":
        return {"stages": "search", **found}
    numbered = re.fullmatch(r"-?[0-9]{1,9}", stages.strip())
    return {"stages": int(stages) if numbered else [name.strip() for name in stages.split(",")], **found}


def parse_pins(texts: Sequence[str] | None, axes: Mapping[str, int]) -> dict[str, Any]:
    """Pins of `autopar.Search` from ``--pin``; the search chooses on axes that are not named.

    Raises:
        ValueError: one is not NAME=PLACEMENT@AXIS,...

    >>> parse_pins(["*.mlp=S(1)@gpu", "batch.0=S(0)@node,R@gpu"], {"node": 2, "gpu": 8})
    {'*.mlp': {'node': None, 'gpu': 'S(1)'}, 'batch.0': {'node': 'S(0)', 'gpu': 'R'}}
    """
    from autopar.explain.why_not import parse_wanted

    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, wanted = text.partition("=")
        if not equals:
            raise ValueError(
                f"--pin {text!r} is not NAME=PLACEMENT@AXIS,...; write for example *.mlp=S(1)@{[*axes][-1]}"
            )
        placements = parse_wanted(wanted, axes)
        unknown = [axis for axis in placements if axis not in axes]
        if unknown:
            raise ValueError(f"--pin {text!r} names axis {unknown[0]!r}; the mesh has {', '.join(axes)}")
        # None leaves an axis to the search; a dict without it would replicate there.
        found[name.strip()] = {axis: placements.get(axis) for axis in axes}
    return found


def parse_roles(text: str) -> dict[str, str]:
    """Roles of axes from ``node=data,gpu=tensor``.

    Raises:
        ValueError: a part is not AXIS=ROLE.

    >>> parse_roles("node=data, gpu=tensor")
    {'node': 'data', 'gpu': 'tensor'}
    """
    roles = {}
    for part in text.split(",") if text else ():
        axis, _, role = (piece.strip() for piece in part.partition("="))
        if not axis or not role:
            raise ValueError(f"--roles {text!r}: {part.strip()!r} is not AXIS=ROLE; write for example gpu=tensor")
        roles[axis] = role
    return roles


def parse_quantized(text: str) -> dict[str, dict[str, int]]:
    """Bits of messages from ``node=8/4``: of weights, and of gradients; ``-`` for whole numbers.

    Raises:
        ValueError: a part is not AXIS=BITS or AXIS=BITS/BITS.

    >>> parse_quantized("node=8/4, gpu=-/8")
    {'node': {'weights': 8, 'gradients': 4}, 'gpu': {'gradients': 8}}
    """
    found = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([^=]*[^=\s])\s*=\s*(-|[0-9]{1,3})(?:/(-|[0-9]{1,3}))?\s*", part)
        if match is None:
            raise ValueError(
                f"--quantized {text!r}: {part.strip()!r} is not AXIS=BITS/BITS; write for example node=8/4"
            )
        axis, *bits = match.groups()
        named = zip(("weights", "gradients"), bits, strict=True)
        found[axis] = {what: int(count) for what, count in named if count not in (None, "-")}
    return found


def parse_shares(text: str) -> dict[str, Any]:
    """The pin of shares of the batch from ``node=3,1`` or ``node=search``.

    Raises:
        ValueError: it is neither.

    >>> parse_shares("node=3, 1")
    {'shares': {'node': [3, 1]}}
    >>> parse_shares("")
    {}
    """
    if not text.strip():
        return {}
    match = re.fullmatch(r"\s*([^=]*[^=\s])\s*=\s*(search|[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})+)\s*", text)
    if match is None:
        raise ValueError(f"--shares {text!r} is not AXIS=search or AXIS=N,N,...; write for example node=3,1")
    axis, numbers = match.groups()
    return {"shares": {axis: numbers if numbers == "search" else [int(n) for n in numbers.split(",")]}}


def check_target(option: str, path: Path | None) -> None:
    """Raise before a long search, not after it, if a file cannot be written there."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.resolve().parent}; create it first")
