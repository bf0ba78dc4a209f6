"""Decompositions and solvers: matrices of a batch are independent, a matrix is not split."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.rules.rule import ANY, ROW_MAJOR, Rule, Spec, dims, letters, rule

aten = torch.ops.aten

FIRST_BATCH_LETTER = 26  # upper case; the equations below have lower case

Linear = tuple[tuple[int, ...], ...]


def batched(equation: str, linear: Linear = (), strides: str = ANY) -> Callable[..., Rule]:
    """A rule function from the equation of one matrix: batch dims in front, which broadcast, are free."""
    left, right = (side.split(",") for side in equation.split("->"))
    # Every element of a decomposition depends on the whole matrix.
    blocked = "".join(dict.fromkeys(c for c in equation if c.isalpha()))

    def batched_rule(*args: Any, **kwargs: Any) -> Rule:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Spec)]
        shapes = [t.shape[: t.ndim - len(own)] for t, own in zip(tensors, left, strict=True)]
        padded = itertools.zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
        # Batch dims broadcast: the longest of each column is the result's.
        sizes = [max(column) for column in padded][::-1]
        names = [c if n != 1 else "" for c, n in zip(letters(len(sizes), FIRST_BATCH_LETTER), sizes, strict=True)]
        inputs = []
        for shape, own in zip(shapes, left, strict=True):
            aligned = zip(names[len(names) - len(shape) :], shape, strict=True)
            inputs.append((dims([c if n != 1 else "" for c, n in aligned]) + own) or ".")
        outputs = [own if own == "_" else (dims(names) + own or ".") for own in right]
        # A matrix of padding may have no decomposition, which raises.
        return Rule(
            f"{','.join(inputs)}->{','.join(outputs)}", blocked=blocked, linear=linear, padded=None, strides=strides
        )

    return batched_rule


ONE_MATRIX = {
    "mn->mn": (aten.cholesky, aten.cholesky_inverse),
    "mn->mn,": (aten.linalg_cholesky_ex, aten.linalg_inv_ex),
    "mn->,mn,k": (aten._linalg_det,),
    "mn->,,mn,k": (aten._linalg_slogdet,),
    "mn->mn,k,": (aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex),
    "mn->mk,kn": (aten.linalg_qr,),
    "mn->k,mn": (aten._linalg_eigh, aten.linalg_eig),
    "mn->mn,k": (aten.geqrf,),
}
for _equation, _ops in ONE_MATRIX.items():
    rule(*(op.default for op in _ops))(batched(_equation))

rule(aten.linalg_matrix_exp.default)(batched("mn->mn", strides=ROW_MAJOR))
rule(aten._linalg_svd.default)(batched("mn->mk,r,ln"))
rule(aten.cholesky_solve.default)(lambda b, factor, upper=False: batched("pr,mn->pr", ((0,),))(b, factor))
rule(aten.linalg_solve_triangular.default)(lambda a, b, **_: batched("mn,pr->pr", ((1,),))(a, b))
rule(aten.linalg_lu_solve.default)(lambda lu, pivots, b, **_: batched("mn,k,pr->pr", ((2,),))(lu, pivots, b))
rule(aten.linalg_householder_product.default)(batched("mn,k->mn"))
rule(aten.ormqr.default)(lambda a, tau, b, *_: batched("mn,k,pr->pr", ((2,),))(a, tau, b))


@rule(aten.lu_unpack.default)
def lu_unpack(lu: Spec, pivots: Spec, unpack_data: bool = True, unpack_pivots: bool = True) -> Rule:
    """Permutation and triangles; what is not asked for is empty."""
    # Otherwise some outputs are empty, and have no batch dims to share.
    if unpack_data and unpack_pivots:
        return batched("mn,k->pq,rs,tu")(lu, pivots)
    permutation, triangle = ("1" * lu.ndim if wanted else "1" for wanted in (unpack_pivots, unpack_data))
    return Rule(f"{'1' * lu.ndim},{'1' * pivots.ndim}->{permutation},{triangle},{triangle}")


@rule(aten._linalg_solve_ex.default)
def solve(a: Spec, b: Spec, *, left: bool = True, check_errors: bool = False) -> Rule:
    """Solution, LU factors, pivots and state; a batch of vectors is told from a matrix by its dims."""
    vectors = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    return batched("mn,p->p,mn,k," if vectors else "mn,pr->pr,mn,k,")(a, b)


@rule(aten.linalg_cross.default)
def cross(a: Spec, b: Spec, *, dim: int = -1) -> Rule:
    """Cross product along a dim of size 3."""
    sizes = [max(n, m) for n, m in zip(a.shape, b.shape, strict=True)]
    names = letters(a.ndim)
    inputs = [dims([c if n == m else "" for c, n, m in zip(names, t.shape, sizes, strict=True)]) for t in (a, b)]
    return Rule(f"{','.join(inputs)}->{names}", blocked=names[dim], linear=((0,), (1,)))


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
