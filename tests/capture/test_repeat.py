"""A plan of a deep model from three of its blocks: the same as from all of them, or else the whole is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.repeat import abridge
from autopar.compiler import plan, program_of, program_to_plan, rewrite, solve
from autopar.errors import PlanError
from autopar.explain.why_not import ask
from autopar.ir.plan import Plan
from autopar.ir.program import Program, RepeatedLayers
from autopar.search.emitted.peak import state_bytes
from autopar.search.options import Search
from tests import models
from tests.distributed.models import slow_devices

AXES = {"a": 2, "b": 4}
EAGER = slow_devices()


class Block(nn.Module):
    """A residual pair of linears, and a number of its own that nobody reads."""

    def __init__(self, number: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)
        self.steps = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Blocks between an embedding and a head; every block's result is used, too."""

    def __init__(
        self,
        layers: int,
        hidden: int = 8,
        ffn: int = 16,
        skip: Callable[[int, int], bool] | None = None,
        odd: int = 0,
        turns: int = 1,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        wide = [i < odd or i % turns > 0 for i in range(layers)]
        self.layers = nn.ModuleList(Block(i, hidden, ffn * (3 if more else 1)) for i, more in enumerate(wide))
        self.head = nn.Linear(hidden, 8)
        self.skip = skip

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        total = x
        for i, layer in enumerate(self.layers):
            if self.skip is None or not self.skip(i, len(self.layers)):
                x = layer(x)
            total = total + x
        return nn.functional.cross_entropy(self.head(total), target)


def deep(layers: int, **settings: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Deep(layers, **settings), {"x": torch.randn(8, 4), "target": torch.randint(0, 8, (8,))}


def both(name: str, layers: int, **settings: Any) -> tuple[Program, Program]:
    """The program of the whole model, and that of three blocks."""
    cached = {"use_cache": True} if name in ("gpt2", "llama") else {}
    model, batch = deep(layers, **settings) if name == "deep" else models.MODELS[name](layers=layers, seq=4, **cached)
    whole, short = program_of(model, batch), program_to_plan(model, batch)
    assert short.repeat is not None
    assert short.repeat.period == settings.get("turns", 1)
    assert short.repeat.lead + short.repeat.blocks * short.repeat.period == layers
    return whole, short


def assert_same(found: Plan, expected: Plan) -> None:
    """Equal in every decision; in figures but for rounding."""
    figures = {"predicted": expected.predicted, "modules": expected.modules, "certificate": expected.certificate}
    assert replace(found, **figures) == expected
    close = pytest.approx
    assert found.certificate.objective == close(expected.certificate.objective, rel=1e-12)
    assert found.certificate.lower_bound == close(expected.certificate.lower_bound, rel=1e-12)
    a, b = found.predicted, expected.predicted
    assert a.collectives == b.collectives
    assert (a.step_seconds, a.compute_seconds) == close((b.step_seconds, b.compute_seconds), rel=1e-12)
    assert a.memory_bytes == close(b.memory_bytes)
    assert a.communication_bytes == close(b.communication_bytes)
    for row, other in zip(found.modules, expected.modules, strict=True):
        assert (row.path, row.instances, row.layouts) == (other.path, other.instances, other.layouts)
        assert (row.seconds, row.memory_bytes) == close((other.seconds, other.memory_bytes), rel=1e-9)
        assert row.communication_bytes == close(other.communication_bytes)


slow = pytest.mark.deep
SEARCHES: dict[str, tuple[dict[str, int], Search]] = {
    "free": (AXES, Search()),
    "fsdp": (AXES, Search(recipe="fsdp")),
    "megatron": (AXES, Search(recipe="megatron")),
    "axis": ({"a": 4}, Search()),
    "cube": ({"a": 2, "b": 2, "c": 2}, Search(time_limit=600)),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "layers", "how"),
    [
        ("deep", 4, "axis"),
        ("deep", 6, "megatron"),
        *(pytest.param("deep", 12, how, marks=slow) for how in SEARCHES),
        *(pytest.param("llama", layers, how, marks=slow) for layers in (4, 12) for how in SEARCHES),
        *(pytest.param("gpt2", 12, how, marks=slow) for how in SEARCHES),
    ],
)
def test_the_plan_is_that_of_the_whole_model(name: str, layers: int, how: str) -> None:
    whole, short = both(name, layers)
    axes, search = SEARCHES[how]
    assert short.fingerprint == whole.fingerprint
    assert_same(solve(short, axes, EAGER, search=search), solve(whole, axes, EAGER, search=search))


@pytest.mark.deep
def test_memory_is_that_of_the_whole_model() -> None:
    whole, short = both("deep", 4)
    total = sum(state_bytes(whole, "adamw").values())
    assert sum(state_bytes(short, "adamw").values()) == total
    # It binds. In much less the two may part: the extrapolated peak is a few per cent off, and steers the rows.
    expected = solve(whole, {"a": 4}, EAGER, memory=total / 1.2)
    assert expected.recompute
    assert_same(solve(short, {"a": 4}, EAGER, memory=total / 1.2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "odd", "turns", "lead"),
    [(6, 2, 1, 2), *(pytest.param(9, *case, marks=pytest.mark.deep) for case in ((2, 1, 2), (0, 2, 1)))],
)
def test_blocks_may_be_of_several_kinds(layers: int, odd: int, turns: int, lead: int) -> None:
    """As the dense layers before mixtures of experts, and windows beside full attention: each plan is that of all."""
    whole, short = both("deep", layers, odd=odd, turns=turns)
    assert short.repeat is not None
    assert short.repeat.lead == lead
    assert short.fingerprint == whole.fingerprint
    assert len(short.sources) < len(whole.sources)
    total = sum(state_bytes(whole, "adamw").values())
    assert sum(state_bytes(short, "adamw").values()) == total
    assert_same(solve(short, {"a": 4}, EAGER), solve(whole, {"a": 4}, EAGER))
    staged = Search(pins={"stages": 2, "stage_axis": "b", "microbatches": 4, "schedule": "1f1b"})
    found = solve(short, {"b": 2, "a": 2}, EAGER, memory=total, search=staged)
    cuts = [stage.modules[0] for stage in found.stages[1:]]  # no turn is cut, where the whole model's may be
    staged = replace(staged, pins={**staged.pins, "stages": cuts})
    expected = solve(whole, {"b": 2, "a": 2}, EAGER, memory=total, search=staged)
    assert found.stages == expected.stages
    assert found.predicted.step_seconds == pytest.approx(expected.predicted.step_seconds, rel=1e-3)
    assert sum(found.predicted.peak_bytes.values()) == pytest.approx(
        sum(expected.predicted.peak_bytes.values()), rel=0.01
    )
    assert found.parameters == expected.parameters


@pytest.mark.deep
def test_others_at_the_beginning_within_a_budget() -> None:
    whole, short = both("deep", 9, odd=2)
    memory = sum(state_bytes(whole, "adamw").values()) / 2
    assert_same(solve(short, {"a": 4}, EAGER, memory=memory), solve(whole, {"a": 4}, EAGER, memory=memory))


@pytest.mark.slow
def test_padding_is_that_of_the_whole_model() -> None:
    whole, short = both("deep", 5, ffn=30)
    search = Search(pins={"*.up.weight": ("S(0)",)})
    expected = solve(whole, {"a": 4}, EAGER, search=search)
    assert len(expected.padding) == 3 * 5  # up.weight, up.bias and down.weight of every block
    assert_same(solve(short, {"a": 4}, EAGER, search=search), expected)


@pytest.mark.slow
def test_the_plan_runs_the_whole_model(tmp_path: Any) -> None:
    model, batch = deep(6)
    found = plan(model, batch, cluster=EAGER, axes={"a": 4})
    assert set(found.parameters) == {name for name, _ in model.named_parameters()}
    found.save(tmp_path / "plan.json")
    assert autopar.verify(model, batch, {"a": 4}, plan=Plan.load(tmp_path / "plan.json")).max_error < 1e-12
    with pytest.raises(PlanError, match="another graph"):
        rewrite(program_of(*deep(7)), found)
    with pytest.raises(ValueError, match="leaves blocks of layers out"):
        rewrite(program_to_plan(model, batch), found)


@pytest.mark.slow
def test_a_pin_of_one_layer_is_asked_of_all() -> None:
    whole, short = both("deep", 5)
    found = solve(short, {"a": 4}, EAGER)
    for name in ("layers.3.up.weight", "head.weight"):
        answer, expected = (ask(p, found, name, {"a": "R"}).plan for p in (short, whole))
        assert answer is not None
        assert expected is not None
        assert_same(answer, expected)


def said_of(model: nn.Module, batch: Any, **search: Any) -> str:
    """Why the model is captured whole."""
    said: list[str] = []
    found = abridge(model, lambda m: program_of(m, batch), search.get("pins", ()), said.append)
    assert found.repeat is None
    assert found.fingerprint == program_of(model, batch).fingerprint
    return said[-1]


@pytest.mark.slow
def test_blocks_that_the_model_tells_apart_are_all_captured() -> None:
    """By their number, in whatever way: what two and three blocks do must say what all do."""
    for skip in (lambda i, n: i % 2 == 1, lambda i, n: i % 3 == 2, lambda i, n: n == 2):
        model, batch = deep(5, skip=skip)
        for p in model.parameters():  # blocks that are skipped get no gradients, which would be an error
            p.requires_grad_(False)
        assert "capturing the whole model: " in said_of(model, batch)
    model, batch = deep(5, skip=lambda i, n: False)
    assert program_to_plan(model, batch).repeat is not None


@pytest.mark.slow
def test_a_number_that_is_read_keeps_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deep(4)
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: forward(self, x) / (self.number + 1))
    assert "a block's own number decides what it computes" in said_of(model, batch)


