"""What the row of memory counts: of the model, of what the forward pass makes, and of whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.ir.graph import is_backward, module_path
from autopar.ir.program import SHORT, Program, Value
from autopar.search.formulation.peak_point import PeakPoint
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses


@dataclass(frozen=True)
class Share:
    """What a device of one stage of a pipeline holds, of what it would hold for the whole model.

    Attributes:
        states: of parameters, what belongs to them, and sums over microbatches.
        kept: of what one microbatch keeps for the backward pass; more than 1 where several are under way.
    """

    states: float = 1.0
    kept: float = 1.0


WHOLE = Share()


@dataclass(frozen=True)
class MemoryModel:
    """What counts as memory.

    Attributes:
        state: bytes of each parameter with what belongs to it, when replicated, by name.
        activations: whether what is kept for the backward pass counts, too.
        again: what may be made or moved again: ``search`` for anything, ``gathers`` for what comes from parameters
            alone, ``none``, which keeps all that the backward pass takes.
        working: bytes that what one operator takes and makes may have, where that is possible.
        regions: whether the model's own checkpointing decides for what is in it.
        away: whether what is kept may lie on the host.
        optimizer: of ``state``, bytes of optimizer state that may lie there, too, by name.
        share: of all this that counts.
        moment: when it counts; None: when the backward pass begins.
    """

    state: Mapping[str, float]
    activations: bool = False
    again: str = "none"
    working: float = np.inf
    regions: bool = False
    away: bool = False
    optimizer: Mapping[str, float] = field(default_factory=dict)
    share: Share = WHOLE
    moment: PeakPoint | None = None

    @property
    def states(self) -> bool:
        """Whether something need not be kept on the device."""
        return self.again != "none" or self.regions or self.away


def carried(program: Program, classes: LayerClasses) -> frozenset[fx.Node]:
    """What each of several blocks hands to the next.

    If all made that again, all of them would run before the first gradient of any, and hold what they make; the row of
    memory does not count such chains.
    """
    blocks: dict[str, str] = {}

    def block(node: fx.Node) -> str:
        path = module_path(node)
        if path not in blocks:
            parts = path.split(".")
            prefixes = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
            blocks[path] = next((p for p in prefixes if p in program.blocks), "")
        return blocks[path]

    forward = [n for n in program.sources if not is_backward(n)]
    over = {s for n in forward for s, _ in program.sources[n] if block(s) and block(n) and block(s) != block(n)}
    carried = (m for m in classes.members.values() if len(m) >= SHORT and over.intersection(m))
    return frozenset(node for members in carried for node in members)


def stored(program: Program, dims: Dims) -> frozenset[Value]:
    """The forward's values that the backward pass takes, itself or as a view of them."""
    found: set[Value] = set()
    for node, sources in program.sources.items():
        for value in sources if is_backward(node) else ():
            while value[0] in dims.operators and dims.operators[value[0]].rule.view:
                value = program.sources[value[0]][0]
            found.add(value)
    return frozenset(found)
