"""What it costs to lose nodes: how many copies are enough, and no fewer; and seconds and bytes by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from autopar.costs.cluster import Cluster, Device, Link
from autopar.explain.survival import copies_for, survival, survival_table, units_of
from autopar.ir.layout import Layout, Replicate, Split
from autopar.ir.plan import Certificate, Plan, Predicted
from autopar.runtime.checkpoint.snapshot_neighbors import neighbors


def survives(layouts: Sequence[Layout], sizes: Sequence[int], devices: int, lost: int, copies: int) -> bool:
    """Whether of any nodes that may be lost the others have all parts: who keeps a copy is what a run does."""
    world = math.prod(sizes)
    nodes = [str(rank // devices) for rank in range(world)]
    kept = [neighbors(nodes, rank, copies)[1] for rank in range(world)]
    places = list(itertools.product(*map(range, sizes)))

    def parts(rank: int) -> set[tuple[int, ...]]:
        split = [(i, d) for i, layout in enumerate(layouts) for d, p in enumerate(layout) if isinstance(p, Split)]
        own = {i: tuple(places[rank][d] for j, d in split if j == i) for i in range(len(layouts))}
        return {(i, *place) for i, place in own.items()}

    everything = set().union(*map(parts, range(world)))
    for gone in itertools.combinations(sorted(set(nodes)), lost):
        left = [rank for rank in range(world) if nodes[rank] not in gone]
        if set().union(*(parts(r) for rank in left for r in (rank, *kept[rank]))) != everything:
            return False
    return True


@pytest.mark.slow
def test_copies_are_enough_and_no_fewer_are() -> None:
    draw = random.Random(49000000)
    seen = set()
    for _ in range(60):
        sizes = [draw.choice((2, 3, 4)) for _ in range(draw.randint(1, 3))]
        devices = draw.choice([n for n in (1, 2, 4) if math.prod(sizes) % n == 0 and math.prod(sizes) > n])
        lost = draw.randint(1, min(3, math.prod(sizes) // devices - 1))
        layouts = [tuple(draw.choice((Replicate(), Split(0))) for _ in sizes) for _ in range(draw.randint(1, 2))]
        copies = copies_for(layouts, sizes, devices, lost)
        assert survives(layouts, sizes, devices, lost, copies)
        assert copies == 0 or not survives(layouts, sizes, devices, lost, copies - 1)
        seen.add(copies)
    assert seen >= {0, 1, 2}


def plan_of(layout: Layout, **predicted: float) -> Plan:
    device = Device("d", {"float32": 1e12}, 1e9, 1e11, 1e-6, host_bandwidth=1e9)
    cluster = Cluster("c", device, (Link("in", 1e10, 1e-9), Link("out", 1e8, 1e-9)), (2,))
    return Plan(
        (("node", 4), ("gpu", 2)), cluster, {"w": layout}, {}, {}, {}, {}, "adamw", "", "",
        Certificate(1.0, 1.0, "", ""), Predicted(step_seconds=1.0, memory_bytes=predicted),
    )  # fmt: skip


def test_seconds_and_bytes_by_hand() -> None:
    sharded = plan_of((Split(0), Split(0)), parameters=3e6, gradients=9e9, optimizer=6e6, buffers=1e6)
    found = survival(sharded, 1)
    assert (found.unit, found.devices, found.units, found.copies) == ("node", 2, 4, 1)
    assert found.snapshot_bytes == 1e7 and found.host_bytes == 3 * 2 * 2 * 1e7
    # To the host at 1 GB/s with a launch, and to the next node at 100 MB/s.
    assert found.step_seconds == pytest.approx(1e-2 + 1e-6 + 1e-1, rel=1e-6)
    assert found.meet_seconds == 18
    assert found.restore_seconds == pytest.approx(4 / 3 * (1e-2 + 1e-6 + 1e-1), rel=1e-6)
    assert found.to_dict()["recovery_seconds"] == found.meet_seconds + found.restore_seconds
    whole = survival(plan_of((Replicate(), Split(0)), parameters=1e7), 3)
    assert whole.copies == 0 and whole.host_bytes == 3 * 2 * 1e7
    assert whole.step_seconds == pytest.approx(1e-2 + 1e-6)
    text = survival_table([("this plan", sharded), ("ddp", plan_of((Replicate(),) * 2, parameters=1e7))], 1)
    assert "survives 1 node of 4" in text and "114.4 MiB" in text and "57.2 MiB" in text and "110 ms" in text


def test_what_cannot_be_survived() -> None:
    cluster = Cluster.preset("h100")
    with pytest.raises(ValueError, match="the mesh has 2 nodes, and one must be left; survive at most 1"):
        units_of(cluster, {"node": 2, "gpu": 8}, 2)
    with pytest.raises(ValueError, match="the mesh has 1 device, and one must be left; leave it out"):
        units_of(cluster, {"gpu": 1}, 1)
    with pytest.raises(ValueError, match="12 devices are no whole number of nodes of 8"):
        units_of(cluster, {"a": 12}, 1)
