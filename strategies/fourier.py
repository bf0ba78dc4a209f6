"""Fourier transforms: free along every dim that is not transformed."""

from collections.abc import Sequence

import torch

from autopar.strategy import Rule, Spec, dims, letters, rule

aten = torch.ops.aten


def _transform(x: Spec, transformed: Sequence[int], changes: bool) -> Rule:
    """``changes``: the last transformed dim has another length afterwards."""
    names = list(letters(x.ndim))
    last, fresh = transformed[-1] % x.ndim, letters(1, x.ndim)
    right = [fresh if changes and d == last else c for d, c in enumerate(names)]
    blocked = "".join(names[d % x.ndim] for d in transformed) + (fresh if changes else "")
    # No Partial: a sum of complex numbers over devices is not supported by every backend.
    return Rule(f"{dims(names)}->{dims(right)}", blocked=blocked)


@rule(aten._fft_r2c.default)
def real_to_complex(x: Spec, dim: Sequence[int], normalization: int, onesided: bool) -> Rule:
    """Of real numbers; only half of the last dim is computed if ``onesided``."""
    return _transform(x, dim, onesided)


@rule(aten._fft_c2r.default)
def complex_to_real(x: Spec, dim: Sequence[int], normalization: int, last_dim_size: int) -> Rule:
    """Its inverse, from half of the last dim."""
    return _transform(x, dim, changes=True)


@rule(aten._fft_c2c.default)
def complex_to_complex(x: Spec, dim: Sequence[int], normalization: int, forward: bool) -> Rule:
    """Of complex numbers, either way."""
    return _transform(x, dim, changes=False)
