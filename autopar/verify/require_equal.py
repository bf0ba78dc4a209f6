"""`require_equal`: what ``parallelize(..., check=True)`` asks of a plan before its first step."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.errors import AutoparError, VerifyError
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.signature.outputs import Loss
from autopar.verify.reference import EAGER
from autopar.verify.verify import EquivalenceReport, verify

TOLERANCE = 1e-7
"""Largest error in float64. A wrong plan is off by far more, rounding by far less."""


def require_equal(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    precision: Precision | None = None,
) -> str:
    """Compare a plan's program, on an emulated mesh, with the model in eager mode; says what was found.

    Args:
        model: with plain parameters that have values; it is not changed.
        batch: real tensors, the global batch.
        plan: for the model and batches of this shape.
        loss_fn: for a model that does not return its loss.
        loss: which scalar of the output is the loss.
        precision: policy of the plan.

    Raises:
        VerifyError: they differ, or cannot be compared; names the first difference.
    """
    tolerance, dtype = TOLERANCE, torch.float64
    try:
        report = verify(model, batch, dict(plan.axes), loss_fn=loss_fn, loss=loss, plan=plan, precision=precision)
    except AutoparError:
        raise
    except Exception as first:
        # Some operators have no kernel for float64: then in the model's own dtype, and with its rounding.
        dtype = _own_dtype(model)
        tolerance = float(1e3 * torch.finfo(dtype).eps)
        try:
            report = verify(
                model, batch, dict(plan.axes), loss_fn=loss_fn, loss=loss, plan=plan, dtype=dtype, precision=precision
            )
        except Exception as e:
            raise VerifyError(
                f"the plan cannot be checked: in float64 {type(first).__name__}: {first}; in {dtype} "
                f"{type(e).__name__}: {e}; leave check=True out, and verify a smaller model of the kind"
            ) from e
    # Not `max_error > tolerance`, which is False for NaN.
    if not all(error <= tolerance for error in report.errors.values()):
        raise VerifyError(_complaint(report))
    against = "the eager model" if report.reference == EAGER else f"the captured graph, since {report.note}"
    return (
        f"the plan computes what the model does: largest error {report.max_error:.1e} of {len(report.errors)} tensors "
        f"in {dtype}, against {against}"
    )


def _own_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _complaint(report: EquivalenceReport) -> str:
    first = report.first_difference
    found = f"the first difference: {first}" if first is not None else "no node differs by more than rounding"
    return (
        f"the plan does not compute what the model does in eager mode: {report.worst} is off by "
        f"{report.max_error:.2g}; "
        f"{found}; please report it with the model. Another plan may be right (plan= or search=), and check=False runs "
        "this one all the same"
    )
