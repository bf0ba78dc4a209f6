"""What a device holds: its state, known before any plan, and the peak of the graph that a plan is rewritten to.

The search counts memory by constraints that leave something out. Whether a plan fits is therefore read off the graph
that would be emitted: it is rewritten as for running, but not verified, and `autopar.memory.liveness` walks through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import is_backward, producer, tensor_arguments, values_of
from autopar.ir.layout import item_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.deep_models import peak_of_blocks
from autopar.memory.peak_snapshot import PeakSnapshot
from autopar.memory.recompute import uniform
from autopar.rules.shapes.local_shapes import propagate
from autopar.search.emitted.rewritten import rewritten
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes


def peak_of(program: Program, plan: Plan, classes: LayerClasses | None = None) -> dict[str, float]:
    """Bytes by category at the program point where a device holds the most, in the graph that a plan gives.

    Args:
        program: canonical program of one microbatch. Where it has three layers for many, their peak is extrapolated.
        plan: for this program.
        classes: its layer classes, where they are known.
    """
    if program.repeat is None:
        return dict(rewritten(program, plan).peak)
    classes = classes or layer_classes(program, analyze(program))
    shorter = program.repeat.shorter
    # Layers may be treated in several ways; each part is the whole model treated in one of them.
    parts = [(share, part) for share, part in uniform(plan, classes.count) if share > 0]
    known = [(s, rewritten(program, part).points, rewritten(shorter, part).points) for s, part in parts]
    return peak_of_blocks(known, program.repeat)


def peak_snapshot_of(program: Program, plan: Plan, classes: LayerClasses) -> PeakSnapshot:
    """The peak tensor by tensor; of a deep model, the tensors are those of the few layers that were captured."""
    found = rewritten(program, plan).snapshot
    if program.repeat is None:
        return found
    held = peak_of(program, plan, classes)
    return replace(found, held=held, totals=(sum(held.values()),))


def saved_for_backward(program: Program, plan: Plan) -> float:
    """Bytes that the backward pass of a rewritten program takes from the forward pass, besides inputs."""
    propagate(program, plan, everything=True)  # passes leave shapes right, but not which tensors share memory
    nodes = list(program.graph.graph.nodes)
    backward = [n for n in nodes if n.op == "call_function" and is_backward(n)]
    inputs = _storages([n for n in nodes if n.op == "placeholder"])
    saved = _storages([a for n in backward for a in tensor_arguments(n) if not is_backward(producer(a)[0])])
    return float(sum(size for storage, size in saved.items() if storage not in inputs))


def _storages(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Bytes of each distinct storage that these nodes' tensors have."""
    return {storage_id(v): v.untyped_storage().nbytes() for n in nodes for v in values_of(n) if v is not None}


def state_bytes(program: Program, optimizer: str, *, gradients: bool = True) -> dict[str, float]:
    """Bytes of each parameter, and of all that it stands for, with optimizer state and gradient, on one device."""
    trained = {
        o.name for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient" and v
    }
    found = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            value = node.meta["val"]
            item = item_bytes(str(value.dtype).removeprefix("torch."))
            size = float(value.numel() * item)
            if spec.name in trained:
                size += (size if gradients else 0.0) + optimizer_state_bytes(optimizer, value.numel(), item)
            found[spec.name] = size * (len(program.repeat.names(spec.name)) if program.repeat else 1)
    return found


def least_state(program: Program, optimizer: str, axes: Mapping[str, int]) -> float:
    """Bytes of parameters, gradients and optimizer state that some device has when the optimizer steps, at least.

    Every plan has all of them on the devices then, also what was in host memory before.
    """
    return sum(state_bytes(program, optimizer).values()) / math.prod(axes.values())


def optimizer_bytes(program: Program, optimizer: str) -> dict[str, float]:
    """Bytes of optimizer state of each parameter that has some, and of all that it stands for, on one device."""
    found, gone = state_bytes(program, optimizer), state_bytes(program, "sgd")
    return {name: size - gone[name] for name, size in found.items() if size > gone[name]}
