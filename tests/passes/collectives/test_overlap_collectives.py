"""overlap_collectives: what is sent runs beside kernels, and computes the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from torch import fx

from autopar.compiler import plan as plan_of
from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.graph import block_of, is_backward, module_path
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import waits_for
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.sharding.graph_order import parameter_only
from autopar.sharding.redistribute.moves import Machine
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.verify.verify import compare, verify
from tests import models

# Their names are those of their functions in the package.
bucketing = import_module("autopar.passes.collectives.bucket_collectives")
overlapping = import_module("autopar.passes.collectives.overlap_collectives")

H100 = Cluster.preset("h100").device
LAYERS = 3
AXES = ({"data": 4}, {"node": 2, "gpu": 2})


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of small models are buckets of their own, as those of large ones are."""
    monkeypatch.setattr(bucketing, "SMALLEST", 1)
    monkeypatch.setattr(bucketing, "LARGEST", 2**12)


@cache
def planned(recipe: str, axes: tuple[tuple[str, int], ...]) -> tuple[Program, list[torch.Tensor], Plan]:
    program, _, values = models.captured("llama", layers=LAYERS)
    # Re-gathered in the backward pass where memory is short, as FSDP does.
    search = Search(recipe=recipe, pins={"recompute": "regather"}) if recipe == "fsdp" else Search(recipe=recipe)
    return program, values, solve(program, dict(axes), "h100", search=search)


def overlapped(recipe: str, axes: dict[str, int]) -> tuple[Program, Program, list[torch.Tensor], Plan]:
    program, values, plan = planned(recipe, tuple(axes.items()))
    assert plan.overlap
    return program, rewrite(program, plan), values, plan


def collectives(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.graph.nodes if info(n).collective]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("recipe", "axes"),
    [
        ("ddp", AXES[1]),
        *(("fsdp", axes) for axes in AXES),
        ("hsdp", AXES[1]),
        ("megatron", AXES[1]),
        pytest.param("ddp", AXES[0], marks=pytest.mark.deep),
    ],
)
def test_computes_the_same(recipe: str, axes: dict[str, int]) -> None:
    program, local, values, plan = overlapped(recipe, axes)
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12


@pytest.mark.parametrize("axes", AXES)
def test_a_layer_has_few_collectives(axes: dict[str, int]) -> None:
    _, local, _, plan = overlapped("fsdp", axes)
    alone = rewrite(_program("fsdp", axes), replace(plan, overlap=False))
    counts = Counter((c.axis, c.kind) for n in collectives(local) if (c := info(n).collective))
    before = Counter((c.axis, c.kind) for n in collectives(alone) if (c := info(n).collective))
    assert sum(before.values()) > 4 * sum(counts.values())
    # Besides the layers: embedding, last norm and head, and the loss.
    assert all(n <= LAYERS + 3 for (_, kind), n in counts.items() if kind == "reduce_scatter")
    members = [sum(c.members for n in collectives(p) if (c := info(n).collective)) for p in (local, alone)]
    assert members[0] == members[1]


def _program(recipe: str, axes: dict[str, int]) -> Program:
    return planned(recipe, tuple(axes.items()))[0]


def test_gathers_are_a_layer_ahead_and_reductions_a_layer_behind() -> None:
    _, local, _, _ = overlapped("fsdp", {"data": 4})
    order = {n: i for i, n in enumerate(local.graph.graph.nodes)}
    products = [i for n, i in order.items() if n.target is torch.ops.aten.mm.default]

    def between(node: fx.Node) -> int:
        first = min(order[w] for w in waits_for(node))
        return sum(order[node] < i < first for i in products)

    gathers = [n for n in collectives(local) if info(n).collective.kind == "all_gather"]  # type: ignore[union-attr]
    in_layers = [n for n in gathers if "layers" in (info(n).module_path or "")]
    # All but the first wait for nothing: 7 products of the layer before are in between.
    assert sum(between(n) >= 7 for n in in_layers) >= len(in_layers) - 2
    scatters = [n for n in collectives(local) if info(n).collective.kind == "reduce_scatter"]  # type: ignore[union-attr]
    beside = [order[waits_for(n)[0]] - order[n] for n in scatters]
    # Tiny sums are over after a few kernels.
    assert sum(nodes > 3 for nodes in beside) >= len(scatters) - 2


