"""Pins on modules: what a module hands on lies so for all who take it, and what the step computes does not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.ir.graph import Value, copy_graph, producer, values_of
from autopar.ir.module_outputs import find_module_outputs, module_outputs
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.insert_collectives import insert_collectives
from autopar.search.options import Search
from autopar.verify.verify import compare
from tests import models
from tests.plans import layout


def lies_in(program: Program, plan: Plan, name: str) -> set[tuple[str, ...]]:
    """Layouts from which the users of what a module hands on get it, in the graph with its moves."""
    program = annotate_layouts(replace(program, graph=copy_graph(program.graph)), plan)
    values = {value for value, _ in module_outputs(program)[name]}
    before = set(program.graph.graph.nodes)
    insert_collectives(program, plan)
    return {
        way
        for user in before
        for argument in user.all_input_nodes
        if (way := _way(argument, before, values)) is not None
    }


def _way(argument: fx.Node, before: set[fx.Node], values: set[Value]) -> tuple[str, ...] | None:
    """The pinned layout, if moves pass through it on the way from a value to its user; else the one it is made in."""
    passed = []
    while argument not in before:
        passed += info(argument).layouts
        argument = argument.all_input_nodes[0]
    source, index = producer(argument)
    if (source, index) not in values or argument.op == "placeholder":
        return None
    passed.append(info(source).layouts[index])
    pinned = info(source).consumer_layouts.get(index)
    return tuple(map(str, pinned if pinned in passed else passed[-1]))


def equal(name: str, plan: Plan, **arguments: Any) -> None:
    program, _, values = models.captured(name, **arguments)
    report = compare(program, rewrite(program, plan), plan, values, torch.float64)
    assert report.max_error < 1e-10, report.worst


@pytest.mark.parametrize("name", list(models.MODELS))
def test_modules_hand_on_what_they_return(name: str) -> None:
    """Of every module the shapes of what it returns, call by call, are those of what stands for it in the graph."""
    program = models.captured(name)[0]
    model, batch = models.MODELS[name]()
    returned: dict[str, list[list[tuple[int, ...]]]] = {}
    for path, module in model.named_modules():

        def note(module: nn.Module, given: Any, output: Any, path: str = path) -> None:
            leaves = torch.utils._pytree.tree_leaves(output)
            returned.setdefault(path, []).append([tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor)])

        module.register_forward_hook(note)
    model(**batch)
    found: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    for rows in module_outputs(program).values():
        for (node, i), mark in rows:
            shape = values_of(node)[i].shape  # type: ignore[union-attr]
            found.setdefault(mark.module, {}).setdefault(mark.call, {})[mark.number] = mark.shape or tuple(shape)
    shapes = {path: [[c[k] for k in sorted(c)] for c in calls.values()] for path, calls in found.items()}
    assert shapes == {path: calls for path, calls in returned.items() if path}


@pytest.mark.parametrize(
    ("name", "axes", "pins", "shown"),
    [
        pytest.param(
            "llama",
            {"a": 2},
            {"*.mlp": "S(1)"},
            {"model.layers.0.mlp": {("S(1.0)",), ("S(0.1)",)}},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "llama",
            {"a": 2},
            {"*.q_proj": "S(2)", "*.mlp": "R"},
            {"model.layers.0.self_attn.q_proj": {("S(1.0)",)}},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "llama",
            {"a": 2},
            {"*.rotary_emb:1": "S(1)", "model.norm": "R"},
            {"model.rotary_emb:1": {("S(1.0)",)}},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "llama",
            {"a": 2, "b": 2},
            {"*.layers.[01]": ("S(0)", "S(1)")},
            {"model.layers.0": {("S(0.0)", "S(1.0)")}},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "llama",
            {"a": 2, "b": 2},
            {"*.act_fn": {"b": "S(2)"}},
            {"model.layers.0.mlp.act_fn": {("R", "S(2.0)")}},
            marks=pytest.mark.deep,
        ),
        ("cnn", {"a": 2, "b": 2}, {"first": {"b": "S(1)"}}, {"first": {("R", "S(1.0)")}}),
    ],
)
def test_every_user_takes_the_pinned_layout(
    name: str, axes: dict[str, int], pins: dict[str, Any], shown: dict[str, Any]
) -> None:
    program = models.captured(name)[0]
    plan = solve(program, axes, "h100", search=Search(pins=pins))
    for module, expected in shown.items():
        assert lies_in(program, plan, module) == expected
    equal(name, plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.certificate.lower_bound <= plan.certificate.objective


class Plain(nn.Module):
    """Whole on both sides: nobody would split what is between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().sum()


