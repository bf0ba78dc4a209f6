"""Backends that this torch does not have are refused before anything is started, and others are tried first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import autopar
from autopar import cli
from autopar.runtime import backends
from autopar.runtime.launch.environment import started_by_mpi
from autopar.runtime.mesh import mesh_context

WITHOUT = r"backend 'mpi': torch .* was built without MPI.* with USE_MPI=1 .* or take 'gloo'"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No process group, and none left behind."""
    for name in ("WORLD_SIZE", "RANK", "AUTOPAR_AXES", "AUTOPAR_BACKEND", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_mpi_is_refused_without_it(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=WITHOUT):
        autopar.mesh({"a": 2}, device="cpu", backend="mpi")
    monkeypatch.setenv("AUTOPAR_BACKEND", "mpi")
    with pytest.raises(ValueError, match=WITHOUT):
        autopar.mesh(device="cpu")
    assert not dist.is_initialized()
    script = alone / "train.py"
    script.write_text("raise SystemExit('started')\n")
    found = CliRunner().invoke(cli.app, ["run", "--nproc", "2", "--backend", "mpi", str(script)])
    assert found.exit_code == 2 and "was built without MPI" in found.output and "started" not in found.output


@pytest.mark.parametrize(
    ("backend", "device", "says"),
    [
        (
            "gloo",
            "cuda",
            "backend 'gloo' is for a mesh of cpu devices, and this one is of cuda: take 'nccl', or device",
        ),
        ("nccl", "cpu", "backend 'nccl' is for a mesh of cuda devices, and this one is of cpu: take 'gloo', or device"),
        ("mpi", "cuda", "backend 'mpi' is for a mesh of cpu devices, and this one is of cuda: take 'nccl', or device"),
        ("ucc", "cpu", "backend 'ucc': expected 'gloo', 'nccl', 'mpi'"),
    ],
)
def test_what_serves_what(backend: str, device: str, says: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        backends.require_backend(backend, device)
    assert says in str(caught.value)


def test_where_torch_has_mpi(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    # The command starts processes that MPI does not know of.
    (alone / "train.py").touch()
    found = CliRunner().invoke(cli.app, ["run", "--nproc", "2", "--backend", "mpi", str(alone / "train.py")])
    assert found.exit_code == 2 and "mpirun -n N python SCRIPT.py" in found.output
    with pytest.raises(ValueError, match=r"this one was not started by it; run mpirun -n N"):
        autopar.mesh(device="cpu", backend="mpi")
    # As under mpirun: the world is Gloo's, whose store control messages need, and MPI is asked for along each axis.
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: made.update(world=backend))
    monkeypatch.setattr(
        "autopar.runtime.launch.mesh.init_device_mesh", lambda kind, sizes, **more: made.update(sizes=sizes, **more)
    )
    for name, value in (("RANK", 1), ("SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 4)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    autopar.mesh({"a": 2, "b": 2}, device="cpu", backend="mpi")
    assert made["world"] == "gloo" and made["sizes"] == (2, 2) and made["backend_override"] == {"a": "mpi", "b": "mpi"}
    assert os.environ["RANK"] == "1" and os.environ["MASTER_ADDR"] == "localhost"


def test_several_nodes_need_an_address() -> None:
    sizes = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match=r"set MASTER_ADDR to the host of rank 0"):
        started_by_mpi(sizes)
    assert started_by_mpi({**sizes, "MASTER_ADDR": "node0"})["MASTER_ADDR"] == "node0"


def test_a_backend_that_lacks_something_is_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    assert backends.lacks(mesh.get_group()) == {}
    assert mesh_context(mesh, 60.0).axes == (("a", 1),)

    def refuses(group: Any) -> bool:
        raise RuntimeError("allreduce_coalesced is currently not supported")

    trials = {**backends.TRIALS, "coalesced collectives": refuses, "all-to-all": lambda group: False}
    monkeypatch.setattr(backends, "TRIALS", trials)
    mesh_context(mesh, 60.0)  # Gloo is known
    monkeypatch.setattr(backends, "PROVEN", ("nccl",))
    monkeypatch.setattr(backends, "SERVES", {"nccl": "cpu"})
    lacks = (
        r"backend 'gloo' of the mesh lacks .*: all-to-all \(its result is wrong\); coalesced collectives \(allreduce_co"
    )
    with pytest.raises(ValueError, match=lacks):
        mesh_context(mesh, 60.0)


def test_a_backend_that_sends_nothing_is_noticed(alone: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    group = dist.group.WORLD
    assert group is not None
    assert {"asynchronous collectives", "all-gather", "reduce-scatter", "coalesced collectives"} <= set(
        backends.lacks(group)
    )


def test_a_world_of_mpi_alone_is_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:mpi,cuda:mpi")
    with pytest.raises(ValueError, match=r'the world is a process group of MPI.* use autopar\.mesh\(backend="mpi"\)'):
        mesh_context(mesh, 60.0)