def test_gradients_of_weights_fill_waits() -> None:
    _, local, _, _ = overlapped("megatron", {"node": 2, "gpu": 2})
    order = {n: i for i, n in enumerate(local.graph.graph.nodes)}
    products = [i for n, i in order.items() if n.target is torch.ops.aten.mm.default]
    made = (info(n).collective for n in order)
    blocking = [n for n, c in zip(order, made, strict=True) if c and c.axis == "gpu" and is_backward(n)]
    filled = [n for n in blocking if any(order[n] < i < order[waits_for(n)[0]] for i in products)]
    # Two a layer, in front of attention and of the ffn, but for the last: nothing waits for it.
    assert len(filled) >= 2 * LAYERS - 1


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["fsdp", "hsdp", "megatron"])
def test_the_simulated_step_is_shorter(recipe: str) -> None:
    program, local, _, plan = overlapped(recipe, {"node": 2, "gpu": 2})
    one_by_one = replace(plan, overlap=False)
    before = simulate(emitted(rewrite(program, one_by_one), one_by_one))
    after = simulate(emitted(local, plan))
    assert after.step_seconds < before.step_seconds
    assert after.exposed_communication[0] < 0.7 * before.exposed_communication[0]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))]


@cache
def drawn(seed: int) -> tuple[Program, Program, list[torch.Tensor], Plan]:
    """A random plan of a model on two axes, as it is emitted."""
    program, dims, values = models.captured("llama", layers=LAYERS)
    plan = replace(random_plan(program, dims, AXES[1], Cluster.preset("h100"), seed), overlap=True)
    return program, rewrite(program, plan), values, plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gathers_of_any_layout_are_ahead(seed: int) -> None:
    """In layouts that are sliced first, by the device's index, too; of gathers in several hops the last one."""
    _, local, _, _ = drawn(seed)
    order = {n: i for i, n in enumerate(local.graph.graph.nodes)}
    static = set(parameter_only(local))
    kernels = [n for n in order if n.op == "call_function" and n not in static and not is_backward(n)]
    blocks = {n: block_of(module_path(n), local.blocks) for n in kernels}
    begins = {b: min(order[n] for n in kernels if blocks[n] == b) for b in set(blocks.values()) if b}
    gathers = [n for n in collectives(local) if n in static and not is_backward(n)]
    uses: dict[fx.Node, str | None] = {}
    for node in gathers:
        found, left = {node}, [node]
        while left:
            for user in left.pop().users:
                if user in blocks:
                    uses[node] = blocks[user]
                elif user in static and user not in found:
                    found.add(user)
                    left.append(user)
        if not found.isdisjoint(set(gathers) - {node}):
            uses.pop(node, None)  # another hop comes after it
    inside = {n: b for n, b in uses.items() if b is not None}
    assert inside
    assert all(order[n] < begins[b] for n, b in inside.items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_compute_the_same(seed: int) -> None:
    program, local, values, plan = drawn(seed)
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12


@pytest.mark.deep
def test_what_kernels_wait_for_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction or a gather that is issued just before would hold it up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.undo()  # buckets of their own size
    config = LlamaConfig(num_hidden_layers=LAYERS, intermediate_size=16384, num_attention_heads=8, use_cache=False)
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).to(torch.bfloat16), torch.zeros(8, 2048, dtype=torch.long)
    program = program_of(model, {"input_ids": ids, "labels": ids})
    # It shards parameters and activations over the same axes.
    plan = replace(random_plan(program, analyze(program), AXES[1], Cluster.preset("h100"), 0), overlap=True)

    def seconds() -> float:
        return simulate(emitted(rewrite(program, plan), plan)).step_seconds

    after = seconds()
    monkeypatch.setattr(overlapping._Schedule, "_let_first", lambda self, at, *_: at)
    assert after < 0.998 * seconds()


