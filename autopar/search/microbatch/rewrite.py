"""Microbatches: a step that computes a part of the batch at a time, and adds up.

A microbatch is the batch split over time: where the devices along a mesh axis each compute a part of the batch at the
same time, one device computes the parts one after the other. So the program of a microbatch is the whole program
rewritten for an axis `TIME`. Sums over that axis become ``autopar.ir.ops.accumulate``; values that depend on the batch
alone, such as the number of tokens that count, are computed from the whole batch before the first microbatch; and
whatever needs the other parts in any other way cannot be cut, but for scales of float8 values: these are a microbatch's
own, and the largest entries that delayed scaling records are those of all microbatches. There is no mean of means: the
sum is that of the whole
batch, however unequal its parts are.

Before, on the time axis:              After, for each microbatch:

    loss = all_reduce(part, "sum")         loss = accumulate(part)
    tokens = all_reduce(count, "sum")      tokens = before_0  # an input, computed from the whole batch
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, LazyGraphModule
from autopar.errors import InfeasibleError
from autopar.ir.graph import computed_from, dependent_on, inherit_origin, user_line, values_of
from autopar.ir.layout import Layout, Replicate, Split
from autopar.ir.node_info import GraphInfo, info, set_graph_info, set_info
from autopar.ir.ops import float8
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import GROUP_ARGUMENT, axis_index, c10d
from autopar.ir.program import Input, Microbatch, Output, Program
from autopar.search.microbatch.time_axis import OF_EACH

TIME = "time"
"""Name of the microbatch axis."""


def cut_microbatches(program: Program, local: Program, count: int) -> Program:
    """The program of one microbatch.

    Args:
        program: of the whole batch.
        local: the same, rewritten for ``count`` devices along the axis `TIME`; no parameter is split among them.
        count: microbatches; ``local`` is changed in place.

    Raises:
        InfeasibleError: something other than a sum needs the whole batch; names it.
    """
    cut = _Cut(program, local, count, dict(zip(local.placeholders, local.inputs, strict=True)))
    _replace_moves(cut)
    # Inputs stay, though nothing may read them now: they are the program's signature.
    local.graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    _number_inputs(cut)
    _refuse_the_rest(cut)
    return _microbatch_of(cut)


@dataclass
class _Cut:
    """The graph of ``local`` while the values that a microbatch shares with others are replaced.

    Attributes:
        whole: the program of the whole batch.
        local: its rewrite along the time axis, whose graph is edited.
        count: microbatches.
        inputs: what each placeholder stands for, those that are added here included.
        computed_before: the values of the whole program that are computed before the first microbatch, by the
            placeholders that stand for them.
    """

    whole: Program
    local: Program
    count: int
    inputs: dict[fx.Node, Input]
    computed_before: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def refusal(self, node: fx.Node) -> InfeasibleError:
        """The error that names the operator because of which a node needs the whole batch."""
        source = _culprit(node)
        return InfeasibleError(
            f"the step cannot be cut into {self.count} microbatches: {source.target} ({source.name}, "
            f"{user_line(source)}) takes something of the whole batch that is no sum over its samples, as batch "
            'normalization does; leave them out (pins={"microbatches": 1}), or change the model'
        )

    def split_dim(self, layout: Layout, node: fx.Node) -> int | None:
        """The dim that is split over time, along its first factor; None: there is none."""
        (placement,) = layout
        if isinstance(placement, Replicate):
            return None
        if not isinstance(placement, Split) or placement.factor:
            raise self.refusal(node)
        return placement.dim


def _replace_moves(cut: _Cut) -> None:
    """All-reduces become sums over time; values of the batch alone become inputs, whole or a microbatch's part."""
    batch_only = _of_batch_alone(cut)
    graph = cut.local.graph.graph
    for node in list(graph.nodes):
        if node.target is c10d.all_reduce.default and node.args[0].target in OF_EACH:
            # The microbatch's own result stands in for that of all, which nobody asks for.
            (wait,), (own, *_) = node.users, node.args
            known = info(wait).inherit(info(own))
            own.meta = {**wait.meta, **own.meta}
            set_info(own, known)
            wait.replace_all_uses_with(own)
            continue
        end = _end_of_move(node)
        if end is not None and ((start := _start(end)) in batch_only or start in cut.computed_before):
            _compute_before(cut, start, end)
        elif node.target is c10d.all_reduce.default and (
            node.args[1] == "sum" or (node.args[1] == "max" and node.args[0].target is float8.amax)
        ):
            (wait,), op = node.users, node.args[1]
            with graph.inserting_after(node.args[0]):  # right there, so that the term is freed at once
                total = graph.call_function(accumulate, (node.args[0],) if op == "sum" else (node.args[0], op))
            inherit_origin(total, node.args[0])
            known = info(wait).inherit(info(total))
            total.meta = {**wait.meta, **total.meta}
            set_info(total, known)
            wait.replace_all_uses_with(total)


