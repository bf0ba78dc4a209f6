"""Names of plans in the cache: whatever is another search has another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import Search
from autopar.compiler import program_of, program_to_plan
from autopar.costs.cluster import Cluster
from autopar.ir.layout import Replicate
from autopar.search import cache
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job
from autopar.sharding.dims import Dims, analyze
from tests import models as zoo
from tests.capture.test_repeat import Deep
from tests.search.cache.planned import AXES, CLUSTER

Ingredients = dict[str, Any]


@pytest.fixture(scope="module")
def ingredients() -> Iterator[Ingredients]:
    program, dims, _ = zoo.captured("mlp")
    yield {
        "program": program,
        "dims": dims,
        "axes": AXES,
        "cluster": Cluster.preset("cpu"),
        "memory": 1e9,
        "optimizer": "adamw",
        "search": Search(),
        "restrictions": Restrictions(),
    }


def name_of(ingredients: Ingredients) -> str:
    named = dict(ingredients)
    program, dims = named.pop("program"), named.pop("dims")
    file = cache.file_of(program, dims, Job(**named))
    assert file is not None
    return file.name


def other_rule(dims: Dims) -> Dims:
    """As if somebody had edited the rule of one operator."""
    node, operator = next(iter(dims.operators.items()))
    return replace(dims, operators={**dims.operators, node: replace(operator, rule=replace(operator.rule, flops=7.0))})


CHANGES: dict[str, Callable[[Ingredients], Ingredients]] = {
    "sizes of axes": lambda i: {"axes": {"a": 4, "b": 2}},
    "names of axes": lambda i: {"axes": {"x": 2, "b": 2}},
    "order of axes": lambda i: {"axes": {"b": 2, "a": 2}},
    "a figure of the cluster": lambda i: {
        "cluster": replace(CLUSTER, device=replace(CLUSTER.device, launch=2 * CLUSTER.device.launch))
    },
    "memory": lambda i: {"memory": 2e9},
    "no limit of memory": lambda i: {"memory": None},
    "optimizer": lambda i: {"optimizer": "sgd"},
    "restrictions": lambda i: {"restrictions": Restrictions(layouts={("batch", "0"): (Replicate(), Replicate())})},
    "local rows": lambda i: {"restrictions": Restrictions(data_axes_only=True)},
    "a rule": lambda i: {"dims": other_rule(i["dims"])},
    "which result is the loss": lambda i: {"program": replace(i["program"], loss=1)},
    "another model": lambda i: dict(zip(("program", "dims"), zoo.captured("residual"), strict=False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_ingredient_counts(change: Callable[..., Ingredients], ingredients: Ingredients, kept: Path) -> None:
    assert name_of({**ingredients, **change(ingredients)}) != name_of(ingredients)
    assert name_of(dict(ingredients)) == name_of(ingredients)


OTHER = {
    "time_limit": 61.0, "gap": 1e-2, "pins": {"up.weight": "R"}, "recipe": "ddp", "roles": {"a": "data"}, "seed": 1,
    "tie_layers": False, "padding": False, "inexact": ("compressed",), "quantized": {"a": {"weights": 8}},
    "imbalance": (3.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Search) if f.name not in ("cache", "check")])
def test_each_option_of_the_search_counts(name: str, ingredients: Ingredients, kept: Path) -> None:
    allowed = {"inexact": ("quantized",)} if name == "quantized" else {}
    usual = {**ingredients, "search": Search(**allowed)}
    assert name_of({**ingredients, "search": Search(**{name: OTHER[name]}, **allowed)}) != name_of(usual)


def test_versions_count(ingredients: Ingredients, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = name_of(ingredients)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    newer = name_of(ingredients)
    monkeypatch.setattr(cache, "_sources", lambda: "edited")
    assert len({own, newer, name_of(ingredients)}) == 3


def test_sources_are_all_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    for name in ("cache.py", "linked/rule.py", "data/h100.toml"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "pass.py").write_text("1")
    (package / "passes").symlink_to(tmp_path / "outside")
    monkeypatch.setattr(cache, "__file__", str(package / "search" / "cache.py"))
    seen = {cache._sources.__wrapped__()}
    for name in ("cache.py", "linked/rule.py", "data/h100.toml", "passes/pass.py"):
        (package / name).write_text("2")
        seen.add(cache._sources.__wrapped__())
    assert len(seen) == 5


@pytest.mark.slow
def test_depth_and_what_is_left_out_count(ingredients: Ingredients, kept: Path) -> None:
    """Of 5 and of 9 alike blocks the same three are captured."""
    batch = torch.zeros(8, 4), torch.zeros(8, 8)
    programs = [program_to_plan(Deep(5), batch), program_to_plan(Deep(9), batch), program_of(Deep(9), batch)]
    assert [p.repeat and p.repeat.blocks for p in programs] == [5, 9, None]
    names = {name_of({**ingredients, "program": p, "dims": analyze(p)}) for p in programs}
    assert len(names) == 3
