"""`Regions`: the parts of a step in which communication can hide, and what is communicated in each.

A region is one pass through all blocks of a kind, such as the backward pass of ``layers.*``, or what is before, between
or behind blocks. The graph that is emitted gathers parameters a block ahead, and waits for the reduction of gradients a
block later (`autopar.passes.collectives.overlap_collectives`): so communication hides behind kernels of its region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.graph import Value, block_of, is_backward, module_path, producer, without_indices
from autopar.ir.ops import float8
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.formula.attention_rows import attention_rows, attention_rows_backward
from autopar.ir.ops.sequence.masked_attention import attention_masked, attention_masked_backward
from autopar.ir.program import Program, draws
from autopar.search.overlap.buckets import Unit
from autopar.sharding.chunks.products import PRODUCTS

aten = torch.ops.aten

_PRODUCTS = frozenset({
    aten.mm.default, aten.bmm.default, aten.convolution.default, aten.convolution_backward.default,
    attention, attention_backward, attention_masked, attention_masked_backward, attention_rows, attention_rows_backward,
    float8.product, float8.block_product,
})  # fmt: skip

BEFORE = "before the microbatches"
"""The region of what runs once a step, ahead of all microbatches: its collectives are waited for one by one."""

FORWARD, BACKWARD = " forward", " backward"
"""Last words of a region's name."""

OUTSIDE = "outside"
"""First word of the name of a region that is not of blocks."""

BLOCKING, WAITED, GATHER, GRADIENT, CHUNKED, WITHIN = 0, 1, 2, 3, 4, 5
"""What a redistribution is of: activations in the forward or in the backward pass, parameters, or gradients; and
activations whose communication chunks of products hide. Or it is within an operator's own code, whose seconds count
what of it kernels do not hide."""

BLOCKING_KINDS = (BLOCKING, WAITED)
"""Those that kernels wait for right away, `autopar.costs.device.Link.wait` included; others begin a block ahead."""


@dataclass(frozen=True, eq=False)
class Regions:
    """Where each operator of a program runs, and where its values are moved.

    Attributes:
        program: whose operators these are.
        names: region of each operator, and of each input as it is first read.
        units: by region, what is gathered together, and reduced together: the parameters of each block, or without
            blocks, each parameter that is read there, in this order.
        opening: the regions that a step begins with: the first one, and the next.
        closing: the regions that it ends with: the last one, and the one before.
        turning: the region that the backward pass begins with, such as a language model's head.
        from_parameters: inputs, and operators that compute from parameters, buffers and constants alone.
        filling: operators of the backward pass from which one gradient of a parameter is computed, and nothing else.
        gradients: values that are such a gradient, in whatever form: results of those operators, and of operators that
            have several, such as the backward of a layer norm, those for a parameter.
        readers: by value, the operators by which the forward and the backward pass first read it.
        working: the regions with products and attention; kernels of others take little time.
        chunkable: by value, the kinds of collectives beside which there is a product of their rows: what a product
            reads may be gathered in chunks, and what one makes summed.
    """

    program: Program
    names: Mapping[fx.Node, str]
    units: Mapping[str, tuple[Unit, ...]]
    opening: tuple[str, str]
    closing: tuple[str, str]
    turning: str
    from_parameters: frozenset[fx.Node]
    filling: frozenset[fx.Node]
    gradients: frozenset[Value]
    readers: Mapping[tuple[Value, bool], fx.Node]
    working: frozenset[str]
    chunkable: Mapping[Value, frozenset[str]]

    def of_recomputed(self, node: fx.Node) -> str:
        """The region in which an operator of the forward pass is recomputed."""
        return f"{self.names[node].removesuffix(FORWARD)}{BACKWARD}"

    def together(self, value: Value, backward: bool) -> str:
        """The block whose parameters a parameter, or its gradient, is sent together with; else its own name."""
        node = self.readers.get((value, backward), value[0]) if value[0].op == "placeholder" else value[0]
        return block_of(module_path(node), self.program.blocks) or f"{value[0].name} {value[1]}"

    def of_move(
        self, value: Value, *, backward: bool, hoisted: bool = False, reader: fx.Node | None = None
    ) -> tuple[str, int]:
        """The region in which a value is moved, and what kind of communication that is.

        Args:
            value: a node and the number of its result.
            backward: whether it is moved in the backward pass.
            hoisted: whether it is moved once a step, before the first microbatch.
            reader: of the value, if there is one only.
        """
        node = value[0]
        if hoisted:
            return BEFORE, BLOCKING
        own = self.names.get(node, self.opening[0])
        if value in self.gradients:
            return own, GRADIENT
        # What the forward pass does not read is moved in the backward pass the first time, too.
        late = backward or ((value, False) not in self.readers and (value, True) in self.readers) or is_backward(node)
        first = self.readers.get((value, late))
        if reader in self.names and reader not in self.from_parameters:
            first = reader
        region = own if first is None else self.names[first]
        if node in self.from_parameters:
            return region, GATHER
        # What a gradient of a weight waits for cannot be filled with it.
        return region, WAITED if late and first not in self.filling else BLOCKING


