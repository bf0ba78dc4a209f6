"""Pins: by name, pattern or axis, in anybody's notation; and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt

import autopar
from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.layout import Factor, Layout, Partial, Replicate, Split, TensorType
from autopar.search.find import find_plan
from autopar.search.formulation.pins import Restrictions, is_boundary_layout, read_pins
from autopar.search.options import Job, Search
from tests import models
from tests.distributed.models import residuals
from tests.plans import layout

AXES = {"data": 2, "model": 2}


def pinned(pins: dict[str, Any], name: str = "mlp") -> dict[str, Layout]:
    program, dims, _ = models.captured(name) if name == "mlp" else models.captured(name, seq=4)
    found = read_pins(program, dims, pins, AXES, None)
    return {f"{kind} {n}": v for (kind, n), v in found.layouts.items()}


@pytest.mark.parametrize(
    "value",
    [
        ("R", "S(0)"),
        ["R", "S(0.0)"],
        ("Replicate()", "Shard(0)"),
        ("R", "Shard(dim=0)"),
        ("R", " S(0) "),
        (dt.Replicate(), dt.Shard(0)),
        (Replicate(), Split(0)),
        {"model": "S(0)"},
        {"model": dt.Shard(0), "data": "R"},
    ],
)
def test_notations(value: Any) -> None:
    assert pinned({"up.weight": value}) == {"parameter up.weight": (Replicate(), Split(0))}


def test_patterns() -> None:
    found = pinned({"*.weight": {"model": "S(0)"}, "batch.*": ("S(0)", "R")})
    assert found == {
        "parameter up.weight": layout("R S(0)"),
        "parameter down.weight": layout("R S(0)"),
        "batch 0": layout("S(0) R"),
        "batch 1": layout("S(0) R"),
    }


def test_later_pins_win() -> None:
    found = pinned({"*": ("R", "R"), "up.bias": ("R", "S(0)")})
    assert found["parameter up.bias"] == layout("R S(0)")
    assert found["parameter up.weight"] == layout("R R")


def test_factor_behind_another() -> None:
    """The heads in GPT-2's fused projection."""
    found = pinned({"*.c_attn.weight": {"model": "S(1.1)"}}, "gpt2")
    assert list(found.values()) == [(Replicate(), Split(1, 1))]


