"""The oracle finds rules that are wrong, and says what it has proven of those that are right."""

from dataclasses import replace

import pytest
import torch

import autopar.strategies  # noqa: F401
from autopar.errors import InvalidRuleError, MissingRuleError
from autopar.rules.oracle.call import rule_of
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Lowering, Rule

aten = torch.ops.aten


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


MM = Rule("mk,kn->mn", reduce="k")


@pytest.mark.parametrize(
    ("target", "args", "rule", "message"),
    [
        (aten.mm.default, (x(4, 4), x(4, 4)), Rule("mk,kn->mn", keep="k"), "k: S,S->R, output 0, replicas"),
        (aten.mm.default, (x(4, 4), x(4, 4)), replace(MM, linear=((0, 1),)), r"linear\[0, 1\]: P,P->P"),
        (aten.mm.default, (x(4, 4), x(4, 4)), Rule("mk,nk->mn", reduce="k"), "m"),
        (aten.mm.default, (x(4, 2), x(2, 4)), Rule("mk,kn->nm", reduce="k"), "local output is"),
        (aten.add.Tensor, (x(4), 1.0), Rule("a->a", linear=((0,),)), r"linear\[0\]: P->P"),
        (aten.relu.default, (x(4),), Rule("a->a", linear=((0,),)), r"linear\[0\]: P->P"),
        (aten.add.Tensor, (x(4) > 0, x(4) > 0), Rule("a,a->a", linear=((0, 1),)), "boolean input cannot be partial"),
        (aten.cumsum.default, (x(4), 0), Rule("a->a"), "a: S->S, output 0: the largest difference"),
        (aten.sum.dim_IntList, (x(4), [0]), Rule("b->.", keep="b"), "replicas"),
        (aten.reshape.default, (x(4, 6), [24]), Rule("ab->(ab)", sizes={"a": 4, "b": 6}), "the local run fails"),
        (aten.reshape.default, (x(4, 6), [6, 4]), Rule("ab->ba", shapes=(1,)), "output 0: the largest difference"),
        (aten.slice.Tensor, (x(8), 0, 0, 4), Rule("(pr)->r", blocked="p", sizes={"p": 2}), "local output"),
    ],
)
def test_a_wrong_rule_is_caught(target, args, rule, message):
    with pytest.raises(InvalidRuleError, match=message):
        check_rule(target, args, {}, rule=rule)


def _without_maximum(context, a, dim, half_to_float):
    return aten._softmax.default(a, dim, half_to_float)


def _ranks_disagree(context, a, dim, half_to_float):
    if context.axis_index() == 1:
        raise ValueError("rank 1 stops")
    return context.all_reduce(a, "sum")


@pytest.mark.parametrize(
    ("build", "message"), [(_without_maximum, "largest difference"), (_ranks_disagree, "rank 1 stops")]
)
def test_a_wrong_lowering_is_caught(build, message):
    rule = Rule("ab->ab", lower={"b": Lowering(build)})
    with pytest.raises(InvalidRuleError, match=message):
        check_rule(aten._softmax.default, (x(2, 4), 1, False), {}, rule=rule)


def test_an_error_on_two_axes_only_is_caught():
    def build(context, a, dims, keepdim=False, dtype=None):
        return aten.sum.dim_IntList(a, dims, keepdim) * context.parts / 2

    rule = Rule("a->.", reduce="a", lower={"a": Lowering(build)})
    assert check_rule(aten.sum.dim_IntList, (x(4), [0]), {}, rule=rule, pairs=False) == ["a: S->P"]
    with pytest.raises(InvalidRuleError, match="a x a"):
        check_rule(aten.sum.dim_IntList, (x(4), [0]), {}, rule=rule)


def test_an_equation_that_does_not_fit_is_refused():
    with pytest.raises(InvalidRuleError, match="does not fit"):
        check_rule(aten.relu.default, (x(4, 6),), {}, rule=Rule("ab->ba"))


def test_report():
    assert check_rule(aten.mm.default, (x(2, 4), x(4, 2)), {}) == [
        "m: S,R->S",
        "k: S,S->P",
        "n: R,S->S",
        "linear[0]: P,R->P",
        "linear[1]: R,P->P",
        "m x k: SS,RS->SP",
        "m x n: SR,RS->SS",
        "m x linear[0]: SP,RR->SP",
        "m x linear[1]: SR,RP->SP",
        "k x k: SS,SS->PP",
        "k x n: SR,SS->PS",
        "k x linear[0]: SP,SR->PP",
        "k x linear[1]: SR,SP->PP",
        "n x linear[0]: RP,SR->SP",
        "n x linear[1]: RR,SP->SP",
        "linear[0] x linear[0]: PP,RR->PP",
        "linear[0] x linear[1]: PR,RP->PP",
        "linear[1] x linear[1]: RR,PP->PP",
    ]


def test_sizes_that_do_not_divide_are_left_out():
    assert check_rule(aten.relu.default, (x(4, 3),), {}, pairs=False) == ["a: S->S"]
    assert check_rule(aten.relu.default, (x(4, 3),), {}, parts=3, pairs=False) == ["b: S->S"]


def test_an_operator_without_a_rule():
    with pytest.raises(MissingRuleError, match=r"aten\.bernoulli"):
        rule_of(aten.bernoulli.default, (x(2),), {})
