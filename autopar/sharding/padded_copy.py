"""A copy of a program with longer factors: padding goes through every operator that stays right with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar._torch_compat import LazyGraphModule
from autopar.ir.graph import Value, inherit_origin, is_operator, producer, replace_tensor_arguments, tensor_arguments
from autopar.ir.layout import Factor, TensorType
from autopar.ir.node_info import info, set_info
from autopar.ir.program import Program
from autopar.rules.rule import Rule, find_rule, lengthened, padding_of, vanishes
from autopar.rules.shapes.kernel_shapes import with_required_strides
from autopar.sharding.dims import Dims, Operator

aten = torch.ops.aten

Fills = dict[int, float | None]
"""Padded dims of a tensor, and what their padding holds, or must hold; None: anything."""


class Place(NamedTuple):
    """Where the padding of a dim is: after ``size`` elements of each of ``blocks``, which are ``longer`` with it."""

    blocks: int
    size: int
    longer: int

    @property
    def padded(self) -> int:
        """Size of the padded dim."""
        return self.blocks * self.longer


def behind(ndim: int, ends: Mapping[int, int]) -> list[int]:
    """Elements behind the ends of dims, as `aten.pad` has them: dims from the last one on, two numbers each."""
    return [n for d in reversed(range(ndim)) for n in (0, ends.get(d, 0))]


def _by_letter(
    operator: Operator, group: Sequence[str], dim: Sequence[Factor]
) -> Iterator[tuple[str, Sequence[Factor]]]:
    """The letters of a dim and the factors of each; none of letters of which they are not known."""
    if len(group) == 1:
        yield group[0], dim
        return
    counts = [len(operator.letters[c].factors) if c in operator.letters else 0 for c in group]
    known, at = sum(counts) == len(dim), 0
    for c, count in zip(group, counts, strict=True):
        yield c, dim[at : at + count] if known else ()
        at += count


class PaddedCopy:
    """A copy of a program with longer dims.

    Attributes:
        made: the copy of each node.
        padding: padded dims of each value, as its operator makes it.
        holds: padded dims of each argument, and of the node of the copy that it is there. Several values may be one
            node: a slice that leaves out a row is the longer tensor, which has a row more that is no padding.
        forms: the nodes of the copy that are a value with some of its dims padded.
        masks: the nodes that say which elements of a dim are padding, by its place and dims after it.
    """

    def __init__(self, program: Program, dims: Dims, sizes: Mapping[int, int]) -> None:
        self.program, self.dims, self.sizes = program, dims, sizes
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.padding: dict[Value, Fills] = {}
        self.holds: dict[tuple[fx.Node, fx.Node], Fills] = {}
        self.forms: dict[Any, fx.Node] = {}
        self.masks: dict[tuple[Place, int], fx.Node] = {}
        # Fake tensors of one mode only can meet in an operator.
        self.mode: Any = next(n.meta["val"].fake_mode for n in program.placeholders)

    def run(self) -> Program:
        """Copy node by node, then the outputs."""
        specs = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        used: dict[tuple[str, str], tuple[int, ...]] = {}
        for node in self.program.graph.graph.nodes:
            if node.op == "placeholder":
                kind, name = specs[node].kind, specs[node].name
                type_ = self.dims.types[node, 0]
                padded = self.entering(kind, type_)
                if padded:
                    used[kind, name] = type_.shape
                self.copy(node, padded)
            elif is_operator(node):
                self.operator(node)
            elif node.op != "output":  # a constant, or getitem
                self.copy(node, {})
        finals = self.outputs({i.name: n for n, i in specs.items() if i.kind == "parameter"}, used)
        self.graph.output(finals).meta = dict(self.program.output_node.meta)
        module = LazyGraphModule(self.program.graph, self.graph)
        module.meta = dict(self.program.graph.meta)
        module.graph.lint()
        return replace(self.program, graph=module, used=used)

    def outputs(
        self, parameters: Mapping[str, fx.Node], used: dict[tuple[str, str], tuple[int, ...]]
    ) -> list[fx.Node | None]:
        """The outputs of the copy; shapes of padded results without their padding are added to ``used``."""
        tangents = {i.name for i in self.program.inputs if i.kind == "tangent"}
        finals: list[fx.Node | None] = []
        for output, value in zip(self.program.outputs, self.program.output_values, strict=True):
            if value is None:
                finals.append(None)
                continue
            wanted: Fills = {}
            if output.kind in ("gradient", "parameter"):
                # Zeros, so that the optimizer leaves the padding of the parameter zero.
                wanted = dict.fromkeys(self.padding[parameters[output.name], 0], 0.0)
            elif output.kind == "result":
                wanted = self.leaving(value, output.name in tangents)
            if output.kind == "result" and wanted:
                used["result", output.name] = self.dims.type_of(value).shape
            finals.append(self.with_padding(value, wanted, value))
        return finals

    def entering(self, kind: str, type_: TensorType) -> Fills:
        """Padding of an argument of the program."""
        return self.paddable(type_) if kind in ("parameter", "tangent") else {}

    def leaving(self, value: fx.Node, has_tangent: bool) -> Fills:
        """Padding of a result."""
        type_ = self.dims.type_of(value)
        if has_tangent:  # which is padded, and both must have one layout
            return dict.fromkeys(self.paddable(type_), None)
        # Whoever takes a result cuts dims at their end: padding of parts that were joined is within.
        places = {d: self.place(type_.dims[d]) for d in self.padding[producer(value)]}
        return {d: None for d, place in places.items() if place is not None and place.blocks == 1}

    def paddable(self, type_: TensorType) -> Fills:
        """Dims of a parameter that would be padded, zeros in the padding."""
        return {d: 0.0 for d, dim in enumerate(type_.dims) if len(dim) == 1 and self.place(dim)}

    def place(self, dim: Sequence[Factor]) -> Place | None:
        """Where the padding of a dim is; None: it has none, or more than one."""
        own = [i for i, f in enumerate(dim) if id(f) in self.sizes]
        if len(own) != 1:
            return None
        sizes, at = [f.size for f in dim], own[0]
        after = math.prod(sizes[at + 1 :])
        return Place(math.prod(sizes[:at]), sizes[at] * after, self.sizes[id(dim[at])] * after)

    def copy(self, node: fx.Node, padded: Fills) -> None:
        """Copy a placeholder, longer where it is padded, a constant, or an output of an operator with several."""
        args: Any = node.args
        if node.op == "call_function":
            args = (self.made[args[0]], args[1])
        made = self.graph.create_node(node.op, node.target, args, node.kwargs, node.name, node.type)
        made.meta = dict(node.meta)
        self.made[node] = made
        if node.op == "call_function":
            # A view of what its producer computes: shapes are never guessed.
            made.meta["val"] = args[0].meta["val"][args[1]]
            return
        self.padding[node, 0] = padded
        if padded:
            value = node.meta["val"]
            with self.mode:
                made.meta["val"] = torch.empty(self.shape(node, 0), dtype=value.dtype, device=value.device)

    def shape(self, node: fx.Node, output: int) -> list[int]:
        """Padded shape of an output."""
        type_, padded = self.dims.types[node, output], self.padding[node, output]
        places = [self.place(dim) if d in padded else None for d, dim in enumerate(type_.dims)]
        return [n if place is None else place.padded for place, n in zip(places, type_.shape, strict=True)]

    def operator(self, node: fx.Node) -> None:
        """An operator on longer tensors, as far as it stays right with padding."""
        operator = self.dims.operators[node]
        letters = self.padded_letters(node, operator)
        arguments = enumerate(tensor_arguments(node))
        values = [self.with_padding(a, self.wanted(operator, i, letters), node) for i, a in arguments]
        for i, dims_or_none in enumerate(operator.rule.outputs):
            padded = [(d, c) for d, group in enumerate(dims_or_none or ()) for c in group if c in letters]
            self.padding[node, i] = {d: self.padding_of_output(node, c, values) for d, c in padded}
        args, kwargs = replace_tensor_arguments(node, values)
        if letters:
            shape = [] if operator.outputs[0] is None else self.shape(node, 0)
            longer, kwargs = lengthened(operator.rule, args, kwargs, shape, letters)
            args = tuple(longer)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.meta = dict(node.meta)
        self.made[node] = made
        if letters:
            made.meta["val"] = self.compute(made, operator.rule)

    def wanted(self, operator: Operator, i: int, letters: Mapping[str, tuple[int, int]]) -> Fills:
        """What argument number ``i`` must hold in its padding."""
        found: Fills = {}
        for d, group in enumerate(operator.rule.inputs[i]):
            letter = next((c for c in group if c in letters), None)
            if letter is None:
                continue
            padding = padding_of(operator.rule, letter)
            assert padding is not None
            found[d] = padding.inputs[i] if i < len(padding.inputs) else None
            if operator.inputs[i].dtype.startswith("int"):
                found[d] = 0  # it may be an index into another tensor
        return found

    def padded_letters(self, node: fx.Node, operator: Operator) -> dict[str, tuple[int, int]]:
        """Size and padded size of the operator's letters that it can have padded."""
        rule = operator.rule
        if find_rule(node.target) is None:  # discovered: what it makes of padding is not known
            return {}
        pairs = [*zip(rule.inputs, operator.inputs, strict=True), *zip(rule.outputs, operator.outputs, strict=False)]
        sources = [*self.program.sources[node], *((node, i) for i in range(len(operator.outputs)))]
        found: dict[str, set[tuple[tuple[int, int], ...]]] = {}
        for (dims, type_), source in zip(pairs, sources, strict=False):
            if dims is None or type_ is None:
                continue
            for group, dim in zip(dims, self.dims.types[source].dims, strict=True):
                for c, factors in _by_letter(operator, group, dim):
                    sizes = tuple((f.size, self.sizes.get(id(f), f.size)) for f in factors)
                    found.setdefault(c, set()).add(sizes if self.place(dim) else ())
        # A letter that is padded in one tensor and not in another (a factor of its own there) must stay as it is.
        single = {c: next(iter(patterns)) for c, patterns in found.items() if len(patterns) == 1}
        letters = {}
        for c, pattern in single.items():
            at = next((i for i, (n, longer) in enumerate(pattern) if n != longer), None)
            if at is None or padding_of(rule, c) is None:
                continue
            n, longer = (math.prod(column) for column in zip(*pattern, strict=True))
            # What a rule says of its padding is said of one at the end.
            if math.prod(n for n, _ in pattern[:at]) == 1 or c not in (rule.padded or {}):
                letters[c] = n, longer
        return letters

    def padding_of_output(self, node: fx.Node, letter: str, values: list[fx.Node]) -> float | None:
        """What the padding of a letter holds in the outputs; None: it is not known."""
        rule = self.dims.operators[node].rule
        if rule.padded is not None and letter in rule.padded:
            return rule.padded[letter].output
        if node.target is aten.full.default:
            return 0.0 if node.args[1] == 0 else None
        held = [
            self.holds[argument, value].get(d)
            for argument, value, dims in zip(tensor_arguments(node), values, rule.inputs, strict=True)
            for d, group in enumerate(dims)
            if letter in group
        ]
        return 0.0 if held and all(h == 0.0 for h in held) and vanishes(rule, letter) else None

    def with_padding(self, value: fx.Node, wanted: Fills, user: fx.Node) -> fx.Node:
        """A value with just the ``wanted`` dims padded, and filled as they say."""
        native = self.padding.get(producer(value), {})
        key = (value, tuple(sorted(wanted.items(), key=lambda item: item[0])))
        if key in self.forms:
            return self.forms[key]
        type_, made, holds = self.dims.type_of(value), self.made[value], dict(native)
        places = [self.place(dim) for dim in type_.dims]
        for d in [d for d in native if d not in wanted]:
            made = self.cut(user, made, d, places[d])
            del holds[d]
        missing = [d for d in wanted if d not in native]
        if missing:
            made = self.longer(user, made, {d: places[d] for d in missing})
            # New zeros lie in the padding of other dims, too: that holds what it held only if it held zeros.
            holds = {**{d: h if h == 0.0 else None for d, h in holds.items()}, **dict.fromkeys(missing, 0.0)}
        for d, fill in wanted.items():
            if fill is not None and holds[d] != fill:
                mask = self.mask(user, places[d], len(type_.dims) - 1 - d)
                made = self.call(user, aten.masked_fill.Scalar, made, mask, fill)
                # Likewise: where two paddings meet, the later fill stands.
                holds = {k: h if h == fill else None for k, h in holds.items()} | {d: fill}
        self.holds[value, made] = holds
        self.forms[key] = made
        return made

    def cut(self, user: fx.Node, made: fx.Node, d: int, place: Place | None) -> fx.Node:
        """A tensor without the padding of one of its dims."""
        assert place is not None
        shape = list(made.meta["val"].shape)
        if place.blocks == 1:
            return self.first(user, made, d, place.size)
        made = self.call(user, aten.reshape.default, made, [*shape[:d], place.blocks, place.longer, *shape[d + 1 :]])
        made = self.first(user, made, d + 1, place.size)
        return self.call(user, aten.reshape.default, made, [*shape[:d], place.blocks * place.size, *shape[d + 1 :]])

    def longer(self, user: fx.Node, made: fx.Node, places: Mapping[int, Place | None]) -> fx.Node:
        """A tensor with zeros in the padding of some dims."""
        shape = list(made.meta["val"].shape)
        ends = {d: p.longer - p.size for d, p in places.items() if p is not None and p.blocks == 1}
        if ends:
            made = self.more(user, made, ends)
        for d, place in places.items():
            if place is None or place.blocks == 1:
                continue
            shape = list(made.meta["val"].shape)
            blocks = [*shape[:d], place.blocks, place.size, *shape[d + 1 :]]
            made = self.more(
                user, self.call(user, aten.reshape.default, made, blocks), {d + 1: place.longer - place.size}
            )
            made = self.call(user, aten.reshape.default, made, [*shape[:d], place.padded, *shape[d + 1 :]])
        return made

    def first(self, user: fx.Node, made: fx.Node, d: int, size: int) -> fx.Node:
        """So many elements of a dim."""
        return self.call(user, aten.narrow.default, made, d, 0, size)

    def more(self, user: fx.Node, made: fx.Node, ends: Mapping[int, int]) -> fx.Node:
        """Some dims with zeros behind."""
        return self.call(user, aten.pad.default, made, behind(made.meta["val"].ndim, ends), "constant", 0.0)

    def mask(self, user: fx.Node, place: Place | None, after: int) -> fx.Node:
        """Which elements of a dim are padding, broadcast over the ``after`` dims that follow it."""
        assert place is not None
        key = (place, after)
        if key not in self.masks:
            device = self.program.placeholders[0].meta["val"].device
            positions = self.call(user, aten.arange.default, place.longer, device=device)
            outside = self.call(user, aten.ge.Scalar, positions, place.size)
            if place.blocks > 1:  # alike in each, so that these may be samples
                outside = self.call(user, aten.expand.default, outside, [place.blocks, place.longer])
            if after or place.blocks > 1:
                outside = self.call(user, aten.reshape.default, outside, [place.padded, *[1] * after])
            self.masks[key] = outside
        return self.masks[key]

    def call(self, user: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A further call in the copy, which comes from where ``user`` does."""
        made = self.graph.call_function(target, args, kwargs)
        inherit_origin(made, user)
        # Terms of a gradient pass through this before they are added up, so it has their dtype for that.
        reduce_dtype = info(args[0]).reduce_dtype if isinstance(args[0], fx.Node) else None
        set_info(made, replace(info(made), internal=False, reduce_dtype=reduce_dtype))
        made.meta["val"] = self.compute(made)
        return made

    def compute(self, node: fx.Node, rule: Rule | None = None) -> Any:
        """What a node of the copy gives, by the strides that its rule asks for."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        target: Any = node.target
        if rule is not None:
            args, kwargs = with_required_strides(target, rule, args, kwargs)
        with self.mode, torch.no_grad():
            return target(*args, **kwargs)
