"""`NeededBytes` and `spread`: about what plans need and send, in closed form, before anything is planned.

It decides which numbers of stages and microbatches are planned first: no bound depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.device import Link
from autopar.ir.graph import is_backward, producer, tensor_arguments, values_of
from autopar.ir.program import Program
from autopar.search.emitted.peak import state_bytes

HELD = 0.3
"""The share of a stage's parameters that a device has whole through a step, and of their gradients that it sums there,
where memory does not matter and there are several microbatches. Of DeepSeek-V3 in 2 to 32 stages on 2,048 devices all
that the search counts, activations included, is 0.90 to 1.19 times what this gives."""

SHORTAGE, SHORTAGE_SPLIT = 0.25, 0.5
"""A plan that needs ``x`` times the memory takes about ``x`` to this power as long within it. Guesses, until something
is searched within the budget: DeepSeek-V3 on 2,048 devices took 1.00, 1.19 and 1.01 times as long for 2.1, 2.9 and 3.8
in 1F1B. Where backward passes are split it took 1.6 for 6.9, or did not fit at all: what is recomputed for the gradient
of the input is held for that of the weights."""

SPREAD = 0.5
"""Where a microbatch has ``1 / x`` samples for each group of devices with fast links, so that a sample is split along
slow ones, a plan takes about ``x`` to this power times as long as its kernels. Llama-3-405B on 2,048 nodes takes 1.1
times as long for 1, 1.4 and 1.6 for 2, 1.3 to 2.3 for 4, and 3.0 for 8."""


@dataclass(frozen=True)
class NeededBytes:
    """Bytes of the whole batch and the whole model.

    Attributes:
        saved: of what the backward pass reads of the forward pass.
        parameters: of parameters.
        state: of parameters, gradients and optimizer state.
    """

    saved: float
    parameters: float
    state: float

    def of_device(self, stages: int, devices: int, count: int, in_flight: float) -> float:
        """Bytes on each device.

        Args:
            stages: of the model.
            devices: of each.
            count: of microbatches.
            in_flight: how often a device holds what one microbatch saves of the whole model.
        """
        held = 2 * HELD * self.parameters / stages if count > 1 else 0.0
        return self.state / (stages * devices) + held + in_flight * self.saved / (count * devices)


def slowdown(needed: float, memory: float, *, split: bool = False) -> float:
    """About how many times as long a step takes within the memory as if there was as much as it needs.

    Args:
        needed: bytes.
        memory: bytes.
        split: whether backward passes are in two parts.
    """
    return float(max(1.0, needed / memory) ** (SHORTAGE_SPLIT if split else SHORTAGE))


def spread(samples: float, sizes: Sequence[int], links: Sequence[Link]) -> float:
    """About how many times as long as its kernels a plan takes, whose samples are too few for the axes with slow links.

    Args:
        samples: of a microbatch.
        sizes: of the axes of a mesh.
        links: of each.
    """
    fastest = max((link.bandwidth for link in links), default=0.0)
    groups = math.prod(n for n, link in zip(sizes, links, strict=True) if link.bandwidth < fastest)
    return float(max(1.0, groups / samples) ** SPREAD)


def needed_bytes(program: Program, optimizer: str) -> NeededBytes:
    """Of a model, of which a program may have three blocks."""
    key = f"needed bytes with {optimizer}"
    if key not in program.memo:
        saved, repeat = _saved(program.graph.graph.nodes), program.repeat
        if repeat is not None:
            saved = float(repeat.extrapolate(saved, _saved(repeat.shorter.graph.graph.nodes)))
        parameters = sum(state_bytes(program, "sgd", gradients=False).values())
        program.memo[key] = NeededBytes(saved, parameters, sum(state_bytes(program, optimizer).values()))
    known: NeededBytes = program.memo[key]
    return known


def _saved(nodes: Iterable[fx.Node]) -> float:
    """Bytes that operators of the forward pass compute and those of the backward pass read."""
    found: dict[int, int] = {}
    for node in nodes:
        for value, output in map(producer, tensor_arguments(node)) if is_backward(node) else ():
            tensor = values_of(value)[output]
            if value.op == "call_function" and not is_backward(value) and tensor is not None:
                found[storage_id(tensor)] = max(tensor.nbytes, found.get(storage_id(tensor), 0))
    return float(sum(found.values()))
