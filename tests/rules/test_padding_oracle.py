"""The oracle for padding finds claims that are wrong, and leaves out letters that cannot be padded."""

import math
from dataclasses import replace

import pytest
import torch

import autopar.strategies  # noqa: F401
from autopar.errors import InvalidRuleError
from autopar.rules.oracle.padding import check_padding
from autopar.rules.rule import Padding, Rule
from tests.rules.test_oracle import x

aten = torch.ops.aten

SOFTMAX = aten._softmax.default, (x(2, 4), 1, False)
SUM = aten.sum.dim_IntList, (x(2, 4), [1])
PRODUCT = aten.mm.default, (x(2, 4), x(4, 3))
VIEW = aten.reshape.default, (x(4), [2, 2])
DIVISION = aten.div.Tensor, (x(4), x(4))


def softmax(fill: float | None, output: float | None) -> Rule:
    return Rule("rc->rc", blocked="c", padded={"c": Padding((fill,), output)})


def total(fill: float | None) -> Rule:
    return Rule("rc->r", reduce="c", linear=((0,),), padded={"c": Padding((fill,))})


DIFFERS, HOLDS, FAILS = "the largest difference", "the padding holds something else than", "the run fails"


@pytest.mark.parametrize(
    ("call", "rule", "message"),
    [
        (SOFTMAX, softmax(0.0, None), f"c padded with nan, output 0: {DIFFERS}"),  # zeros share in the sum
        (SOFTMAX, softmax(None, None), f"c padded with nan, output 0: {DIFFERS} is inf"),
        (SOFTMAX, softmax(-math.inf, -math.inf), f"c padded with nan, output 0: {HOLDS} -inf"),
        (SUM, total(1.0), f"c padded with nan, output 0: {DIFFERS} is 3"),
        (SUM, total(None), f"c padded with nan, output 0: {DIFFERS} is inf"),
        (PRODUCT, Rule("mk,kn->mn", reduce="k", padded={"k": Padding((0.0,))}), f"k padded with nan.*{DIFFERS} is inf"),
        (PRODUCT, Rule("mk,kn->mn", padded={"m": Padding(output=0.0)}), f"m padded with nan, output 0: {HOLDS} 0"),
        (DIVISION, Rule("a,a->a", linear=((0,),)), f"a padded with 0, output 0: {HOLDS} 0"),  # 0 / 0
        ((aten.cos.default, (x(4),)), Rule("a->a", zero=True), f"a padded with 0, output 0: {HOLDS} 0"),
        ((aten.flip.default, (x(4), [0])), Rule("a->a"), f"a padded with nan, output 0: {DIFFERS}"),
        (VIEW, Rule("a->11", keep="a", padded={"a": Padding()}), f"a padded with nan: {FAILS}"),
        ((aten.slice.Tensor, (x(4), 0, 0, 4)), Rule("a->a"), "a padded with nan, output 0: the output is"),
        ((aten.argmax.default, (x(4),)), Rule("a->.", padded={"a": Padding((9.0,))}), DIFFERS),  # integers
    ],
)
def test_a_wrong_claim_is_caught(call, rule, message):
    with pytest.raises(InvalidRuleError, match=message):
        check_padding(*call, {}, rule=rule)


@pytest.mark.parametrize(
    ("call", "rule", "proven"),
    [
        (SOFTMAX, softmax(-math.inf, 0.0), ["r", "c"]),
        (SOFTMAX, Rule("rc->rc", blocked="c"), ["r"]),
        (SOFTMAX, replace(softmax(0.0, None), padded=None), []),
        (SUM, total(0.0), ["r", "c"]),
        (PRODUCT, Rule("mk,kn->mn", reduce="k", linear=((0,), (1,))), ["m", "k", "n"]),
        (DIVISION, Rule("a,a->a", linear=((0,),), zero=False), ["a"]),
        ((aten.reshape.default, (x(4, 2), [8])), Rule("ab->(ab)"), []),
    ],
)
def test_a_right_claim_is_proven(call, rule, proven):
    assert check_padding(*call, {}, rule=rule) == proven
