"""`backend_of`: what ``parallelize(compile=...)`` names, as a function that compiles one region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch_compat import inductor, inductor_lacks
from autopar.ir.ops.attention import KERNELS

Compile = bool | str | Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]] | None
"""``True`` or ``"inductor"``; ``False`` or None: nothing is compiled; or a backend as `torch.compile` takes them."""

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[[list[Any]], Any]]
"""From the graph of a region, which takes a list, and tensors like its inputs to what runs: it empties the list."""


def backend_of(compile: Compile, device: torch.device) -> Backend | None:
    """The backend that an argument names.

    Raises:
        ValueError: the argument names none, or inductor lacks what it needs on this machine.
    """
    if compile is None or compile is False:
        return None
    if compile is True or compile == "inductor":
        if lacks := inductor_lacks(device):
            raise ValueError(
                f"compile={compile!r} needs {lacks}: install it, pass a backend of your own as compile=, or leave "
                "compile= out"
            )
        return by_inductor
    if callable(compile):
        return lambda graph, values: _boxed(compile(_unboxed(graph), values))
    raise ValueError(f"compile={compile!r}: expected {no_backend(compile)}")


def no_backend(compile: object) -> str | None:
    """What is expected in the place of a value that names no backend; None: it names one."""
    if isinstance(compile, bool) or compile == "inductor" or callable(compile):
        return None
    return (
        'True or "inductor", False, or a function (graph_module, example_inputs) -> callable, as torch.compile takes '
        "for its backend"
    )


def by_inductor(graph: fx.GraphModule, values: list[Tensor]) -> Callable[[list[Any]], Any]:
    """Compile a region with inductor."""
    compiled: Callable[[list[Any]], Any] = inductor(_unboxed(graph), values, KERNELS)
    return compiled


def _unboxed(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph as one that takes its inputs one by one; a copy, since compilers change what they are given."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copied)


def _boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def call(values: list[Any]) -> Any:
        given = tuple(values)
        values.clear()
        return function(*given)

    return call
