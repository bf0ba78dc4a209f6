"""Collectives are timed within nodes and between them: four ranks, as two nodes of two."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.distributed.launch import Ranks

pytestmark = pytest.mark.distributed

SIZES = (1024, 65536)


def measured(rank: int, local: int) -> list[Any]:
    from autopar.costs.calibrate.collectives import measure_collectives

    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    try:
        return measure_collectives(torch.device("cpu"), sizes=SIZES, runs=2)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


@pytest.mark.parametrize(
    ("local", "levels"), [(2, [0, 1]), *(pytest.param(*c, marks=pytest.mark.deep) for c in ((4, [0]), (1, [1])))]
)
def test_every_collective_on_every_level(ranks: Ranks, local: int, levels: list[int]) -> None:
    from autopar.costs.calibrate.collectives import BEFORE, HIDDEN, KINDS, SMALL

    every = ranks.run(measured, local)
    assert all(found == every[0] for found in every)  # seconds of the slowest, on all of them
    expected = [(kind, size, level) for level in levels for kind in KINDS for size in SIZES]
    for level in levels:
        expected += [("beside", size, level) for size in HIDDEN] + [("behind", SMALL, level) for _ in BEFORE]
    assert [(s.kind, s.sizes[0], s.level) for s in every[0]] == expected
    assert {s.sizes[1] for s in every[0]} == {2 if local == 2 else 4}
    assert all(s.seconds > 0 for s in every[0])
