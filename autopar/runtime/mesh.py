"""`MeshContext`: where this process is on a mesh, and how it talks to the others there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch_compat import set_group_timeout
from autopar.errors import AutoparError, PlanError, RankError
from autopar.runtime.agreement.control import Control, control_of
from autopar.runtime.agreement.points import Details
from autopar.runtime.backends import MPI, backend_of, require_trials

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """The workers of a mesh, whose graphs have no collectives among them, and which of them this rank belongs to.

    Attributes:
        axis: the mesh axis of the workers.
        role: of this axis: ``local``, they train apart between exchanges, or ``compressed``.
        count: how many there are.
        index: of this rank's worker.
        group: the ranks at this rank's place in each worker, which hold the same shards.
        everyone: the agreement of all ranks of all workers.
    """

    axis: str
    role: str
    count: int
    index: int
    group: ProcessGroup
    everyone: Control


@dataclass(frozen=True)
class MeshContext:
    """This process's rank on a mesh, and its means of communication.

    Attributes:
        axes: name and size of each mesh axis, outermost first.
        coordinates: this rank's, one for each axis.
        device: where its tensors live.
        mesh: None for one device without a process group.
        groups: name of the process group along each axis.
        control: how this rank agrees with the others; None for one device.
        timeout: seconds that a rank waits for the others.
        workers: where the mesh is one worker's part of a larger one, in which others train apart.
    """

    axes: tuple[tuple[str, int], ...]
    coordinates: tuple[int, ...]
    device: torch.device
    mesh: DeviceMesh | None = None
    groups: dict[str, str] = field(default_factory=dict)
    control: Control | None = None
    timeout: float = 600.0
    workers: Workers | None = None

    @property
    def everyone(self) -> MeshContext:
        """The context whose agreements are among the ranks of all workers; the same where there are no workers."""
        return self if self.workers is None else replace(self, control=self.workers.everyone)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(n for _, n in self.axes)

    @property
    def rank(self) -> int:
        """Number of this rank among those of the mesh; rank 0 searches for plans."""
        return 0 if self.control is None else self.control.rank

    @property
    def spans_world(self) -> bool:
        """Whether all processes are on the mesh, so that it can be split into finer axes."""
        return self.mesh is not None and self.mesh.size() == dist.get_world_size()

    def gather(self, value: T, what: str) -> list[T]:
        """What every rank has to say about ``what``, in rank order.

        Raises:
            RankError: some rank does not answer, or is at something else.
        """
        return [value] if self.control is None else self.control.gather(value, what)

    def decide(self, solve: Callable[[], T], what: str) -> T:
        """What rank 0 finds; if it fails, every rank raises its error."""
        if self.control is None:
            return solve()
        result_and_error: list[Any] = [None, None]
        own: Exception | None = None
        if self.rank == 0:
            try:
                result_and_error[0] = solve()
            except Exception as e:
                own, result_and_error[1] = e, portable(e)
        # Else a rank that is at another call would take part in this broadcast, and unpickle something else.
        self.control.meet(what)
        with self.control.during(what, everyone=True):
            dist.broadcast_object_list(result_and_error, group=self.control.group, group_src=0)
        if result_and_error[1] is not None:
            # Rank 0 raises its own error, which still has its traceback; pickling drops it.
            raise own or result_and_error[1]
        result: T = result_and_error[0]
        return result

    def together(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on every rank; if it fails on one, it fails on all, so that none waits for it.

        Raises:
            RankError: it failed on another rank only.
        """
        result: T | None = None
        own: Exception | None = None
        try:
            result = work()
        except Exception as e:
            own = e
        # Gathered even on success: without it this rank would go on into a collective that a failed rank never joins.
        errors = self.gather(None if own is None else f"{type(own).__name__}: {own}", what)
        if own is not None:
            raise own
        for rank, error in enumerate(errors):
            if error is not None:
                raise RankError(f"rank {rank} failed at {what}: {error}")
        return result  # type: ignore[return-value]

    def agree(self, value: Hashable, what: str, remedy: str) -> None:
        """Check that every rank has the same ``value``.

        Raises:
            RankError: they differ; names the ranks.
        """
        values = self.gather(value, what)
        different = [r for r, v in enumerate(values) if v != values[0]]
        if different:
            rank = different[0]
            raise RankError(f"{what}: rank {rank} has {values[rank]}, rank 0 has {values[0]}; {remedy}")

    def meet(self, what: str, details: Details = ()) -> None:
        """Wait until every rank is about to do the same; nothing where there is no mesh.

        Raises:
            RankError: one is not, or does not come.
        """
        if self.control is not None:
            self.control.meet(what, details)

    def during(
        self, what: str, locate: Callable[[BaseException], str] = lambda _: "", *, in_step: bool = True
    ) -> AbstractContextManager[None]:
        """Replace the error of a collective within, which fails where another rank is gone, by one that says so.

        Args:
            what: what the body does, for the message.
            locate: says which collective an error comes from.
            in_step: whether this rank is out of step with the others if it alone fails at it.

        Raises:
            RankError: some rank does not answer.
        """
        return nullcontext() if self.control is None else self.control.during(what, in_step=in_step, locate=locate)

    def telling_workers(self, what: str) -> AbstractContextManager[None]:
        """Within, an error is heard of by the other workers, where there are some: they wait for this one later."""
        return nullcontext() if self.workers is None else self.workers.everyone.telling_apart(what)


def portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return AutoparError(f"{type(error).__name__}: {error}")


