"""Matrix products (``addmm`` and ``baddbmm`` are decomposed before rules are asked)."""

import torch

from autopar.strategy import Rule, Spec, rule

aten = torch.ops.aten

EITHER = ((0,), (1,))


@rule(aten.mm.default)
def mm(a: Spec, b: Spec) -> Rule:
    """Matrix times matrix."""
    (m, k), n = a.shape, b.shape[1]
    return Rule("mk,kn->mn", reduce="k", linear=EITHER, flops=2.0 * m * k * n)


@rule(aten.bmm.default)
def bmm(a: Spec, b: Spec) -> Rule:
    """One matrix product for each element of a batch."""
    (batch, m, k), n = a.shape, b.shape[2]
    return Rule("bmk,bkn->bmn", reduce="k", linear=EITHER, flops=2.0 * batch * m * k * n)


@rule(aten.mv.default)
def mv(a: Spec, b: Spec) -> Rule:
    """Matrix times vector."""
    return Rule("mk,k->m", reduce="k", linear=EITHER, flops=2.0 * a.shape[0] * a.shape[1])


@rule(aten.dot.default)
def dot(a: Spec, b: Spec) -> Rule:
    """Inner product."""
    return Rule("k,k->.", reduce="k", linear=EITHER, flops=2.0 * a.shape[0])


@rule(aten.addr.default)
def addr(x: Spec, a: Spec, b: Spec, *, beta: float = 1, alpha: float = 1) -> Rule:
    """Outer product, added to a matrix."""
    shape = (a.shape[0], b.shape[0])[2 - x.ndim :]
    whole = "".join(c if n == m else "1" for c, n, m in zip("mn"[2 - x.ndim :], x.shape, shape, strict=True))
    return Rule(f"{whole or '.'},m,n->mn", linear=((0, 1), (0, 2)))


@rule(aten.vdot.default)
def vdot(a: Spec, b: Spec) -> Rule:
    """Inner product, the first vector conjugated."""
    return Rule("k,k->.", reduce="k", linear=EITHER, flops=2.0 * a.shape[0])


@rule(aten._cdist_forward.default)
def cdist(a: Spec, b: Spec, p: float, mode: int | None) -> Rule:
    """Distances between all rows of two matrices, for each element of a batch."""
    batch = "".join(c if n != 1 else "1" for c, n in zip("bcdefgh", a.shape[:-2], strict=False))
    return Rule(f"{batch}pm,{batch}rm->{batch}pr", blocked="m")


@rule(aten._cdist_backward.default)
def cdist_backward(grad: Spec, a: Spec, b: Spec, p: float, distances: Spec) -> Rule:
    """Its gradient of the first matrix: a sum over rows of the second."""
    batch = "".join(c if n != 1 else "1" for c, n in zip("bcdefgh", a.shape[:-2], strict=False))
    pairs = f"{batch}pr"
    return Rule(f"{pairs},{batch}pm,{batch}rm,{pairs}->{batch}pm", reduce="r", blocked="m", linear=((0,),))
