"""Microbatches: a step that computes a part of the batch at a time, and adds up.

A microbatch is the batch split over time: as the devices along a mesh axis each compute a part of the batch at once,
one device computes the parts one after the other. So the program of a microbatch is what the rules make of the whole
program for an axis `TIME`. Sums over that axis become ``autopar.ir.ops.accumulate``; what is computed of the batch
alone, such as the number of tokens that count, is computed of the whole batch before; and what needs the other parts in
any other way cannot be cut. No mean of means is taken: the sum is that of the whole batch, however unequal its parts
are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar._torch_compat import FakeTensor
from autopar.errors import InfeasibleError
from autopar.ir.graph import inherit_origin, user_line
from autopar.ir.layout import Layout, Replicate, Split
from autopar.ir.node_info import GraphInfo, info, set_graph_info, set_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import GROUP_ARGUMENT, axis_index, c10d
from autopar.ir.program import Input, Microbatch, Output, Program, values_of

TIME = "time"
"""Name of the axis along which microbatches follow one another."""


def cut_microbatches(program: Program, local: Program, count: int) -> Program:
    """The program of one microbatch.

    Args:
        program: of the whole batch.
        local: the same, rewritten for ``count`` devices along the axis `TIME`; no parameter is split among them.
        count: microbatches; ``local`` is changed in place.

    Raises:
        InfeasibleError: something other than a sum needs the whole batch; names it.
    """
    cutter = _Cutter(program, local, count, dict(zip(local.placeholders, local.inputs, strict=True)))
    cutter.sums()
    local.graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    cutter.number()
    cutter.refuse_the_rest()
    return cutter.program()


@dataclass
class _Cutter:
    """Replaces what a microbatch has of others, in the graph of ``local``.

    Attributes:
        inputs: what each placeholder stands for; those that are added here, too.
        fed: the values of the whole program that are computed before, by the placeholders that stand for them.
    """

    whole: Program
    local: Program
    count: int
    inputs: dict[fx.Node, Input]
    fed: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def sums(self) -> None:
        """All-reduces become sums over time; what is of the batch alone is given, whole or a microbatch's part."""
        alone = self._of_batch_alone()
        graph = self.local.graph.graph
        for node in list(graph.nodes):
            end = _end_of_move(node)
            if end is not None and ((start := _start(end)) in alone or start in self.fed):
                self._feed(start, end)
            elif node.target is c10d.all_reduce.default and node.args[1] == "sum":
                (wait,) = node.users
                with graph.inserting_after(node.args[0]):  # so that the term lives for a moment only
                    total = graph.call_function(accumulate, (node.args[0],))
                inherit_origin(total, node.args[0])
                known = info(wait).inherit(info(total))
                total.meta = {**wait.meta, **total.meta}
                set_info(total, known)
                wait.replace_all_uses_with(total)

    def _of_batch_alone(self) -> set[fx.Node]:
        """Nodes that no parameter or tangent goes into."""
        tied = {n for n, i in self.inputs.items() if i.kind in ("parameter", "tangent")}
        found = set()
        for node in self.local.graph.graph.nodes:
            if node in tied or any(a in tied for a in node.all_input_nodes):
                tied.add(node)
            else:
                found.add(node)
        return found

    def _feed(self, value: fx.Node, end: fx.Node) -> None:
        """Let a new tensor of the batch stand for ``end``: a value of the whole program, or a microbatch's part."""
        names = {n.name: n for n in self.whole.graph.graph.nodes}
        whole = self.fed.get(value) or names.get(value.name)  # what is moved once more, or for the first time
        if whole is None:
            raise self._refusal(value)
        graph = self.local.graph.graph
        with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
            given = graph.placeholder(f"before_{len(self.fed)}")
        given.meta = dict(end.meta)
        end.replace_all_uses_with(given)
        self.fed[given] = whole

    def number(self) -> None:
        """Let what is computed before, and taken, follow the tensors of the batch."""
        for given in [n for n in self.fed if not n.users]:  # what is made of it is computed before, too
            self.local.graph.graph.erase_node(given)
            del self.fed[given]
        first = sum(i.kind == "batch" for i in self.inputs.values())
        self.inputs |= {given: Input("batch", str(first + i)) for i, given in enumerate(self.fed)}

    def _leading(self, layout: Layout, node: fx.Node) -> int | None:
        """The dim that is split over time, along its first factor; None: there is none."""
        (placement,) = layout
        if isinstance(placement, Replicate):
            return None
        if not isinstance(placement, Split) or placement.factor:
            raise self._refusal(node)
        return placement.dim

    def refuse_the_rest(self) -> None:
        """Refuse what needs other microbatches in another way, and sums that the same microbatch would need."""
        late = replace(self.local).per_step
        varying: set[fx.Node] = set()
        for node in self.local.graph.graph.nodes:
            if node.target is axis_index or node.target in GROUP_ARGUMENT:
                raise self._refusal(node)
            if node.op == "output" or node.target is accumulate:
                continue
            split = any(isinstance(lay[0], Split) for lay in info(node).layouts if lay is not None)
            if split or any(a in varying for a in node.all_input_nodes):
                varying.add(node)
            if node in varying and node in late:
                raise self._refusal(node)

    def _refusal(self, node: fx.Node) -> InfeasibleError:
        source = _culprit(node)
        return InfeasibleError(
            f"the step cannot be cut into {self.count} microbatches: {source.target} ({source.name}, "
            f"{user_line(source)}) takes something of the whole batch that is no sum over its samples, as batch "
            'normalization does; leave them out (pins={"microbatches": 1}), or change the model'
        )

    def program(self) -> Program:
        """The program of one microbatch."""
        local = self.local
        given = {i.name: self._leading(info(n).layout(), n) for n, i in self.inputs.items() if i.kind == "batch"}
        rows = {name: dim for name, dim in given.items() if dim is not None}
        results = {}
        finals = info(local.output_node).input_layouts
        for output, value, layout in zip(local.outputs, local.output_values, finals, strict=True):
            dim = self._leading(layout, value) if output.kind == "result" and value is not None else None
            if dim is not None:
                results[output.name] = dim
        example = self.whole.placeholders[0].meta["val"]
        for node in local.graph.graph.nodes:
            set_info(node, info(node).without_plan())
            if "val" in node.meta:
                made = values_of(node)
                fakes = tuple(v if v is None else _fake(v, example) for v in made)
                node.meta["val"] = fakes if isinstance(node.meta["val"], tuple | list) else fakes[0]
        set_graph_info(local.graph, GraphInfo())
        local.graph.recompile()
        before = _program_of(self.whole, list(self.fed.values())) if self.fed else None
        inputs = tuple(self.inputs[n] for n in local.placeholders)
        return replace(local, inputs=inputs, part=Microbatch(self.count, before, rows, results))


