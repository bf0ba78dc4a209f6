"""canonicalize_random: random operators become draws of numbers, and arithmetic on them.

Before::

    dropout, mask = aten.native_dropout(x, 0.1, True); noise = aten.rand_like(x); coin = aten.bernoulli(p)

After::

    mask = autopar.ir.ops.random("dropout", [0.1, 4], [8, 16], [0, 1], dtype=bool)
    dropout = aten.native_dropout_backward(x, mask, 1.11)                        # x * mask * 1.11
    noise = autopar.ir.ops.random("uniform", [0, 1], [8, 16], [0, 1], dtype=float32)
    coin = aten._to_copy(aten.lt(autopar.ir.ops.random("uniform", [0, 1], ...), p), dtype=float32)

A draw takes as many numbers from the generator as the operator did, in the same order, and none is removed: not even
one that nothing uses, since it changes what the next one draws.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.graph import copy_graph, user_line
from autopar.ir.module_outputs import pass_on
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.random import DROPOUT, SCATTERED_NORMAL, dropout_draw
from autopar.ir.program import Program

aten = torch.ops.aten

# What fills the tensor: the name of a method without its underscore, and its arguments, by name where they are the
# operator's own.
_FILLS: dict[Any, tuple[str, tuple[Any, ...]]] = {
    aten.rand.default: ("uniform", (0, 1)),
    aten.rand_like.default: ("uniform", (0, 1)),
    aten.randn.default: ("normal", (0, 1)),
    aten.randn_like.default: ("normal", (0, 1)),
    aten.randint.default: ("random", (0, "high")),
    aten.randint.low: ("random", ("low", "high")),
    aten.randint_like.default: ("random", (0, "high")),
    aten.randint_like.low_dtype: ("random", ("low", "high")),
    aten.randperm.default: ("permutation", ()),
    aten.bernoulli.p: ("bernoulli", ("p",)),
    aten.uniform.default: ("uniform", ("from", "to")),
    aten.normal_functional.default: ("normal", ("mean", "std")),
    aten.normal.float_float: ("normal", ("mean", "std")),
    aten.exponential.default: ("exponential", ("lambd",)),
    aten.geometric.default: ("geometric", ("p",)),
    aten.cauchy.default: ("cauchy", ("median", "sigma")),
    aten.log_normal.default: ("log_normal", ("mean", "std")),
    aten.random.default: ("random", ()),
    aten.random.to: ("random", ("to",)),
    getattr(aten.random, "from"): ("random", ("from", "to")),
}


def canonicalize_random(program: Program) -> Program:
    """Rewrite random operators into draws; computes the same from the same state of the generator.

    Raises:
        CaptureError: an operator draws from a generator of its own.
    """
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        # What is not rewritten below, such as multinomial, keeps its own kernel and rule.
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        _check_generator(node)
        with graph.graph.inserting_before(node):
            _rewrite(graph.graph, node)
    graph.graph.lint()
    return replace(program, graph=graph)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by name, defaults included."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found.update({a.name: v for a, v in zip(schema.arguments, node.args, strict=False)})
    return found | dict(node.kwargs)


def _check_generator(node: fx.Node) -> None:
    if _arguments(node).get("generator") is not None:
        raise CaptureError(
            f"node {node.name} ({node.target}, {user_line(node)}) draws from a generator of its own, whose state is no "
            "part of the graph; leave generator= out and call torch.manual_seed before the step"
        )


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    if node.target in _FILLS:
        distribution, parameters = _FILLS[node.target]
        named = _arguments(node)
        numbers = [named[p] if isinstance(p, str) else p for p in parameters]
        # The functional form of `normal_`: its result has no gaps where the tensor that a model fills has some.
        if node.target is aten.normal_functional.default and _has_gaps(named["self"].meta["val"]):
            distribution = SCATTERED_NORMAL
        _replace(node, _draw(graph, node, distribution, numbers, node.meta["val"]))
    elif node.target is aten.native_dropout.default:
        _dropout(graph, node)
    elif node.target is aten.bernoulli.default:
        _coins(graph, node)
    elif node.target in (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor):
        _scaled_normal(graph, node)


def _has_gaps(value: torch.Tensor) -> bool:
    """Whether there is memory of others between a tensor's elements."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return value.numel() < span


def _draw(
    graph: fx.Graph, node: fx.Node, distribution: str, parameters: list[Any], like: torch.Tensor, dtype: Any = None
) -> fx.Node:
    """A draw of the shape of ``like``, in the order of its elements in memory, as the operator ``node`` makes it."""
    # Numbers are drawn in the order of storage: a tensor with other strides gets them in other places.
    order = sorted(range(like.ndim), key=like.stride().__getitem__, reverse=True)  # stable
    options = {"dtype": dtype or like.dtype, "device": like.device}
    return _call(
        graph, node, like, torch.ops.autopar.draw.default, distribution, parameters, list(like.shape), order, **options
    )


def _call(graph: fx.Graph, source: fx.Node, value: torch.Tensor, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node in place of ``source``, with its origin; ``value`` is a fake tensor like its output."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {**source.meta, "val": value}
    set_info(node, replace(info(source), module_outputs=()))
    return node


def _replace(node: fx.Node, value: fx.Node) -> None:
    pass_on(node, value)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _dropout(graph: fx.Graph, node: fx.Node) -> None:
    """``x * mask / (1 - p)``, which is what the operator's backward computes of a gradient."""
    named = _arguments(node)
    if named["train"] is False:
        return
    chance = 1.0 - named["p"]  # of an element to stay
    output, like = node.meta["val"]
    if chance:
        _, parameters, *_ = dropout_draw(named["p"], named["input"].meta["val"].dtype, like.shape)
        mask = _draw(graph, node, DROPOUT, parameters, like)
    else:  # nothing is left to chance, and eager draws nothing
        options = {"dtype": like.dtype, "device": like.device}
        mask = _call(graph, node, like, aten.full.default, list(like.shape), False, **options)
    scale = 1.0 / chance if chance else 0.0
    result = _call(graph, node, output, aten.native_dropout_backward.default, named["input"], mask, scale)
    for user in list(node.users):
        assert user.target is operator.getitem
        _replace(user, (result, mask)[user.args[1]])  # type: ignore[index]
    graph.erase_node(node)


def _coins(graph: fx.Graph, node: fx.Node) -> None:
    """A coin shows one where a uniform number is below its probability."""
    chance, value = node.args[0], node.meta["val"]
    # In the order of the result, which is row-major whatever the strides of the probabilities.
    drawn = _draw(graph, node, "uniform", [0, 1], value, chance.meta["val"].dtype)  # type: ignore[union-attr]
    below = _call(graph, node, value.bool(), aten.lt.Tensor, drawn, chance)
    _replace(node, _call(graph, node, value, aten._to_copy.default, below, dtype=value.dtype))


def _scaled_normal(graph: fx.Graph, node: fx.Node) -> None:
    """``standard * std + mean``, rounded as the operator does."""
    named, value = _arguments(node), node.meta["val"]
    # The kernel fills a row-major tensor, whatever the strides of means and deviations; fake tensors have theirs.
    standard = _draw(graph, node, "normal", [0, 1], value.new_empty(value.shape))
    scaled = _call(graph, node, value, aten.mul.Tensor, standard, named["std"])
    _replace(node, _call(graph, node, value, aten.add.Tensor, scaled, named["mean"]))
