"""`ask`: what a plan would cost if a tensor had another layout, and what rules that layout out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.compiler import solve
from autopar.errors import InfeasibleError
from autopar.explain.recipes import reason_of
from autopar.ir.graph import module_path, values_of
from autopar.ir.layout import Layout, Split, TensorType
from autopar.ir.module_outputs import module_outputs
from autopar.ir.ops.attention import attention
from autopar.ir.ops.sequence.masked_attention import attention_masked
from autopar.ir.ops.sequence.masked_parts import is_joined
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import as_planned
from autopar.search.formulation.pins import read_placement
from autopar.search.options import Progress, Search
from autopar.sharding.assignment import assign
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.strategies.attention.operators import no_ring


@dataclass(frozen=True)
class Answer:
    """The best plan in which a tensor has a given placement.

    Attributes:
        wanted: placement by axis; the search chooses on the other axes.
        plan: the best one with it; None if there is none.
        reason: why there is none.
        note: what was not among the choices, if the placement is of a sequence: attention in a ring.
    """

    wanted: Mapping[str, str]
    plan: Plan | None
    reason: str = ""
    note: str = ""


def ask(
    program: Program,
    found: Plan,
    name: str,
    wanted: Mapping[str, str],
    *,
    memory: str | float | None = None,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Solve once more with a placement pinned.

    Args:
        program: canonical program that the plan is of.
        found: the plan.
        name: a parameter, ``batch.N``, ``result.N`` or a module, for its output; layers that share
            their layouts follow.
        wanted: its placement by axis; the search chooses on axes that are not named.
        memory: budget per device.
        search: how the plan was searched.
        progress: called with ``(phase, incumbent, bound)``.

    Raises:
        ValueError: no such tensor, axis or placement.
    """
    search = search or Search()
    ndim = tensor_of(program, name)[1]
    for axis, text in wanted.items():
        if axis not in found.axis_names:
            raise ValueError(f"axis {axis!r} is not one of the mesh's: {', '.join(found.axis_names)}")
        placement = read_placement(name, text)
        if isinstance(placement, Split) and placement.dim >= ndim:
            raise ValueError(f"{name} has {ndim} dims; {text} splits dim {placement.dim}, counted from 0")
    # Tied parameters have one layout, under one of their names.
    name = program.aliases.get(name, name)
    # Captured layers stand for the others: a pin on one must hold for all that share its decisions.
    names = program.repeat.alike(name) if program.repeat else (name,)
    note = _without_ring(program, name, wanted)
    pins: dict[str, Any] = {**search.pins, **{n: [wanted.get(axis) for axis in found.axis_names] for n in names}}
    try:
        plan = solve(
            program,
            dict(found.axes),
            found.cluster,
            memory=memory,
            optimizer=found.optimizer,
            search=replace(search, pins=pins),
            progress=progress,
        )
    except (InfeasibleError, ValueError) as e:  # too little memory, or sizes that do not divide
        return Answer(dict(wanted), None, reason_of(e), note)
    return Answer(dict(wanted), plan, note=note)


def _without_ring(program: Program, name: str, wanted: Mapping[str, str]) -> str:
    """Which attention along a factor that is wanted split cannot go round in a ring, and why; empty if all can."""
    dims = analyze(program)
    type_ = _type_of(program, dims, name)
    placements = (read_placement(name, text) for text in wanted.values())
    positions = [(p.dim, p.factor) for p in placements if isinstance(p, Split)]
    split = {id(type_.dims[d][j]) for d, j in positions if (d, j) in type_.positions} if type_ else set()
    reasons: dict[str, str] = {}
    for node in program.sources:
        if node.target not in (attention, attention_masked):
            continue
        queries, keys = (dims.types[program.sources[node][i]] for i in (0, 1))
        if node.target is attention_masked:
            joined = is_joined(bool(node.args[5]), str(node.args[14]))
            reason = None if joined else "what is added to its scores may be large numbers"
        else:
            reason = no_ring(queries.shape[2], keys.shape[2], node.args[3], node.args[4], bool(node.args[6]))
        if reason is not None and any(id(f) in split for t in (queries, keys) for f in t.dims[2]):
            reasons.setdefault(reason, module_path(node) or "the model")
    return "; ".join(f"attention in {path} cannot go round in a ring: {reason}" for reason, path in reasons.items())


