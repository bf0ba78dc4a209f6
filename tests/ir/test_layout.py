"""Layouts: text and back, what divides, local shapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.layout import (
    Factor,
    Layout,
    Partial,
    Replicate,
    Split,
    TensorType,
    describe,
    divides,
    factor_parts,
    local_dims,
    local_shape,
    parse_placement,
    replicated,
)

BATCH, SEQ, HIDDEN = Factor("batch", 8), Factor("seq", 4), Factor("hidden", 6)
TYPE = TensorType("bfloat16", ((BATCH, SEQ), (HIDDEN,), ()))
R, P, S00, S01, S10 = Replicate(), Partial(), Split(0), Split(0, 1), Split(1)
AXES = ("node", "gpu")

placements = st.one_of(
    st.just(R), st.sampled_from(["sum", "max"]).map(Partial), st.builds(Split, st.integers(0, 9), st.integers(0, 9))
)


def test_type() -> None:
    assert TYPE.shape == (32, 6, 1)
    assert TYPE.numel == 192
    assert TYPE.positions == ((0, 0), (0, 1), (1, 0))
    assert str(TYPE) == "bfloat16[(batch:8 seq:4), hidden:6, 1]"
    assert TensorType("int64", ()).shape == ()
    assert TensorType("int64", ()).numel == 1


@given(placements)
def test_text_and_back(placement: Replicate | Partial | Split) -> None:
    assert parse_placement(str(placement)) == placement


def test_a_split_may_leave_its_factor_out() -> None:
    assert parse_placement("S(1)") == Split(1, 0)


@pytest.mark.parametrize("text", ["", "X", "S", "S()", "S(a)", "S(1.b)", "P", "Shard(0)", "R ", "S(0"])
def test_other_text_is_no_placement(text: str) -> None:
    with pytest.raises(ValueError):
        parse_placement(text)


@pytest.mark.parametrize(
    ("layout", "dims"),
    [
        ((R, R), ((8, 4), (6,), ())),
        ((S00, S01), ((4, 1), (6,), ())),
        ((S00, S00), ((1, 4), (6,), ())),  # both nest in one factor
        ((S10, P), ((8, 4), (3,), ())),
    ],
)
def test_local_dims(layout: Layout, dims: tuple[tuple[int, ...], ...]) -> None:
    assert local_dims(TYPE, layout, (2, 4)) == dims
    assert local_shape(TYPE, layout, (2, 4)) == tuple(math.prod(d) for d in dims)


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        ((R, P), True),
        ((S00, S00), True),  # 8 / (2 * 4)
        ((S01, S01), False),  # 4 / (2 * 4)
        ((R, S10), False),  # 6 / 4
        ((S10, R), True),
        ((Split(0, 2), R), False),  # no such factor
        ((Split(2), R), False),  # a dim of size one has no factor
        ((Split(3), R), False),  # no such dim
    ],
)
def test_divides(layout: Layout, fits: bool) -> None:
    assert divides(TYPE, layout, (2, 4)) is fits


def test_factor_parts_multiply() -> None:
    assert factor_parts((S00, P, S00, S10), (2, 3, 4, 5)) == {(0, 0): 8, (1, 0): 5}


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ((R, R), "bf16[(batch seq), hidden, 1]"),
        ((S00, S10), "bf16[(batch{node} seq), hidden{gpu}, 1]"),
        ((S00, S00), "bf16[(batch{node,gpu} seq), hidden, 1]"),
        ((S01, P), "bf16[(batch seq{node}), hidden, 1] +sum{gpu}"),
        ((P, P), "bf16[(batch seq), hidden, 1] +sum{node,gpu}"),
        ((Partial("max"), P), "bf16[(batch seq), hidden, 1] +max{node} +sum{gpu}"),
    ],
)
def test_description(layout: Layout, text: str) -> None:
    assert describe(TYPE, layout, AXES) == text


def test_replicated() -> None:
    assert replicated(3) == (R, R, R)
    assert replicated(0) == ()