@pytest.mark.slow
def test_pins_of_some_blocks_keep_the_model_whole() -> None:
    model, batch = deep(4)
    assert "'layers.2.*' holds for some blocks only" in said_of(model, batch, pins={"layers.2.*": ("R",)})
    assert program_to_plan(model, batch, search=Search(pins={"*.up.weight": ("R",)})).repeat is not None


@pytest.mark.slow
def test_shared_parameters_keep_the_model_whole() -> None:
    model, batch = deep(4)
    model.layers[3].up.weight = model.layers[0].up.weight
    assert "blocks of layers share parameters" in said_of(model, batch)


@pytest.mark.slow
def test_untied_layers_and_random_plans_need_the_whole_model() -> None:
    model, batch = deep(4)
    for search in (Search(tie_layers=False), Search(recipe="random")):
        assert program_to_plan(model, batch, search=search).repeat is None


def test_names_of_what_is_left_out() -> None:
    repeat = RepeatedLayers("model.layers", 5, None)  # type: ignore[arg-type]
    assert repeat.names("model.layers.0.up") == ("model.layers.0.up",)
    assert repeat.names("model.layers.1.up") == ("model.layers.1.up", "model.layers.2.up", "model.layers.3.up")
    assert repeat.names("model.layers.2.up") == ("model.layers.4.up",)
    assert repeat.names("model.layers2.1.up") == ("model.layers2.1.up",)
    assert repeat.alike("model.layers.4.up") == tuple(f"model.layers.{i}.up" for i in range(3))
    assert repeat.alike("head.weight") == ("head.weight",)
    assert repeat.extrapolate(7, 5) == 11