def one_device(device: torch.device) -> MeshContext:
    """The context of a process without others."""
    return MeshContext((("device", 1),), (0,), device)


def split_mesh(mesh: DeviceMesh, axes: Sequence[tuple[str, int]]) -> DeviceMesh:
    """The same ranks on finer axes; every rank calls it, since it makes process groups."""
    # Row-major: an axis that is split has its outer factor first, so ranks stay in the order of the coarse mesh.
    ranks = mesh.mesh.reshape([n for _, n in axes])
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(name for name, _ in axes))


def with_axes(context: MeshContext, axes: tuple[tuple[str, int], ...]) -> MeshContext:
    """The context on finer axes of the same mesh; every rank calls it. The same context if it has these axes."""
    if axes == context.axes or context.mesh is None:
        return context
    if context.workers is not None:
        raise PlanError(
            f"the plan is for axes {dict(axes)}, and a worker has {dict(context.axes)}: its mesh cannot "
            "be split further; ask for as many stages as an axis has"
        )
    with context.during(f"making axes {dict(axes)} of the mesh"):
        mesh = split_mesh(context.mesh, axes)
    return mesh_context(mesh, context.timeout)


def axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Name and size of each axis of a mesh."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(mesh.shape)))
    return dict(zip(names, mesh.shape, strict=True))


def worker_context(mesh: DeviceMesh, timeout: float, role: str) -> MeshContext:
    """This rank's context within its worker, where each index of the mesh's outermost axis is one; every rank calls it.

    Args:
        mesh: of all workers.
        timeout: seconds that a rank waits for the others.
        role: of the workers' axis.

    Raises:
        ValueError: as `mesh_context`.
    """
    whole = mesh_context(mesh, timeout)
    (axis, count), *within = whole.axes
    assert whole.control is not None
    whole.agree(("workers", role, *whole.axes), "the axes of the mesh", "pass the same plan= or search= on every rank")
    group = mesh.get_group(0)
    workers = Workers(axis, role, count, whole.coordinates[0], group, whole.control)
    if not within:
        return replace(one_device(whole.device), timeout=timeout, workers=workers)
    # The same ranks as torch's submesh: every process makes the group of its own worker only.
    ranks = mesh.mesh[whole.coordinates[0]].flatten().tolist()
    all_ranks = whole.control.new_group(ranks, "a worker", backend=None)
    inner = mesh[tuple(name for name, _ in within)]
    return replace(mesh_context(inner, timeout, all_ranks), workers=workers)


def mesh_context(mesh: DeviceMesh, timeout: float, all_ranks: ProcessGroup | None = None) -> MeshContext:
    """This rank's context on a mesh; ``timeout`` is set on the mesh's process groups.

    Args:
        mesh: of one axis, or of several that span the world, or ``all_ranks``.
        timeout: seconds.
        all_ranks: the group of the mesh's ranks where it is a part of the world.

    Raises:
        ValueError: no process group, a backend that does not fit the device, or a mesh of another size than the world.
    """
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group() first, or pass mesh=None")
    names, sizes = zip(*axes_of(mesh).items(), strict=True)
    world = dist.get_world_size()
    if len(sizes) > 1 and mesh.size() != world and all_ranks is None:
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {world}; a mesh of several axes must span the world: "
            f"start {mesh.size()} processes, or make the mesh with init_device_mesh of sizes whose product is {world}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call parallelize on the mesh's ranks only")
    groups = [mesh.get_group(i) for i in range(len(sizes))]
    # A DeviceMesh has a group for each axis and none for all of its ranks. A mesh of one axis may be a part of the
    # world; of several axes it must span the world, whose group is then the one of all ranks.
    all_ranks = all_ranks or (groups[0] if len(sizes) == 1 else dist.group.WORLD)
    for group in (*groups, all_ranks):
        _check_backend(group, mesh.device_type)
        set_group_timeout(timedelta(seconds=timeout), group)
    for each in groups:
        require_trials(each, mesh.device_type)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        # "cuda" without an index compares unequal to the device of a tensor on it.
        device = torch.device("cuda", torch.cuda.current_device())
    group_names = {n: str(g.group_name) for n, g in zip(names, groups, strict=True)}
    axes = tuple(zip(names, sizes, strict=True))
    assert all_ranks is not None
    control = control_of(all_ranks, groups, timeout)
    return MeshContext(axes, tuple(coordinate), device, mesh, group_names, control, timeout)


def _check_backend(group: ProcessGroup | None, device_type: str) -> None:
    backends = dist.get_backend_config(group)
    if dist.group.WORLD is not None and backend_of(dist.group.WORLD, "cpu") == MPI:
        raise ValueError(
            "the world is a process group of MPI, which has no store to make the groups of control messages from; use "
            'autopar.mesh(backend="mpi"), which makes a world of Gloo with MPI along the axes'
        )
    if "cuda:gloo" in str(backends) and device_type == "cuda":
        # https://github.com/pytorch/pytorch/issues/152645, seen with torch 2.11
        raise ValueError(
            "Gloo reads the memory of GPU tensors as the host's when it gathers them, which ends the process; use "
            'init_process_group("nccl") with one process for each GPU, or a mesh of CPUs'
        )
    if f"{device_type}:" not in str(backends):
        raise ValueError(
            f"the process group's backend ({backends}) does not serve {device_type} tensors, as the mesh needs; "
            f'use init_process_group("{"nccl" if device_type == "cuda" else "gloo"}") or a mesh of another device type'
        )
