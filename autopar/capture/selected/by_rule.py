"""`by_rule`: calls whose rule says enough of what becomes of selected rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.selected.dims import by_letter, outputs_by_letter
from autopar.capture.selected.graph import AllRows, arguments
from autopar.errors import InvalidRuleError
from autopar.ir.graph import computed, map_nodes
from autopar.rules.rule import Padding, Rule, Spec, find_rule, letter_sizes, padding_of

aten = torch.ops.aten

_INDICES: dict[Any, int] = {
    aten.gather.default: 2, aten.scatter.value: 2, aten.scatter.src: 2, aten.scatter_add.default: 2,
    aten.index_select.default: 2, aten.embedding.default: 1,
}  # fmt: skip
"""Operators that look up: which argument says where."""

_PRIMITIVES: dict[Any, Any] = {torch.ops.prims.div.default: aten.div.Tensor}
"""Parts of torch's decompositions that have no rule, and operators that are the same."""

DRAWS = "it draws a number for each row, others than one device draws for those that are selected"

_DIVIDES = {
    aten.div.Tensor_mode, aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor,
    aten.remainder.Scalar_Tensor,
}  # fmt: skip
"""Operators that divide by their second argument, also whole numbers."""

_ORDER_FREE = ("strategies.reduction", "strategies.loss")
"""Modules of rules whose padded letters may have their padding anywhere, not at the end alone."""

_SCANS: dict[Any, float] = {aten.cumsum.default: 0.0, aten.cumprod.default: 1.0}
"""Running results, and what changes nothing of them."""

_OF_TENSORS = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor", "default": "Tensor", "Scalar_mode": "Tensor_mode"}
"""Overloads with a number, and those with a tensor in its place."""


def by_rule(rows: AllRows, node: fx.Node) -> None:
    """A call that its rule says enough of."""
    args, kwargs = _arguments(rows, node)
    target = _PRIMITIVES.get(node.target, node.target)
    node.target = target
    if any(isinstance(a.meta.get("val"), torch.SymInt | torch.SymFloat) for a in _flat((args, kwargs))):
        target, args = _with_tensors(rows, node, args)
    node.target, node.args, node.kwargs = target, args, kwargs
    place = _INDICES.get(target)
    if place is not None:
        node.args = (*node.args[:place], rows.index(arguments(node)[place]), *node.args[place + 1 :])
    elif target in _DIVIDES and not node.meta["val"].dtype.is_floating_point:
        # Whole numbers have no infinity: what is left out may not be zero.
        x, divisor, *others = arguments(node)
        node.args = (x, rows.filled(divisor, 1) if isinstance(divisor, fx.Node) else divisor, *others)
    read = _looked_up(rows, node)
    ranked(rows, node, read)
    rule, sizes = rule_of(rows, node)
    inputs = [rows.dims_of(a) for a in _tensors(node)]
    letters = by_letter(rule, sizes, inputs)
    if isinstance(letters, str):
        rows.refuse(letters)
    fills: dict[int, tuple[float, list[int]]] = {}
    for c, dim in letters.items():
        if dim is None or (read and c in rule.inputs[0][arguments(node)[1]]):
            continue
        padding = _padding(rows, rule, c)
        for i, fill in enumerate(padding.inputs):
            along = [d for d, group in enumerate(rule.inputs[i]) if c in group]
            if fill is not None and along:
                if fills.setdefault(i, (fill, []))[0] != fill:
                    rows.refuse("its rows and its columns would need other values where they are left out")
                fills[i][1].extend(along)
    replacing = [rows.filled(a, *fills[i]) if i in fills else a for i, a in enumerate(_tensors(node))]
    pending = iter(replacing)
    node.args, node.kwargs = map_nodes((node.args, node.kwargs), lambda _: next(pending))
    node.meta["val"] = computed(node)
    rows.set_dims(node, outputs_by_letter(rule, sizes, letters))


