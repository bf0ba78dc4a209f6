"""`with_all_rows`: in the place of what a mask selects, a traced graph computes all rows.

How many rows ``x[mask]`` has depends on the batch. Traced, their number is a symbol ``u``, which no layout describes.
Here all rows are computed, also those that the mask leaves out. What these hold reaches nothing: where rows meet, as in
sums, products along them, or maxima, they hold what changes nothing (`autopar.rules.rule.padding_of`), gradients of
zero included, and a number of rows becomes the number of them that are selected.

Before::

    rows = aten.index.Tensor(x, [mask])               # [u, 8]
    loss = aten.mean.default(rows)

After::

    rows = aten.reshape.default(x, [24, 8])
    kept = aten.where.self(aten.unsqueeze.default(mask, -1), rows, 0)
    loss = aten.div.Tensor(aten.sum.dim_IntList(kept, [0, 1]), aten.mul.Scalar(aten.sum.default(mask), 8))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from autopar.capture.selected.dims import Dim, Dims, Factor, by_letter, outputs_by_letter, size_of
from autopar.errors import CaptureError, InvalidRuleError
from autopar.ir.graph import computed, insert_call, map_nodes, producer, user_line, values_of
from autopar.rules.rule import Padding, Rule, Spec, find_rule, letter_sizes, padding_of

aten = torch.ops.aten

_CHECKS = {
    aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default,
}  # fmt: skip
"""What torch checks of numbers of rows: there are some of one mask, and of masks that meet, `by_letter` asks."""

_INDICES = {
    aten.gather.default: 2, aten.scatter.value: 2, aten.scatter.src: 2, aten.scatter_add.default: 2,
    aten.index_select.default: 2, aten.embedding.default: 1,
}  # fmt: skip
"""Operators that look up: which argument says where."""

_ORDER_FREE = ("strategies.reduction", "strategies.loss")
"""Modules of rules whose padded letters may have their padding anywhere, not at the end alone."""

_SCANS: dict[Any, float] = {aten.cumsum.default: 0.0, aten.cumprod.default: 1.0}
"""Running results, and what changes nothing of them."""

_NUMBERS: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.mod: aten.remainder.Tensor, operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default, torch.sym_max: aten.maximum.default, torch.sym_min: aten.minimum.default,
}  # fmt: skip
"""Functions of numbers, and the operators of tensors that are the same."""

_OF_TENSORS = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor", "default": "Tensor", "Scalar_mode": "Tensor_mode"}
"""Overloads with a number, and those with a tensor in its place."""

REMEDY = (
    "keep all rows: torch.where(mask, a, b), masked sums divided by mask.sum(), or labels of -100 for what a loss is "
    "to leave out"
)


def with_all_rows(graph: fx.Graph) -> None:
    """Rewrite a joint graph in place so that no size depends on the batch.

    Raises:
        CaptureError: selected rows go into something that is not known to be right with the others.
    """
    if any(_is_symbolic(n.meta.get("val")) for n in graph.nodes):
        AllRows(graph).run()


class AllRows:
    """One graph while it is rewritten.

    Attributes:
        graph: it.
        node: the node that is rewritten now.
        dims: of each tensor node; of an operator of several results a list.
        masks: by their numbers, tensors of booleans ``[size]``.
        places: of tensors of places along a selected dim (``arange`` of the number of rows, ``argmax``): the dim.
        coordinates: what ``nonzero`` of a mask gives: the mask's number, its shape, and the column, None for all.
        parts: of a concatenation's mask, where each part of it begins, its dim and its size.
        flipped: of dims, those in the other order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Nothing is rewritten yet."""
        self.graph = graph
        self.node: fx.Node = next(iter(graph.nodes))
        self.dims: dict[fx.Node, Any] = {}
        self.masks: dict[int, fx.Node] = {}
        self.places: dict[Any, Dim] = {}
        self.coordinates: dict[Any, tuple[int, tuple[int, ...], int | None]] = {}
        self.parts: dict[int, list[tuple[int, Dim, int]]] = {}
        self.flipped: dict[Dim, Dim] = {}
        self.sizes: dict[Any, int] = {}  # by torch's symbols
        self._by_size: dict[Any, Dim] = {}
        self._unclear: set[Any] = set()
        self._numbers: dict[Any, int] = {}
        self._number_of: dict[fx.Node, int] = {}
        self._gone: set[fx.Node] = set()

    def run(self) -> None:
        """Rewrite all nodes."""
        from autopar.capture.selected.calls import CALLS

        dead = []
        for node in list(self.graph.nodes):
            self.node = node
            value = node.meta.get("val")
            if node in self._gone:
                continue
            if node.op == "output":
                self._require_whole(node)
            elif node.op != "call_function":
                self.dims[node] = (None,) * value.ndim if isinstance(value, torch.Tensor) else ()
            elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or node.target in _CHECKS:
                dead.append(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif not self._touches(node):
                self.set_dims(node, [(None,) * (v.ndim if v is not None else 0) for v in values_of(node)])
            else:
                with self.graph.inserting_before(node):
                    shapes = [None if v is None else tuple(v.shape) for v in values_of(node)]
                    CALLS.get(node.target, by_rule)(self, node)
                    if node not in self._gone:
                        self._require_sizes(node, shapes)
        for node in reversed(dead):
            self.graph.erase_node(node)

    # What calls are made of.

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before the one that is rewritten."""
        return insert_call(self.graph, self.node, target, *args, **kwargs)

    def become(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, dims: Dims) -> None:
        """The node becomes another call of one result."""
        self.node.target, self.node.args, self.node.kwargs = target, tuple(args), kwargs or {}
        self.node.meta["val"] = computed(self.node, self.node)
        self.set_dims(self.node, [dims])

    def replace(self, node: fx.Node, results: Sequence[fx.Node | None], dims: Sequence[Dims]) -> None:
        """New nodes take the place of an operator's results."""
        for user in list(node.users):
            made, own = results[user.args[1]], dims[user.args[1]]  # type: ignore[index]
            if made is not None:
                self.dims[made] = own
                user.replace_all_uses_with(made)
            self.graph.erase_node(user)
            self._gone.add(user)
        self.graph.erase_node(node)
        self._gone.add(node)

    def set_dims(self, node: fx.Node, outputs: Sequence[Dims]) -> None:
        """What is selected of an operator's results."""
        self.dims[node] = outputs[0] if isinstance(node.meta.get("val"), torch.Tensor) else list(outputs)

    def dims_of(self, node: fx.Node) -> Dims:
        """What is selected of a tensor."""
        return self.dims[node]  # type: ignore[no-any-return]

    def size(self, size: Any) -> Any:
        """A size, or a list of these, with all rows."""
        if isinstance(size, list | tuple):
            return [self.size(n) for n in size]
        size = size.meta["val"] if isinstance(size, fx.Node) else size
        return int(size.node.expr.xreplace(self.sizes)) if isinstance(size, torch.SymInt) else size

    def dim_of_size(self, size: Any) -> Dim:
        """What is selected of a dim that has been given a size."""
        size = size.meta["val"] if isinstance(size, fx.Node) else size
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            return None
        if size.node.expr in self._unclear or size.node.expr not in self._by_size:
            self.refuse("a tensor of as many rows is made, of which several masks, or none, may be meant")
        return self._by_size[size.node.expr]

    def number(self, node: fx.Node) -> int:
        """The same for tensors that are computed alike."""
        if node not in self._number_of:
            args, kwargs = map_nodes((node.args, node.kwargs), lambda n: f"%{self.number(n)}")
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            is_own = node.op != "call_function" or random
            key = node if is_own else (str(node.target), repr(args), repr(sorted(kwargs.items())))
            self._number_of[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._number_of[node]

    def select(self, mask: fx.Node) -> Dim:
        """The dim of what a mask ``[size]`` selects."""
        number = self.number(mask)
        self.masks.setdefault(number, mask)
        return (Factor(mask.meta["val"].shape[0], number),)

    def enter(self, size: Any, dim: Dim) -> None:
        """What a symbol stands for."""
        assert dim is not None
        self.sizes[size.node.expr] = size_of(dim)

    def full_mask(self, dim: Dim) -> fx.Node:
        """The booleans of a dim, ``[size]``."""
        assert dim is not None
        found: fx.Node | None = None
        for i, factor in enumerate(dim):
            if factor.mask is not None:
                shape = [1] * len(dim)
                shape[i] = factor.size
                own = self.masks[factor.mask]
                own = own if len(dim) == 1 else self.emit(aten.reshape.default, own, shape)
                found = own if found is None else self.emit(aten.logical_and.default, found, own)
        assert found is not None
        if len(dim) == 1:
            return found
        found = self.emit(aten.expand.default, found, [f.size for f in dim])
        return self.emit(aten.reshape.default, found, [size_of(dim)])

    def count(self, dim: Dim, size: int) -> fx.Node | int:
        """How many elements of a dim are selected: a number in a tensor."""
        if dim is None:
            return size
        found: Any = 1
        for factor in dim:
            own: Any = factor.size
            if factor.mask is not None:
                own = self.emit(aten.sum.default, self.masks[factor.mask])
            both = isinstance(found, fx.Node) and isinstance(own, fx.Node)
            found, own = (own, found) if isinstance(own, fx.Node) and not both else (found, own)
            if isinstance(found, fx.Node):
                found = found if own == 1 else self.emit(aten.mul.Tensor, found, own)
            else:
                found *= own
        return found  # type: ignore[no-any-return]

    def count_of(self, node: fx.Node, along: Sequence[int], dtype: torch.dtype | None = None) -> fx.Node:
        """How many elements of a tensor are selected, along some dims, in a tensor."""
        found: Any = 1
        for d in along:
            own = self.count(self.dims_of(node)[d], int(node.meta["val"].shape[d]))
            if isinstance(own, fx.Node) and isinstance(found, int):
                found, own = own, found
            elif not isinstance(found, fx.Node):
                found, own = found * own, 1
            if own != 1:
                found = self.emit(aten.mul.Tensor, found, own)
        found = found if isinstance(found, fx.Node) else self._number(found)
        if dtype is not None and found.meta["val"].dtype != dtype:
            found = self.emit(aten._to_copy.default, found, dtype=dtype)
        return found  # type: ignore[no-any-return]

    def filled(self, node: fx.Node, fill: float, along: Sequence[int] | None = None) -> fx.Node:
        """A tensor with another value in what is left out of some of its dims, of all by default."""
        value = node.meta["val"]
        found: fx.Node | None = None
        for d, dim in enumerate(self.dims_of(node)):
            if dim is not None and (along is None or d in along):
                shape = [1] * value.ndim
                shape[d] = value.shape[d]
                own = self.full_mask(dim)
                own = own if value.ndim == 1 else self.emit(aten.reshape.default, own, shape)
                found = own if found is None else self.emit(aten.logical_and.default, found, own)
        if found is None:
            return node
        other = self.emit(
            aten.scalar_tensor.default, _of_dtype(fill, value.dtype), dtype=value.dtype, device=value.device
        )
        made = self.emit(aten.where.self, found, node, other)
        self.dims[made] = self.dims_of(node)
        return made

    def index(self, node: fx.Node) -> fx.Node:
        """Places, where those that are left out are some that exist."""
        if node in self.coordinates or node in self.places or node.meta["val"].dtype == torch.bool:
            return node
        return self.filled(node, 0)

    def value(self, node: Any, like: torch.dtype | None) -> Any:
        """A number of the graph as a tensor, in a dtype if it is a floating one."""
        made = self._number(node)
        value = made.meta["val"]
        if like is not None and value.dtype != like:
            made = self.emit(aten._to_copy.default, made, dtype=like)
        self.dims[made] = ()
        return made

    def refuse(self, reason: str) -> NoReturn:
        """Say why the node cannot be rewritten.

        Raises:
            CaptureError: always.
        """
        name = str(self.node.target).removesuffix(".default") if self.node.op == "call_function" else "the output"
        raise CaptureError(
            f"{name} ({user_line(self.node)}) is given what a mask selects (x[mask], masked_select, nonzero): how many "
            f"rows these are depends on the batch, and a graph computes all rows and leaves some out where they meet; "
            f"{reason}; {REMEDY}"
        )

    # Steps.

    def _touches(self, node: fx.Node) -> bool:
        if any(a in table for a in node.all_input_nodes for table in (self.places, self.coordinates)):
            return True
        if any(_is_symbolic(v) for v in (*values_of(node), *(a.meta.get("val") for a in node.all_input_nodes))):
            return True
        return any(d is not None for a in node.all_input_nodes for dims in _listed(self.dims.get(a, ())) for d in dims)

    def _getitem(self, node: fx.Node) -> None:
        source, i = producer(node)
        dims = self.dims[source]
        self.dims[node] = dims[i] if isinstance(dims, list) else dims
        value = source.meta["val"]
        if isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = value[i] if isinstance(value, tuple | list) else value
        for table in (self.places, self.coordinates):
            if (source, i) in table:
                table[node] = table[source, i]

    def _require_whole(self, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            if any(d is not None for d in self.dims[node]):
                raise CaptureError(
                    f"the model returns, or keeps, what a mask selects (x[mask], masked_select, nonzero), of shape "
                    f"{_shape(node.meta['val'], self.dims[node])} ({user_line(node)}): how many rows that are depends "
                    "on the batch, and every call of a graph has results of the same shape; return all rows and the "
                    "mask, or what is computed of them"
                )

    def _require_sizes(self, node: fx.Node, before: Sequence[Any]) -> None:
        """What is selected must be what torch says depends on the batch."""
        outputs = [self.dims[node]] if isinstance(self.dims[node], tuple) else self.dims[node]
        for value, dims, shape in zip(values_of(node), outputs, before, strict=False):
            if value is None or shape is None or (not dims and not _is_symbolic(value) and not value.numel()):
                continue  # an output that does not exist may have a tensor of no elements
            fits = len(shape) == value.ndim == len(dims)
            for n, size, dim in zip(value.shape, shape, dims, strict=False):
                symbolic = isinstance(size, torch.SymInt) and not size.node.expr.is_number
                fits = fits and n == self.size(size) and (dim is not None) == symbolic
                if fits and symbolic and self._by_size.setdefault(size.node.expr, dim) != dim:
                    self._unclear.add(size.node.expr)
            if not fits:
                self.refuse(f"what it gives, {list(shape)}, cannot be told from the masks alone")

    def _number(self, node: Any) -> fx.Node:
        """A number in a tensor: whole ones, and others in float64 as Python has them."""
        if not isinstance(node, fx.Node):
            return self.emit(
                aten.scalar_tensor.default, node, dtype=torch.int64 if isinstance(node, int) else torch.float64
            )
        if node.target is aten.sym_size.int:
            source, d = node.args
            assert isinstance(source, fx.Node)
            found = self.count(self.dims_of(source)[int(d)], source.meta["val"].shape[int(d)])  # type: ignore[call-overload]
            return found if isinstance(found, fx.Node) else self._number(found)
        if node.target is aten.sym_numel.default:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.count_of(source, range(source.meta["val"].ndim))
        if node.target is torch.sym_float:
            return self.emit(aten._to_copy.default, self._number(node.args[0]), dtype=torch.float64)
        numbers = [self._number(a) for a in node.args]
        if node.target is operator.floordiv:
            return self.emit(aten.div.Tensor_mode, *numbers, rounding_mode="floor")
        if node.target not in _NUMBERS:
            self.refuse(f"a number of rows goes through {getattr(node.target, '__name__', node.target)}")
        if node.target is operator.truediv:
            numbers[0] = self.emit(aten._to_copy.default, numbers[0], dtype=torch.float64)
        return self.emit(_NUMBERS[node.target], *numbers)


def by_rule(rows: AllRows, node: fx.Node) -> None:
    """A call that its rule says enough of."""
    args, kwargs = _arguments(rows, node)
    target = node.target
    if any(isinstance(a.meta.get("val"), torch.SymInt | torch.SymFloat) for a in _flat((args, kwargs))):
        target, args = _with_tensors(rows, node, args)
    node.target, node.args, node.kwargs = target, args, kwargs
    place = _INDICES.get(target)
    if place is not None:
        node.args = (*node.args[:place], rows.index(node.args[place]), *node.args[place + 1 :])
    read = _looked_up(rows, node)
    ranked(rows, node, read)
    rule, sizes = rule_of(rows, node)
    inputs = [rows.dims_of(a) for a in _tensors(node)]
    letters = by_letter(rule, sizes, inputs)
    if isinstance(letters, str):
        rows.refuse(letters)
    fills: dict[int, tuple[float, list[int]]] = {}
    for c, dim in letters.items():
        if dim is None or (read and c in rule.inputs[0][node.args[1]]):
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
        rows.refuse("draws are others" if rule.random else "it looks at all of them at once")
    return found


def rule_of(rows: AllRows, node: fx.Node) -> tuple[Rule, dict[str, int]]:
    """A call's rule, and the sizes of its letters, of all rows."""
    function = find_rule(node.target)
    if function is None:
        rows.refuse("it has no rule")
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
    x, d, index = node.args[:3]
    assert isinstance(x, fx.Node)
    assert isinstance(d, int)
    return index in rows.places and rows.dims_of(x)[d] == rows.places[index]


def ranked(rows: AllRows, node: fx.Node, kept: bool = False) -> None:
    """Places along selected rows become numbers among these, but where they say which row is looked up."""

    def number(own: fx.Node) -> fx.Node:
        if own not in rows.places or (kept and own is node.args[2]):
            return own
        counted = rows.emit(aten.cumsum.default, rows.full_mask(rows.places[own]), 0)
        ranks = rows.emit(aten.clamp_min.default, rows.emit(aten.sub.Tensor, counted, 1), 0)
        made = rows.emit(aten.index.Tensor, ranks, [own])
        rows.dims[made] = rows.dims_of(own)
        return made

    node.args, node.kwargs = map_nodes((node.args, node.kwargs), number)


def _arguments(rows: AllRows, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with the sizes of all rows, and numbers as they are."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())

    def own(value: fx.Node) -> Any:
        is_size = isinstance(value.meta.get("val"), torch.SymInt) and not pointwise
        return rows.size(value) if is_size else value

    return map_nodes((node.args, node.kwargs), own)  # type: ignore[return-value]


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


def _listed(dims: Any) -> list[Dims]:
    return dims if isinstance(dims, list) else [dims]


def _of_dtype(fill: float, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return fill != 0
    return fill if dtype.is_floating_point or dtype.is_complex else int(fill)


def _shape(value: torch.Tensor, dims: Dims) -> list[Any]:
    return ["rows" if dim is not None else int(n) for n, dim in zip(value.shape, dims, strict=True)]


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    values = value if isinstance(value, tuple | list) else (value,)
    return any(
        isinstance(n, torch.SymInt) and not n.node.expr.is_number
        for v in values
        if isinstance(v, torch.Tensor)
        for n in v.shape
    )


Call = Callable[[AllRows, fx.Node], None]
"""Rewrites the node."""
