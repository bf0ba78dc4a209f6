"""Products of rows, sorted by expert, with the matrix of their expert: the dims of the matrices are free.

Rows and experts are not split: where one expert ends and the next begins depends on the data.
"""

from typing import Any

import torch

from autopar.strategy import MATRIX, ROW_MAJOR, Rule, Spec, rule

aten = torch.ops.aten


@rule("transformers.grouped_mm_fallback.default")
def grouped_mm(rows: Spec, weight: Spec, ends: Spec) -> Rule:
    """``rows[start:end] @ weight[expert]`` for each expert."""
    (s, k), n = rows.shape, weight.shape[2]
    return Rule("sk,ekn,e->sn", reduce="k", blocked="se", linear=((0,), (1,)), flops=2.0 * s * k * n)


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(rows: Spec, weight: Spec, ends: Spec, grad: Spec) -> Rule:
    """Gradients of rows and weight; only the first is a sum over the weight's columns."""
    (s, k), n = rows.shape, weight.shape[2]
    equation = "sk,ekn,e,sn->sk,ekn"
    return Rule(equation, reduce="n", blocked="se", linear=((3,),), flops=4.0 * s * k * n)


@rule(aten._grouped_mm.default)
def torch_grouped_mm(
    rows: Spec, weight: Spec, ends: Spec | None = None, bias: Spec | None = None, out_dtype: Any = None
) -> Rule:
    """The same in torch: also a product for each expert (3D rows), and gradients of weights (rows 2D on both sides)."""
    row, column = ("esk" if rows.ndim == 3 else "sk"), ("ekn" if weight.ndim == 3 else "kn")
    result = "sn" if (rows.ndim, weight.ndim) in ((2, 3), (3, 2)) else "esn"
    blocked = "e" + {(2, 3): "s", (3, 2): "n", (2, 2): "k"}.get((rows.ndim, weight.ndim), "")
    inputs = ",".join([row, column, *["e"] * (ends is not None)])
    flops = 2.0 * rows.shape[-2] * rows.shape[-1] * weight.shape[-1]
    return Rule(
        f"{inputs}->{result}", reduce="k", blocked=blocked if ends else "", linear=((0,), (1,)), flops=flops,
        strides=(MATRIX, MATRIX, *[ROW_MAJOR] * (ends is not None)),
    )  # fmt: skip
