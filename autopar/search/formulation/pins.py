"""What a search leaves open: the user's pins, layouts that a module has already, axes that are not searched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Value
from autopar.ir.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Split,
    TensorType,
    divides,
    is_boundary_layout,
    is_uneven,
    parse_placement,
)
from autopar.ir.module_outputs import find_module_outputs, module_outputs, placement_in
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

Pinned = tuple[Placement | None, ...]
"""A layout that is decided, None on axes that are open."""

MOST_BATCH = 100
"""Tensors of a batch, or results, that a pin may be for before the model is captured."""


@dataclass(frozen=True)
class Restrictions:
    """What a search leaves open.

    Attributes:
        layouts: for parameters, batch tensors and results, by kind and name: the only layout allowed, or with None for
            axes that are open.
        fixed: strategy name or placement of each variable on each axis that is not searched; absent: replicated.
        free: axes that are searched; None searches all.
        data_axes_only: batch tensors may be split along the first factor of their first dim only.
        placements: the same as ``layouts``, axis by axis, None where it is open; ``layouts`` win. Both contain consumer
            layouts under ``consumer`` and their name; those in ``layouts`` are forced: every reader takes the value in
            this layout.
        strategies: names that each class of operators may take, axis by axis; None: any.
    """

    layouts: Mapping[tuple[str, str], Pinned] = field(default_factory=dict)
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    free: tuple[int, ...] | None = None
    data_axes_only: bool = False
    placements: Mapping[tuple[str, str], Sequence[Placement | None]] = field(default_factory=dict)
    strategies: Mapping[str, Sequence[frozenset[str] | None]] = field(default_factory=dict)

    @property
    def forced_consumer_layouts(self) -> tuple[str, ...]:
        """Consumer layouts that are pinned."""
        return tuple(sorted(name for kind, name in self.layouts if kind == "consumer"))


def read_pins(
    program: Program, dims: Dims, pins: Mapping[str, Any], axes: Mapping[str, int], restrictions: Restrictions | None
) -> Restrictions:
    """Restrictions with the user's pins added; those of modules are only checked, `pin_modules` adds them.

    Args:
        program: names of parameters, batch tensors (``batch.0``), results (``result.0``) and modules come from here.
        dims: their types.
        pins: a name or pattern (``*.up_proj.weight``) to placements: one an axis (just it where the mesh has one
            axis), or a dict by axis name, which replicates on the others; each as text (``R``, ``S(0)``, ``S(0.1)`` for
            factor 1 of dim 0, ``Shard(0)``), or torch's or autopar's own object; None leaves an axis to the search.
        axes: name and size of each mesh axis.
        restrictions: what holds besides.

    Raises:
        ValueError: a pin names nothing, is no placement, or does not divide; names the pin and what there is.
    """
    restrictions = restrictions or Restrictions()
    if not pins:
        return restrictions
    named = _pinnable(program, dims)
    layouts = dict(restrictions.layouts)
    for pattern, value in pins.items():
        found = _tensors(named, pattern)
        wanted, sizes = read_layout(pattern, value, tuple(axes)), tuple(axes.values())
        if not found and not _modules(program, pattern):
            raise ValueError(_names_nothing(pattern, list(map(_pin_name, named)), list(module_outputs(program))))
        for key in found:
            type_ = named[key]
            # Open axes count as replicated: only what is pinned is checked here.
            layout = tuple(p or Replicate() for p in wanted)
            fits = divides(type_, layout, sizes) or (key[0] == "parameter" and is_uneven(type_, layout, sizes))
            if not fits or not is_boundary_layout(type_, layout, sizes):
                raise ValueError(
                    f"pin {pattern!r}: {_pin_name(key)} is {type_} and cannot be laid out as "
                    f"({', '.join(map(str, layout))}) on axes {dict(axes)}: sizes must divide (or a parameter's dim of "
                    "one factor is padded, along one axis), one split a dim"
                )
            layouts[key] = wanted
    return replace(restrictions, layouts=layouts)


def check_names(patterns: Iterable[str], parameters: Iterable[str], modules: Iterable[str]) -> None:
    """Refuse pins that name nothing, before the model is captured; batch tensors and results are not known yet.

    Args:
        patterns: of the pins that are layouts.
        parameters: names of the model's.
        modules: likewise.

    Raises:
        ValueError: names the pin and what there is.
    """
    own, inner = list(parameters), [name for name in modules if name]
    for pattern in patterns:
        names = (*own, *(f"{kind}.{i}" for kind in ("batch", "result") for i in range(MOST_BATCH)))
        output = pattern.partition(":")[0]
        if not any(fnmatchcase(n, pattern) for n in names) and not any(fnmatchcase(n, output) for n in inner):
            raise ValueError(_names_nothing(pattern, own, inner))


def _names_nothing(pattern: str, tensors: Sequence[str], modules: Sequence[str]) -> str:
    some = [f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" for names in (tensors, modules)]
    return (
        f"pin {pattern!r} names no parameter, batch.N, result.N or module of the model; there are {some[0]}; and "
        f"modules {some[1] or 'none'}"
    )


def require_pinned(
    plan: Plan,
    program: Program,
    dims: Dims,
    pins: Mapping[str, Any],
    axes: Mapping[str, int],
    restrictions: Restrictions,
) -> None:
    """Refuse a plan whose layouts are not those that are asked for.

    Args:
        plan: for these axes, without stages.
        program: of the whole batch.
        dims: its dimension analysis.
        pins: as for `read_pins`.
        axes: name and size of each mesh axis.
        restrictions: what holds besides.

    Raises:
        PlanError: names the first tensor.
    """
    layouts = {"parameter": plan.parameters, "batch": plan.batch, "result": plan.results}
    if plan.microbatches > 1:  # the rows of one are other factors
        del layouts["batch"], layouts["result"]
    for (kind, name), wanted in read_pins(program, dims, pins, axes, restrictions).layouts.items():
        own = layouts.get(kind, {}).get(name)
        if own is not None and any(p is not None and p != q for p, q in zip(wanted, own, strict=True)):
            pinned = ", ".join("open" if p is None else str(p) for p in wanted)
            raise PlanError(
                f"{_pin_name((kind, name))} is ({', '.join(map(str, own))}) in it, and pinned to ({pinned})"
            )
    named = _pinnable(program, dims)
    modules = [pattern for pattern in pins if not _tensors(named, pattern)]
    if modules and not plan.forced_consumer_layouts:
        raise PlanError(f"it has no pinned output of a module, and {modules[0]!r} is pinned")


def pin_modules(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    pins: Mapping[str, Any],
    axes: Mapping[str, int],
    restrictions: Restrictions,
) -> Restrictions:
    """Restrictions with the pins of module outputs added: names and patterns that no tensor has, see `read_pins`.

    Args:
        program: whose modules these are.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        pins: names or patterns to placements.
        axes: name and size of each mesh axis.
        restrictions: what holds besides.

    Raises:
        InfeasibleError: sizes do not divide, or two pins are of values that share a decision, and differ.
    """
    named, wanted = _pinnable(program, dims), dict[str, Pinned]()
    for pattern, value in pins.items():
        if not _tensors(named, pattern):
            pinned = read_layout(pattern, value, tuple(axes))
            wanted.update(dict.fromkeys(_modules(program, pattern), pinned))
    layouts, owner = dict(restrictions.layouts), dict[str, str]()
    for name, pinned in wanted.items():
        for value, own in _of_values(program, dims, name, pinned, axes).items():
            consumer = f"{classes.key[value[0]]} {value[1]}"
            before = layouts.get(("consumer", consumer), own)
            # An axis that one pin leaves open may be decided by the other.
            if any(a is not None and b is not None and a != b for a, b in zip(before, own, strict=True)):
                raise InfeasibleError(
                    f"the pins of {owner[consumer]} and {name} differ, but their outputs are one tensor, or are laid "
                    "out alike as repeated layers are: pin them alike, or set tie_layers=False"
                )
            layouts["consumer", consumer] = tuple(a or b for a, b in zip(before, own, strict=True))
            owner[consumer] = name
    return replace(restrictions, layouts=layouts)


def _of_values(program: Program, dims: Dims, name: str, pinned: Pinned, axes: Mapping[str, int]) -> dict[Value, Pinned]:
    """The layout of each value that stands for a module's output."""
    found: dict[Value, Pinned] = {}
    reason: Exception | str = ""
    for value, mark in module_outputs(program)[name]:
        type_ = dims.types[value]
        try:
            # The module may return the value in another shape, or for the whole batch: the pin speaks of that.
            own = tuple(placement_in(p, type_, mark, program.microbatches) for p in pinned)
        except ValueError as e:
            reason = e
            continue
        if not divides(type_, tuple(p or Replicate() for p in own), tuple(axes.values())):
            raise InfeasibleError(
                f"the output of module {name} is {type_}, which cannot be laid out as "
                f"({', '.join(str(p or Replicate()) for p in pinned)}) on axes {dict(axes)}: sizes must divide"
            )
        found[value] = own
    if not found:
        raise InfeasibleError(f"the output of module {name} cannot be pinned: {reason}")
    return found


