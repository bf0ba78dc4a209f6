"""The quotient graph: as large for many layers as for few, and the same optimum."""

from __future__ import annotations

import pytest

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster, Device, Link
from autopar.ir.graph import is_operator
from autopar.search.options import Search
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from tests import models

FAST = Cluster("slow devices", Device("slow", {"float32": 1e6}, 1e9, 1e6, 1e-9), (Link("fast", 1e9, 1e-9),))


def classes_of(name: str, layers: int, tie: bool = True) -> LayerClasses:
    program, dims, _ = models.captured(name, layers=layers, seq=4)
    return layer_classes(program, dims, tie=tie)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.deep)])
def test_number_of_classes_does_not_depend_on_depth(name: str) -> None:
    few, many = classes_of(name, 2), classes_of(name, 4)
    assert list(few.members) == list(many.members)
    sizes = {k: (len(few.members[k]), len(v)) for k, v in many.members.items()}
    assert {b - a for a, b in sizes.values()} <= {0, 2, 4}
    assert any(b > a for a, b in sizes.values())
    assert len(few.members) < len(few.key)


def test_members_are_alike() -> None:
    program, dims, _ = models.captured("llama", layers=2, seq=4)
    for key, members in layer_classes(program, dims).members.items():
        assert len({n.op for n in members}) == 1, key
        assert len({n.target for n in members if is_operator(n)}) <= 1, key
        shapes = {tuple(dims.types[n, 0].shape) for n in members if (n, 0) in dims.types}
        assert len(shapes) <= 1, key


def test_every_node_has_one_class() -> None:
    program, dims, _ = models.captured("gpt2", layers=2, seq=4)
    found = layer_classes(program, dims)
    nodes = [n for n in program.graph.graph.nodes if is_operator(n) or n.op in ("placeholder", "get_attr")]
    assert set(found.key) == set(nodes)
    assert sorted(n.name for v in found.members.values() for n in v) == sorted(n.name for n in nodes)


def test_untied_is_one_class_a_node() -> None:
    found = classes_of("gpt2", 2, tie=False)
    assert all(len(v) == 1 for v in found.members.values())
    assert len(found.members) == len(found.key)


def test_numbered_leaves_are_not_layers() -> None:
    """`nn.Sequential`'s own linear layers are different parameters, not repetitions."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    program = program_of(model, (torch.ones(8, 8),), loss_fn=lambda output, batch: output.sum())
    found = layer_classes(program, analyze(program))
    assert not any("*" in key for key in found.members)


def test_keys_are_the_same_in_every_analysis() -> None:
    program, dims, _ = models.captured("gpt2", layers=2, seq=4)
    again = program_of(*models.gpt2(layers=2, seq=4))
    assert list(layer_classes(program, dims).members) == list(layer_classes(again, analyze(again)).members)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.deep)])
@pytest.mark.parametrize("cluster", [pytest.param("h100", marks=pytest.mark.deep), FAST])
def test_tied_optimum_equals_the_untied(cluster: str | Cluster, layers: int) -> None:
    """Tying repeated layers loses nothing: Llama on one axis."""
    program, _, _ = models.captured("llama", layers=layers, seq=4)
    exact = {"gap": 1e-9, "pins": {"overlap": "none"}}
    tied = solve(program, {"a": 4}, cluster, search=Search(**exact))
    untied = solve(program, {"a": 4}, cluster, search=Search(tie_layers=False, **exact))
    assert tied.certificate.gap < 1e-6
    assert untied.certificate.gap < 1e-6
    assert tied.certificate.objective == pytest.approx(untied.certificate.objective, rel=1e-6)
    assert tied.certificate.objective == pytest.approx(tied.predicted.step_seconds, rel=1e-6)
    assert "repeated layers alike" in tied.certificate.space
    assert "repeated layers alike" not in untied.certificate.space


@pytest.mark.slow
def test_plan_without_ties_can_be_run() -> None:
    import torch

    from autopar.verify.verify import compare

    program, _, values = models.captured("gpt2", layers=2, seq=4)
    plan = solve(program, {"a": 2}, FAST, search=Search(tie_layers=False))
    assert compare(program, rewrite(program, plan), plan, values, torch.float64).max_error < 1e-10
