"""`explain`: how parameters lie and what else they could be; what is kept for the backward pass, and why."""

from __future__ import annotations

from autopar.costs.memory import format_bytes
from autopar.explain.activations import activations
from autopar.explain.tables.activations import activations_table
from autopar.ir.layout import Layout, describe, factor_parts, is_boundary_layout, item_bytes
from autopar.sharding.candidates import layouts
from autopar.specialize import Specialization

SHOWN = 6
"""Alternatives that are listed."""


def explain(found: Specialization, name: str) -> str:
    """Text about a parameter, a module's parameters and what it computes, or one operator.

    Raises:
        ValueError: the model has nothing of that name.
    """
    types, plan = found.step.types.parameters, found.plan
    name = found.program.aliases.get(name, name)
    chosen = [name] if name in types else [n for n in types if n.startswith(name + ".")]
    tensors = activations(found.part, plan, name)
    lines = []
    for parameter in chosen:
        type_, layout = types[parameter]
        size = type_.numel * item_bytes(type_.dtype)

        def local(candidate: Layout, size: int = size) -> float:
            parts = 1
            for n in factor_parts(candidate, plan.axis_sizes).values():
                parts *= n
            return size / parts

        lines.append(f"{parameter}: {describe(type_, layout, plan.axis_names)}, {format_bytes(local(layout))} a device")
        others = [
            c for c in layouts(type_, plan.axis_sizes, False)
            if c != layout and is_boundary_layout(type_, c, plan.axis_sizes)
        ]  # fmt: skip
        for other in others[:SHOWN]:
            lines.append(f"  instead: {describe(type_, other, plan.axis_names)}, {format_bytes(local(other))} a device")
        if len(others) > SHOWN:
            lines.append(f"  and {len(others) - SHOWN} more")
    for row in plan.modules:
        if chosen and (row.path == name or chosen[0].rpartition(".")[0] == row.path):
            sent = ", ".join(f"{format_bytes(v)} over {a}" for a, v in row.communication_bytes.items())
            lines.append(f"module {row.path} x{row.instances}: {row.seconds:.3g} s, sends {sent or 'nothing'}")
    lines.append(f"chosen together with all other layouts for the shortest step: {plan.certificate.objective:.3g} s, "
                 f"at least {plan.certificate.lower_bound:.3g} s in {plan.certificate.space}")  # fmt: skip
    return "\n".join([*lines, *([activations_table(plan, tensors)] if tensors else [])])
