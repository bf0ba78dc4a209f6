"""`Regions`: the parts of a step in which communication can hide, and what is communicated in each.

A region is one pass through all blocks of a kind, such as the backward pass of ``layers.*``, or what is before, between
or behind blocks. The graph that is emitted gathers parameters a block ahead, and waits for the reduction of gradients a
block later (`autopar.passes.collectives.overlap_collectives`): so communication hides behind kernels of its region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import Value, block_of, is_backward, module_path, producer, without_indices
from autopar.ir.program import Program, draws

BEFORE = "before the microbatches"
"""The region of what runs once a step, ahead of all microbatches: its collectives are waited for one by one."""

FORWARD, BACKWARD = " forward", " backward"
"""Last words of a region's name."""

BLOCKING, WAITED, GATHER, GRADIENT, WITHIN = 0, 1, 2, 3, 4
"""What a redistribution is of: activations in the forward or in the backward pass, parameters, or gradients.

Or it is within an operator's own code, whose seconds count what of it kernels do not hide."""


@dataclass(frozen=True, eq=False)
class Regions:
    """Where each operator of a program runs, and where its values are moved.

    Attributes:
        program: whose operators these are.
        names: region of each operator, and of each input as it is first read.
        units: by region, how many blocks there are, or without blocks, how many parameters are read there.
        opening: the region that a step begins with.
        closing: the region that it ends with.
        from_parameters: inputs, and operators that compute from parameters, buffers and constants alone.
        filling: operators of the backward pass from which one gradient of a parameter is computed, and nothing else.
        gradients: those of them whose values are the gradient, in whatever form.
        readers: by value, the operators by which the forward and the backward pass first read it.
    """

    program: Program
    names: Mapping[fx.Node, str]
    units: Mapping[str, int]
    opening: str
    closing: str
    from_parameters: frozenset[fx.Node]
    filling: frozenset[fx.Node]
    gradients: frozenset[fx.Node]
    readers: Mapping[tuple[Value, bool], fx.Node]

    def of_recomputed(self, node: fx.Node) -> str:
        """The region in which an operator of the forward pass is recomputed."""
        return f"{self.names[node].removesuffix(FORWARD)}{BACKWARD}"

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
        own = self.names.get(node, self.opening)
        if node in self.gradients:
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
    own = [n for n in forward if n not in static] or ordered
    closing = [n for n in ordered if is_backward(n)] or ordered
    readers = _readers(program, names, static)
    return Regions(
        program, names, _units(program, names, readers), names[own[0]], names[closing[-1]], static, filling,
        gradients, readers,
    )  # fmt: skip


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
                kind = f"outside {in_all - len(seen) if backward else len(seen)}"
            found[node] = f"{kind}{BACKWARD if backward else FORWARD}"
    return found


def _from_parameters(program: Program) -> frozenset[fx.Node]:
    inputs = zip(program.placeholders, program.inputs, strict=True)
    found = {n for n, i in inputs if i.kind in ("parameter", "buffer")}
    found.update(n for n in program.graph.graph.nodes if n.op == "get_attr")
    for node, sources in program.sources.items():
        if not draws(node) and all(source in found for source, _ in sources):
            found.add(node)
    return frozenset(found)


def _towards_gradients(program: Program) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Operators from which one gradient of a parameter is computed and nothing else; those whose values it is."""
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, sources in program.sources.items():
        for source in dict.fromkeys(source for source, _ in sources):
            users[source].append(node)
    ends: dict[fx.Node, set[str]] = defaultdict(set)
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if value is not None:
            # Whatever else is returned is no gradient of a parameter: two names, so that it is not alone.
            ends[producer(value)[0]] |= {output.name} if output.kind == "gradient" else {"", " "}
    filling: dict[fx.Node, str] = {}
    kept: set[fx.Node] = set()
    for node in reversed(program.sources):
        reached = {filling.get(user, "") for user in users[node]} | ends[node]
        if not is_backward(node) or len(reached) != 1 or "" in reached:
            continue
        filling[node] = next(iter(reached))
        if all(user in kept and len(program.sources[user]) == 1 for user in users[node]):
            kept.add(node)
    return frozenset(filling), frozenset(kept)


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
    program: Program, names: Mapping[fx.Node, str], readers: Mapping[tuple[Value, bool], fx.Node]
) -> dict[str, int]:
    blocks: dict[str, set[str]] = defaultdict(set)
    for node, region in names.items():
        block = block_of(module_path(node), program.blocks)
        if block is not None:
            blocks[region].add(block)
    parameters: dict[str, int] = defaultdict(int)
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        for backward in (False, True):
            reader = readers.get(((node, 0), backward))
            if spec.kind == "parameter" and reader is not None:
                parameters[names[reader]] += 1
    return {region: len(blocks[region]) or max(parameters[region], 1) for region in set(names.values())}
