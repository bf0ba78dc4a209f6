"""Torch's compilers of graphs: its partitioners, and inductor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module


def default_partition(*arguments: Any, **options: Any) -> Any:
    """Torch's function of this name, imported on its first use as well."""
    from torch._functorch.partitioners import default_partition as partition

    # Python code is made of what it returns, once, when that runs first; not of every graph in between.
    with _use_lazy_graph_module(True):
        return partition(*arguments, **options)


def budget_partition(joint: Any, outputs: int, budget: float, solver: str) -> Any:
    """Torch's own choice of what to recompute, to compare with: forward and backward graph; ``joint`` is changed.

    Args:
        joint: a joint graph as torch captures it.
        outputs: how many of its outputs are the forward pass's.
        budget: share of the memory for activations, 0 to 1.
        solver: ``dp``, ``greedy`` or ``ilp``.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
        return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)


def inductor(graph: Any, values: Sequence[torch.Tensor], decompositions: dict[Any, Any]) -> Any:
    """A function from a list, which it empties, to what a graph of operators returns, with the strides of the graph.

    Args:
        graph: a `GraphModule` on tensors that are not differentiated; it is changed.
        values: like its inputs; of their strides, too, the function depends.
        decompositions: of operators, besides inductor's own.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(v.detach(), static_shapes=True) for v in values]
    with torch.no_grad():
        compile_fx(graph, fakes, inner_compile=inner, decompositions={**select_decomp_table(), **decompositions})
    # What is around it binds views of outputs to their bases, for autograd, in every call.
    (found,) = made
    return found


def inductor_lacks(device: torch.device) -> str:
    """What is not installed that inductor needs for a device; empty: nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton (pip install triton)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (apt-get install g++, or the path of one in CXX)"
    return ""