def _type_of(program: Program, dims: Dims, name: str) -> TensorType | None:
    """The type of a tensor or module output; None where that has another shape than what computes it."""
    kind, _, number = name.partition(".")
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if (spec.kind == "parameter" and spec.name == name) or (spec.kind == kind == "batch" and spec.name == number):
            return dims.types[node, 0]
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if output.kind == kind == "result" and output.name == number and value is not None:
            return dims.type_of(value)
    rows = module_outputs(program).get(name)
    return dims.types.get(rows[0][0]) if rows and rows[0][1].shape is None else None


def tensor_of(program: Program, name: str) -> tuple[str, int]:
    """A parameter's own name (not an alias), ``batch.N``, ``result.N`` or a module, and its number of dims.

    Raises:
        ValueError: there is no such tensor; names some that there are.
    """
    own = program.aliases.get(name, name)
    # A tensor wins over a module of the same name: it has a layout of its own.
    known = {**_modules(program), **_tensors(program)}
    if own not in known:
        close = difflib.get_close_matches(own, known, n=3) or list(known)[:3]
        raise ValueError(
            f"no parameter, batch.N, result.N or module with one output tensor is called {name!r}; there are "
            f"{', '.join(close)}, ..."
        )
    return own, known[own]


def has_layout(program: Program, name: str) -> bool:
    """Whether a name is that of a tensor with a layout of its own: a parameter, ``batch.N`` or ``result.N``."""
    return program.aliases.get(name, name) in _tensors(program)


def _tensors(program: Program) -> dict[str, int]:
    """Dims of every parameter, ``batch.N`` and ``result.N``."""
    known = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind in ("parameter", "batch"):
            names = program.repeat.names(spec.name) if program.repeat else (spec.name,)
            ndim = node.meta["val"].ndim
            known.update({n if spec.kind == "parameter" else f"batch.{n}": ndim for n in names})
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if output.kind == "result" and value is not None:
            known[f"result.{output.name}"] = value.meta["val"].ndim
    return known


def _modules(program: Program) -> dict[str, int]:
    """Dims of module outputs; of several tensors each has its number after the name."""
    known = {}
    for name, rows in module_outputs(program).items():
        (node, index), mark = rows[0]
        value = values_of(node)[index]
        assert value is not None
        names = program.repeat.names(name) if program.repeat else (name,)
        known.update(dict.fromkeys(names, value.ndim if mark.shape is None else len(mark.shape)))
    return known


def output_layout(part: Program, plan: Plan, name: str) -> Layout:
    """The layout of a module output under a plan: the consumer layout if the value has one.

    Args:
        part: the program that the plan is of, one microbatch of it.
        plan: of it.
        name: see `tensor_of`.
    """
    padded = as_planned(part, plan)
    dims = analyze(padded)
    assignment = assign(padded, dims, plan, layer_classes(padded, dims))
    own = padded.repeat.alike(name)[0] if padded.repeat else name
    value = min(module_outputs(padded)[own], key=lambda row: row[1].shape is not None)[0]
    return assignment.consumer_layouts.get(value, assignment.outputs[value])


def layout_in(plan: Plan, name: str) -> Layout:
    """The layout of a parameter, ``batch.N`` or ``result.N``."""
    # A module of the model may be called batch: its parameters are looked up as such.
    kind, _, number = name.partition(".")
    table = {"batch": plan.batch, "result": plan.results}.get(kind) if name not in plan.parameters else None
    return plan.parameters[name] if table is None else table[number]


def alternatives(program: Program, found: Plan, name: str) -> list[dict[str, str]]:
    """Every other placement of a tensor on one axis, axis by axis; a dim of several factors is split on the first."""
    own, ndim = tensor_of(program, name)
    # One axis at a time: all combinations would be too many searches.
    options = ("R", *(f"S({dim}.0)" for dim in range(ndim)))
    chosen = zip(found.axis_names, layout_in(found, own), strict=True)
    return [{axis: option} for axis, placement in chosen for option in options if str(placement) != option]


def parse_wanted(text: str, axes: Iterable[str]) -> dict[str, str]:
    """Placements by axis from ``Shard(1)@gpu``; the axis may be left out if there is only one.

    Raises:
        ValueError: a part is not PLACEMENT@AXIS.

    >>> parse_wanted("Shard(1)@gpu, R@node", ["node", "gpu"])
    {'gpu': 'Shard(1)', 'node': 'R'}
    """
    axes = list(axes)
    wanted: dict[str, str] = {}
    for part in text.split(","):
        placement, _, axis = (piece.strip() for piece in part.partition("@"))
        axis = axis or (axes[0] if len(axes) == 1 else "")
        if not placement or not axis:
            raise ValueError(f"{text!r}: {part.strip()!r} is not PLACEMENT@AXIS; write for example Shard(1)@{axes[-1]}")
        wanted[axis] = placement
    return wanted
