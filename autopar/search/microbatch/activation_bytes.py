"""`ActivationBytes`: about what activations take, in closed form, before anything is planned.

It decides which numbers of microbatches and stages are planned first: no bound depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autopar._torch_compat import storage_id
from autopar.ir.graph import is_backward, module_path, producer, tensor_arguments, values_of
from autopar.ir.program import Program

ALL_RECOMPUTED = 1 / 3
"""What it adds to a step to recompute all of its forward pass, of which the backward pass takes twice the time."""

IN_ONE_PIECE = 2.0
"""How many times as much the plans take that need least, since not every tensor is split over all devices: DeepSeek-V3
on 2,048 devices 135 GiB for 66, and 17 for 11 in stages."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of the whole batch, of tensors that are split over all devices.

    Attributes:
        saved: of what the backward pass reads of the forward pass, where nothing is recomputed.
        least: of that, what is saved where each block is recomputed: what other blocks read of one.
        working: of a block that is recomputed and of its gradients, or of one operator.
    """

    saved: float
    least: float
    working: float

    def slowdown(self, in_flight: float, microbatches: float, room: float) -> float:
        """About how many times as long a step takes where this must be recomputed; infinite: it does not fit at all.

        Args:
            in_flight: how often a device holds what one microbatch saves of the whole model.
            microbatches: times the devices that share one.
            room: bytes for activations on a device.
        """
        free = (self.saved * in_flight + self.working) / microbatches
        least = IN_ONE_PIECE * (self.least * in_flight + self.working) / microbatches
        if free <= room:
            return 1.0
        return 1 + ALL_RECOMPUTED * (free - room) / (free - least) if least < room else float("inf")


def activation_bytes(program: Program) -> ActivationBytes:
    """Of a model, of which a program may have three blocks."""
    if "activation_bytes" not in program.memo:
        program.memo["activation_bytes"] = _activation_bytes(program)
    known: ActivationBytes = program.memo["activation_bytes"]
    return known


def _activation_bytes(program: Program) -> ActivationBytes:
    saved, largest = _saved(program.graph.graph.nodes), _largest_operator(program)
    repeat = program.repeat
    if repeat is None:
        return ActivationBytes(saved, 0.0, largest)
    shorter = _saved(repeat.shorter.graph.graph.nodes)
    return ActivationBytes(
        repeat.extrapolate(saved, shorter), repeat.blocks * _leaves_block(program), max(2 * (saved - shorter), largest)
    )


def _saved(nodes: Iterable[fx.Node]) -> float:
    """Bytes that operators of the forward pass compute and those of the backward pass read."""
    found: dict[int, int] = {}
    for node in nodes:
        for value, output in map(producer, tensor_arguments(node)) if is_backward(node) else ():
            tensor = values_of(value)[output]
            if value.op == "call_function" and not is_backward(value) and tensor is not None:
                found[storage_id(tensor)] = max(tensor.nbytes, found.get(storage_id(tensor), 0))
    return float(sum(found.values()))


def _leaves_block(program: Program) -> float:
    """Bytes that the forward pass of other modules reads of the block in the middle."""
    assert program.repeat is not None
    middle, found = program.repeat.modules(1), {}
    for node in program.graph.graph.nodes:
        if is_backward(node) or _within(node, middle):
            continue
        for value, output in map(producer, tensor_arguments(node)):
            tensor = values_of(value)[output]
            if value.op == "call_function" and tensor is not None and _within(value, middle):
                found[storage_id(tensor)] = tensor.nbytes
    return float(sum(found.values()))


def _within(node: fx.Node, modules: Iterable[str]) -> bool:
    return any(f"{module_path(node)}.".startswith(f"{m}.") for m in modules)


def _largest_operator(program: Program) -> float:
    """Bytes of the arguments and results of the operator that has the most."""
    most = 0
    for node in program.graph.graph.nodes:
        if node.op == "call_function":
            read = [values_of(value)[output] for value, output in dict.fromkeys(map(producer, tensor_arguments(node)))]
            sizes = {storage_id(v): v.nbytes for v in (*values_of(node), *read) if v is not None}
            most = max(most, sum(sizes.values()))
    return float(most)
