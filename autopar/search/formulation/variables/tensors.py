"""Variables of tensors that no operator computes: parameters, batch tensors, results and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.costs.host_copies import copy_seconds
from autopar.errors import InfeasibleError
from autopar.ir.layout import Layout, Partial, Placement, Replicate, Split, TensorType, is_boundary_layout
from autopar.search.formulation.pins import Pinned
from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.variable import SAVED, Floats, Ints, Port, Variable
from autopar.sharding.candidates import split_parts


def parameter_variable(context: BuildContext, key: str, names: tuple[str, ...]) -> Variable:
    """The variable of a class of parameters, with the memory of their states and gradients.

    Args:
        context: of the problem.
        key: of the class.
        names: of its members.
    """
    node, memory = context.classes.members[key][0], context.memory
    gradients = memory.point.gradients if memory.point else {}
    size = sum(memory.state[n] + gradients.get(n, 0.0) for n in names) * memory.state_share
    type_ = context.dims.types[node, 0]
    found = tensor_variable(context, key, context.classes.count[key], type_, "parameter", names, size)
    offloadable = sum(memory.optimizer.get(n, 0.0) for n in names) * memory.state_share
    return _with_offloaded_states(context, found, offloadable)


def _with_offloaded_states(context: BuildContext, variable: Variable, size: float) -> Variable:
    """A parameter's variable with each layout twice, if so many of its bytes may be offloaded between steps.

    Only a parameter that is split as much as possible may be: for the optimizer's step all its state is on the device,
    and the memory constraint does not count that.
    """
    if not size:
        return variable
    parts = context.tables.of(variable.types["out", 0]).parts[variable.ports["out", 0]]
    local = size / parts
    seconds = 2 * copy_seconds(local, context.tables.machine.device, variable.count)
    seconds = np.where(parts == parts.max(), seconds, np.inf)
    return replace(variable, memory=variable.memory - local).in_states((SAVED,), 1, local, seconds)


def result_variable(context: BuildContext, name: str, type_: TensorType) -> Variable:
    """The variable of a result of the model.

    Args:
        context: of the problem.
        name: of the result.
        type_: of its value.
    """
    kind = "constant" if is_loss(context, name) else "result"
    found = tensor_variable(context, f"result {name}", 1, type_, kind, (name,))
    point, part = context.memory.point, context.program.part
    if point is None or name not in point.results:
        return found
    times = part.count if name in part.results else 1
    return replace(found, memory=found.memory + times * context.bytes(found, "out", 0))


def is_loss(context: BuildContext, name: str) -> bool:
    """Whether a result is the loss, which is always replicated."""
    return context.program.loss is not None and int(name) == context.program.loss


def tensor_variable(
    context: BuildContext,
    key: str,
    count: int,
    type_: TensorType,
    kind: str,
    names: tuple[str, ...] = (),
    memory: float = 0.0,
) -> Variable:
    """The variable of a class of tensors, with a label for each layout that the restrictions admit.

    Args:
        context: of the problem.
        key: of the class.
        count: of its members.
        type_: of one member.
        kind: ``parameter``, ``batch``, ``result``, ``consumer`` or ``constant``.
        names: of the members, as pins name them.
        memory: bytes of all members where they are replicated.

    Raises:
        InfeasibleError: no layout satisfies the pins.
    """
    table = context.tables.of(type_)
    # Once for all layouts: there are as many names as layers.
    pins = dict.fromkeys(p for n in names if (p := context.restrictions.layouts.get((kind, n))) is not None)
    roles = next((r for n in names if (r := context.restrictions.placements.get((kind, n))) is not None), None)
    none: Sequence[Placement | None] = (None,) * len(context.sizes)
    wanted = [pin or role for pin, role in zip(next(iter(pins), none), roles or none, strict=True)]
    allowed = [
        i for i, layout in enumerate(table.layouts) if _admits(context, kind, type_, layout, key, wanted, list(pins))
    ]
    if not allowed:
        alike = "; repeated layers are laid out alike: pin them alike, or set tie_layers=False"
        raise InfeasibleError(
            f"no layout of {kind} {', '.join(names) or key} of shape {type_.shape} satisfies what is pinned "
            f"({', '.join(map(str, pins))}) on axes of sizes {context.sizes}{alike if len(pins) > 1 else ''}"
        )
    labels: Ints = np.array(allowed, dtype=np.int64)
    parts: Floats = np.array([split_parts(table.layouts[i], context.sizes) for i in allowed], dtype=np.float64)
    ports: dict[Port, Ints] = {("in", 0): labels, ("out", 0): labels}
    types: dict[Port, TensorType] = {("in", 0): type_, ("out", 0): type_}
    return Variable(key, count, ports, types, None, np.zeros(len(labels)), memory / parts, np.arange(len(labels)))


def _admits(
    context: BuildContext,
    kind: str,
    type_: TensorType,
    layout: Layout,
    key: str,
    wanted: Sequence[Placement | None],
    pins: Sequence[Pinned],
) -> bool:
    """Whether a tensor may have a layout.

    Args:
        context: of the problem.
        kind: of the tensor.
        type_: its type.
        layout: in question.
        key: of its class.
        wanted: placement by axis, of a pin or else of a role; None where it is open.
        pins: of all tensors of its class.
    """
    restrictions = context.restrictions
    if any(w is not None and p != w for p, w in zip(layout, wanted, strict=True)):
        return False
    # A pin holds on every axis, searched or not.
    free, fixed = restrictions.free, restrictions.fixed.get(key, [w or Replicate() for w in wanted])
    if free is not None and any(layout[a] != fixed[a] for a in range(len(layout)) if a not in free):
        return False
    # Every device computes constants and holds buffers; the loss is what all devices agree on.
    if kind == "constant":
        return all(isinstance(p, Replicate) for p in layout)
    if kind == "consumer":
        return True
    if any(isinstance(p, Partial) for p in layout):
        return False
    if any(w is not None and p != w for pin in pins for p, w in zip(layout, pin, strict=True)):
        return False
    if kind == "batch":
        data = not restrictions.data_axes_only or all(p in (Replicate(), Split(0, 0)) for p in layout)
        return data and (key not in context.differentiable or is_boundary_layout(type_, layout, context.sizes))
    return is_boundary_layout(type_, layout, context.sizes)
