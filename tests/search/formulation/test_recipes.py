"""Recipes compute what one device would, have the collectives that they are known for, and say when they do not fit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import InfeasibleError, Search
from autopar.compiler import peak_of, program_of, rewrite, solve
from autopar.explain.recipes import Found, compare_recipes
from autopar.ir.graph import is_backward
from autopar.ir.layout import Replicate, Split
from autopar.ir.node_info import info
from autopar.ir.plan import BY_AXES, Plan
from autopar.search.formulation.recipes import RECIPES
from autopar.search.formulation.tensor_parallel import tensor_factors
from autopar.search.rounds import NEAR
from autopar.verify.verify import compare
from tests import models as zoo
from tests.plans import layout

SQUARE, LINE = {"a": 2, "b": 2}, {"a": 2}

# The sequence is not as long as the batch has rows: one `arange` would stand for both, and both be one factor.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"seq": 16, "layers": 2}, "gpt2": {"seq": 16}, "bert": {"seq": 16}, "encoder": {"seq": 16},
}  # fmt: skip


def planned(name: str, axes: dict[str, int], cluster: str = "h100", **search: Any) -> Plan:
    """What the search finds; once, for all tests that look at it."""
    known = (name, *axes.items(), cluster, repr(search))
    if known not in PLANS:
        program, _, _ = zoo.captured(name, **SIZES.get(name, {}))
        PLANS[known] = solve(program, axes, cluster, search=Search(**search))
    return PLANS[known]


PLANS: dict[tuple[Any, ...], Plan] = {}


def error_of(name: str, plan: Plan) -> float:
    program, _, values = zoo.captured(name, **SIZES.get(name, {}))
    report = compare(program, rewrite(program, plan), plan, values, torch.float64)
    assert report.gradients.keys() == report.reference_gradients.keys() != set()
    return report.max_error


def census(name: str, plan: Plan) -> dict[str, Counter[tuple[str, int]]]:
    """Kinds of collectives with how many dims they move, each on its own, by pass; but those of scalars."""
    program, _, _ = zoo.captured(name, **SIZES.get(name, {}))
    found: dict[str, Counter[tuple[str, int]]] = {"forward": Counter(), "backward": Counter()}
    for node in rewrite(program, replace(plan, overlap=False)).graph.graph.nodes:
        if info(node).collective is not None and node.meta["val"].ndim:
            pass_ = "backward" if is_backward(node) else "forward"
            found[pass_][info(node).collective.kind, node.meta["val"].numel()] += 1
    return found


OF_SEQUENCES = ("megatron-sequence", "context")
SHORT = {("llama", "megatron"), ("gpt2", "megatron-sequence"), ("llama", "context")}


def cases() -> list[Any]:
    """Every recipe, on one axis and on two, for the models; `make test` takes each recipe once or twice."""
    found = []
    for i, name in enumerate(("mlp", "llama", "gpt2")):
        for k, recipe in enumerate(RECIPES):
            # It has no sequence; none has experts, see `tests.passes.canonicalize.test_experts`.
            if (name == "mlp" and recipe in OF_SEQUENCES) or recipe == "expert":
                continue
            for axes in (LINE, SQUARE) if recipe != "hsdp" else (SQUARE,):
                short = (recipe == "hsdp" or (i + k) % 2 == (axes is SQUARE)) and (
                    name == "mlp" or (name, recipe) in SHORT
                )
                marks = [] if short else [pytest.mark.deep]
                found.append(pytest.param(name, recipe, axes, id=f"{name}-{recipe}-{len(axes)}", marks=marks))
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "recipe", "axes"), cases())
def test_a_recipe_computes_what_one_device_would(name: str, recipe: str, axes: dict[str, int]) -> None:
    plan = planned(name, axes, recipe=recipe)
    assert error_of(name, plan) <= 1e-10
    assert f"what recipe {recipe} leaves open" in plan.certificate.space
    assert sum(map(len, plan.predicted.collectives.values())) >= len(axes)


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.deep)])
def test_ddp_reduces_gradients_once_and_nothing_else(name: str) -> None:
    plan = planned(name, LINE, recipe="ddp")
    program, _, values = zoo.captured(name, **SIZES.get(name, {}))
    numel = sum(v.numel() for v, i in zip(values, program.inputs, strict=True) if i.kind == "parameter")
    found = census(name, plan)
    assert found["forward"] == {}
    assert found["backward"] == {("all_reduce", numel): 1}
    assert {p for v in plan.parameters.values() for p in v} == {Replicate()}
    assert {p for v in plan.batch.values() for p in v} == {Split(0, 0)}


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_fsdp_gathers_every_parameter_and_scatters_every_gradient(name: str) -> None:
    plan = planned(name, LINE, recipe="fsdp")
    program, _, values = zoo.captured(name, **SIZES.get(name, {}))
    sizes = [v.numel() for v, i in zip(values, program.inputs, strict=True) if i.kind == "parameter"]
    found = census(name, plan)
    assert found["forward"] == Counter(("all_gather", n) for n in sizes)
    assert found["backward"] == Counter(("reduce_scatter", n // 2) for n in sizes)
    assert {p for v in plan.parameters.values() for p in v} == {Split(0, 0)}
    assert set(plan.predicted.collectives["a"]) == {"all_gather", "reduce_scatter", "all_reduce"}  # of the loss


@pytest.mark.slow
def test_zeros_stages_by_what_they_send() -> None:
    """Stage 1 gathers once and all-reduces, stage 2 gathers once and scatters, stage 3 may gather twice."""
    program, _, values = zoo.captured("llama", **SIZES["llama"])
    sizes = [v.numel() for v, i in zip(values, program.inputs, strict=True) if i.kind == "parameter"]
    numel = sum(sizes)
    gathered = Counter(("all_gather", n) for n in sizes)
    found = {stage: census("llama", planned("llama", LINE, recipe=stage)) for stage in ("zero1", "zero2")}
    assert found["zero1"]["forward"] == found["zero2"]["forward"] == gathered
    first = found["zero1"]["backward"]
    assert {kind for kind, _ in first} == {"all_reduce"}
    assert sum(n * count for (_, n), count in first.items()) == numel
    assert found["zero2"]["backward"] == Counter(("reduce_scatter", n // 2) for n in sizes)


@pytest.mark.deep
def test_fsdp_gathers_again_where_zero2_does_not_fit() -> None:
    program, _, _ = zoo.captured("llama", **SIZES["llama"])
    ample = planned("llama", LINE, recipe="zero2")
    room = 0.6 * sum(peak("llama", ample).values())
    tight = solve(program, LINE, "h100", memory=room, search=Search(recipe="fsdp"))
    found = census("llama", tight)
    assert found["forward"] == census("llama", ample)["forward"]
    assert sum(count for (kind, _), count in found["backward"].items() if kind == "all_gather") >= 4
    assert error_of("llama", tight) <= 1e-10
    with pytest.raises(InfeasibleError, match="missing"):
        solve(program, LINE, "h100", memory=room, search=Search(recipe="zero2"))


def peak(name: str, plan: Plan) -> dict[str, float]:
    program, _, _ = zoo.captured(name, **SIZES.get(name, {}))
    return peak_of(program, replace(plan, overlap=False))


def test_zeros_stages_need_less_and_less() -> None:
    plans = [planned("mlp", {"a": 4}, recipe=r) for r in ("ddp", "zero1", "zero2", "fsdp")]
    state = [plan.predicted.memory_bytes for plan in plans]
    for category in ("parameters", "gradients", "optimizer"):
        held = [memory[category] for memory in state]
        assert held == sorted(held, reverse=True)
        assert held[0] == 4 * held[1]
    most = [sum(peak("mlp", plan).values()) for plan in plans]
    assert most[0] > most[1] >= most[2] >= most[3]


def test_zero_on_one_axis_of_two() -> None:
    plan = planned("mlp", SQUARE, recipe="megatron", roles={"a": "optimizer", "b": "tensor"})
    assert plan.parameters["up.weight"] == layout("S(0) S(0)")
    assert set(plan.predicted.collectives["a"]) == {"all_gather", "all_reduce"}
    assert error_of("mlp", plan) <= 1e-10


@pytest.mark.slow
def test_hsdp_is_ddp_outside_and_fsdp_inside() -> None:
    plan = planned("llama", SQUARE, recipe="hsdp")
    assert {v for v in plan.parameters.values()} == {layout("R S(0)")}
    assert {v for v in plan.batch.values()} == {layout("S(0) S(0)")}
    count = len(plan.parameters)
    inner = plan.predicted.collectives["b"]
    assert (inner["all_gather"], inner["reduce_scatter"]) == (count, count)
    assert plan.predicted.collectives["a"].keys() == {"all_reduce"}
    # What is reduced over the outer axis has been scattered over the inner one.
    assert plan.predicted.communication_bytes["a"] < plan.predicted.communication_bytes["b"]


def test_megatron_reduces_twice_a_layer_forward_and_backward() -> None:
    plan = planned("llama", LINE, recipe="megatron")
    found = census("llama", plan)
    layers, activation = 2, 8 * 16 * 32
    # Besides: the embedding forward, the head's input backward; for the vocabulary's loss a number a token, and two.
    assert found["forward"]["all_reduce", activation] == 2 * layers + 1
    assert found["backward"]["all_reduce", activation] == 2 * layers + 1
    rest = (found["forward"] + found["backward"]).keys() - {("all_reduce", activation)}
    assert rest == {("all_reduce", 8 * 16), ("all_reduce", 2 * 8 * 16)}
    assert plan.parameters["model.layers.1.self_attn.q_proj.weight"] == layout("S(0)")
    assert plan.parameters["model.layers.1.self_attn.o_proj.weight"] == layout("S(1)")
    assert plan.parameters["model.layers.0.mlp.down_proj.weight"] == layout("S(1)")
    assert plan.parameters["model.layers.0.input_layernorm.weight"] == layout("R")
    assert plan.parameters["model.embed_tokens.weight"] == plan.parameters["lm_head.weight"] == layout("S(0)")
    assert set(plan.batch.values()) == {layout("R")}


def test_sequence_parallelism_scatters_and_gathers_instead() -> None:
    # Where launches count more than bytes, as for a model of this size on a GPU, all-reduces need fewer copies.
    plan = planned("llama", LINE, "cpu", recipe="megatron-sequence")
    found = census("llama", plan)
    layers, activation = 2, 8 * 16 * 32
    assert found["forward"]["all_gather", activation] == 2 * layers + 1
    assert found["forward"]["reduce_scatter", activation // 2] == 2 * layers + 1
    assert found["backward"]["all_gather", activation] == 2 * layers + 1
    assert found["backward"]["reduce_scatter", activation // 2] >= 2 * layers + 1
    assert not {("all_reduce", activation)} & (found["forward"] + found["backward"]).keys()


def test_megatron_finds_fused_heads_and_tied_vocabularies() -> None:
    plan = planned("gpt2", {"dp": 2, "tp": 2}, recipe="megatron")
    block = "transformer.h.0"
    assert plan.parameters[f"{block}.attn.c_attn.weight"] == layout("R S(1.1)")
    assert plan.parameters[f"{block}.attn.c_proj.weight"] == layout("R S(0)")
    assert plan.parameters[f"{block}.mlp.c_fc.weight"] == layout("R S(1)")
    assert plan.parameters[f"{block}.mlp.c_proj.weight"] == layout("R S(0)")
    assert plan.parameters["transformer.wte.weight"] == layout("R S(0)")
    assert plan.parameters["transformer.wpe.weight"] == layout("R R")
    assert set(plan.batch.values()) == {layout("S(0) R")}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("mlp", {"ffn"}),
        ("llama", {"vocab", "lm_head.0", "ffn", "kv_heads"}),
        pytest.param("bert", {"vocab", "dense.0", "heads"}, marks=pytest.mark.deep),
        pytest.param("encoder", {"vocab", "heads", "ffn", "head.0"}, marks=pytest.mark.deep),
        pytest.param("vit", {"heads", "ffn", "classifier.0"}, marks=pytest.mark.deep),
        ("residual", {"head.0"}),
    ],
)
def test_tensor_parallel_factors(name: str, names: set[str]) -> None:
    program, dims, _ = zoo.captured(name, **SIZES.get(name, {}))
    assert {f.name for f in tensor_factors(program, dims, 2)} == names


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.deep) for n in ("bert", "encoder", "cnn")] + ["residual"]
)
def test_megatron_on_other_models(name: str) -> None:
    assert error_of(name, planned(name, LINE, recipe="megatron")) <= 1e-10


@pytest.mark.deep
def test_three_axes() -> None:
    axes = {"node": 2, "dp": 2, "tp": 2}
    plan = planned("llama", axes, recipe="megatron")
    assert plan.certificate.method != BY_AXES
    assert plan.batch["0"] == layout("S(0) S(0) R")
    assert error_of("llama", plan) <= 1e-10


def test_roles_win_over_names_and_order() -> None:
    roles = {"a": "tensor", "b": "shard"}
    plan = planned("mlp", SQUARE, recipe="megatron", roles=roles)
    assert plan.batch["0"] == layout("R S(0)")
    assert plan.parameters["up.weight"] == layout("S(0) S(0)")
    assert plan.parameters["down.weight"] == layout("S(1) S(0)")
    assert error_of("mlp", plan) <= 1e-10


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.deep)])
def test_an_axis_without_a_role_is_searched(name: str) -> None:
    free = planned(name, SQUARE)
    plan = planned(name, SQUARE, roles={"a": "data"})
    assert {v[0] for v in plan.batch.values()} == {Split(0, 0)}
    assert {v[0] for v in plan.parameters.values()} == {Replicate()}
    best = min(planned(name, SQUARE, recipe=r).certificate.objective for r in ("ddp", "hsdp", "megatron"))
    assert plan.certificate.objective >= free.certificate.lower_bound
    # Its second axis could have been any of these (`hsdp` shards, which costs more than it gains without a budget).
    assert plan.certificate.objective <= best * (1 + 1e-3)
    assert "a for data" in plan.certificate.space


def test_three_axes_of_which_one_is_decided() -> None:
    axes = {"a": 2, "b": 2, "c": 2}
    plan = planned("mlp", axes, roles={"a": "data"})
    assert plan.batch["0"][0] == Split(0, 0)
    assert error_of("mlp", plan) <= 1e-10
    assert plan.certificate.lower_bound <= plan.certificate.objective


@pytest.mark.parametrize(
    ("name", "axes", "cluster"),
    [
        ("mlp", SQUARE, "h100"),
        ("llama", LINE, "h100"),
        pytest.param("llama", SQUARE, "h100", marks=pytest.mark.deep),
        pytest.param("llama", SQUARE, "a100-80gb", marks=pytest.mark.deep),
    ],
)
def test_the_search_is_never_worse_than_a_recipe(name: str, axes: dict[str, int], cluster: str) -> None:
    best = planned(name, axes, cluster).certificate.objective
    # None has experts; one axis is too few for `hsdp`, and an MLP has no sequence.
    unfit = {"expert"} | ({"hsdp"} if axes is LINE else set()) | ({*OF_SEQUENCES} if name == "mlp" else set())
    for recipe in {*RECIPES} - unfit:
        assert best <= planned(name, axes, cluster, recipe=recipe).certificate.objective * NEAR, recipe


def test_pins_win_over_a_recipe() -> None:
    pins = {"up.weight": ("S(1)",), "batch.1": ("R",)}
    plan = planned("mlp", LINE, recipe="ddp", pins=pins)
    assert plan.parameters["up.weight"] == layout("S(1)")
    assert plan.parameters["down.weight"] == layout("R")
    assert (plan.batch["0"], plan.batch["1"]) == (layout("S(0)"), layout("R"))
    assert error_of("mlp", plan) <= 1e-10
    pins = {"model.layers.0.mlp.up_proj.weight": ("S(0)",)}  # and so in the layers that are tied to it
    plan = planned("llama", LINE, recipe="ddp", pins=pins)
    assert plan.parameters["model.layers.1.mlp.up_proj.weight"] == layout("S(0)")


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"recipe": "fsdb"}, r"no recipe 'fsdb'; there are ddp, zero1, zero2, fsdp, hsdp, megatron.*mean 'fsdp'"),
        ({"recipe": "zero4"}, r"no recipe 'zero4'.*did you mean 'zero"),
        ({"recipe": "ddp", "roles": {"a": "tensor"}}, r"recipe 'ddp' decides the roles"),
    ],
)
def test_what_no_recipe_is(search: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Search(**search)


@pytest.mark.parametrize(
    ("axes", "search", "message"),
    [
        (LINE, {"recipe": "hsdp"}, "takes two axes"),
        (LINE, {"recipe": "megatron", "roles": {"c": "data"}}, "axis 'c'; the mesh has a"),
        (
            LINE,
            {"recipe": "megatron", "roles": {"a": "pipe"}},
            "role 'pipe'; there are data, optimizer, shard, expert, context, tensor",
        ),
        (LINE, {"recipe": "megatron", "roles": {"a": "data"}}, "has no tensor axis"),
        ({"data": 2}, {"recipe": "megatron"}, "has no tensor axis"),
    ],
)
def test_axes_that_do_not_suit(axes: dict[str, int], search: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("mlp", axes, **search)


@pytest.mark.parametrize(
    ("name", "axes", "recipe", "message"),
    [
        ("mlp", {"a": 3}, "ddp", "8 samples do not divide along axis a=3; take a batch of a multiple of 3"),
        ("mlp", {"a": 4, "b": 4}, "fsdp", "8 samples do not divide along axes a=4 x b=4"),
        ("mlp", {"a": 5}, "megatron", "nothing is tensor-parallel along axis a=5"),
        ("mlp", {"a": 2}, "megatron-sequence", "the batch has none"),
    ],
)
def test_sizes_that_do_not_divide(name: str, axes: dict[str, int], recipe: str, message: str) -> None:
    with pytest.raises(InfeasibleError, match=re.escape(message)):
        planned(name, axes, recipe=recipe, padding=False)


@pytest.mark.parametrize(
    ("axes", "count", "message"),
    [
        (
            {"a": 4},
            4,
            "8 samples in 4 microbatches do not divide along axis a=4; take a batch of a multiple of 16, fewer",
        ),
        ({"a": 2}, 8, "(a microbatch, one of 8, has one sample); take a batch of a multiple of 16, fewer microbatches"),
    ],
)
def test_samples_of_microbatches_that_do_not_divide(axes: dict[str, int], count: int, message: str) -> None:
    """What is named is the batch that the user has."""
    with pytest.raises(InfeasibleError, match=re.escape(message)):
        planned("mlp", axes, recipe="ddp", padding=False, pins={"microbatches": count})


class Chunks(torch.nn.Module):
    """Looks at a sequence as two chunks, as scans do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).unflatten(1, (2, -1)).mean(2).square().sum(1).mean()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, r"\(32 positions of batch tensor 0\) cannot .* axis a=4: .*\.py:\d+\) computes it as 2 x 16, of which"),
        (3, r"the sequence \(32\) does not divide along axis a=3; pad it"),
    ],
)
def test_a_sequence_in_chunks_is_not_said_to_be_short(size: int, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        solve(program_of(Chunks(), (torch.randn(4, 32, 8),)), {"a": size}, "cpu", search=Search(roles={"a": "context"}))


def test_public_plan_and_verify() -> None:
    model, batch = zoo.mlp()
    plan = autopar.plan(model, batch, cluster="h100", axes=LINE, search=Search(recipe="fsdp"))
    assert autopar.verify(model, batch, LINE, plan=plan).max_error <= 1e-10


@pytest.mark.slow
def test_the_sequence_of_one_sample_is_split() -> None:
    program, _, values = zoo.captured("llama", batch=1, seq=16)
    plan = solve(program, {"a": 2}, "cpu", search=Search(recipe="megatron-sequence", padding=False))
    assert plan.predicted.collectives["a"]["reduce_scatter"] > 0
    report = compare(program, rewrite(program, plan), plan, values, torch.float64)
    assert report.max_error < 1e-10, report.worst


@pytest.mark.deep
def test_a_recipe_that_does_not_fit_is_compared_with_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What users would do next; one that does not fit even so says what it needs then."""
    layers = [m for _ in range(2) for m in (torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))]
    program = program_of(
        torch.nn.Sequential(*layers), (torch.randn(6, 64, 8),), loss_fn=lambda y, batch: y.square().mean()
    )  # six samples on two devices are no microbatches
    monkeypatch.setattr("autopar.explain.recipes.RECIPES", ("ddp", "fsdp"))
    found = solve(program, LINE, "h100")
    ample = solve(program, LINE, "h100", memory="1GiB", search=Search(recipe="fsdp"))
    budget = 0.8 * sum(ample.predicted.peak_bytes.values())
    rows = {row.recipe: row for row in compare_recipes(Found(found, program, budget, Search()))}
    assert {row.label for row in rows.values()} == {"ddp, recomputing", "fsdp, recomputing"}
    plan = rows["fsdp"].plan
    assert plan is not None
    assert plan.recompute
    assert sum(plan.predicted.peak_bytes.values()) <= budget
    rows = {row.recipe: row for row in compare_recipes(Found(found, program, 1000, Search()))}
    assert re.fullmatch(r"needs .* per device, .* more than the budget of .*", rows["fsdp"].reason)