def regions_of(program: Program) -> Regions:
    """The regions of a canonical program; worked out once."""
    found = program.memo.get("regions")
    if found is None:
        found = program.memo["regions"] = _regions(program)
    assert isinstance(found, Regions)
    return found


def _regions(program: Program) -> Regions:
    names = _names(program)
    ordered = list(program.sources)
    forward = [n for n in ordered if not is_backward(n)]
    static = _from_parameters(program)
    filling, gradients = _towards_gradients(program)
    readers = _readers(program, names, static)
    own = [n for n in forward if n not in static] or ordered
    opening = _two(names[n] for n in own)
    backward = [n for n in ordered if is_backward(n) and n not in static] or own
    closing = _two(names[n] for n in reversed(backward))
    working = frozenset(name for node, name in names.items() if node.target in _PRODUCTS)
    return Regions(
        program, names, _units(program, names, readers, static), opening, closing, names[backward[0]], static, filling,
        gradients, readers, working, _chunkable(program, static, gradients),
    )  # fmt: skip


def _two(names: Iterable[str]) -> tuple[str, str]:
    """The first two different names; the first one twice where all are the same."""
    found = list(dict.fromkeys(names))
    return found[0], found[min(1, len(found) - 1)]


def _names(program: Program) -> dict[fx.Node, str]:
    """Outside of blocks, a region is known by how many kinds of blocks the forward pass has behind it."""
    blocks = program.blocks
    kinds = {n: block_of(module_path(n), blocks) for n in program.sources}
    found: dict[fx.Node, str] = {}
    in_all = len({without_indices(b, blocks) for n, b in kinds.items() if b is not None})
    for backward in (False, True):
        seen: set[str] = set()
        for node in program.sources:
            if is_backward(node) is not backward:
                continue
            block = kinds[node]
            if block is not None:
                kind = without_indices(block, blocks)
                seen.add(kind)
            else:
                kind = f"{OUTSIDE} {in_all - len(seen) if backward else len(seen)}"
            found[node] = f"{kind}{BACKWARD if backward else FORWARD}"
    return found


def _from_parameters(program: Program) -> frozenset[fx.Node]:
    found = program.inputs_of("parameter", "buffer")
    found.update(n for n in program.graph.graph.nodes if n.op == "get_attr")
    for node, sources in program.sources.items():
        if not draws(node) and all(source in found for source, _ in sources):
            found.add(node)
    return frozenset(found)


def _towards_gradients(program: Program) -> tuple[frozenset[fx.Node], frozenset[Value]]:
    """Operators from which one gradient of a parameter is computed and nothing else; values that are one."""
    users: dict[Value, list[fx.Node]] = defaultdict(list)
    for node, sources in program.sources.items():
        for source in dict.fromkeys(sources):
            users[source].append(node)
    ends: dict[Value, set[str]] = defaultdict(set)
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if value is not None:
            # Whatever else is returned is no gradient of a parameter: two names, so that it is not alone.
            ends[producer(value)] |= {output.name} if output.kind == "gradient" else {"", " "}
    results: dict[fx.Node, list[Value]] = defaultdict(list)
    for result in dict.fromkeys([*users, *ends]):
        results[result[0]].append(result)
    filling: dict[fx.Node, str] = {}
    gradients: set[Value] = set()
    for node in reversed(program.sources):
        if not is_backward(node):
            continue
        reached = {r: {filling.get(user, "") for user in users[r]} | ends[r] for r in results[node]}
        of_all = set[str]().union(*reached.values())
        if len(of_all) == 1 and "" not in of_all:
            filling[node] = next(iter(of_all))
        for result, own in reached.items():
            alone = len(own) == 1 and "" not in own
            if alone and all((u, 0) in gradients and len(program.sources[u]) == 1 for u in users[result]):
                gradients.add(result)
    return frozenset(filling), frozenset(gradients)


