"""What candidates cost."""

from __future__ import annotations

import pytest

from autopar.compiler import program_of
from autopar.costs.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from autopar.costs.kernels import kernel_seconds
from autopar.ir.ops.cross_entropy import cross_entropy
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.lagrangian import solve as solve_labels
from autopar.search.formulation import build
from autopar.search.options import Job
from autopar.search.overlap.step_time import step_time_of
from autopar.search.overlap.weights import Weights
from autopar.search.predict import step_features
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Ints, evaluate
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute.moves import Machine
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.deep)])
def test_who_takes_a_value_as_it_was_made_pays_for_no_slice_of_its_consumer_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans do so; a search that charges for it claims more than this plan takes."""
    program, (axes, cluster) = zoo.captured(name)[0], ({"a": 2, "b": 4}, Cluster.preset("cpu"))
    dims = analyze(program)
    classes = layer_classes(program, dims)
    weights = Weights(step_time_of(program, tuple(axes.values()), cluster.link_for(axes)), chunks=False)
    problem = BudgetProblem.of(program, dims, classes, Job(axes, cluster), weights)
    built = problem.formulation(problem.job.restrictions, problem.states_alone)
    met: list[Ints] = []
    found = solve_labels(built.problem, met=met.append)
    assert built.features is not None
    for labels in met:
        own = sum(float(weights.prices(region) @ seconds) for region, seconds in built.features(labels).items())
        assert own <= evaluate(built.problem, labels)[0] * (1 + 1e-9)
    assert any(v.made[x] for v, x in zip(built.variables, found.labels, strict=True))
    plan = problem.plan(built, LayerMix.of(found), found.lower_bound, found.method)
    features = step_features(program, dims, plan, classes, chunks=False)
    seconds = sum(float(weights.prices(region) @ own) for region, own in features.items())
    monkeypatch.setattr(build, "MOST_AXES", 0)
    charging = solve_labels(problem.formulation(problem.job.restrictions, problem.states_alone).problem)
    assert charging.lower_bound > 1.01 * seconds
    # Two readers that take a third layout share its moves in a plan, and pay for each in the search.
    assert seconds * (1 - 1e-9) <= found.objective == pytest.approx(seconds, rel=1e-3)
