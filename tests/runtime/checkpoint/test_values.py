"""Values as JSON: the same with the same types, or an error that says where; damaged texts are errors, too."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch

from autopar.runtime.checkpoint.values import dumps, loads

VALUES: list[Any] = [
    None, True, 3, -2.5, 1e300, float("inf"), "text \u00fc\n", b"\x00\xff", (1, (2, [3])), {"a": {1: 2, (3, 4): None}},
    {1, 2}, frozenset({"x"}), deque([1, 2]), Counter({30: 1, 80: 2}), OrderedDict(b=1, a=2), torch.bfloat16,
    torch.arange(6).reshape(2, 3), torch.ones((), dtype=torch.bfloat16), torch.empty(0, 4), [], {}, (),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[str(i) for i in range(len(VALUES))])
def test_values_come_back(value: Any) -> None:
    found = loads(dumps(value, "it"), "it")
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype and torch.equal(found, value)
    else:
        assert found == value


def test_numbers_of_numpy_are_numbers() -> None:
    assert loads(dumps({"a": np.float32(0.5), "b": np.int64(7)}, "it"), "it") == {"a": 0.5, "b": 7}
    assert torch.equal(loads(dumps(np.arange(3), "it"), "it"), torch.arange(3))
    assert loads(dumps(torch.Size([2, 3]), "it"), "it") == (2, 3)
    assert str(loads(dumps(float("nan"), "it"), "it")) == "nan"


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"f": [print]}, r"extra\['f'\]\[0\] is a builtin_function_or_method, which cannot be saved"),
        (object(), "extra is a object"),
        (torch.zeros(2**18 + 1), "extra is a tensor of 1048580 bytes"),
        (nested(70), "nested more than 64 deep"),
        ({1 + 2j: 0}, "a key of extra is a complex"),
    ],
)
def test_what_cannot_be_saved(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dumps(value, "extra")


@pytest.mark.parametrize(
    "text",
    ["", "[", "[1]", '{"list": 3}', '{"dict": [[1]]}', '{"tensor": {}}', '{"os": "system"}', '{"dtype": "load"}', "{}",
     '{"list": [], "dict": []}', '{"bytes": "?"}', '{"tensor": {"dtype": "float32", "shape": [9], "data": "AAAA"}}',
     '{"list": [' * 300 + "1" + "]}" * 300, '{"set": [{"list": []}]}'],
)  # fmt: skip
def test_damaged_texts_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the file is damaged"):
        loads(text, "the file")


def test_mutated_texts_are_values_or_errors() -> None:
    draw, text = random.Random(0), dumps({"a": VALUES[8], "t": VALUES[16], "c": VALUES[13]}, "it")
    for _ in range(500):
        i, kind = draw.randrange(len(text)), draw.randrange(3)
        mutated = text[:i] + ("", draw.choice('{}[]",:0x'), text[i:] * 2)[kind] + text[i + 1 :]
        try:
            loads(mutated, "the file")
        except ValueError as e:
            assert str(e).startswith("the file is damaged")
    assert json.loads(text)
