"""The rule language, and rules whose equations are worked out from sizes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InvalidRuleError
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Rule, Spec, dims, letter_sizes, letters, registered, rule
from autopar.strategies import indexing, pointwise
from autopar.strategies.attention import kernels, operators
from autopar.strategies.view import shapes, slices

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("mk,kn->mn", (("m", "k"), ("k", "n")), (("m", "n"),)),
        ("(ab)1->a,_,.", (("ab", ""),), (("a",), None, ())),
        ("->ab", (), (("a", "b"),)),
        (".,a->a", ((), ("a",)), (("a",),)),
        (".->.", ((),), ((),)),
        ("()a->a", (("", "a"),), (("a",),)),
    ],
)
def test_parsing(text, inputs, outputs):
    parsed = Rule(text)
    assert parsed.inputs == tuple(tuple(tuple(d) for d in t) for t in inputs)
    assert parsed.outputs == tuple(None if t is None else tuple(tuple(d) for d in t) for t in outputs)


@pytest.mark.parametrize("text", ["a2->a", "a(b->a", "(a(b))->a", "a b->a", "_->a"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(InvalidRuleError, match="cannot read"):
        _ = Rule(text).inputs


def test_letter_sizes():
    assert letter_sizes(Rule("(ab)c->abc"), [(8, 3)], [(2, 4, 3)]) == {"a": 2, "b": 4, "c": 3}
    with pytest.raises(InvalidRuleError, match="have no size"):
        letter_sizes(Rule("(ab)->(ba)"), [(8,)], [(8,)])
    with pytest.raises(InvalidRuleError, match="does not fit"):
        letter_sizes(Rule("ab->ab"), [(2, 3)], [(3, 2)])
    with pytest.raises(InvalidRuleError, match="1 parts for 2"):
        letter_sizes(Rule("a->a"), [(2,), (2,)], [(2,)])


def test_letters_and_dims():
    assert letters(2, 1) == "bc"
    assert dims(["ab", "c", ""]) == "(ab)c1"
    with pytest.raises(InvalidRuleError, match="at most 52"):
        letters(53)


def test_an_operator_has_one_rule():
    with pytest.raises(InvalidRuleError, match="already has a rule"):
        rule(aten.mm.default)(lambda a, b: Rule("mk,kn->mn"))
    assert registered()[aten.mm.default].__name__ == "mm"


@pytest.mark.parametrize(
    ("before", "after", "equation", "blocked"),
    [
        ((4, 6), (24,), "ab->(ab)", ""),
        ((24, 5), (4, 6, 5), "(ab)c->abc", ""),
        ((320,), (32, 10), "(ab)->ab", ""),
        ((32, 10), (5, 64), "ad->bc", "abcd"),
        ((7, 32, 10), (7, 5, 64), "abe->acd", "bcde"),
        ((6, 4), (4, 6), "(ab)e->(ac)d", "bcde"),
        ((1, 4, 1), (4,), "1a1->a", ""),
        ((1,), (), "1->.", ""),
        ((), (1, 1), ".->11", ""),
        ((2, 4096), (2, 8, 4, 128), "a(bcd)->abcd", ""),
    ],
)
def test_view(before, after, equation, blocked):
    found = shapes.view(Spec(before), after)
    assert found.equation == equation
    assert sorted(found.blocked) == sorted(blocked)


@st.composite
def factorings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to group the same primes, in any order, into dims."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 2, 3, 5]), min_size=1, max_size=6))

    def group(values: list[int]) -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, len(values)), max_size=4)))
        return [math.prod(values[i:j]) for i, j in zip([0, *cuts], [*cuts, len(values)], strict=True)]

    return group(primes), group(draw(st.permutations(primes)))


@settings(max_examples=150, deadline=None)
@given(factorings())
def test_views_of_random_factorings(shapes):
    before, after = shapes
    values = torch.arange(math.prod(before), dtype=torch.float64).reshape(before)
    check_rule(aten.reshape.default, (values, after), {})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_slices(data):
    size = data.draw(st.sampled_from([8, 12, 16]))
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    step = data.draw(st.integers(1, 4))
    values = torch.arange(size * 2, dtype=torch.float64).reshape(size, 2)
    check_rule(aten.slice.Tensor, (values, 0, start, end, step), {})
    part = aten.slice.Tensor(values, 0, start, end, step)
    check_rule(aten.slice_backward.default, (part, [size, 2], 0, start, end, step), {})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_random_splits(parts):
    values = torch.arange(sum(parts) * 2, dtype=torch.float64).reshape(2, -1)
    check_rule(aten.split_with_sizes.default, (values, parts, 1), {})
    check_rule(aten.cat.default, (list(values.split(parts, 1)), 1), {})


def test_fused_projection_is_free_within_heads():
    """Grouped-query attention's fused projection: 32 query heads and twice 8 others of 128."""
    found = slices.split(Spec((2, 6144)), [4096, 1024, 1024], 1)
    assert found.equation == "a(cb)->a(db),ab,ab"
    assert found.sizes == {"c": 6, "d": 4, "b": 1024}
    assert found.blocked == "cd"


def test_broadcasting_has_no_letters():
    assert pointwise.equation([Spec((4, 1, 3)), Spec((2, 1)), Spec(())]) == "a1c,b1,.->abc"


def test_dropout_blocks_attention():
    q = Spec((2, 4, 4, 8))
    found = kernels.cpu(q, q, q, 0.5)
    assert set(found.blocked) >= set(found.letters)


def test_dropout_does_not_block_our_attention():
    q, kept = Spec((2, 4, 4, 8), torch.float32), Spec((2, 4, 4, 4), torch.bool)
    found = operators.attention(q, q, q, None, kept, 0.5, False, None)
    assert set(found.letters) - set(found.blocked) == set("bhgq")
    assert not found.random


def test_attention_counts_products():
    q = Spec((2, 4, 16, 8))
    assert kernels.cpu(q, q, q).flops == 4 * 2 * 4 * 16 * 16 * 8


def test_indices_have_the_letters_they_broadcast_with():
    x, i, j = Spec((2, 4, 6), torch.float64), Spec((5, 1), torch.int64), Spec((3,), torch.int64)
    assert indexing.index(x, [None, i, j]).equation == "abc,d1,e->ade"
    assert indexing.index(x, [i, None, j]).equation == "abc,d1,e->deb"