def _padding(rows: AllRows, rule: Rule, letter: str) -> Padding:
    """What must be where rows are left out, wherever that is."""
    target = rows.node.target
    if target in _SCANS and letter in rule.lower:
        return Padding((_SCANS[target],))
    function = find_rule(target)
    if letter in (rule.padded or {}) and not (function and function.__module__.endswith(_ORDER_FREE)):
        rows.refuse("its result depends on the order of rows")
    found = padding_of(rule, letter)
    if found is None:
        rows.refuse(DRAWS if rule.random else "it looks at all of them at once")
    return found


def rule_of(rows: AllRows, node: fx.Node) -> tuple[Rule, dict[str, int]]:
    """A call's rule, and the sizes of its letters, of all rows."""
    function = find_rule(node.target)
    if function is None:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        rows.refuse(DRAWS if random else "it has no rule")
    args, kwargs = map_nodes((node.args, node.kwargs), _spec)
    value = computed(node)
    outputs = value if isinstance(value, tuple | list) else (value,)
    try:
        rule = function(*args, **kwargs)
        inputs = [tuple(a.meta["val"].shape) for a in _tensors(node)]
        shapes = [None if o is None or not isinstance(o, torch.Tensor) else tuple(o.shape) for o in outputs]
        return rule, letter_sizes(rule, inputs, shapes)
    except (InvalidRuleError, TypeError, IndexError, ValueError, ArithmeticError) as e:
        rows.refuse(f"its rule does not tell how ({e})")


def _looked_up(rows: AllRows, node: fx.Node) -> bool:
    """Whether a call looks up selected rows by their places, each of which it has."""
    place = _INDICES.get(node.target)
    if place != 2:
        return False
    x, d, index = arguments(node)[:3]
    return index in rows.places and rows.dims_of(x)[d] == rows.places[index]


def ranked(rows: AllRows, node: fx.Node, kept: bool = False) -> None:
    """Places along selected rows become numbers among these, but where they say which row is looked up."""

    def own(argument: fx.Node) -> fx.Node:
        is_read = kept and argument is node.args[2]
        return rank(rows, argument) if argument in rows.places and not is_read else argument

    node.args, node.kwargs = map_nodes((node.args, node.kwargs), own)


def rank(rows: AllRows, places: fx.Node) -> fx.Node:
    """The numbers that places along selected rows have among these."""
    counted = rows.emit(aten.cumsum.default, rows.full_mask(rows.places[places]), 0)
    numbers = rows.emit(aten.clamp_min.default, rows.emit(aten.sub.Tensor, counted, 1), 0)
    made = rows.emit(aten.index.Tensor, numbers, [places])
    rows.dims[made] = rows.dims_of(places)
    return made


def _arguments(rows: AllRows, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with the sizes of all rows, and numbers as they are."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())

    def own(value: fx.Node) -> Any:
        is_size = isinstance(value.meta.get("val"), torch.SymInt) and not pointwise
        return rows.size(value) if is_size else value

    args, kwargs = map_nodes((node.args, node.kwargs), own)
    return args, kwargs


def _with_tensors(rows: AllRows, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call of an elementwise operator with tensors in the place of numbers of rows."""
    target: Any = node.target
    packet, overload = target.overloadpacket, target._overloadname
    tensors = [a for a in args if isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor)]
    value = node.meta["val"]
    wanted = value.dtype if value.dtype != torch.bool else tensors[0].meta["val"].dtype
    found = tuple(
        rows.value(a, wanted) if isinstance(a, fx.Node) and not isinstance(a.meta["val"], torch.Tensor) else a
        for a in args
    )
    numbers = [
        a for a in node.kwargs.values() if isinstance(a, fx.Node) and not isinstance(a.meta["val"], torch.Tensor)
    ]
    if numbers or (overload != "Tensor" and _OF_TENSORS.get(overload) not in packet.overloads()):
        rows.refuse("a number of rows is among its arguments")
    return target if overload == "Tensor" else getattr(packet, _OF_TENSORS[overload]), found


def _spec(node: fx.Node) -> Spec:
    value = node.meta["val"]
    return Spec(tuple(int(n) for n in value.shape), value.dtype)


def _tensors(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_nodes((node.args, node.kwargs), found.append)
    return found


def _flat(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_nodes(args, found.append)
    return found
