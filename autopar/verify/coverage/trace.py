"""One call of an operator, forward and backward, as a canonical graph of ATen operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from autopar._torch_compat import OpOverload
from autopar.capture.decompositions import decompositions
from autopar.errors import CaptureError
from autopar.ir.graph import values_of
from autopar.ir.program import Input, Output, Program
from autopar.passes.canonicalize import canonical

Forward = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of a flat list of tensors."""


@dataclass(frozen=True)
class TracedSample:
    """A graph, the tensors that go in, and what was in it before it was made canonical.

    Attributes:
        program: canonical.
        values: a tensor for each placeholder.
        overloads: operator overloads that the tracer met.
        differentiable: the graph has a backward pass.
    """

    program: Program
    values: list[torch.Tensor]
    overloads: tuple[Any, ...]
    differentiable: bool


def trace(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], gradients: bool) -> TracedSample:
    """Trace ``function`` on these arguments with the decompositions of `autopar.capture.capture`.

    Args:
        function: what to call.
        args: positional arguments, tensors anywhere in them.
        kwargs: keyword arguments.
        gradients: also trace the gradients of the tensors that require one.
    """
    tensors = _tensors((tuple(args), kwargs))
    wanted = [gradients and t.requires_grad for t in tensors]
    forward = _of_tensors(function, (tuple(args), kwargs))
    tensors = [t.detach() for t in tensors]
    tangents = {i: torch.randn_like(o) for i, o in _differentiable(forward, tensors, wanted).items()}
    # make_fx and not torch.export: a single operator on any arguments, with the tracer that export uses beneath.
    joint = torch.func.functionalize(_joint(forward, wanted, list(tangents)))
    with torch.enable_grad():
        graph = make_fx(joint, decomposition_table=decompositions(), tracing_mode="fake")(
            tensors, list(tangents.values())
        )
    _complete(graph)
    # functionalize() turns a write to an argument into one copy at the end: no program has such a node.
    if any(n.target is torch.ops.aten.copy_.default for n in graph.graph.nodes):
        raise CaptureError("it writes to its arguments")
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and isinstance(n.target, OpOverload)]
    overloads = tuple(dict.fromkeys(n.target for n in nodes))
    values = [*tensors, *tangents.values()]
    inputs = tuple(Input("batch", str(i)) for i in range(len(values)))
    results: Any = graph.graph.output_node().args[0]
    outputs = tuple(Output("result", str(i)) for i in range(len(results)))
    traced = Program(graph, inputs, outputs, len(outputs), None, training=False)
    program = canonical(traced)
    return TracedSample(program, values, overloads, bool(tangents))


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_aggregate(tree, lambda a: found.append(a) if isinstance(a, torch.Tensor) else None)
    return found


def _complete(graph: fx.GraphModule) -> None:
    """Constants have a fake tensor too, and every size is a number.

    Raises:
        CaptureError: one is not.
    """
    # Data-dependent sizes are symbols, of which a program has none.
    for node in graph.graph.nodes:
        if any(not isinstance(n, int) for v in values_of(node) if v is not None for n in v.shape):
            raise CaptureError("the shape of its output depends on data")
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = getattr(graph, str(node.target)).to("meta")


def _of_tensors(function: Callable[..., Any], arguments: Any) -> Forward:
    """A function of the tensors among its arguments alone, in order, to the tensors among its results."""

    def forward(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        remaining = iter(tensors)
        args, kwargs = map_aggregate(arguments, lambda a: next(remaining) if isinstance(a, torch.Tensor) else a)
        return _tensors(function(*_plain(args), **_plain(kwargs)))

    return forward


def _differentiable(
    forward: Forward, tensors: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> dict[int, torch.Tensor]:
    """Outputs that have gradients, by number; ``wanted``: whether the gradient of each input is."""
    leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        return {i: o.detach() for i, o in enumerate(forward(leaves)) if o.requires_grad}


def _joint(forward: Forward, wanted: Sequence[bool], live: list[int]) -> Callable[..., list[torch.Tensor]]:
    """Inputs and tangents to outputs and gradients; ``live``: the outputs that have gradients."""

    def run(tensors: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        if not live:
            return forward(tensors)
        positions = [i for i, w in enumerate(wanted) if w]

        def outputs(*primals: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
            primal_of = dict(zip(positions, primals, strict=True))
            results = forward([primal_of.get(i, t) for i, t in enumerate(tensors)])
            return tuple(results[i] for i in live), [o for i, o in enumerate(results) if i not in live]

        vjp: Any = torch.func.vjp(outputs, *(tensors[i] for i in positions), has_aux=True)
        primal, pull_back, rest = vjp
        return [*primal, *rest, *pull_back(tuple(tangents))]

    return run


def _plain(value: Any) -> Any:
    """Built-in lists, tuples and dicts in place of fx's, which are classes of their own: some operators insist."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if type(value) is tuple:
        return tuple(_plain(v) for v in value)
    return value