def test_who_takes_it_as_it_was_made_gets_it_from_the_pinned_layout() -> None:
    """Made whole and taken whole, and split between."""
    program = program_of(Plain(), (torch.ones(4, 8),))
    whole = {name: "R" for name in ("a.weight", "a.bias", "b.weight", "b.bias", "batch.0")}
    plan = solve(program, {"x": 2}, "h100", search=Search(pins={**whole, "a": "S(1)"}))
    assert lies_in(program, plan, "a") == {("S(1.0)",)}
    loose = solve(program, {"x": 2}, "h100", search=Search(pins=whole))
    assert not loose.forced_consumer_layouts
    assert plan.predicted.step_seconds > loose.predicted.step_seconds
    assert autopar.verify(Plain(), (torch.ones(4, 8),), {"x": 2}, plan=plan).max_error < 1e-12


NAMES = {"gpt2": ("transformer.h.*.attn", "*.ln_2", "*.mlp.act", "transformer.wte", "lm_head"),
         "encoder": ("*.self_attn", "embed", "head", "*.linear1"),
         "cnn": ("first", "norm", "second"), "vit": ("vit.embeddings", "*.q_proj", "*.o_proj")}  # fmt: skip


@pytest.mark.slow
@given(st.data())
@settings(max_examples=2)
def test_any_pin_keeps_what_is_computed(data: st.DataObject) -> None:
    """Searched and random plans, in which values are also made and moved again, with drawn pins on drawn modules."""
    name = data.draw(st.sampled_from(sorted(NAMES)))
    program = models.captured(name)[0]
    axes = data.draw(st.sampled_from([{"a": 2}, {"a": 2, "b": 2}]))
    placement = st.sampled_from(["R", "S(0)", "S(1)", "S(2)"])
    pins = {p: tuple(data.draw(placement) for _ in axes) for p in data.draw(st.sets(st.sampled_from(NAMES[name])))}
    recipe = data.draw(st.sampled_from([None, "random"]))
    search = Search(pins={**pins, "recompute": "search"}, recipe=recipe, seed=data.draw(st.integers(0, 99)))
    try:
        plan = solve(program, axes, "cpu", search=search)
    except InfeasibleError as e:
        assert "output of module" in str(e) or "is no placement" in str(e), e
        return
    for pattern, wanted in pins.items():
        for module in find_module_outputs(program, pattern):
            direct = [v for v, mark in module_outputs(program)[module] if mark.shape is None]
            if direct:
                expected = tuple(str(p) for p in layout(" ".join(wanted).replace(")", ".0)")))
                assert expected in lies_in(program, plan, module) or not direct[0][0].users
    equal(name, plan)


