"""What the runtime asks of a backend, tried on four processes with Gloo, along axes of two ranks and of all."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Ranks, mesh_of

pytestmark = pytest.mark.distributed


def trials(rank: int) -> list[dict[str, str]]:
    from autopar.runtime.backends import lacks

    meshes = (mesh_of(4), mesh_of(2, 2))
    return [lacks(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim)]


def test_gloo_does_all_of_it(ranks: Ranks) -> None:
    assert ranks.run(trials) == [[{}, {}, {}]] * 4
