"""Tracing joint graphs, and what is being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def sizes_of_rows(answer: Callable[[Any], bool | None]) -> Any:
    """What gives fake tensors symbols for sizes that depend on values, as of ``x[mask]``, and none for values.

    Args:
        answer: says whether a condition of such sizes, a `sympy` expression, is to hold; None: torch raises.
    """
    import sympy
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    class Sizes(ShapeEnv):
        def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                is_condition = isinstance(
                    orig_expr, sympy.core.relational.Relational | sympy.logic.boolalg.BooleanFunction
                )
                found = answer(orig_expr) if is_condition else None
                if found is None:
                    raise
                return sympy.true if found else sympy.false

    return Sizes(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)


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


def is_tracing() -> bool:
    """Whether a graph is being traced, in any of the calls that a tracer makes."""
    # The tracer's first call records no operators yet, but functionalizes what writes in place.
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FUNCTIONAL, keys.PROXY))


def function_modes() -> list[Any]:
    """The modes that torch's functions are called under now (`torch.overrides.TorchFunctionMode`).

    But for torch's own, such as ``with torch.device(...)``, and ours.
    """
    if not torch._C._len_torch_function_stack():
        return []
    from torch import overrides

    stack: Any = overrides._get_current_function_mode_stack
    return [m for m in stack() if type(m).__module__.partition(".")[0] not in ("torch", "autopar")]


@contextmanager
def without_users_modes() -> Iterator[None]:
    """While it lasts, no mode of the user's sees operators (`TorchDispatchMode`): a counter of FLOPs, say.

    Where torch's own fake tensors are among them, they stay as they are.
    """
    from torch.utils import _python_dispatch as module

    modes = module._get_current_dispatch_mode_stack()
    if not modes or any(getattr(m, "_mode_key", None) is not None for m in modes):
        yield
        return
    for _ in modes:
        module._pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            module._push_mode(mode)
