"""``autopar run``: start a training script on all devices of this machine, or of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import Debug, clear_errors
from autopar.runtime.launch.environment import OPEN, axes_of_world, parse_range, require_world

RESTARTS = 20
"""After failures, of runs whose nodes come and go: each node that is lost counts as one for those that are left."""


def run_command(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py", help="The script, or with -m a module; none with --config.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets.")] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Processes of a node; default: its GPUs, or one.", min=1)
    ] = None,
    nnodes: Annotated[int, typer.Option(metavar="N", help="Nodes; start the command on each.", min=1)] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several nodes meet: the first, and a free port.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the run, the same on all nodes.")] = "autopar",
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Nodes may come and go; start the command on each, at any time."),
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Axes of autopar.mesh(), one size may be *, for what the others leave; default: node and gpu, as they "
            "are.",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="gloo|nccl|mpi", help="Of autopar.mesh(); default: by the devices.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long processes wait for the others to start.")
    ] = 600.0,
    restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Start anew so often after a failure; 0, or {RESTARTS} with --elastic.", min=0),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the first process of a node prints.")] = False,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="A recipe of the run, in place of a script.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a script in a process for each device; it gets its mesh from autopar.mesh()."""
    with clear_errors(debug):
        if (script is None) == (config is None):
            raise ValueError("give one of the two: a script, or --config and the file of a recipe")
        sizes: Mapping[str, int | str] | None = None if axes is None else _sizes(axes)
        nodes = None if elastic is None else parse_range(elastic, "--elastic")
        if config is not None:
            from autopar.integrations.recipe.schema import read_recipe

            recipe = read_recipe(config)  # before any process is started
            sizes = sizes or recipe.mesh.axes or None
            script, arguments, is_module = "autopar.integrations.recipe", [str(config)], True
        assert script is not None
        if not is_module and not Path(script).is_file():
            raise ValueError(f"no file {script}; autopar run takes a Python file, or -m and the name of a module")
        if not 0 < timeout < math.inf:
            raise ValueError(f"--timeout {timeout}: give seconds, more than 0")
        if nodes is not None and nnodes > 1:
            raise ValueError(f"--nnodes {nnodes} and --elastic {elastic} both say how many nodes there are; give one")
        if nodes is not None and rendezvous is None:
            raise ValueError(
                f"--elastic {elastic} needs --rendezvous: the host and port at which nodes meet that come and go, such "
                "as node0:29500"
            )
        if nodes is None and (nnodes > 1) != (rendezvous is not None):
            raise ValueError(
                f"--nnodes {nnodes} {'needs' if nnodes > 1 else 'takes no'} --rendezvous: the host and port at which "
                "several nodes meet, such as node0:29500"
            )
        if backend is not None:
            _check_backend(backend)
        processes = nproc or _devices()
        fewest, most = nodes or (nnodes, nnodes)
        if sizes is not None:
            worlds = range(fewest * processes, most * processes + 1, processes)
            _check_axes(sizes, worlds, "mesh.axes" if axes is None else "--axes")
        from autopar.runtime.launch.agent import Launch, launch

        if restarts is None:
            restarts = 0 if nodes is None else RESTARTS
        named = name if nodes is not None or nnodes > 1 else ""
        wanted = Launch(
            processes, most, sizes, rendezvous, named, timeout, restarts, backend, quiet,
            fewest=None if nodes is None else fewest,
        )  # fmt: skip
        code = launch(wanted, script, arguments or [], is_module=is_module)
        if code:
            raise typer.Exit(code)


def rendezvous_command(
    at: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of this machine, as for autopar run --rendezvous.")],
    debug: Debug = False,
) -> None:
    """Keep open the rendezvous of runs whose nodes come and go, until Ctrl-C: then any of their nodes may be lost."""
    with clear_errors(debug):
        from autopar.runtime.launch.rendezvous import keep_open

        host, _, port = at.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(f"{at!r} is not HOST:PORT; write for example node0:29500")
        keep_open(host, int(port), lambda: typer.echo(f"rendezvous at {at}", err=True))


def _sizes(axes: str) -> dict[str, int | str]:
    """Axes of which one size may be open."""
    axes_of_world(axes, 0)  # any world divides 0
    pairs = (part.split("=") for part in axes.split(","))
    return {axis.strip(): OPEN if size.strip() == OPEN else int(size) for axis, size in pairs}


def _check_axes(sizes: Mapping[str, int | str], worlds: range, name: str) -> None:
    """Refuse axes that are no mesh of any world that there may be."""
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if OPEN not in sizes.values():
        if len(worlds) > 1:
            raise ValueError(
                f"{name} {text} has no open size, and there are {worlds[0]} to {worlds[-1]} processes; write * for the "
                f"size of the axis that grows and shrinks, such as {next(iter(sizes))}={OPEN}"
            )
        require_world(axes_of_world(text, worlds[0], name), worlds[0], name)
        return
    rest = math.prod(size for size in sizes.values() if isinstance(size, int))
    if all(world % rest for world in worlds):
        axes_of_world(text, worlds[-1], name)


def _check_backend(backend: str) -> None:
    """Refuse a backend that the processes could not use, before they are started."""
    from autopar.runtime.backends import MPI, SERVES, require_backend

    require_backend(backend, SERVES.get(backend, ""))
    if backend == MPI:
        raise ValueError(
            "--backend mpi: MPI starts its processes itself; run mpirun -n N python SCRIPT.py, whose script calls "
            'autopar.mesh(device="cpu", backend="mpi")'
        )


def _devices() -> int:
    """GPUs of this machine; 1 without."""
    import torch

    return max(1, torch.cuda.device_count())
