"""Copies of snapshots on other nodes: which ranks keep one for which, and how they get it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.checkpoint.snapshot_files import PARTIAL
from autopar.runtime.mesh import MeshContext


def neighbors(nodes: Sequence[str], rank: int, copies: int) -> tuple[list[int], list[int]]:
    """To which ranks this one's snapshot goes, and whose it keeps: each on another node, as many as there are.

    Args:
        nodes: of each rank, its node.
        rank: this one.
        copies: how many nodes, besides its own, have each rank's snapshot.

    >>> neighbors(["a", "a", "b", "b", "c", "c"], 1, 1), neighbors(["a", "a"], 1, 1)
    (([3], [5]), ([], []))
    """
    distinct = list(dict.fromkeys(nodes))
    ranks = {node: [r for r, n in enumerate(nodes) if n == node] for node in distinct}

    def keepers(of: int) -> list[int]:
        place, own = ranks[nodes[of]].index(of), distinct.index(nodes[of])
        others = [distinct[(own + k) % len(distinct)] for k in range(1, min(copies, len(distinct) - 1) + 1)]
        return [ranks[node][place % len(ranks[node])] for node in others]

    return keepers(rank), [r for r in range(len(nodes)) if rank in keepers(r)]


def send_files(
    context: MeshContext, group: Any, own: Path, to: Sequence[int], sources: Sequence[int], folder: Path
) -> list[Path]:
    """Send this rank's file to those that keep it, and write those that this rank keeps.

    Args:
        context: of the ranks.
        group: of processes on the host, of the ranks.
        own: this rank's file.
        to: ranks that get it.
        sources: ranks whose files this one gets.
        folder: for them.

    Returns:
        Paths of the files that came.
    """
    if not to:  # on any rank, and then on all of them
        return []
    names_and_sizes = context.gather((own.name, own.stat().st_size), "copies of a snapshot")
    content = torch.from_file(str(own), shared=False, size=own.stat().st_size, dtype=torch.uint8)
    world = len(names_and_sizes)
    going = [content.numel() if r in to else 0 for r in range(world)]
    coming = [names_and_sizes[r][1] if r in sources else 0 for r in range(world)]
    received = torch.empty(sum(coming), dtype=torch.uint8)
    with context.during("sending copies of a snapshot"):
        dist.all_to_all_single(received, content.repeat(len(to)), coming, going, group=group)
    written = []
    at = 0
    for source in sources:
        path = folder / names_and_sizes[source][0]
        received[at : at + coming[source]].numpy().tofile(path.with_suffix(PARTIAL))
        written.append(path.with_suffix(PARTIAL).rename(path))
        at += coming[source]
    return written
