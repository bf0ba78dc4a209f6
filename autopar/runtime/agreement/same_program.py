"""What ranks compare around the planning of a step: programs, contents of batches, and the order of collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from autopar.errors import RankError
from autopar.ir.graph import values_of
from autopar.ir.ops.collectives import GROUP_ARGUMENT
from autopar.ir.program import Program
from autopar.runtime.mesh import MeshContext


def require_same_program(
    program: Program, batch: Sequence[tuple[Sequence[int], torch.dtype]], weights: str, context: MeshContext
) -> None:
    """Check what must be the same on every rank before it is worth planning.

    Args:
        program: as captured.
        batch: global shape and dtype of each batch tensor.
        weights: a checksum.
        context: this rank's mesh context.

    Raises:
        RankError: ranks differ.
    """
    shapes = str([(list(shape), str(dtype)) for shape, dtype in batch])
    every_rank = context.gather(
        (shapes, program.fingerprint, weights, hash("a")), "the shapes of the batch (do all ranks see a new one?)"
    )
    model = "build the same model, in the same mode, on every rank"
    if len({values[3] for values in every_rank}) > 1:
        # A model that is otherwise the same has its operators in the order of `set(adapter_names)`, say.
        model += (
            "; a loop over a set of strings in forward (PEFT's adapter_names=) is in another order in each process: "
            "set PYTHONHASHSEED=0 in the environment of all ranks, or loop over sorted(names)"
        )
    # In this order: other shapes make another fingerprint.
    remedies = (
        ("the global shape of the batch", "pass tensors of equal shapes on every rank (drop_last=True for a sampler)"),
        ("the captured model", model),
        ("the parameters' values", "call torch.manual_seed with the same seed on every rank, or load the same weights"),
    )
    for i, (what, remedy) in enumerate(remedies):
        for rank, values in enumerate(every_rank):
            if values[i] != every_rank[0][i]:
                raise RankError(f"{what} differs: rank {rank} has {values[i]}, rank 0 has {every_rank[0][i]}; {remedy}")


def require_same_contents(digest: str, part: int, context: MeshContext) -> None:
    """Ranks that take the same part of a batch must pass the same.

    Raises:
        RankError: two do not.
    """
    first: dict[int, tuple[int, str]] = {}  # rank and digest, by part
    for rank, (own_digest, own_part) in enumerate(context.gather((digest, part), "the batch's contents")):
        other, expected = first.setdefault(own_part, (rank, own_digest))
        if own_digest != expected:
            raise RankError(
                f"the batch's contents differ: rank {rank} has {own_digest}, rank {other} has {expected}; pass the "
                'same batch on every rank, or inputs="local" for each rank\'s own part: a sampler takes '
                "model.data_rank and model.data_world_size"
            )


def collective_order(program: Program) -> str:
    """A hash of which collectives run, on which axes and shapes, in order."""
    # NCCL matches collectives by their order alone: one rank that runs two in another order hangs, or gets wrong data.
    digest = hashlib.sha256()
    for node in program.graph.graph.nodes:
        if node.target in GROUP_ARGUMENT:
            shape = [(tuple(v.shape), str(v.dtype)) for v in values_of(node) if v is not None]
            digest.update(f"{node.target} {node.args[GROUP_ARGUMENT[node.target]]} {shape}\n".encode())
    return digest.hexdigest()[:16]
