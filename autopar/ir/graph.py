"""Graphs and their nodes: where a node comes from, its arguments and results, copies; which modules repeat."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, LazyGraphModule
from autopar.ir.node_info import info, set_info

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Value = tuple[fx.Node, int]
"""A node that makes tensors, and the number of one of its outputs."""


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost module that the node (or the forward node it differentiates) comes from."""
    found = info(node).module_path
    if found is None:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = str(next(reversed(stack.values()))[0]) if stack else ""
        # Torch's exporter and our own harness begin paths in different ways.
        found = re.sub(r"^(L\['self'\]\.)?model\.?", "", path, count=1)
        set_info(node, replace(info(node), module_path=found))
    return found


def block_of(path: str, blocks: Collection[str]) -> str | None:
    """The block that a module is in, or is; None if it is in none.

    >>> block_of("layers.3.mlp", {"layers.3"})
    'layers.3'
    """
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i in range(len(parts)) if ".".join(parts[: i + 1]) in blocks), None)


def module_calls(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Every module that the node comes from, the outermost first: its qualified name, and what its calls differ in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    named = ((str(entry[0]), str(call)) for call, entry in stack.items())
    return tuple((name.removeprefix("model."), call) for name, call in named if name.startswith("model."))


def is_backward(node: fx.Node) -> bool:
    """Whether the node belongs to the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def inherit_origin(node: fx.Node, source: fx.Node) -> None:
    """A node that a pass makes comes from where ``source`` does: module, pass of the step, region, the user's line."""
    # Not ``val``: the new node's shape and dtype are its own.
    for key in ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr", "stack_trace"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    set_info(node, info(node).inherit(info(source)))


def insert_call(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node where the graph inserts, which comes from where ``origin`` does, with what it gives."""
    node = graph.call_function(target, args, kwargs)
    inherit_origin(node, origin)
    set_info(node, replace(info(node), internal=False))
    node.meta["val"] = computed(node, origin)
    return node


def computed(node: fx.Node, origin: fx.Node | None = None) -> Any:
    """What a node gives: fake tensors of the graph's own mode; without arguments that are tensors, of the origin's."""
    args, kwargs = (map_nodes(own, lambda n: n.meta["val"]) for own in (node.args, node.kwargs))
    sources = [n for n in (*node.all_input_nodes, origin) if n is not None]
    known = next(n.meta["val"] for n in sources if isinstance(n.meta["val"], torch.Tensor | tuple))
    known = known[0] if isinstance(known, tuple) else known
    target: Any = node.target
    with known.fake_mode if isinstance(known, FakeTensor) else nullcontext(), torch.no_grad():
        return target(*args, **kwargs)


def user_line(node: fx.Node) -> str:
    """``file.py:12`` of the user's code that the node comes from, or the module's name."""
    trace = node.meta.get("stack_trace") or ""
    # The last frame is the innermost of the user's.
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    if lines:
        return f"{lines[-1][0]}:{lines[-1][1]}"
    return f"module {module_path(node)!r}" if module_path(node) else "no source line"


def block_prefixes(parameters: Iterable[str]) -> frozenset[str]:
    """Prefixes ``layers.3`` of numbered modules that contain modules: these repeat; numbered leaves need not.

    Args:
        parameters: names of all parameters.
    """
    found: set[str] = set()
    for name in parameters:
        parts = name.split(".")
        # Two further parts, a module and its parameter: ``blocks.3.weight`` is a leaf in a list, no block.
        found.update(".".join(parts[: i + 1]) for i, p in enumerate(parts[:-2]) if p.isdigit())
    return frozenset(found)


@lru_cache(maxsize=4096)
def without_indices(path: str, blocks: frozenset[str]) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp`` if ``layers.3`` is a repeated block."""
    # Later calls of a shared module are those of ``name@1``: they are alike, too.
    parts = re.sub(r"@\d+", "", path).split(".")
    return ".".join("*" if ".".join(parts[: i + 1]) in blocks else p for i, p in enumerate(parts))


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """The same module on a graph of its own; fake tensors and constants are shared."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, environment))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for old, new in environment.items():
        # Frozen values may be shared; the dict may not: passes write to it.
        new.meta = dict(old.meta)
    copied = LazyGraphModule(module, graph)  # lazily compiled: most copies never run
    copied.meta = dict(module.meta)
    return copied


def map_nodes(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """``value`` with ``function`` applied to every node in it; lists, tuples and dicts keep their structure."""
    return fx.map_arg(value, function)


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The node's arguments that are tensors, in order of appearance among args and kwargs, lists flattened."""
    found: list[fx.Node] = []
    map_nodes((node.args, node.kwargs), found.append)
    return found


def replace_tensor_arguments(node: fx.Node, values: list[Any]) -> Arguments:
    """``(args, kwargs)`` of the node with its tensor arguments, in order, replaced by ``values``."""
    remaining = iter(values)
    args, kwargs = map_nodes((node.args, node.kwargs), lambda _: next(remaining))
    return args, kwargs


def producer(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator node and the number of its output that a value is; looks through getitem."""
    if node.op == "call_function" and node.target is operator.getitem:
        # A getitem is not an operator: it names one output of its producer.
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0


def values_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Fake tensors of the node's outputs; None for one that does not exist."""
    value = node.meta.get("val")
    # An operator of several outputs; kernels may leave some of them out.
    if isinstance(value, tuple | list):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in value)
    return (value if isinstance(value, torch.Tensor) else None,)


def is_operator(node: fx.Node) -> bool:
    """Whether the node computes tensors by an operator (getitem belongs to its producer)."""
    return node.op == "call_function" and node.target is not operator.getitem


def dependent_on(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that is computed from them."""
    found = set(sources)
    for node in graph.nodes:  # arguments come before their users
        if node.op != "output" and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def computed_from(nodes: Iterable[fx.Node], within: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """These nodes, and all that they are computed from; if ``within`` is given, without what is not in it."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and (within is None or node in within):
            found.add(node)
            pending += node.all_input_nodes
    return found


def operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """Operator nodes in order."""
    return (n for n in graph.nodes if is_operator(n))


def static_arguments(node: fx.Node) -> str:
    """Text of the node's arguments that are not tensors; the same for equal calls in every process, on any device."""
    # Devices are left out: a plan made for a GPU on a CPU is the same plan.
    args, kwargs = map_nodes((node.args, node.kwargs), lambda _: "%")
    return f"{args!r}{sorted((k, v) for k, v in kwargs.items() if k not in ('device', 'pin_memory'))!r}"
