"""Candidates: one strategy a letter and factor, all products that divide."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from torch import fx

from autopar.ir.graph import is_operator
from autopar.ir.layout import Factor, Partial, Replicate, Split, TensorType, divides
from autopar.sharding.candidates import Strategy, candidates, combine, layouts, split_parts, strategies
from autopar.sharding.dims import Operator
from tests import models
from tests.plans import tiny


def operator(name: str) -> Operator:
    _, dims = tiny(True)
    return next(o for n, o in dims.operators.items() if n.name == name)


def texts(found: tuple[Strategy, ...]) -> list[str]:
    return [f"{s.name}: {','.join(map(str, s.inputs))} -> {','.join(map(str, s.outputs))}" for s in found]


def test_matrix_product() -> None:
    assert texts(strategies(operator("mm"))) == [
        "R: R,R -> R",
        "m.0: S(0.0),R -> S(0.0)",
        "k.0: S(1.0),S(0.0) -> P(sum)",
        "n.0: R,S(1.0) -> S(1.0)",
        "P0: P(sum),R -> P(sum)",
        "P1: R,P(sum) -> P(sum)",
    ]


def test_nonlinear_operator_takes_no_partial() -> None:
    assert texts(strategies(operator("relu"))) == ["R: R -> R", "a.0: S(0.0) -> S(0.0)", "b.0: S(1.0) -> S(1.0)"]


def test_partial_narrow_integers_stay_narrow() -> None:
    """Terms that wrap add up to what the sum wraps to, in their own dtype alone."""
    product = operator("mm")
    for given, made, passes in (("int8", "int8", True), ("int8", "int64", False), ("int64", "float64", True)):
        inputs = tuple(replace(t, dtype=given) for t in product.inputs)
        outputs = tuple(t and replace(t, dtype=made) for t in product.outputs)
        names = [s.name for s in strategies(replace(product, inputs=inputs, outputs=outputs))]
        assert ("P0" in names) == passes
        assert "k.0" in names


def test_every_factor_of_a_letter() -> None:
    """GPT-2's fused projection: its output dim is 3 x heads x head, and each can be split."""
    _, dims, _ = models.captured("gpt2", seq=4)
    fused = next(
        o for n, o in dims.operators.items() if "mm" in str(n.target) and any(len(d) == 3 for d in o.outputs[0].dims)
    )
    outputs = [s.outputs[0] for s in strategies(fused)]
    wide = next(d for d, dim in enumerate(fused.outputs[0].dims) if len(dim) == 3)
    assert {Split(wide, 0), Split(wide, 1), Split(wide, 2)} <= set(outputs)


@pytest.mark.slow
def test_lowered_letters_split_by_their_first_factor_only() -> None:
    for name in ("gpt2", "llama"):
        _, dims, _ = models.captured(name, seq=4)
        lowered = [o for o in dims.operators.values() if o.rule.lower]
        assert lowered
        for found in lowered:
            assert all(s.factor[1] == 0 for s in strategies(found) if s.factor and s.factor[0] in found.rule.lower)


def test_blocked_letters_offer_nothing() -> None:
    blocked = [
        o for name in ("gpt2", "llama") for o in models.captured(name, seq=4)[1].operators.values() if o.rule.blocked
    ]
    for found in blocked:
        assert not any(s.factor and s.factor[0] in found.rule.blocked for s in strategies(found))


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (4, 2), (2, 2, 2)])
def test_every_product_that_divides(sizes: tuple[int, ...]) -> None:
    for name in ("mm", "relu"):
        found = operator(name)
        got = {candidates(found, sizes).names(i) for i in range(len(candidates(found, sizes).choice))}
        expected = set()
        for names in itertools.product([s.name for s in strategies(found)], repeat=len(sizes)):
            inputs, outputs = combine(found, names)
            types = (*found.inputs, *found.outputs)
            if all(divides(t, x, sizes) for t, x in zip(types, (*inputs, *outputs), strict=True)):
                expected.add(names)
        assert got == expected


def test_allowed_names() -> None:
    found = candidates(operator("mm"), (2, 2), allowed=[["m.0", "R"], ["k.0"]])
    assert [found.names(i) for i in range(len(found.choice))] == [("R", "k.0"), ("m.0", "k.0")]


def test_combine_wants_known_names() -> None:
    assert combine(operator("mm"), ("m.0", "k.0")) == (
        ((Split(0), Split(1)), (Replicate(), Split(0))),
        ((Split(0), Partial()),),
    )
    with pytest.raises(KeyError):
        combine(operator("mm"), ("m.7",))


def test_layouts_of_a_tensor() -> None:
    found = layouts(TensorType("float32", ((Factor("a", 4), Factor("b", 3)),)), (2, 2))
    assert found[0] == (Replicate(), Replicate())
    assert (Split(0), Split(0)) in found
    assert not any(Split(0, 1) in layout for layout in found)  # 3 cannot be halved
    assert len(found) == len(set(found)) == 9  # R, P, S(0.0) on each axis
    assert len(layouts(TensorType("float32", ((Factor("a", 2),),)), (2, 2))) == 8  # no nesting of 2 in halves
    assert layouts(TensorType("float32", ()), (2,), False) == ((Replicate(),),)


def test_split_parts() -> None:
    assert split_parts((Split(0), Partial(), Split(1), Replicate()), (2, 3, 4, 5)) == 8


def test_every_operator_of_the_models_can_be_replicated() -> None:
    for name in ("mlp", "gpt2", "llama"):
        program, dims, _ = models.captured(name) if name == "mlp" else models.captured(name, seq=4)
        nodes: list[fx.Node] = [n for n in program.graph.graph.nodes if is_operator(n)]
        assert set(dims.operators) == set(nodes)
        for found in dims.operators.values():
            assert strategies(found)[0].name == "R"
            assert len({s.name for s in strategies(found)}) == len(strategies(found))
