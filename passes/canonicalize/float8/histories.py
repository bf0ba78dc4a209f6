"""`with_histories`: the inputs and outputs of a program whose float8 scales come from earlier steps.

Before::

    def step(w, x, ...): ...; return loss, dw

After::

    def step(w, w_amax_history, x, ...): ...; return loss, float8_amax(x), float8_amax(w), float8_amax(dy), dw

The histories are buffers, and what is returned for them are outputs of the backward pass: `autopar.runtime.step.record`
writes it into them. A step without a backward pass returns nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar._torch_compat import FakeTensor
from autopar.ir.graph import insert_call
from autopar.ir.node_info import info, set_info
from autopar.ir.ops import float8
from autopar.ir.ops.float8.formats import wide_dtype
from autopar.ir.ops.float8.histories import ROWS, history_name, is_history
from autopar.ir.program import RECORDED, Input, Output, Program

Used = tuple[str, int, fx.Node, fx.Node]
"""A weight's name, a row of its history, a matrix that the row is of, and the product that takes it."""


@dataclass(frozen=True)
class Histories:
    """Where scales come from.

    Attributes:
        inputs: placeholders of the histories, by the names of their weights.
        of: by weight and row the weight and row whose history is taken. Layers that take the same values, as queries
            and keys do, record the same: one history serves them all, and the values are rounded once.
    """

    inputs: Mapping[str, fx.Node]
    of: Mapping[tuple[str, int], tuple[str, int]]


def with_histories(program: Program, used: Sequence[Used], steps: int) -> tuple[Program, Histories]:
    """The program with histories as inputs, and what they record as outputs.

    Args:
        program: its graph is changed in place.
        used: what is rounded to float8, in the order of the graph.
        steps: how many a history has.
    """
    # Those that are registered with the model already are in the graph, as all buffers are, and nothing reads them.
    kept = []
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "buffer" and is_history(spec.name):
            program.graph.graph.erase_node(node)
        else:
            kept.append(spec)
    program = replace(program, inputs=tuple(kept))
    matrices: dict[tuple[str, int], dict[fx.Node, None]] = {}
    readers: dict[fx.Node, fx.Node] = {}
    for weight, row, matrix, product in used:
        matrices.setdefault((weight, row), {})[matrix] = None
        readers.setdefault(matrix, product)
    program, inputs = _with_inputs(program, {w: m for w, _, m, _ in used}, steps)
    first: dict[tuple[int, frozenset[fx.Node]], tuple[str, int]] = {}
    of = {key: first.setdefault((key[1], frozenset(own)), key) for key, own in matrices.items()}
    if any(o.kind == "gradient" and v is not None for o, v in _outputs(program)):
        program = _with_outputs(program, matrices, readers)
    return program, Histories(inputs, of)


def _outputs(program: Program) -> Iterable[tuple[Output, fx.Node | None]]:
    return zip(program.outputs, program.output_values, strict=True)


def _with_inputs(program: Program, weights: Mapping[str, fx.Node], steps: int) -> tuple[Program, dict[str, fx.Node]]:
    """A placeholder for the history of each weight, after the parameters; ``weights`` have a matrix of each."""
    specs, nodes, found = list(program.inputs), program.placeholders, {}
    at = max(i for i, spec in enumerate(specs) if spec.kind == "parameter")
    last, added = nodes[at], []
    for weight, matrix in weights.items():
        like = matrix.meta["val"]
        with program.graph.graph.inserting_after(last):
            last = program.graph.graph.placeholder(history_name(weight).replace(".", "_"))
        assert isinstance(like, FakeTensor)
        with like.fake_mode:
            last.meta["val"] = torch.zeros(len(ROWS), steps, dtype=wide_dtype(like), device=like.device)
        found[weight] = last
        added.append(Input("buffer", history_name(weight)))
    return replace(program, inputs=(*specs[: at + 1], *added, *specs[at + 1 :])), found


def _with_outputs(
    program: Program, matrices: Mapping[tuple[str, int], Iterable[fx.Node]], readers: Mapping[fx.Node, fx.Node]
) -> Program:
    """The largest entry of each matrix, as an output of the backward pass for each history that it is recorded in."""
    largest: dict[fx.Node, fx.Node] = {}
    described: dict[Output, fx.Node] = {}
    for (weight, row), own in matrices.items():
        for number, matrix in enumerate(own):
            if matrix not in largest:
                largest[matrix] = _insert_amax(matrix, readers[matrix])
            described[Output(RECORDED, f"{history_name(weight)}:{row}:{number}")] = largest[matrix]
    # Before the gradients: those of parameters are split off by `no_sync`.
    first, values = program.forward_outputs, program.output_values
    program.output_node.args = ([*values[:first], *described.values(), *values[first:]],)
    return replace(program, outputs=(*program.outputs[:first], *described, *program.outputs[first:]))


def _insert_amax(matrix: fx.Node, product: fx.Node) -> fx.Node:
    """The largest entry, in the pass of the first product that takes the matrix: it is saved, and not the matrix."""
    with product.graph.inserting_before(product):
        node = insert_call(product.graph, product, float8.amax, matrix)
    set_info(node, replace(info(node), saved=None))
    return node