def _tensors(named: Mapping[tuple[str, str], TensorType], pattern: str) -> list[tuple[str, str]]:
    return [key for key in named if fnmatchcase(_pin_name(key), pattern)]


def _modules(program: Program, pattern: str) -> list[str]:
    try:
        return find_module_outputs(program, pattern)
    except ValueError as e:
        raise ValueError(f"pin {pattern!r}: {e}") from e


def _pin_name(key: tuple[str, str]) -> str:
    return key[1] if key[0] == "parameter" else f"{key[0]}.{key[1]}"


def _pinnable(program: Program, dims: Dims) -> dict[tuple[str, str], TensorType]:
    found = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind in ("parameter", "batch"):
            found[spec.kind, spec.name] = dims.type_of(node)
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if output.kind == "result" and value is not None:
            found["result", output.name] = dims.type_of(value)
    return found


def read_layout(pattern: str, value: Any, axes: Sequence[str]) -> Pinned:
    """A pin's placements, one an axis.

    Raises:
        ValueError: it is for other axes, or one is no placement; names the pin.
    """
    if isinstance(value, Mapping):
        unknown = [a for a in value if a not in axes]
        if unknown:
            raise ValueError(f"pin {pattern!r} names axis {unknown[0]!r}; the mesh has {', '.join(axes)}")
        # Axes that a dict does not name are replicated, as a pin is a whole layout.
        value = [value.get(a, Replicate()) for a in axes]
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or len(value) != len(axes):
        raise ValueError(f"pin {pattern!r} must give one placement for each axis ({', '.join(axes)}), got {value!r}")
    return tuple(None if v is None else read_placement(pattern, v) for v in value)


def read_placement(pattern: str, value: Any) -> Placement:
    """A placement from text or from torch's or autopar's object."""
    if isinstance(value, Replicate | Split):
        return value
    kind = type(value).__name__
    # By name, so that torch.distributed need not be imported: planning knows no process group.
    if kind == "Shard":
        return Split(int(value.dim))
    if kind == "Replicate":
        return Replicate()
    text = re.sub(r"^Shard", "S", str(value).strip()).replace("dim=", "")
    try:
        found = parse_placement("R" if text in ("Replicate()", "Replicate") else text)
    except ValueError as e:
        raise ValueError(
            f"pin {pattern!r}: {value!r} is no placement; write R, S(dim), S(dim.factor) or Shard(dim)"
        ) from e
    if isinstance(found, Partial):
        raise ValueError(f"pin {pattern!r}: what is pinned cannot be Partial; write R or S(dim)")
    return found


def complete(name: str, pinned: Pinned) -> Layout:
    """A layout without open axes.

    Raises:
        ValueError: there are some; names the tensor.
    """
    layout = tuple(p for p in pinned if p is not None)
    if len(layout) < len(pinned):
        raise ValueError(f"the pin of {name!r} leaves axes open, which a random plan does not search; pin them all")
    return layout
