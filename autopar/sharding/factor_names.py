"""Names that people use for factors: batch, seq, heads, head, ffn, vocab, hidden."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import fx

from autopar.ir.graph import operators, producer, tensor_arguments, values_of
from autopar.ir.program import Program

aten = torch.ops.aten

_ATTENTION = ("scaled_dot_product", "autopar.attention")


def factor_names(
    program: Program, dims_of: Callable[[tuple[fx.Node, int]], list[list[int]]], sizes: Mapping[int, int]
) -> dict[int, str]:
    """A name for each factor class: what it means where that is known, else by the parameter it comes from.

    Args:
        program: the analyzed program.
        dims_of: factor classes of each dim of a value.
        sizes: every class, with its size.
    """
    names: dict[int, str] = {}

    def give(classes: list[int], name: str) -> None:
        for i, c in enumerate(classes):
            names.setdefault(c, name if len(classes) == 1 else f"{name}.{i}")

    # In order of confidence, since the first name stays: what a dim means goes before the parameter it comes from.
    _name_batch(program, dims_of, give)
    for node in operators(program.graph.graph):
        if node.target is aten.embedding.default:
            vocab, hidden = dims_of(producer(tensor_arguments(node)[0]))
            # A small table is one of positions or types, not of words.
            give(vocab, "vocab" if sizes.get(vocab[0], 0) >= 64 else "rows") if vocab else None
            give(hidden, "hidden")
    for node in operators(program.graph.graph):
        if any(word in str(node.target) for word in _ATTENTION) and "backward" not in str(node.target):
            _name_attention(node, dims_of, give)
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            _name_parameter(spec.name, dims_of((node, 0)), give)
    return names


def _name_batch(
    program: Program,
    dims_of: Callable[[tuple[fx.Node, int]], list[list[int]]],
    give: Callable[[list[int], str], None],
) -> None:
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind != "batch":
            continue
        dims = dims_of((node, 0))
        value = values_of(node)[0]
        if dims:
            give(dims[0], "batch")
        # Vectors of a sequence, or token numbers; two floating dims are samples of features.
        if value is not None and (value.ndim == 3 or (value.ndim == 2 and not value.is_floating_point())):
            give(dims[1], "seq")


def _name_attention(
    node: fx.Node,
    dims_of: Callable[[tuple[fx.Node, int]], list[list[int]]],
    give: Callable[[list[int], str], None],
) -> None:
    query = dims_of(producer(tensor_arguments(node)[0]))
    heads = query[1]
    if len(heads) == 2:  # grouped queries
        give(heads[:1], "kv_heads")
        give(heads[1:], "group")
    give(heads, "heads")
    give(query[3], "head")


def _name_parameter(name: str, dims: list[list[int]], give: Callable[[list[int], str], None]) -> None:
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 else parts[-1]
    # ``blocks.3.weight``: the number alone would name nothing.
    if module.isdigit() and len(parts) > 2:
        module = parts[-3] + module
    # What Llama, GPT-2, BERT and torch's own transformer call the layers that widen the hidden dim.
    if re.search(r"up|gate|fc1|c_fc|intermediate|linear1|w1|w3", module):
        for dim in dims:
            give(dim, "ffn" if dim is not dims[-1] or len(dims) == 1 else "hidden")
    for i, dim in enumerate(dims):
        give(dim, f"{module}.{i}" if len(dims) > 1 else module)
