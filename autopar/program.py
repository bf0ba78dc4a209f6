"""`Program`: one step of a model as one graph of ATen operators on global tensors."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Value = tuple[fx.Node, int]
"""A node that makes tensors, and the number of one of its outputs."""


@dataclass(frozen=True)
class Input:
    """What a placeholder of the graph stands for.

    Attributes:
        kind: ``parameter``, ``buffer``, ``batch`` or ``tangent``.
        name: qualified name of a parameter or buffer; index of a batch tensor or of the output of a tangent.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Output:
    """What an output of the graph is: a ``buffer``'s new value, a ``result`` of the model or a ``gradient``.

    Attributes:
        name: of the buffer or parameter; index of the result.
    """

    kind: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """An operator call, whichever tensors it takes; calls that are alike are one object.

    Attributes:
        target: the operator overload.
        arguments: text of the arguments that are not tensors.
        inputs: shape and dtype of each tensor argument.
        outputs: of each output; None for one that does not exist.
    """

    target: Any
    arguments: str
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


@dataclass(frozen=True)
class Program:
    """A captured step: the joint forward and backward graph, and what goes in and out.

    Attributes:
        graph: joint graph; call_function nodes on ATen overloads, ``meta["val"]`` a fake tensor.
        inputs: one for each placeholder.
        outputs: one for each output; those of the forward pass come first.
        forward_outputs: how many outputs belong to the forward pass (buffers, then results).
        skeleton: structure of the model's output, see `autopar.tree`.
        loss: index of the result that is the loss; None if the outputs carry gradients.
        unused: parameters that require a gradient and, in the plain model too, get none.
        aliases: every further name of a tied parameter or shared buffer, to the name that stands for it.
        used: shape without padding of the parameters, tangents and results that are padded, by kind and name.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    forward_outputs: int
    skeleton: Any
    loss: int | None = None
    training: bool = True
    unused: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    used: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[fx.Node]:
        """Placeholder nodes, in the order of ``inputs``."""
        return [n for n in self.graph.graph.nodes if n.op == "placeholder"]

    @property
    def output_node(self) -> fx.Node:
        """The graph's output node."""
        return self.graph.graph.output_node()

    @property
    def output_values(self) -> list[fx.Node | None]:
        """The node of each output, in the order of ``outputs``; None for a gradient that does not exist."""
        values: Any = self.output_node.args[0]
        return list(values)

    # What follows is computed once: it holds as long as nobody changes the graph in place (see `compiler.rewrite`).

    @cached_property
    def sources(self) -> dict[fx.Node, tuple[Value, ...]]:
        """The values that each operator takes, in the order of its `tensor_arguments`."""
        return {n: tuple(producer(a) for a in tensor_arguments(n)) for n in operators(self.graph.graph)}

    @cached_property
    def calls(self) -> dict[fx.Node, Call]:
        """What each operator node calls."""
        types = {n: _types(n) for n in self.graph.graph.nodes}
        known: dict[Any, Call] = {}
        found = {}
        for node, sources in self.sources.items():
            inputs = tuple(types[source][i] for source, i in sources)
            key = (node.target, static_arguments(node), inputs, types[node])
            found[node] = known.get(key) or known.setdefault(key, Call(*key))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A hash of operators, arguments, shapes and dtypes, of parameter names, and of nothing else."""
        digest = hashlib.sha256(repr((self.inputs, self.outputs)).encode())
        number = {node: i for i, node in enumerate(self.graph.graph.nodes)}
        texts: dict[Call, str] = {}
        for node in self.graph.graph.nodes:
            call = self.calls.get(node)
            if call is None:
                arguments = [number[a] for a in tensor_arguments(node)]
                digest.update(f"{node.op} {static_arguments(node)} {arguments} {_types(node)}\n".encode())
                continue
            if call not in texts:
                texts[call] = f"{call.target} {call.arguments} {call.outputs}"
            sources = [(number[source], i) for source, i in self.sources[node]]
            digest.update(f"{texts[call]} {sources}\n".encode())
        return digest.hexdigest()[:16]


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """The same module on a graph of its own; fake tensors and constants are shared."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, environment))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for old, new in environment.items():
        new.meta = dict(old.meta)
    copied = fx.GraphModule(module, graph)
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
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0


def values_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Fake tensors of the node's outputs; None for one that does not exist."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in value)
    return (value if isinstance(value, torch.Tensor) else None,)


def draws(node: fx.Node) -> bool:
    """Whether the node, which has been annotated, takes numbers from a random generator."""
    operator_ = node.meta.get("operator")
    return operator_ is not None and bool(operator_.rule.random)


def is_operator(node: fx.Node) -> bool:
    """Whether the node computes tensors by an operator (getitem belongs to its producer)."""
    return node.op == "call_function" and node.target is not operator.getitem


def operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """Operator nodes in order."""
    return (n for n in graph.nodes if is_operator(n))


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost module that the node (or the forward node it differentiates) comes from."""
    if "module_path" not in node.meta:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = str(next(reversed(stack.values()))[0]) if stack else ""
        node.meta["module_path"] = re.sub(r"^(L\['self'\]\.)?model\.?", "", path, count=1)
    found: str = node.meta["module_path"]
    return found


def is_backward(node: fx.Node) -> bool:
    """Whether the node belongs to the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def inherit_origin(node: fx.Node, source: fx.Node) -> None:
    """A node that a pass makes comes from where ``source`` does: module, pass of the step, the user's line."""
    for key in ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "stack_trace"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    node.meta["internal"] = True


def user_line(node: fx.Node) -> str:
    """``file.py:12`` of the user's code that the node comes from, or the module's name."""
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    if lines:
        return f"{lines[-1][0]}:{lines[-1][1]}"
    return f"module {module_path(node)!r}" if module_path(node) else "no source line"


def static_arguments(node: fx.Node) -> str:
    """Text of the node's arguments that are not tensors; the same for equal calls in every process, on any device."""
    args, kwargs = map_nodes((node.args, node.kwargs), lambda _: "%")
    return f"{args!r}{sorted((k, v) for k, v in kwargs.items() if k not in ('device', 'pin_memory'))!r}"


def _types(node: fx.Node) -> tuple[Any, ...]:
    return tuple(None if v is None else (tuple(map(int, v.shape)), v.dtype) for v in values_of(node))
