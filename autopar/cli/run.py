"""``autopar run``: start a training script on all devices of this machine, or of several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import Debug, clear_errors, parse_axes
from autopar.runtime.launch.environment import require_world


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
    axes: Annotated[
        str | None,
        typer.Option(metavar="NAME=SIZE,...", help="Axes of autopar.mesh(); default: node and gpu, as they are."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="gloo|nccl|mpi", help="Of autopar.mesh(); default: by the devices.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long processes wait for the others to start.")
    ] = 600.0,
    restarts: Annotated[int, typer.Option(metavar="N", help="Start anew so often after a failure.", min=0)] = 0,
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
        sizes = None if axes is None else parse_axes(axes)
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
        if (nnodes > 1) != (rendezvous is not None):
            raise ValueError(
                f"--nnodes {nnodes} {'needs' if nnodes > 1 else 'takes no'} --rendezvous: the host and port at which "
                "several nodes meet, such as node0:29500"
            )
        if backend is not None:
            _check_backend(backend)
        processes = nproc or _devices()
        if sizes is not None:
            require_world(sizes, nnodes * processes, "--axes" if axes is not None else "mesh.axes")
        from autopar.runtime.launch.agent import Launch, launch

        code = launch(
            Launch(processes, nnodes, sizes, rendezvous, name if nnodes > 1 else "", timeout, restarts, backend, quiet),
            script,
            arguments or [],
            is_module=is_module,
        )
        if code:
            raise typer.Exit(code)


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
