"""Tracing joint graphs, and what is being traced."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module


def aot_export_joint_with_descriptors(*arguments: Any, **options: Any) -> Any:
    """Torch's function of this name, imported on its first use: that takes longer than all of autopar and torch."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors as export

    # The graph is rewritten before anything runs: no Python code is made of it.
    with _use_lazy_graph_module(True):
        return export(*arguments, **options)


def traced_graph() -> Any:
    """The `fx.Graph` that is being traced now; None: none is."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's code is one that is being traced, and not one with values."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if is_transformed(tensor):  # of which the next question may end the process
        return True
    # Torch asks what is within a `FunctionalTensor` for its layout, say.
    return torch._is_functional_tensor(tensor) or isinstance(tensor, FunctionalTensor | FakeTensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's code is one of a function that `torch.func` transforms."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_transforming() -> bool:
    """Whether a transform of `torch.func` runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def traced_node(tensor: torch.Tensor) -> Any:
    """The `fx.Node` that computes a tensor of the user's code in the graph that is being traced; None: none does."""
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None
    inner = tensor.from_functional() if isinstance(tensor, FunctionalTensor) else tensor
    return get_proxy_slot(inner, mode.tracer, None, lambda found: found.proxy.node)


def traced_root() -> Any:
    """The module that holds the constants of the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else getattr(mode.tracer, "root")  # noqa: B009  not every tracer's type has it