def _of_batch_alone(cut: _Cut) -> set[fx.Node]:
    """Nodes that depend on no parameter or tangent."""
    graph = cut.local.graph.graph
    return set(graph.nodes) - dependent_on(
        graph, {n for n, i in cut.inputs.items() if i.kind in ("parameter", "tangent")}
    )


def _compute_before(cut: _Cut, value: fx.Node, end: fx.Node) -> None:
    """Replace ``end`` by a new batch tensor: a value of the whole program, or a microbatch's part of it."""
    names = {n.name: n for n in cut.whole.graph.graph.nodes}
    whole = cut.computed_before.get(value) or names.get(value.name)  # moved once more, or for the first time
    if whole is None:
        raise cut.refusal(value)
    graph = cut.local.graph.graph
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        added = graph.placeholder(f"before_{len(cut.computed_before)}")
    added.meta = dict(end.meta)
    end.replace_all_uses_with(added)
    cut.computed_before[added] = whole


def _number_inputs(cut: _Cut) -> None:
    """Number the batch tensors that were added after the model's own; those that nothing reads any more go."""
    for added in [n for n in cut.computed_before if not n.users]:  # what is computed from it is computed before, too
        cut.local.graph.graph.erase_node(added)
        del cut.computed_before[added]
    first = sum(i.kind == "batch" for i in cut.inputs.values())
    cut.inputs |= {added: Input("batch", str(first + i)) for i, added in enumerate(cut.computed_before)}


def _refuse_the_rest(cut: _Cut) -> None:
    """Refuse what needs other microbatches in another way, and sums that the same microbatch would need.

    Raises:
        InfeasibleError: names the operator.
    """
    per_step = replace(cut.local).per_step
    varying: set[fx.Node] = set()  # from microbatch to microbatch
    for node in cut.local.graph.graph.nodes:
        if node.target is axis_index or node.target in GROUP_ARGUMENT:
            raise cut.refusal(node)
        if node.op == "output" or node.target is accumulate:
            continue
        split = any(isinstance(lay[0], Split) for lay in info(node).layouts if lay is not None)
        if split or any(a in varying for a in node.all_input_nodes):
            varying.add(node)
        if node in varying and node in per_step:
            raise cut.refusal(node)


def _microbatch_of(cut: _Cut) -> Program:
    """The program of one microbatch, from the graph as it is now."""
    local = cut.local
    batch = {i.name: cut.split_dim(info(n).layout(), n) for n, i in cut.inputs.items() if i.kind == "batch"}
    rows = {name: dim for name, dim in batch.items() if dim is not None}
    results = {}
    finals = info(local.output_node).input_layouts
    for output, value, layout in zip(local.outputs, local.output_values, finals, strict=True):
        dim = cut.split_dim(layout, value) if output.kind == "result" and value is not None else None
        if dim is not None:
            results[output.name] = dim
    _drop_notes(local, cut.whole.placeholders[0].meta["val"])
    local.graph.recompile()
    before = _program_of(cut.whole, list(cut.computed_before.values())) if cut.computed_before else None
    inputs = tuple(cut.inputs[n] for n in local.placeholders)
    return replace(local, inputs=inputs, part=Microbatch(cut.count, before, rows, results))


def _drop_notes(local: Program, example: FakeTensor) -> None:
    """Drop what the passes along the time axis have written, and make the values fake tensors like the example."""
    for node in local.graph.graph.nodes:
        set_info(node, info(node).without_plan())
        if "val" in node.meta:
            values = values_of(node)
            fakes = tuple(v if v is None else _fake(v, example) for v in values)
            node.meta["val"] = fakes if isinstance(node.meta["val"], tuple | list) else fakes[0]
    set_graph_info(local.graph, GraphInfo())


def _fake(value: torch.Tensor, like: FakeTensor) -> torch.Tensor:
    """A fake tensor like the program's others, of the shape of a tensor on the meta device."""
    with like.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=like.device)


def _culprit(node: fx.Node) -> fx.Node:
    """The operator because of which a node exists: the reader of a gathered value, or the producer of a reduced one."""
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
    """The last node of the move that a collective or an index belongs to; None: it belongs to none."""
    if info(node).moved_value is None or (node.target not in GROUP_ARGUMENT and node.target is not axis_index):
        return None
    while not info(node).layouts:
        (node,) = node.users
    return node


def _program_of(program: Program, values: list[fx.Node]) -> Program:
    """The program that computes some values of the whole batch."""
    needed, graph = computed_from(values), fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node in needed or (node in inputs and inputs[node].kind == "batch"):  # it takes all batch tensors
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].meta = {k: v for k, v in node.meta.items() if k != "partitioner_tag"}
    graph.output([known[v] for v in values])
    outputs = tuple(Output("result", str(i)) for i in range(len(values)))
    own_inputs = tuple(i for n, i in inputs.items() if n in known)
    return Program(LazyGraphModule(program.graph, graph), own_inputs, outputs, len(outputs), None, training=False)