def _fake(value: torch.Tensor, like: FakeTensor) -> torch.Tensor:
    """A tensor of the meta device as one of the program's fake ones."""
    with like.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=like.device)


def _culprit(node: fx.Node) -> fx.Node:
    """The operator because of which a node is there: that which takes what is gathered, or makes what is reduced."""
    moved = node.op == "placeholder" or node.target in GROUP_ARGUMENT or node.target is axis_index
    reduced = node.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
    waiting, seen = [node] if moved and not reduced else [], set()
    while waiting:
        for user in waiting.pop(0).users:
            if user.op == "call_function" and info(user).operator is not None:
                return user
            if user not in seen and user.op != "output":
                seen.add(user)
                waiting.append(user)
    while node.all_input_nodes and info(node).operator is None:
        node = node.all_input_nodes[0]
    return node


def _start(node: fx.Node) -> fx.Node:
    """The value that is moved, from the last node of the move."""
    (node,) = node.all_input_nodes
    while not info(node).layouts and node.target is not operator.getitem:
        node = next(n for n in node.all_input_nodes if n.target is not axis_index)
    return node


def _end_of_move(node: fx.Node) -> fx.Node | None:
    """The last node of the move that a collective or an index is of; None: it is of none."""
    if info(node).moved_value is None or (node.target not in GROUP_ARGUMENT and node.target is not axis_index):
        return None
    while not info(node).layouts:
        (node,) = node.users
    return node


def _program_of(program: Program, values: list[fx.Node]) -> Program:
    """The program that computes some values of the whole batch."""
    waiting, needed = list(values), set()
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node in needed or (node in inputs and inputs[node].kind == "batch"):  # the batch goes in whole
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].meta = {k: v for k, v in node.meta.items() if k != "partitioner_tag"}
    graph.output([known[v] for v in values])
    outputs = tuple(Output("result", str(i)) for i in range(len(values)))
    taken = tuple(i for n, i in inputs.items() if n in known)
    return Program(fx.GraphModule(program.graph, graph), taken, outputs, len(outputs), None, training=False)
