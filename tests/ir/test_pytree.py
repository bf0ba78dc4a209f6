"""Nested batches and outputs as flat tensors, and back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import CaptureError
from autopar.ir.signature import pytree
from autopar.ir.signature.outputs import path_of

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    """What a model might return."""

    logits: Any
    note: str = ""


def _tensor() -> torch.Tensor:
    return torch.zeros(1)


leaves = st.one_of(
    st.builds(_tensor), st.none(), st.booleans(), st.integers(), st.text(max_size=2), st.just(torch.float32)
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, constants and order, with the very same tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Record):
        return same(vars(a), vars(b))
    return bool(a == b)


@pytest.mark.slow
@given(values)
def test_round_trip(value: Any) -> None:
    tensors, skeleton = pytree.flatten(value)
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    assert same(pytree.unflatten(skeleton, tensors), value)


def test_order_is_of_appearance() -> None:
    a, b, c = (torch.full((), float(i)) for i in range(3))
    tensors, skeleton = pytree.flatten({"z": a, "a": [b, {"k": c}]})
    assert [float(t) for t in tensors] == [0.0, 1.0, 2.0]
    assert skeleton.items == {
        "z": pytree.Leaf(0),
        "a": [pytree.Leaf(1), pytree.flatten({"k": c})[1].__class__(dict, {"k": pytree.Leaf(2)})],
    }


def test_skeleton_holds_no_tensor_and_can_be_filled_with_anything() -> None:
    _, skeleton = pytree.flatten(Record((_tensor(), 3), "n"))
    assert pytree.unflatten(skeleton, ["x"]) == Record(("x", 3), "n")
    assert "Tensor" not in repr(skeleton)


def test_model_output_keeps_class_and_order() -> None:
    from transformers.modeling_outputs import MaskedLMOutput

    output = MaskedLMOutput(loss=_tensor(), logits=_tensor(), hidden_states=(_tensor(),))
    tensors, skeleton = pytree.flatten(output)
    rebuilt = pytree.unflatten(skeleton, tensors)
    assert type(rebuilt) is MaskedLMOutput
    assert list(rebuilt) == ["loss", "logits", "hidden_states"]
    assert rebuilt.to_tuple()[0] is output.loss
    assert rebuilt.attentions is None


def test_other_objects_are_named() -> None:
    with pytest.raises(CaptureError, match=r"batch\['a'\]\[1\] is a object"):
        pytree.flatten({"a": [1, object()]}, "batch")


def test_results_are_named_by_where_they_are_in_the_output() -> None:
    """Also beside numbers of the model's own, and floats of the batch, which are known at a call alone."""
    anneal = pytree.RuntimeFloat("half of float 0", lambda numbers: numbers[0] / 2)
    tensors, skeleton = pytree.flatten(
        {"steps": 0, "losses": {"fit": torch.ones(()), "small": torch.ones(3)}}, "output"
    )
    assert len(tensors) == 2
    skeleton = [anneal, skeleton, True]
    assert [path_of(skeleton, i) for i in range(3)] == ["1.losses.fit", "1.losses.small", None]