class Twice(nn.Module):
    """One module that is called twice, one that returns two tensors, and one that only changes a shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.pair, self.flat = nn.Linear(8, 8), Pair(), nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pair(self.inner(torch.relu(self.inner(x))))
        return (self.flat(first) * second.flatten(1)).sum()


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


def test_calls_and_several_tensors() -> None:
    program, axes = program_of(Twice(), (torch.randn(4, 2, 8),)), {"a": 2}
    assert len({mark.call for _, mark in module_outputs(program)["inner"]}) == 2
    plan = solve(program, axes, "h100", search=Search(pins={"inner": "S(2)", "pair:0": "S(1)", "pair:1": "S(0)"}))
    assert lies_in(program, plan, "pair:0") == {("S(1.0)",)}
    assert lies_in(program, plan, "pair:1") == {("S(0.0)",)}
    assert autopar.verify(Twice(), (torch.randn(4, 2, 8),), axes, plan=plan).max_error < 1e-12
    with pytest.raises(ValueError, match=r"pin 'pair': module pair returns several tensors; name one: pair:0, pair:1"):
        solve(program, axes, "h100", search=Search(pins={"pair": "R"}))


@pytest.mark.parametrize(
    ("pins", "error", "message"),
    [
        ({"transformer.h.7": "R"}, ValueError, r"names no parameter, batch\.N, result\.N or module .* modules lm_head"),
        ({"transformer.h.*.mlp": "P(sum)"}, ValueError, "what is pinned cannot be Partial"),
        ({"transformer.h.*.mlp": "half"}, ValueError, "'half' is no placement"),
        ({"transformer.h.*.mlp": ("R", "R")}, ValueError, "one placement for each axis"),
        (
            {"transformer.h.*.mlp": "S(0)"},
            InfeasibleError,
            r"output of module transformer\.h\.0\.mlp is .* sizes must divide",
        ),
        ({"transformer.h.*.mlp": "S(7)"}, InfeasibleError, "output of module"),
        ({"transformer.h.*.mlp:1": "R"}, ValueError, "names no parameter"),
        ({"*.attn.c_proj": "S(7)"}, InfeasibleError, "output of module"),
        ({"*.attn.c_fc": "R"}, ValueError, "names no parameter"),
        ({"*.mlp.act": "S(1.1)"}, InfeasibleError, "output of module"),
        ({"transformer.h.0.mlp": "R", "transformer.h.1.mlp": "S(2)"}, InfeasibleError, "tie_layers=False"),
        (
            {"transformer.h.0.mlp.c_fc.weight": "R", "transformer.h.1.mlp.c_fc.weight": "S(1)"},
            InfeasibleError,
            "laid out alike: pin them alike, or set tie_layers=False",
        ),
    ],
)
def test_what_is_wrong_with_others(pins: dict[str, Any], error: type[Exception], message: str) -> None:
    program = models.captured("gpt2", layers=2, seq=4)[0]
    axes = {"a": 16} if "sizes" in message else {"a": 2}
    with pytest.raises(error, match=message):
        solve(program, axes, "h100", search=Search(pins=pins, padding=False))


@pytest.mark.deep
def test_tied_and_untied_layers() -> None:
    """What is pinned for one of alike layers holds for all, unless they are not tied."""
    arguments: dict[str, int] = {"layers": 2, "seq": 4}
    program, axes = models.captured("gpt2", **arguments)[0], {"a": 2}
    tied = solve(program, axes, "cpu", search=Search(pins={"transformer.h.0.mlp": "S(1)"}))
    assert lies_in(program, tied, "transformer.h.1.mlp") == lies_in(program, tied, "transformer.h.0.mlp")
    pins = {"transformer.h.0.mlp": "S(1)", "transformer.h.1.mlp": "S(2)"}
    apart = solve(program, axes, "cpu", search=Search(pins=pins, tie_layers=False))
    assert ("S(1.0)",) in lies_in(program, apart, "transformer.h.0.mlp")
    assert ("S(2.0)",) in lies_in(program, apart, "transformer.h.1.mlp")
    equal("gpt2", apart, **arguments)


@pytest.mark.deep
def test_microbatches() -> None:
    """In each part of the batch; where the module's own shape is not in the graph, too."""
    program, axes = models.captured("llama")[0], {"a": 2}
    pins = {"*.q_proj": "S(0)", "*.mlp": "S(1)", "microbatches": 2}
    plan = solve(program, axes, "cpu", search=Search(pins=pins))
    assert plan.microbatches == 2
    assert {plan.consumer_layouts[name] for name in plan.forced_consumer_layouts} == {
        layout("S(0.0)"),
        layout("S(0.1)"),
        layout("S(1.0)"),
    }
    equal("llama", plan)


