"""`explain`: the layouts of parameters and their alternatives; what is saved for the backward pass, and why."""

from __future__ import annotations

import math

from autopar.costs.memory import format_bytes
from autopar.explain.activations import activations
from autopar.explain.tables.activations import activations_table
from autopar.ir.layout import Layout, TensorType, describe, factor_parts, is_boundary_layout, item_bytes
from autopar.ir.plan import Plan
from autopar.sharding.candidates import layouts
from autopar.specialize import Specialization

SHOWN = 6
"""Alternative layouts that are listed."""


def explain(found: Specialization, name: str) -> str:
    """Text about a parameter, about a module's parameters and activations, or about one operator.

    Raises:
        ValueError: the model has nothing of that name.
    """
    types, plan = found.step.types.parameters, found.plan
    name = found.program.aliases.get(name, name)
    # A module stands for all of its parameters.
    chosen = [name] if name in types else [n for n in types if n.startswith(name + ".")]
    tensors = activations(found.part, plan, name)
    lines = [line for parameter in chosen for line in _layouts(parameter, *types[parameter], plan)]
    for row in plan.modules:
        if chosen and (row.path == name or chosen[0].rpartition(".")[0] == row.path):
            sent = ", ".join(f"{format_bytes(v)} over {a}" for a, v in row.communication_bytes.items())
            lines.append(f"module {row.path} x{row.instances}: {row.seconds:.3g} s, sends {sent or 'nothing'}")
    own = plan.certificate
    lines.append(
        f"chosen with all other layouts for the shortest step: {own.objective:.3g} s, "
        f"at least {own.lower_bound:.3g} s in {own.space}"
    )
    return "\n".join([*lines, *([activations_table(plan, tensors)] if tensors else [])])


def _layouts(name: str, type_: TensorType, layout: Layout, plan: Plan) -> list[str]:
    """The layout of a parameter, and the others that it could have, each with its bytes per device."""

    def line(candidate: Layout) -> str:
        size = type_.numel * item_bytes(type_.dtype)
        # By parts of factors: a dim of several factors may be split along one of them.
        local = size / math.prod(factor_parts(candidate, plan.axis_sizes).values())
        return f"{describe(type_, candidate, plan.axis_names)}, {format_bytes(local)} per device"

    others = [
        other for other in layouts(type_, plan.axis_sizes, False)
        if other != layout and is_boundary_layout(type_, other, plan.axis_sizes)
    ]  # fmt: skip
    lines = [f"{name}: {line(layout)}", *(f"  instead: {line(other)}" for other in others[:SHOWN])]
    more = len(others) - SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines
