"""What candidates cost."""

from __future__ import annotations

import pytest

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from autopar.costs.kernels import kernel_seconds
from autopar.ir.ops.cross_entropy import cross_entropy
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Machine
from tests import models as zoo


def test_all_reduces_of_a_lowering_are_charged_for_what_the_other_axis_leaves() -> None:
    """Rows split by one axis, classes by the other: maxima and two sums of half of the rows are reduced."""
    program = program_of(*zoo.gpt2())
    dims = analyze(program)
    node = next(n for n in dims.operators if n.target is cross_entropy)
    operator = dims.operators[node]
    cluster = Cluster.preset("cpu")
    machine = Machine(("a", "b"), (2, 2), cluster.link_for({"a": 2, "b": 2}), cluster.device)
    rows, vocabulary = (f"{c}.0" for c in operator.rule.letters)

    bytes_of_rows = 4 * operator.inputs[0].shape[0]
    found = lowered_cost(operator, (rows, vocabulary), machine)
    assert found is not None
    assert [(made.kind, made.axis, made.bytes) for made in found.collectives] == [
        ("all_reduce", "b", bytes_of_rows / 2),
        ("all_reduce", "b", 2 * bytes_of_rows / 2),
    ]
    kernels = kernel_seconds(found.kernels, "float32", machine.device).sum()
    rings = [float(collective_seconds("all_reduce", n * bytes_of_rows / 2, 2, machine.links[1])) for n in (1, 2)]
    chosen = candidates(operator, machine.sizes, allowed=[[rows], [vocabulary]])
    expected = kernels + sum(rings) + 2 * machine.device.launch
    assert float(operator_seconds(operator, chosen, machine)[0]) == pytest.approx(expected, rel=1e-9)
    assert lowered_cost(operator, (rows, rows), machine) is None


@pytest.mark.parametrize("model", ["encoder", *(pytest.param(m, marks=pytest.mark.deep) for m in ("gpt2", "bert"))])
def test_objective_is_what_the_prediction_counts(model: str) -> None:
    program = program_of(*zoo.MODELS[model]())
    plan = solve(program, {"a": 2, "b": 2}, "cpu")
    assert plan.predicted.step_seconds == pytest.approx(plan.certificate.objective, rel=1e-9)