@pytest.mark.slow
def test_what_is_in_flight_must_fit() -> None:
    program, _, plan = planned("fsdp", tuple(AXES[1].items()))
    needed = [sum(peak_memory(rewrite(program, p), p).values()) for p in (plan, replace(plan, overlap=False))]
    assert needed[0] > needed[1]
    search = Search(recipe="fsdp", pins={"recompute": "regather", "microbatches": 1})
    tight = solve(program, AXES[1], "h100", memory=needed[1] + 1, search=search)
    # It may overlap if it re-gathers more; in less memory than any such plan takes, nothing does.
    assert sum(peak_memory(rewrite(program, tight), tight).values()) <= needed[1] + 1
    roomy = solve(program, AXES[1], "h100", memory=needed[0] + 1, search=search)
    assert roomy.overlap
    assert sum(roomy.predicted.peak_bytes.values()) == needed[0]


def test_one_axis_of_one_device_sends_nothing() -> None:
    program, _, _ = models.captured("mlp")
    assert not solve(program, {"data": 1}, "h100").overlap


def test_plans_say_whether_they_overlap() -> None:
    _, _, plan = planned("fsdp", (("data", 4),))
    data = plan.to_dict()
    assert Plan.from_dict(data).overlap
    del data["overlap"]
    assert not Plan.from_dict(data).overlap


def mixture(layers: int) -> Program:
    """A mixture of experts large enough to hide its gathers, without values."""
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        config = MixtralConfig(num_hidden_layers=layers, use_cache=False, tie_word_embeddings=False)  # 8x7B's sizes
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(128, 2048, dtype=torch.long)
    return program_of(model, {"input_ids": ids, "labels": ids})


@pytest.mark.deep
def test_a_layer_that_is_gathered_in_several_hops_takes_as_long_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers over nodes, an exchange, gathers within: kernels between them stood behind what they waited for.

    Two layers more, so that the first gathers and the last reductions, which nothing hides, do not count.
    """
    monkeypatch.undo()  # buckets of their own size
    found = []
    for layers in (4, 6):
        program = mixture(layers)
        plan = solve(program, {"node": 8, "gpu": 8}, "h100", search=Search(recipe="fsdp"))
        found.append((plan.predicted.step_seconds, simulate(emitted(rewrite(program, plan), plan)).step_seconds))
    predicted, simulated = (b - a for a, b in zip(*found, strict=True))
    assert simulated < 1.06 * predicted


def test_exchanges_are_packed_where_that_takes_less_than_a_message() -> None:
    machine = Machine(("node", "gpu"), (8, 8), Cluster.preset("h100").link_for({"node": 8, "gpu": 8}), H100)
    assert not bucketing.packs_in_vain(4 * 2**20, machine, 1)  # the weight of a projection
    assert bucketing.packs_in_vain(224 * 2**20, machine, 1)  # those of a mixture's experts


@pytest.mark.slow
def test_exchanges_that_stay_alone_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    program, dims, values = models.captured("mlp")
    exchange, changed = torch.ops._c10d_functional.all_to_all_single.default, 0
    for seed in range(6):
        plan = replace(random_plan(program, dims, {"a": 2, "b": 2}, Cluster.preset("h100"), seed), overlap=True)
        counts = []
        for alone in (False, True):
            monkeypatch.setattr(bucketing, "packs_in_vain", lambda *_, alone=alone: alone)
            local = rewrite(program, plan)
            counts.append(sum(n.target is exchange for n in local.graph.graph.nodes))
        changed += counts[0] < counts[1]
        if counts[0] < counts[1]:
            assert compare(program, local, plan, values, torch.float64).max_error < 1e-10
    assert changed, "no exchange was packed"


class Handed(torch.nn.Module):
    """A parameter, as it is, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean(), "scale": self.scale.detach()}


def test_what_is_gathered_for_the_caller_alone() -> None:
    """A parameter that no kernel reads as it was gathered; the output has no place in the order."""
    model, batch = Handed(), (torch.randn(4, 8),)
    search = Search(pins={"scale": "S(0)", "result.1": "R"})
    found = plan_of(model, batch, cluster="h100", axes={"a": 2}, search=search)
    report = verify(model, batch, {"a": 2}, plan=replace(found, overlap=True))
    assert report.max_error < 1e-12
