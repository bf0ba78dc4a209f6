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
