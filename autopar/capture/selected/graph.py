"""`AllRows`: a graph while it is rewritten, and what rewriting a call is made of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from autopar.capture.selected.alike import Alike
from autopar.capture.selected.dims import Dim, Dims, Factor, Selected, size_of
from autopar.errors import CaptureError
from autopar.ir.graph import computed, insert_call, is_backward, producer, user_line, values_of

aten = torch.ops.aten

_CHECKS = {
    aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default,
}  # fmt: skip
"""What torch checks of numbers of rows: there are some of one mask, and of masks that meet, `by_letter` asks."""

_NUMBERS: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.mod: aten.remainder.Tensor, operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default, torch.sym_max: aten.maximum.default, torch.sym_min: aten.minimum.default,
}  # fmt: skip
"""Functions of numbers, and the operators of tensors that are the same."""

REMEDY = (
    "keep all rows: torch.where(mask, a, b), masked sums divided by mask.sum(), or labels of -100 for what a loss is "
    "to leave out"
)


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
        fixed: of masks that select a number of elements that is known, that.
        alike: which nodes are computed alike.
        true: tensors of booleans that are true of every selected row.
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
        self._gone: set[fx.Node] = set()
        self._filled: dict[Any, fx.Node] = {}
        self.true: set[fx.Node] = set()
        self.fixed: dict[int, int] = {}
        self.alike = Alike()

    def run(self, calls: Mapping[Any, Call], others: Call) -> None:
        """Rewrite all nodes.

        Args:
            calls: by operators, what rewrites a call.
            others: what rewrites those of other operators.
        """
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
                    calls.get(node.target, others)(self, node)
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
        if not is_symbolic_size(size):
            return None
        if size.node.expr in self._unclear or size.node.expr not in self._by_size:
            self.refuse("a tensor of as many rows is made, of which several masks, or none, may be meant")
        return self._by_size[size.node.expr]

    def select(self, mask: fx.Node) -> Dim:
        """The dim of what a mask ``[size]`` selects."""
        number = self.alike.number(mask)
        self.masks.setdefault(number, mask)
        return (Factor(mask.meta["val"].shape[0], number),)

    def enter(self, size: Any, dim: Dim) -> None:
        """What a symbol stands for."""
        assert dim is not None
        self.sizes[size.node.expr] = size_of(dim)

    def known(self, dim: Selected) -> int | None:
        """How many elements of a dim are selected, where that is known."""
        mask = dim[0].mask if len(dim) == 1 else None
        return None if mask is None else self.fixed.get(mask)

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
        dims = self.dims_of(node)
        own = [d for d, dim in enumerate(dims) if dim is not None and (along is None or d in along)]
        if not own:
            return node
        key = node, fill, tuple(own), is_backward(self.node)
        if key not in self._filled:
            self._filled[key] = self._fill(node, fill, own)
            self.dims[self._filled[key]] = dims
        return self._filled[key]

    def _fill(self, node: fx.Node, fill: float, along: Sequence[int]) -> fx.Node:
        if node.target is aten.permute.default:
            # What is permuted may be wanted as it is, too: one copy serves both.
            source, order = arguments(node)
            inner = self.filled(source, fill, [order[d] % len(order) for d in along])
            return self.emit(aten.permute.default, inner, order)
        value = node.meta["val"]
        found: fx.Node | None = None
        for d in along:
            shape = [1] * value.ndim
            shape[d] = value.shape[d]
            own = self.full_mask(self.dims_of(node)[d])
            own = own if value.ndim == 1 else self.emit(aten.reshape.default, own, shape)
            found = own if found is None else self.emit(aten.logical_and.default, found, own)
        options = {"dtype": value.dtype, "device": value.device}
        other = self.emit(aten.scalar_tensor.default, _of_dtype(fill, value.dtype), **options)
        return self.emit(aten.where.self, found, node, other)

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
        if selects(node) or (self.fixed and node.target is aten.index_put.default and _has_mask(node)):
            return True
        if any(a in table for a in node.all_input_nodes for table in (self.places, self.coordinates)):
            return True
        if any(is_symbolic(v) for v in (*values_of(node), *(a.meta.get("val") for a in node.all_input_nodes))):
            return True
        return any(d is not None for a in node.all_input_nodes for dims in _listed(self.dims.get(a, ())) for d in dims)

    def _getitem(self, node: fx.Node) -> None:
        source, i = producer(node)
        dims = self.dims[source]
        self.dims[node] = dims[i] if isinstance(dims, list) else dims
        value = source.meta["val"]
        if isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = value[i] if isinstance(value, tuple | list) else value
        self.pass_on((source, i), node)

    def pass_on(self, source: Any, node: fx.Node) -> None:
        """Say of a node what is said of a value: which places it holds."""
        if source in self.places:
            self.places[node] = self.places[source]
        if source in self.coordinates:
            self.coordinates[node] = self.coordinates[source]

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
            if value is None or shape is None or (not dims and not is_symbolic(value) and not value.numel()):
                continue  # an output that does not exist may have a tensor of no elements
            fits = len(shape) == value.ndim == len(dims)
            for n, size, dim in zip(value.shape, shape, dims, strict=False):
                symbolic = is_symbolic_size(size)
                fits = fits and n == self.size(size) and (dim is not None) == symbolic
                if (
                    fits
                    and symbolic
                    and self._by_size.setdefault(size.node.expr, dim) not in (dim, self.flipped.get(dim))
                ):
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
            source, d = arguments(node)
            found = self.count(self.dims_of(source)[d], source.meta["val"].shape[d])
            return found if isinstance(found, fx.Node) else self._number(found)
        if node.target is aten.sym_numel.default:
            source = arguments(node)[0]
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


def arguments(node: fx.Node, name: str = "") -> Any:
    """A call's positional arguments, or one by name."""
    return node.kwargs.get(name) if name else node.args


def selects(node: fx.Node) -> bool:
    """Whether it selects what a mask says."""
    if node.target in (aten.masked_select.default, aten.nonzero.default):
        return True
    return node.target in (aten.index.Tensor, aten._unsafe_index.Tensor) and _has_mask(node)


def _has_mask(node: fx.Node) -> bool:
    indices = arguments(node)[1]
    return any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)


def is_symbolic_size(size: Any) -> bool:
    """Whether a size depends on the batch."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def is_symbolic(value: Any) -> bool:
    """Whether a size of a value, or a number, is one of torch's, which may depend on the batch."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    values = value if isinstance(value, tuple | list) else (value,)
    return isinstance(value, numbers) or any(
        isinstance(n, numbers) for v in values if isinstance(v, torch.Tensor) for n in v.shape
    )


def _listed(dims: Any) -> list[Dims]:
    return dims if isinstance(dims, list) else [dims]


def _of_dtype(fill: float, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return fill != 0
    return fill if dtype.is_floating_point or dtype.is_complex else int(fill)


def _shape(value: torch.Tensor, dims: Dims) -> list[Any]:
    return ["rows" if dim is not None else int(n) for n, dim in zip(value.shape, dims, strict=True)]


Call = Callable[[AllRows, fx.Node], None]
"""Rewrites the node."""
