"""What candidates cost."""

from __future__ import annotations

import pytest
import torch

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Machine
from tests import models as zoo

aten = torch.ops.aten


def test_all_reduces_of_a_lowering_are_charged_for_what_the_other_axis_leaves() -> None:
    """Rows split by one axis, softmax's dim by the other: the row maxima of half of the rows are reduced."""
    program = program_of(*zoo.gpt2())
    dims = analyze(program)
    node = next(n for n in dims.operators if n.target is aten._log_softmax.default)
    operator = dims.operators[node]
    cluster = Cluster.preset("cpu")
    machine = Machine(("a", "b"), (2, 2), cluster.link_for({"a": 2, "b": 2}), cluster.device)
    rows, vocabulary = (f"{c}.0" for c in operator.rule.letters)

    def lowered_seconds(first: str) -> float:
        """Time beyond the same splits of an operator without a lowering."""
        chosen = candidates(operator, machine.sizes, allowed=[[first], [vocabulary]])
        none = candidates(operator, machine.sizes, allowed=[[first], [rows]])
        return float(operator_seconds(operator, chosen, machine)[0] - operator_seconds(operator, none, machine)[0])

    bytes_of_rows = 4 * operator.inputs[0].shape[0]
    expected = 2 * (machine.device.launch + collective_seconds("all_reduce", bytes_of_rows / 2, 2, machine.links[1]))
    assert lowered_seconds(rows) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("model", ["gpt2", pytest.param("bert", marks=pytest.mark.deep)])
def test_objective_is_what_the_prediction_counts(model: str) -> None:
    program = program_of(*zoo.MODELS[model]())
    plan = solve(program, {"a": 2, "b": 2}, "cpu")
    assert plan.predicted.step_seconds == pytest.approx(plan.certificate.objective, rel=1e-9)
