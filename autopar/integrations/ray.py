"""A Ray Train worker: its mesh, reports of metrics and checkpoints, and where a run goes on.

::

    from autopar.integrations import ray as autopar_ray

    def train(config):  # on every worker of ray.train.torch.TorchTrainer
        mesh = autopar_ray.mesh()
        model = autopar.parallelize(build(), mesh, batch)
        optimizer = torch.optim.AdamW(model.parameters())
        start = autopar_ray.load(model, optimizer).step
        for step in range(start, 100):
            ...
            autopar_ray.report({"loss": loss}, model, optimizer, step=step + 1)

Ray starts the workers and their process group. They share one model, so that each is given the whole batch: not
``ray.train.torch.prepare_model`` and ``prepare_data_loader``, which are for copies of it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import checkpoint
from autopar.costs.arguments import AXES, PATH, optional, require, whole
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.launch.environment import require_world

try:
    from ray import train
    from ray.train.torch import get_device
except ImportError as e:
    raise ImportError(f"ray.train cannot be imported: {e}; pip install 'ray[train]'") from e

FOLDER = "autopar"
"""Of `autopar.checkpoint.save`, in a checkpoint of Ray's."""


def mesh(axes: Mapping[str, int] | None = None) -> DeviceMesh | None:
    """The mesh of all workers of this run; None where there is one worker.

    Args:
        axes: name and size of each axis, outermost first. Default: ``node`` and ``gpu`` (of CPUs, ``cpu``), or the
            second alone where there is one node, or nodes have different numbers of workers.

    Raises:
        RuntimeError: this process is no worker of ``ray.train.torch.TorchTrainer``.
        ValueError: the axes are not of as many devices as there are workers.
    """
    require(axes=(axes, optional(AXES)))
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call autopar.integrations.ray.mesh() in the function that "
            "ray.train.torch.TorchTrainer runs on its workers"
        )
    context, kind = train.get_context(), get_device().type
    world = context.get_world_size()
    named = dict(axes) if axes is not None else _axes(world, context.get_local_world_size(), kind)
    require_world(named, world, "axes")
    if world == 1:
        return None
    return init_device_mesh(kind, tuple(named.values()), mesh_dim_names=tuple(named))


def _axes(world: int, local: int, kind: str) -> dict[str, int]:
    counts: list[Any] = [None] * world
    dist.all_gather_object(counts, local)
    name = "gpu" if kind == "cuda" else kind
    # Ranks of a node are consecutive: Ray numbers the workers by node.
    if set(counts) == {local} and 1 < local < world:
        return {"node": world // local, name: local}
    return {name: world}


@dataclass(frozen=True)
class Found:
    """What `load` has found.

    Attributes:
        step: as it was given to `report`; 0 where the run begins.
        extra: likewise; None where the run begins.
    """

    step: int = 0
    extra: Any = None


def load(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None, **stateful: Any) -> Found:
    """Go on from the checkpoint that Ray has for this run, if there is one; every worker calls it.

    That is the last that `report` gave it, after a failure or where the run is started again under the same name and
    storage. The number of workers and the plan may be others.

    Args:
        model: a parallelized model with the same names and shapes.
        optimizer: of its parameters.
        stateful: as for `autopar.checkpoint.save`.

    Raises:
        AutoparError: the checkpoint is of another model or optimizer.
    """
    known = train.get_checkpoint()
    if known is None:
        return Found()
    with known.as_directory() as folder:
        found = checkpoint.load(Path(folder) / FOLDER, model, optimizer, **stateful)
        model._autopar.context.meet("reading a checkpoint of Ray's")  # the folder is deleted when one leaves it
    return Found(found.step, found.extra)


def report(
    metrics: Mapping[str, Any],
    model: ParallelModule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    folder: str | Path | None = None,
    **stateful: Any,
) -> None:
    """Report metrics to Ray, and with ``model`` a checkpoint of the run; every worker calls it.

    All workers write the checkpoint with `autopar.checkpoint.save`; then one of them gives it to Ray, which copies it
    to the storage of the run.

    Args:
        metrics: numbers by name, the same on every worker: Ray keeps those of one.
        model: what is saved; None: metrics alone.
        optimizer: of its parameters.
        step: how many steps have been taken, which `load` gives back.
        extra: as for `autopar.checkpoint.save`.
        folder: where the checkpoint is written, on a file system that all workers see; default: a temporary folder,
            which workers on one node share.
        stateful: as for `autopar.checkpoint.save`.

    Raises:
        ValueError: an argument is wrong, workers are on several nodes and ``folder`` is not given, or something cannot
            be saved without pickle.
        AutoparError: the checkpoint could not be written.
    """
    require(step=(step, whole(0)), folder=(folder, optional(PATH)))
    if model is None:
        train.report(dict(metrics))
        return
    context = model._autopar.context.everyone
    nodes = context.gather(train.get_context().get_node_rank(), "the nodes of Ray's workers")
    if folder is None and len(set(nodes)) > 1:
        raise ValueError(
            f"folder=None: workers are on {len(set(nodes))} nodes; give a folder on a file system that all of them see"
        )
    parent = None if folder is None else str(folder)
    root = Path(context.decide(lambda: tempfile.mkdtemp(prefix="autopar-", dir=parent), "the folder of a checkpoint"))
    checkpoint.save(root / FOLDER, model, optimizer, step=step, extra=extra, keep=1, **stateful)
    first = train.get_context().get_world_rank() == 0
    try:
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(str(root)) if first else None)
    finally:
        if first:  # Ray has its copy
            shutil.rmtree(root, ignore_errors=True)
