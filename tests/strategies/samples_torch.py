"""Samples of operators that torch's own database has and models seldom use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.strategies import pointwise
from tests.strategies.sample import Sample, boolean, call, integer, positive, x

aten = torch.ops.aten


def special() -> Iterator[Sample]:
    for name in pointwise.SPECIAL:
        op = getattr(aten, name).default
        if name == "polygamma":
            yield call(op, 1, positive(4, 2))
        elif name == "mvlgamma":
            yield call(op, positive(4, 2) + 2, 2)
        elif len([a for a in op._schema.arguments if "Tensor" in str(a.type) and "Optional" not in str(a.type)]) == 2:
            yield call(op, positive(4, 2), positive(2))
        else:
            yield call(op, positive(4, 2) + (1 if name == "acosh" else 0))
    for op in (aten.clamp_min, aten.clamp_max, aten.copysign):
        yield call(op.Tensor, x(4, 2), x(2))
    yield call(aten.copysign.Scalar, x(4, 2), -1.0)
    yield call(aten.logit_backward.default, x(4, 2), positive(4, 2), 0.01)
    yield call(aten.hardshrink_backward.default, x(4, 2), x(4, 2), 0.5)
    yield call(aten.softshrink_backward.default, x(4, 2), x(4, 2), 0.5)
    for op in (aten.deg2rad, aten.rad2deg):
        yield call(op.default, x(4, 2))
    for op in (aten.real, aten.imag, aten._conj, aten._conj_physical):
        yield call(op.default, torch.complex(x(4, 2), x(4, 2)))
    for op in (aten.polar, aten.complex):
        yield call(op.default, x(4, 2), x(4, 2))
    yield call(aten._prelu_kernel.default, x(4, 2), x(2))


def _definite(*shape: int) -> torch.Tensor:
    a = x(*shape)
    return a @ a.mT + torch.eye(shape[-1], dtype=torch.float64)


def linalg() -> Iterator[Sample]:
    a, b = _definite(2, 4, 3, 3), x(2, 4, 3, 2)
    general = a + a.triu()  # with columns for rows it is another matrix
    for op in (
        *((aten.cholesky,) if hasattr(aten, "cholesky") else ()),  # until torch 2.13
        aten.cholesky_inverse,
        aten.linalg_cholesky_ex,
        aten.linalg_ldl_factor_ex,
    ):
        yield call(op.default, a)
    for op in (aten.linalg_matrix_exp, aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten.geqrf):
        yield call(op.default, general)
    for op in (aten._linalg_det, aten._linalg_slogdet):
        yield call(op.default, general)
    yield call(aten.linalg_qr.default, x(4, 3, 2))
    yield call(aten._linalg_eigh.default, a)
    yield call(aten.linalg_eig.default, general)
    yield call(aten._linalg_svd.default, x(4, 3, 2))
    yield call(aten.cholesky_solve.default, b, torch.linalg.cholesky(a))
    yield call(aten.linalg_solve_triangular.default, torch.linalg.cholesky(a[:, :1]), b, upper=False)
    yield call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(a), b)
    yield call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(a), b.mT, left=False)
    for data, pivots in ((True, True), (False, True), (True, False)):
        yield call(aten.lu_unpack.default, *torch.linalg.lu_factor(a), data, pivots)
    yield call(aten.linalg_householder_product.default, x(4, 3, 2), x(4, 2))
    yield call(aten.ormqr.default, x(4, 3, 2), x(4, 2), x(4, 3, 2))
    yield call(aten._linalg_solve_ex.default, general, b)
    yield call(aten._linalg_solve_ex.default, general, b[..., 0])
    yield call(aten._linalg_solve_ex.default, general[0, 0], x(3))
    yield call(aten._linalg_solve_ex.default, general[0, 0], b)
    yield call(aten.linalg_cross.default, x(4, 3, 2), x(1, 3, 2), dim=1)
    yield call(aten._pdist_forward.default, x(4, 2), 1.5)
    for p in (0.0, 1.0, 2.0, 1.5, float("inf")):
        yield call(aten._pdist_backward.default, x(6), x(4, 2), p, torch.pdist(x(4, 2), p))


def dims() -> Iterator[Sample]:
    for op in (aten.cummax, aten.cummin):
        yield call(op.default, x(2, 4), 1)
        yield call(op.default, integer(3, 2, 8), 1)
        yield call(op.default, boolean(4, 2), 0)
        edges = [*([torch.inf] * 2), *([-torch.inf] * 2), torch.nan, torch.nan, 1.0, torch.inf]
        yield call(op.default, torch.tensor([edges, edges[::-1], edges[2:4] * 4], dtype=torch.float64), 1)
    for op in (aten.mode.default, aten.median.dim, aten.nanmedian.dim):
        yield call(op, x(2, 4), 1, True)
    for op in (aten.median, aten.nanmedian):
        yield call(op.default, x(2, 4))
    yield call(aten.kthvalue.default, x(2, 4), 2, 0)
    yield call(aten.aminmax.default, x(2, 4), dim=1)
    yield call(aten.aminmax.default, x(2, 4))
    yield call(aten.count_nonzero.default, x(2, 4).round())
    yield call(aten.count_nonzero.dim_IntList, x(2, 4).round(), [1])
    for op in (aten.diagonal, aten.diagonal_copy):
        yield call(op.default, x(4, 2, 3, 2), 1, -1, 0)
    yield call(aten.diagonal_scatter.default, x(4, 2, 3), x(2, 3), 0, 0, 2)
    yield call(aten.diagonal_backward.default, x(2, 3), [4, 2, 3], 0, 0, 2)
    yield call(aten.diag_embed.default, x(4, 2, 3), 1, 0, -2)
    yield call(aten.pixel_shuffle.default, x(2, 8, 4, 2), 2)
    yield call(aten.pixel_unshuffle.default, x(2, 2, 4, 8), 2)
    yield call(aten.repeat.default, x(4, 1, 2), [2, 3, 1, 1])
    yield call(aten.repeat.default, x(4, 2), [1, 3])
    yield call(aten.glu.default, x(2, 8, 2), 1)
    yield call(aten.glu_backward.default, x(2, 4, 2), x(2, 8, 2), 1)
    yield call(aten.addr.default, x(4, 2), x(4), x(2), beta=2, alpha=3)
    yield call(aten.addr.default, x(2), x(4), x(2))
    yield call(aten.vdot.default, x(4), x(4))
    yield call(aten._cdist_forward.default, x(2, 4, 3), x(2, 6, 3), 2.0, None)
    distances = torch.cdist(x(2, 4, 3), x(2, 6, 3))
    yield call(aten._cdist_backward.default, x(2, 4, 6), x(2, 4, 3), x(2, 6, 3), 2.0, distances)
    for first, second in ((x(2, 4, 3), x(6, 3)), (x(6, 3), x(2, 4, 3)), (x(4, 2, 4, 3), x(1, 2, 6, 3))):
        distances = torch.cdist(first, second)
        yield call(aten._cdist_forward.default, first, second, 2.0, None)
        yield call(aten._cdist_backward.default, x(*distances.shape), first, second, 2.0, distances)


def without_dims() -> Iterator[Sample]:
    first = torch.zeros(1, dtype=torch.int64)
    yield call(aten.index_select.default, x(), 0, first)
    yield call(aten.unfold.default, x(), 0, 1, 1)
    yield call(aten.index_copy.default, x(), 0, first, x(1))
    for op in (aten.index_add, aten.index_copy):
        yield call(op.default, x(), 0, first[0], x())


FAMILIES = (special, linalg, dims, without_dims)