class Deep(nn.Module):
    """Blocks of which three are captured."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.deep
def test_deep_models_of_which_three_blocks_are_captured() -> None:
    model, batch, said = Deep(6), (torch.randn(4, 4, 8),), list[str]()
    axes = {"a": 2, "b": 2}

    def planned(search: Search) -> Plan:
        return autopar.plan(
            model, batch, cluster="cpu", axes=axes, search=search, progress=lambda phase, *_: said.append(phase)
        )

    plan = planned(Search(pins={"blocks.[0-9]": {"b": "S(1)", "a": "S(0)"}}))
    assert "capturing 3 of the 6 blocks" in said[0]
    program = program_of(model, batch)
    for i in (0, 3, 5):
        assert ("S(0.0)", "S(1.0)") in lies_in(program, plan, f"blocks.{i}")
    assert autopar.verify(model, batch, axes, plan=plan).max_error < 1e-10
    said.clear()
    planned(Search(pins={"blocks.[1-3]": ("S(0)", "R")}))
    assert "the pin 'blocks.[1-3]' holds for some blocks only" in said[0]


def test_three_axes() -> None:
    program, axes = models.captured("mlp")[0], {"a": 2, "b": 2, "c": 2}
    plan = solve(program, axes, "h100", search=Search(pins={"up": ("S(0)", "S(1)", "R")}))
    assert lies_in(program, plan, "up") == {("S(0.0)", "S(1.0)", "R")}
    assert plan.certificate.lower_bound <= plan.certificate.objective
    equal("mlp", plan)


@pytest.mark.deep
def test_recipes_keep_pins() -> None:
    program = models.captured("llama")[0]
    search = Search(recipe="megatron", roles={"gpu": "tensor"}, pins={"*.mlp": (None, "S(1)")})
    plan = solve(program, {"node": 2, "gpu": 2}, "h100", search=search)
    assert {x[1] for x in lies_in(program, plan, "model.layers.0.mlp")} == {"S(1.0)", "S(0.1)"}
    equal("llama", plan)


@pytest.mark.slow
def test_pipelines() -> None:
    model, batch = Deep(2), (torch.randn(4, 4, 8),)
    program, axes = program_of(model, batch), {"pp": 2, "a": 2}
    fixed = {"stages": 2, "stage_axis": "pp", "microbatches": 2, "schedule": "1f1b"}
    for pin in (("R", "S(1)"), {"a": "S(1)"}):
        plan = solve(program, axes, "cpu", search=Search(pins={**fixed, "blocks.[01]": pin}))
        assert {plan.consumer_layouts[name] for name in plan.forced_consumer_layouts} == {
            layout("R S(1.0)"),
            layout("R S(0.1)"),
        }
    assert autopar.verify(model, batch, axes, plan=plan).max_error < 1e-10
    with pytest.raises(InfeasibleError, match=r"splits a tensor along axis 'pp', where the stages lie"):
        solve(program, axes, "cpu", search=Search(pins={**fixed, "blocks.[01]": ("S(1)", "R")}))


@pytest.mark.deep
def test_dropout_that_all_draw_alike() -> None:
    model, batch = models.gpt2(resid_pdrop=0.5, seq=4)
    search = Search(pins={"*.mlp.dropout": "S(1)"})
    plan = autopar.plan(model, batch, cluster="cpu", axes={"a": 2}, search=search)
    assert {plan.consumer_layouts[name] for name in plan.forced_consumer_layouts} == {layout("S(1.0)")}
    assert autopar.verify(model, batch, {"a": 2}, plan=plan).max_error < 1e-10
