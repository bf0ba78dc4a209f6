"""`regions_of`: which nodes of a local graph are compiled together, in which order, and what stays a node.

Collectives, waits, host copies, draws and sums over microbatches stay nodes of the graph, in their order. Between them
lie *regions* of operators that are functions of tensors; a region ends, too, where another block of the model begins:
blocks that are alike are then regions that are alike, and no input of a region lives longer than a block takes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload
from autopar.ir.graph import block_of, module_path
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.attention import KERNELS
from autopar.ir.ops.random import draw, replayed, seeded
from autopar.rules.rule import LAST, ROW_MAJOR
from autopar.rules.strides import meets, with_strides

aten = torch.ops.aten

DRAWS = frozenset({draw, seeded, replayed})
"""Calls that depend on no tensor of a region, so that they can run before it; they keep their order."""

FEWEST = 2
"""Operators, views not counted, below which a region is not worth a compilation."""

SMALLEST_BLOCK = 12
"""Operators of a forward or backward pass below which a repeated module is no region of its own."""

OUTSIDE = "outside of repeated modules"

VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int,
    aten.alias.default, aten.detach.default, with_strides, operator.getitem,
})  # fmt: skip
"""Operators that, most of the time, compute nothing."""

_ORDERED = frozenset({
    aten.as_strided.default, aten.new_empty_strided.default, aten.empty_strided.default, aten.empty.memory_format,
})  # fmt: skip
"""Operators that read or make storage; compilers give it another order, or start."""


@dataclass
class Region:
    """Nodes that are compiled together.

    Attributes:
        nodes: in order.
        block: the repeated module that they come from, or `OUTSIDE`; empty: no node says.
        after: nodes that run after the region, whatever their place among its nodes.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    block: str = ""
    after: list[fx.Node] = field(default_factory=list)

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes that something outside of the region, or one of `views`, needs."""
        inside, views = set(self.nodes), set(self.views)
        needed = {a for v in views for a in v.all_input_nodes}
        return [n for n in self.nodes if n not in views and (n in needed or any(u not in inside for u in n.users))]

    @cached_property
    def views(self) -> list[fx.Node]:
        """Views that something outside uses: they are taken of the region's outputs, or inputs, after it has run.

        A region would return each as a tensor of its own, in the same memory, and autograd would not notice that one
        was written through another.
        """
        inside, found = set(self.nodes), set()
        for node in reversed(self.nodes):
            if is_view(node) and any(u not in inside or u in found for u in node.users):
                found.add(node)
        return [n for n in self.nodes if n in found]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes outside of the region that it uses, in the order of their first use."""
        inside = set(self.nodes)
        return list(dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside))


def regions_of(graph: fx.Graph, blocks: Collection[str]) -> list[fx.Node | Region]:
    """Nodes and regions in the order in which they run; placeholders and the output node are left out.

    Args:
        graph: on local tensors; its nodes stay as they are.
        blocks: names of the model's repeated modules.
    """
    nodes = [n for n in in_order(graph) if n.op not in ("placeholder", "output")]
    open_ = _with_open_sizes(graph)
    compiled = {n for n in nodes if is_function(n) and not open_ & {n, *n.all_input_nodes}}
    block = _blocks(nodes, compiled, blocks)
    found: list[fx.Node | Region] = []
    region = Region()
    for node in nodes:
        if node in compiled:
            other = bool(region.block and block[node]) and region.block != block[node]
            if other or any(a in region.after for a in node.all_input_nodes):
                region = _close(found, region)
            region.nodes.append(node)
            region.block = block[node] or region.block
        elif _runs_before(node, region):
            found.append(node)
        elif node.target is accumulate and region.nodes:
            region.after.append(node)
        else:
            region = _close(found, region)
            found.append(node)
    _close(found, region)
    return found


def _with_open_sizes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes with a size that only the data give: a compiler would take the guess for it."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = info(node).open_size
        # Later passes add nodes that are not noted: views and copies of what they take.
        if known or (known is None and any(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found


def _close(found: list[fx.Node | Region], region: Region) -> Region:
    """Add a region to what runs, or its nodes where compiling them is not worth it; the next one, empty."""
    work = sum(n.target not in VIEWS for n in region.nodes)
    if work >= FEWEST and region.outputs:
        found.append(region)
    else:
        found += region.nodes
    found += region.after
    return Region()


def in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes, getitem nodes right after what they take from: both are in one region, whose outputs are tensors."""
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        if node in moved:
            continue
        yield node
        pending = [node]
        while pending:
            for user in pending.pop(0).users:
                if user.target is operator.getitem and user not in moved:
                    moved.add(user)
                    pending.append(user)
                    yield user


def is_view(node: fx.Node) -> bool:
    """Whether a node of one input shares its memory, going by the strides that are expected of it."""
    target: Any = node.target
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if target is operator.getitem:
        return source is not None and is_view(source)
    if source is None or not isinstance(target, OpOverload) or not any(r.alias_info for r in target._schema.returns):
        return False
    value: Any = source.meta["val"]
    # These copy where they have to.
    if target is aten.reshape.default:
        return _is_viewable(value, node.meta["val"].shape)
    if target is aten.contiguous.default or target is with_strides:
        return meets(value, ROW_MAJOR if target is aten.contiguous.default else str(node.args[1]))
    return True


def _is_viewable(value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def _runs_before(node: fx.Node, region: Region) -> bool:
    """Whether a node can run before a region that has begun: a constant, or a draw that takes nothing from it."""
    return (node.op == "get_attr" or node.target in DRAWS) and not any(a in region.nodes for a in node.all_input_nodes)


def _blocks(nodes: list[fx.Node], compiled: Collection[fx.Node], blocks: Collection[str]) -> dict[fx.Node, str]:
    """The repeated module of each node; empty for nodes that are of no module, such as sums of gradients."""
    found = {}
    sizes: dict[str, int] = {}
    for node in nodes:
        path = module_path(node)
        name = (block_of(path, blocks) or OUTSIDE) if path else ""
        found[node] = name
        sizes[name] = sizes.get(name, 0) + (node in compiled and node.target not in VIEWS)
    small = {name for name, size in sizes.items() if size < SMALLEST_BLOCK}
    return {n: "" if name in small and name != OUTSIDE else name for n, name in found.items()}


def is_function(node: fx.Node) -> bool:
    """Whether a compiler may take a node: tensors in, tensors of known shape out, and nothing else happens."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_function(node.all_input_nodes[0])
    target: Any = node.target
    if target is with_strides:
        # Others look at the offset as well, which calls of one region may differ in.
        return node.args[1] in (LAST, ROW_MAJOR) and _on_one_device(node)
    known = target in KERNELS or (isinstance(target, OpOverload) and target.namespace in ("aten", "prims"))
    return known and target not in _ORDERED and not _acts(target) and _on_one_device(node)


def _acts(target: Any) -> bool:
    """Whether an operator writes, draws, or has a result whose shape depends on values."""
    kinds = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return bool(kinds & set(target.tags)) or target._schema.is_mutable


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex()


def _on_one_device(node: fx.Node) -> bool:
    """Whether a node takes plain tensors and makes such, all on one device."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        # What a region returns are tensors: of several results, each is taken by a getitem.
        if not all(u.target is operator.getitem and _is_plain(u.meta.get("val")) for u in node.users):
            return False
    elif not _is_plain(value):
        return False
    made = [v for v in (value if isinstance(value, tuple | list) else [value]) if v is not None]
    taken = [a.meta.get("val") for a in node.all_input_nodes]
    return all(map(_is_plain, (*made, *taken))) and len({v.device for v in (*made, *taken)}) == 1
