"""What the memory constraint counts: of parameters and their states, and of what is saved for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.ir.graph import Value, is_backward, module_path
from autopar.ir.program import SHORT, Program
from autopar.search.formulation.program_point import ProgramPoint
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses


@dataclass(frozen=True)
class MemoryModel:
    """What counts as memory.

    Attributes:
        state: bytes of each parameter and its states, when replicated, by name.
        activations: whether what is saved for the backward pass counts, too.
        recompute: what may be recomputed or re-gathered: ``search`` for anything, ``regather`` for values that depend
            on parameters alone, ``none``, which saves everything that the backward pass reads.
        working: the most bytes that the arguments and results of one operator may have, where that is possible.
        regions: whether the model's own checkpointing decides for the operators in it.
        offload: whether saved activations may be offloaded.
        optimizer: bytes of optimizer state within ``state`` that may be offloaded, too, by name.
        state_share: of parameters, optimizer states, gradients and sums over microbatches, what counts: the share of a
            pipeline stage's device.
        activation_share: of what one microbatch saves for backward, what counts; more than 1 where several microbatches
            are in flight.
        point: the program point at which memory is counted; None: where the backward pass begins.
    """

    state: Mapping[str, float]
    activations: bool = False
    recompute: str = "none"
    working: float = np.inf
    regions: bool = False
    offload: bool = False
    optimizer: Mapping[str, float] = field(default_factory=dict)
    state_share: float = 1.0
    activation_share: float = 1.0
    point: ProgramPoint | None = None

    @property
    def decides_saving(self) -> bool:
        """Whether some activation need not be saved on the device."""
        return self.recompute != "none" or self.regions or self.offload


def block_boundary_activations(program: Program, classes: LayerClasses) -> frozenset[fx.Node]:
    """Activations that repeated blocks pass to the next block; the search always saves them.

    If all blocks recomputed their inputs, the first recomputation of the backward pass would run the blocks one after
    the other from the start and hold everything in between. The memory constraint does not count such chains. To save
    block inputs alone is full recomputation as in Korthikanti et al., https://arxiv.org/abs/2205.05198.
    """
    blocks: dict[str, str] = {}

    def block(node: fx.Node) -> str:
        path = module_path(node)
        if path not in blocks:
            # The innermost block: of an expert within a layer, the expert.
            parts = path.split(".")
            prefixes = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
            blocks[path] = next((p for p in prefixes if p in program.blocks), "")
        return blocks[path]

    forward = [n for n in program.sources if not is_backward(n)]
    over = {s for n in forward for s, _ in program.sources[n] if block(s) and block(n) and block(s) != block(n)}
    # A value that leaves one of few blocks is no chain: only classes with several members are.
    repeated = (m for m in classes.members.values() if len(m) >= SHORT and over.intersection(m))
    return frozenset(node for members in repeated for node in members)


def saved_for_backward(program: Program, dims: Dims) -> frozenset[Value]:
    """The forward values that the backward pass reads, itself or a view of them."""
    found: set[Value] = set()
    for node, sources in program.sources.items():
        for value in sources if is_backward(node) else ():
            while value[0] in dims.operators and dims.operators[value[0]].rule.view:
                value = program.sources[value[0]][0]
            found.add(value)
    return frozenset(found)
