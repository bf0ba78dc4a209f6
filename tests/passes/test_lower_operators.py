"""lower_operators: other code where a split needs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.compiler import program_of, rewrite
from autopar.passes import PASSES
from autopar.passes.lower_operators import lower_operators
from autopar.sharding.dims import analyze
from autopar.sharding.lowered.emit import lowered_letters
from autopar.verify.emulate import census
from autopar.verify.verify import compare, global_values
from tests.plans import hand_plan, show

UNTIL = PASSES[: PASSES.index(lower_operators) + 1]


class Lookup(nn.Module):
    """An embedding and the softmax of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.table(ids), -1)


BATCH = (torch.tensor([[0, 1, 7, 3], [5, 6, 2, 4]]),)


def test_vocabulary_parallel_embedding() -> None:
    program = program_of(Lookup(), BATCH, training=False)
    plan = hand_plan(program, {"a": 2}, {"embedding": "v.0"}, parameters={"table.weight": "S(0)"})
    text = show(rewrite(program, plan, passes=UNTIL))
    assert text.splitlines()[2] == "axis_index = axis_index('a')"
    assert "embedding = embedding(table.weight, " in text
    assert "+sum{a}" in text
    assert text.count("embedding(") == 1


@pytest.mark.parametrize(("axes", "softmax"), [({"a": 2}, "c.0"), ({"a": 4}, "c.0"), ({"a": 2, "b": 2}, "c.0 c.0")])
def test_softmax_along_its_dim(axes: dict[str, int], softmax: str) -> None:
    model = Lookup()
    program = program_of(model, BATCH, training=False)
    plan = hand_plan(program, axes, {"_softmax": softmax})
    after = rewrite(program, plan)
    kinds = {axis: {k: n for k, (n, _) in found.items()} for axis, found in census(after).items()}
    assert all(found["all_reduce"] == 2 for found in kinds.values())  # maximum and sum
    assert compare(program, after, plan, global_values(program, model, BATCH), torch.float64).max_error < 1e-12


def test_nothing_to_lower() -> None:
    program = program_of(Lookup(), BATCH, training=False)
    plan = hand_plan(program, {"a": 2}, {"embedding": "a.0"}, batch={"0": "S(0)"})
    before = rewrite(program, plan, passes=UNTIL[:-1])
    assert show(rewrite(program, plan, passes=UNTIL)) == show(before)


def test_lowered_letters() -> None:
    program = program_of(Lookup(), BATCH, training=False)
    operator = next(o for n, o in analyze(program).operators.items() if n.name == "embedding")
    assert lowered_letters(operator, ("v.0", "R")) == ["v"]
    assert lowered_letters(operator, ("v.0", "v.0")) == ["v"]
    assert lowered_letters(operator, ("R", "R")) == []