def _chunkable(
    program: Program, static: Collection[fx.Node], gradients: Collection[Value]
) -> dict[Value, frozenset[str]]:
    """As `autopar.sharding.chunks.sites` looks for products in the rewritten graph: through reshapes, and a sum."""
    read: set[Value] = set()
    for node in reversed(program.sources):
        sources = program.sources[node]
        if node.target in PRODUCTS:
            read.add(sources[0])
        elif node.target is aten.reshape.default and (node, 0) in read:
            read.update(sources)
    made: set[Value] = set()
    added: set[Value] = set()
    for node, sources in program.sources.items():
        reshapes = node.target is aten.reshape.default
        if node.target in PRODUCTS or (reshapes and sources[0] in made):
            made.add((node, 0))
        elif (reshapes and sources[0] in added) or (node.target is aten.add.Tensor and not made.isdisjoint(sources)):
            added.add((node, 0))
    found: dict[Value, frozenset[str]] = {value: frozenset({"all_gather"}) for value in read}
    for value in made | added:
        found[value] = found.get(value, frozenset()) | {"all_reduce", "reduce_scatter"}
    return {value: kinds for value, kinds in found.items() if value[0] not in static and value not in gradients}


def _readers(
    program: Program, names: Mapping[fx.Node, str], static: Collection[fx.Node]
) -> dict[tuple[Value, bool], fx.Node]:
    """What computes from parameters alone reads where its own result is read first."""
    first: dict[tuple[Value, bool], fx.Node] = {}
    last: dict[tuple[Value, bool], fx.Node] = {}
    for node in reversed(program.sources):
        for source in program.sources[node]:
            if node in static:
                for backward in (False, True):
                    later = first.get(((node, 0), backward))
                    if later is not None:
                        first[source, backward] = later
            else:
                first[source, is_backward(node)] = node
                last.setdefault((source, is_backward(node)), node)
    # Of several regions only the last is sure to need an activation in the layout that it is moved to.
    apart = {k: n for k, n in last.items() if k[0][0] not in static and names[n] != names[first[k]]}
    return {**first, **apart}


def _units(
    program: Program,
    names: Mapping[fx.Node, str],
    readers: Mapping[tuple[Value, bool], fx.Node],
    static: Collection[fx.Node],
) -> dict[str, tuple[Unit, ...]]:
    blocks: dict[str, set[str]] = defaultdict(set)
    for node, region in names.items():
        block = block_of(module_path(node), program.blocks)
        if block is not None:
            blocks[region].add(block)
    order = {node: i for i, node in enumerate(program.sources)}
    ordered = [region for node, region in names.items() if node not in static]
    read: dict[str, list[tuple[int, float]]] = {region: [] for region in (*ordered, *names.values())}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        for backward in (False, True):
            reader = readers.get(((node, 0), backward))
            if spec.kind == "parameter" and reader is not None:
                value = node.meta["val"]
                read[names[reader]].append((order[reader], float(value.numel() * value.element_size())))
    found: dict[str, tuple[Unit, ...]] = {}
    for region, parameters in read.items():
        sizes = [size for _, size in sorted(parameters)]
        forward = read.get(region.removesuffix(BACKWARD) + FORWARD, [])
        if len(forward) > len(sizes):
            # As many gradients are computed in a backward pass as parameters are read in its forward pass.
            sizes = [size for _, size in sorted(forward, reverse=True)]
        count = len(blocks[region])
        if count and sizes:
            found[region] = (Unit(sum(sizes) / count, len(sizes) / count),) * count
        else:
            found[region] = tuple(Unit(size) for size in sizes)
    return found
