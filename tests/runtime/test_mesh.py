"""What a mesh must be for a rank to have coordinates on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import mesh as mesh_module
from autopar.runtime.mesh import mesh_context, one_device


def mesh(*sizes: int, device: str = "cpu", coordinate: tuple[int, ...] | None = None) -> Any:
    """What `mesh_context` reads of a mesh."""
    total = int(torch.tensor(sizes).prod())
    return SimpleNamespace(
        shape=sizes, mesh_dim_names=None, device_type=device, size=lambda: total,
        get_coordinate=lambda: coordinate, get_group=lambda i: f"group {i}",
    )  # fmt: skip


@pytest.fixture
def world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(mesh_module, "set_group_timeout", lambda timeout, group: None)


def test_missing_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group.*init_process_group.*mesh=None"):
        mesh_context(mesh(2, 2), 1.0)


@pytest.mark.usefixtures("world_of_four")
def test_axes_that_do_not_match_the_world() -> None:
    with pytest.raises(ValueError, match=r"mesh has 6 ranks and the world 4.*start 6 processes"):
        mesh_context(mesh(2, 3), 1.0)


@pytest.mark.usefixtures("world_of_four")
def test_rank_outside_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"rank 3 is not in the mesh"):
        mesh_context(mesh(2), 1.0)


@pytest.mark.usefixtures("world_of_four")
def test_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(ValueError, match=r'cuda:nccl\) does not serve cpu tensors.*"gloo"'):
        mesh_context(mesh(2, 2, coordinate=(1, 1)), 1.0)


@pytest.mark.usefixtures("world_of_four")
def test_gloo_for_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    with pytest.raises(ValueError, match=r'Gloo reads the memory of GPU tensors.*"nccl"'):
        mesh_context(mesh(2, 2, device="cuda", coordinate=(1, 1)), 1.0)


def test_one_device_needs_no_group() -> None:
    found = one_device(torch.device("cpu"))
    assert (found.axes, found.coordinates, found.mesh) == ((("device", 1),), (0,), None)
