"""Tracers around a parallel model: its step has graphs of its own, which none of them can follow."""

from __future__ import annotations

import torch

from autopar._torch_compat import function_modes, is_tracing, is_transforming
from autopar.errors import AutoparError

_EXPORT = (
    "it runs graphs of its own on this rank's part of the tensors. Export a plain model that has loaded what "
    "model.full_state_dict() returns, where every rank calls that"
)


def refuse_tracers() -> None:
    """Refuse a call within what transforms or traces it.

    Raises:
        AutoparError: something does.
    """
    if is_transforming():
        raise AutoparError(
            "the parallelized model is called within a transform of torch.func (vmap, grad, jvp, ...), which its "
            "graphs do not compute: transform functions in the model's forward, or in loss_fn=lambda output, batch: ..."
        )
    if is_tracing():
        raise AutoparError(
            "the parallelized model is called in the forward of another one that is captured, which cannot follow its "
            "graphs: let that one have the plain model (a submodule, or one that it refers to), or call this one "
            "before, and pass what it returns as an argument"
        )
    if modes := function_modes():
        raise AutoparError(
            f"the parallelized model is called under a TorchFunctionMode ({type(modes[-1]).__qualname__}), which would "
            "not see the functions that its forward calls: the step's graphs have operators in their place. Enter the "
            "mode in the model's forward, so that what it does is captured, or around other code alone"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise not_exported("torch.jit.trace or torch.onnx.export")


def not_exported(tracer: str) -> AutoparError:
    """What is said to a function of torch that exports models."""
    return AutoparError(f"a parallelized model cannot be traced ({tracer}): {_EXPORT}")