def test_results_can_be_pinned() -> None:
    assert pinned({"result.1": ("S(0)", "R")}, "gpt2") == {"result 1": layout("S(0) R")}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"upp.weight": ("R", "R")}, r"pin 'upp\.weight' names no parameter.*there are up\.weight"),
        ({"up.weight": ("R",)}, r"must give one placement for each axis \(data, model\)"),
        ({"up.weight": "S(0)"}, "must give one placement for each axis"),
        ({"up.weight": {"gpu": "S(0)"}}, "names axis 'gpu'; the mesh has data, model"),
        ({"up.weight": ("R", "split")}, "'split' is no placement; write R"),
        ({"up.weight": ("R", Partial())}, "cannot be Partial"),
        ({"up.weight": ("R", "S(2)")}, "cannot be laid out"),
        ({"up.weight": ("R", "S(0.1)")}, "cannot be laid out"),
        ({"up.weight": ("R", 3)}, "is no placement"),
    ],
)
def test_errors_name_the_pin(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pinned(pins)


def test_names_are_looked_up_before_the_model_is_captured() -> None:
    class Never(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("captured")

    model, batch = torch.nn.Sequential(Never(4, 4), torch.nn.ReLU()), (torch.randn(2, 4),)
    for name in ("0.wieght", "*.weights", "batch", "2", "*.0.bias"):
        with pytest.raises(ValueError, match=r"names no parameter.*there are 0\.weight, 0\.bias; and modules 0, 1"):
            autopar.plan(model, batch, cluster="cpu", axes={"a": 2}, search=autopar.Search(pins={name: "R"}))
    for name in ("0.weight", "*.bias", "batch.0", "b*", "*.0", "result.3", "1", "1:0", "[01]"):
        with pytest.raises(Exception, match="captured"):
            autopar.plan(model, batch, cluster="cpu", axes={"a": 2}, search=autopar.Search(pins={name: "R"}))


def test_torch_partial_is_an_error() -> None:
    for value in (dt.Partial(), "P(sum)"):
        with pytest.raises(ValueError, match=r"pin 'up\.weight': .* cannot be Partial"):
            pinned({"up.weight": ("R", value)})


def test_sizes_that_do_not_divide() -> None:
    program, dims, _ = models.captured("mlp")
    with pytest.raises(ValueError, match=r"cannot be laid out as \(S\(0\.0\)\) on axes \{'a': 3\}: sizes must divide"):
        read_pins(program, dims, {"batch.0": ("S(0)",)}, {"a": 3}, None)
    with pytest.raises(ValueError, match="along one axis"):  # uneven parts of uneven parts
        read_pins(program, dims, {"up.weight": ("S(0)", "S(0)")}, {"a": 3, "b": 2}, None)
    read_pins(program, dims, {"up.weight": ("S(0)", "S(1)")}, {"a": 3, "b": 2}, None)  # is padded


def test_a_lone_placement_where_there_is_one_axis() -> None:
    program, dims, _ = models.captured("mlp")
    found = read_pins(program, dims, {"up.weight": "S(0)"}, {"a": 2}, None)
    assert found.layouts["parameter", "up.weight"] == (Split(0),)


def test_no_pins_restrict_nothing() -> None:
    program, dims, _ = models.captured("mlp")
    assert read_pins(program, dims, {}, AXES, None) == Restrictions()
    held = Restrictions(layouts={("parameter", "up.bias"): layout("R R")})
    assert read_pins(program, dims, {}, AXES, held) is held
    both = read_pins(program, dims, {"down.bias": ("R", "R")}, AXES, held)
    assert set(both.layouts) == {("parameter", "up.bias"), ("parameter", "down.bias")}


@pytest.mark.parametrize(
    ("spelled", "expressible"),
    [
        ("R S(0.0)", True),
        ("S(0.0) S(0.0)", True),
        ("R S(0.1)", True),
        ("S(0.1) S(0.1)", False),  # a strided split has one axis
        ("S(0.0) S(0.1)", False),
        ("S(0.1) S(1.0)", True),
    ],
)
def test_what_torch_can_express(spelled: str, expressible: bool) -> None:
    type_ = TensorType("float32", ((Factor("a", 4), Factor("b", 4)), (Factor("c", 4),)))
    assert is_boundary_layout(type_, layout(spelled), (2, 2)) is expressible


def test_the_plan_keeps_pins() -> None:
    pins = {"up.weight": ("S(0)", "R"), "batch.0": ("R", "S(0)"), "down.*": {"model": "S(0)"}}
    program, _, _ = models.captured("mlp")
    plan = solve(program, AXES, "h100", search=Search(pins=pins))
    assert plan.parameters["up.weight"] == layout("S(0) R")
    assert plan.parameters["down.weight"] == plan.parameters["down.bias"] == layout("R S(0)")
    assert plan.batch["0"] == layout("R S(0)")
    model, batch = models.mlp()
    assert autopar.verify(model, batch, AXES, plan=plan).max_error < 1e-12
    free = solve(program, AXES, "h100")
    assert plan.certificate.objective >= free.certificate.objective * (1 - 1e-9)


def test_three_axes_keep_pins() -> None:
    program, _, _ = models.captured("mlp")
    axes = {"a": 2, "b": 2, "c": 2}
    plan = solve(program, axes, "h100", search=Search(pins={"up.weight": ("S(0)", "S(1)", "R")}))
    assert plan.parameters["up.weight"] == layout("S(0) S(1) R")
    assert plan.certificate.lower_bound <= plan.certificate.objective


def test_pins_of_tied_layers_that_differ() -> None:
    """Layers share one decision; pins that pull it two ways are infeasible, and say so."""
    program = program_of(*residuals())
    pins = {"layers.0.up.bias": ("S(0)",), "layers.1.up.bias": ("R",)}
    with pytest.raises(InfeasibleError, match=r"no layout of parameter .*up\.bias"):
        solve(program, {"a": 2}, "cpu", search=Search(pins=pins))
    plan = solve(program, {"a": 2}, "cpu", search=Search(pins=pins, tie_layers=False))
    assert plan.parameters["layers.0.up.bias"] == layout("S(0)")
    assert plan.parameters["layers.1.up.bias"] == layout("R")


def test_data_axes_only() -> None:
    program, dims, _ = models.captured("mlp")
    found = find_plan(program, dims, Job(AXES, Cluster.preset("h100"), restrictions=Restrictions(data_axes_only=True)))
    assert all(p in (Replicate(), Split(0)) for v in found.batch.values() for p in v)
