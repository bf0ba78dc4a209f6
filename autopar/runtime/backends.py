"""Backends of process groups: which this build of torch has, and whether one does all that a step asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

GLOO, NCCL, MPI = "gloo", "nccl", "mpi"

SERVES = {GLOO: "cpu", NCCL: "cuda", MPI: "cpu"}
"""The devices that a mesh over each backend has; MPI that reads GPU memory is not asked for."""

PROVEN = (GLOO, NCCL)
"""Backends that need no trial."""

c10d = torch.ops._c10d_functional

Trial = Callable[[ProcessGroup], bool]
"""Makes one kind of call on all ranks of a group; whether the result is right."""


def require_backend(name: str, device: str) -> None:
    """Refuse a backend that this torch does not have, or that does not serve the device, before anything is started.

    Args:
        name: ``gloo``, ``nccl`` or ``mpi``.
        device: of the mesh, ``cuda`` or ``cpu``.

    Raises:
        ValueError: says how to get it, or what to take instead.
    """
    if name not in SERVES:
        raise ValueError(f"backend {name!r}: expected {', '.join(map(repr, SERVES))}")
    if device != SERVES[name]:
        raise ValueError(
            f"backend {name!r} is for a mesh of {SERVES[name]} devices, and this one is of {device}: take "
            f"{next(repr(b) for b, d in SERVES.items() if d == device)}, or device={SERVES[name]!r}"
        )
    if name == MPI and not dist.is_mpi_available():
        raise ValueError(
            f"backend 'mpi': torch {torch.__version__} was built without MPI, as those on pytorch.org and PyPI are; "
            "build torch from source with USE_MPI=1 where Open MPI or MPICH is installed, or take 'gloo', which needs "
            "nothing"
        )
    available = {GLOO: dist.is_gloo_available, NCCL: dist.is_nccl_available, MPI: dist.is_mpi_available}[name]()
    if not available:
        raise ValueError(
            f"backend {name!r}: torch {torch.__version__} was built without it; install a build that has it"
        )


def require_trials(group: ProcessGroup, device: str) -> None:
    """Try on a group what steps will ask of it, unless its backend is known to do it all; every rank calls it.

    Raises:
        ValueError: the backend lacks something, or does it wrong; names what.
    """
    backend = backend_of(group, device)
    if backend in PROVEN:
        return
    if lacking := lacks(group):
        listed = "; ".join(f"{what} ({why})" for what, why in lacking.items())
        raise ValueError(
            f"backend {backend!r} of the mesh lacks what a step asks for: {listed}; take "
            f"{next(repr(b) for b in PROVEN if SERVES[b] == device)}"
        )


def backend_of(group: ProcessGroup | None, device: str) -> str:
    """The backend by which a group serves a device."""
    served = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
    return served.get(device, "")


def lacks(group: ProcessGroup) -> dict[str, str]:
    """What a backend does not do, and why it is known; every rank of the group calls it."""
    found = {}
    for what, trial in TRIALS.items():
        try:
            right = trial(group)
        except Exception as error:
            # A backend says so in errors of any type: RuntimeError, NotImplementedError, ValueError.
            found[what] = " ".join(str(error).split())[:120] or type(error).__name__
            continue
        if not right:
            found[what] = "its result is wrong"
    return found


def _asynchronous(group: ProcessGroup) -> bool:
    own = torch.ones(2)
    work = dist.all_reduce(own, group=group, async_op=True)
    assert work is not None
    work.wait()
    return own.tolist() == [group.size()] * 2


def _extremes(group: ProcessGroup) -> bool:
    own = torch.tensor([group.rank(), -group.rank()])
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own.tolist() == [group.size() - 1, 0]


def _gathers(group: ProcessGroup) -> bool:
    name, count = str(group.group_name), group.size()
    own = torch.tensor([float(group.rank())])
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(own, count, name))
    return bool(whole.tolist() == [*range(count)])


def _scatters(group: ProcessGroup) -> bool:
    name, count = str(group.group_name), group.size()
    own = c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.arange(float(count)), "sum", count, name))
    return bool(own.tolist() == [group.rank() * count])


def _exchanges(group: ProcessGroup) -> bool:
    name, count = str(group.group_name), group.size()
    own = torch.full((count,), float(group.rank()))
    got = c10d.wait_tensor(c10d.all_to_all_single(own, [1] * count, [1] * count, name))
    return bool(got.tolist() == [*range(count)])


def _together(group: ProcessGroup) -> bool:
    name, count = str(group.group_name), group.size()
    whole = c10d.all_gather_into_tensor_coalesced([torch.ones(1), torch.zeros(1)], count, name)
    parts = c10d.reduce_scatter_tensor_coalesced([torch.ones(count), torch.zeros(count)], "sum", count, name)
    sums = c10d.all_reduce_coalesced([torch.ones(1), torch.zeros(1)], "sum", name)
    found = [c10d.wait_tensor(each).tolist() for each in (*whole, *parts, *sums)]
    return found == [[1.0] * count, [0.0] * count, [count], [0.0], [count], [0.0]]


def _messages(group: ProcessGroup) -> bool:
    count, rank = group.size(), group.rank()
    if count == 1:
        return True
    got = torch.zeros(1)
    sent = dist.isend(torch.tensor([float(rank)]), group=group, group_dst=(rank + 1) % count)
    received = dist.irecv(got, group=group, group_src=(rank - 1) % count)
    for work in (sent, received):
        assert work is not None
        work.wait()
    return got.tolist() == [(rank - 1) % count]


def _objects(group: ProcessGroup) -> bool:
    every: list[object] = [None] * group.size()
    dist.all_gather_object(every, ("rank", group.rank()), group=group)
    return every == [("rank", rank) for rank in range(group.size())]


TRIALS: Mapping[str, Trial] = {
    "asynchronous collectives": _asynchronous,
    "reductions of whole numbers": _extremes,
    "all-gather": _gathers,
    "reduce-scatter": _scatters,
    "all-to-all": _exchanges,
    "coalesced collectives": _together,
    "messages between two ranks": _messages,
    "collectives of objects": _objects,
}
"""What the runtime asks of a backend, in the order in which it is tried; timeouts are set by `mesh_context`."""
