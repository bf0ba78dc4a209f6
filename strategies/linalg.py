"""Decompositions and solvers: matrices of a batch are independent, a matrix is not split.

Also diagonals, Fourier transforms, and complex numbers as pairs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.rule import ANY, PAIRS, ROW_MAJOR, Rule, Spec, dims, letters, rule

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


# `torch.cholesky`, which torch took away in 2.14; `torch.linalg.cholesky` runs another operator.
_FORMER = (aten.cholesky,) if hasattr(aten, "cholesky") else ()

ONE_MATRIX = {
    "mn->mn": (*_FORMER, aten.cholesky_inverse),
    "mn->mn,": (aten.linalg_cholesky_ex, aten.linalg_inv_ex),
    "mn->mn,k,": (aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex),
    "mn->mk,kn": (aten.linalg_qr,),
    "mn->k,mn": (aten._linalg_eigh, aten.linalg_eig),
    "mn->mn,k": (aten.geqrf,),
}
for _equation, _ops in ONE_MATRIX.items():
    rule(*(op.default for op in _ops))(batched(_equation))

# Of a row-major matrix they factorize the transposed one, which gradients count on.
rule(aten._linalg_det.default)(batched("mn->,mn,k", strides=ROW_MAJOR))
rule(aten._linalg_slogdet.default)(batched("mn->,,mn,k", strides=ROW_MAJOR))

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
    found = batched("mn,p->p,mn,k," if vectors else "mn,pr->pr,mn,k,")(a, b)
    inputs, outputs = found.equation.split("->")
    # The factors are of the matrices that are given, which may serve several right sides.
    matrices = inputs.split(",")[0]
    factors = [matrices, matrices[:-2] + "k", matrices[:-2] or "."]
    return replace(found, equation=f"{inputs}->{','.join([outputs.split(',')[0], *factors])}")


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


@rule(aten.view_as_real.default)
def view_as_real(x: Spec) -> Rule:
    """Real and imaginary parts in a new last dim."""
    names = letters(x.ndim + 1)
    return Rule(f"{names[:-1] or '.'}->{names}", blocked=names[-1], linear=((0,),), view=True)


@rule(aten.view_as_complex.default)
def view_as_complex(x: Spec) -> Rule:
    """The last dim as real and imaginary parts."""
    names = letters(x.ndim)
    return Rule(f"{names}->{names[:-1] or '.'}", blocked=names[-1], linear=((0,),), view=True, strides=PAIRS)


def _diagonal(ndim: int, dim1: int, dim2: int) -> tuple[str, str, str]:
    """Letters of a tensor, of its diagonal (in a new last dim), and those that are tied by it."""
    names, new = letters(ndim), letters(1, ndim)
    # An element of a diagonal is at equal positions of two dims, which blocks of one of them do not have.
    tied = names[dim1 % ndim] + names[dim2 % ndim]
    return names, "".join(c for c in names if c not in tied) + new, tied + new


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Spec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """Elements at equal positions of two dims, in a new last dim."""
    whole, part, tied = _diagonal(x.ndim, dim1, dim2)
    return Rule(f"{whole}->{part}", blocked=tied, linear=((0,),))


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(x: Spec, source: Spec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """``x`` with a diagonal replaced."""
    whole, part, tied = _diagonal(x.ndim, dim1, dim2)
    return Rule(f"{whole},{part}->{whole}", blocked=tied, linear=((0, 1),))


@rule(aten.diagonal_backward.default)
def diagonal_backward(grad: Spec, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Rule:
    """Zeros but for a diagonal."""
    whole, part, tied = _diagonal(len(shape), dim1, dim2)
    return Rule(f"{part}->{whole}", blocked=tied, linear=((0,),), shapes=(1,))


@rule(aten.diag_embed.default)
def diag_embed(x: Spec, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule:
    """The last dim as a diagonal of two dims, zeros elsewhere."""
    whole, part, tied = _diagonal(x.ndim + 1, dim1, dim2)
    return Rule(f"{part}->{whole}", blocked=tied, linear=((0,),))
