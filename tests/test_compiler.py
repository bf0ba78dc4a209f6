"""The compiler as a whole: passes in order; what is emitted is what was predicted; what the checks catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import autopar
from autopar.compiler import plan, program_of, rewrite, solve
from autopar.costs.cluster import Cluster, Device, Link
from autopar.errors import PassError, PlanError
from autopar.ir.layout import Partial, Replicate, Split
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.ops.collectives import ALL_REDUCES, GROUP_ARGUMENT, axis_index, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES, PASSES
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.canonicalize.attention import canonicalize_attention
from autopar.passes.canonicalize.operators import canonicalize
from autopar.passes.canonicalize.rng import canonicalize_random
from autopar.passes.collectives.bucket_collectives import bucket_collectives
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize_shapes import localize_shapes
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import Dims
from autopar.verify.emulate import census
from autopar.verify.verify import compare
from tests import models
from tests.plans import follow_plan, hand_plan, show, tiny

aten = torch.ops.aten

# Devices so slow, and links so fast, that even the smallest model is worth splitting.
SLOW = Device("slow", {"float32": 1e6}, 1e9, 1e6, 1e-9)
EAGER = Cluster("eager to split", SLOW, (Link("fast", 1e9, 1e-9),))


def test_passes_in_order() -> None:
    assert [p.__name__ for p in PASSES] == [
        "pad_dims", "copy_for_backward", "annotate_layouts", "insert_recompute", "hoist_invariants",
        "insert_collectives", "localize_shapes", "localize_random", "lower_operators", "draw_in_attention",
        "assign_stages", "insert_offload", "join_maxima", "bucket_collectives", "eliminate_dead_code", "scatter_sends",
        "delay_gradients", "fill_waits", "overlap_collectives", "chunk_collectives", "insert_contiguous",
        "merge_views", "reduce_in_place", "fill_in_place", "add_bias_in_product",
    ]  # fmt: skip


def test_every_pass_shows_its_rewrite() -> None:
    import sys

    for step in (
        canonicalize,
        canonicalize_attention,
        canonicalize_random,
        *dict.fromkeys((*PASSES, *DETERMINISTIC_PASSES)),
    ):
        text = sys.modules[step.__module__].__doc__ or ""
        assert text.startswith(f"{step.__name__}: ")
        assert "Before::" in text or "Before (" in text
        assert "After" in text


# --- prediction and emission


REST = [(sizes, kind) for sizes in ((4,), (2, 2)) for kind in ("random", "searched")]
"""Further meshes and plans, for `make test-deep`."""


@cache
def planned(name: str, sizes: tuple[int, ...], kind: str) -> tuple[Program, Dims, list[torch.Tensor], Plan]:
    program, dims, values = models.captured(name, **({} if name == "mlp" else {"seq": 4}))
    axes = dict(zip("ab", sizes, strict=False))
    if kind == "searched":
        return program, dims, values, solve(program, axes, EAGER)
    return program, dims, values, predict(program, dims, random_plan(program, dims, axes, Cluster.preset("h100"), 3))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [
        ("mlp", (2, 2), "random"),
        ("llama", (4,), "searched"),
        *(pytest.param(n, *c, marks=pytest.mark.deep) for n in ("mlp", "llama", "gpt2") for c in REST),
    ],
)
def test_census_equals_the_prediction(name: str, sizes: tuple[int, ...], kind: str) -> None:
    program, _, _, found = planned(name, sizes, kind)
    counted = census(rewrite(program, found))
    counts = {axis: {k: n for k, (n, _) in kinds.items()} for axis, kinds in counted.items()}
    assert counts == {axis: dict(kinds) for axis, kinds in found.predicted.collectives.items() if kinds}
    sent = {axis: sum(b for _, b in kinds.values()) for axis, kinds in counted.items()}
    for axis in found.axis_names:
        assert sent.get(axis, 0.0) == pytest.approx(found.predicted.communication_bytes[axis])
    assert counts, "a plan without any collective tests nothing"


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.deep)])
def test_searched_plan_is_right(name: str) -> None:
    program, _, values, found = planned(name, (2, 2), "searched")
    report = compare(program, rewrite(program, found), found, values, torch.float64)
    assert report.max_error < 1e-10
    assert found.certificate.objective == pytest.approx(found.predicted.step_seconds, rel=1e-6)


def test_rewriting_leaves_the_program_alone() -> None:
    program, _, _, found = planned("mlp", (2, 2), "random")
    text, metas = show(program), [sorted(n.meta) for n in program.graph.graph.nodes]
    first = show(rewrite(program, found))
    assert show(program) == text
    assert [sorted(n.meta) for n in program.graph.graph.nodes] == metas
    assert show(rewrite(program, found)) == first


# --- what the checker catches between passes


def broken(tamper: Callable[[Program], None], after: str = "localize_shapes") -> str:
    """Rewrite with a pass that does damage behind another one; the error's text."""
    until = [p.__name__ for p in PASSES].index(after) + 1
    program, _ = tiny()
    found = hand_plan(program, {"a": 2}, {"mm": "k.0"}, batch={"0": "S(1)"}, parameters={"w": "S(0)"})

    def saboteur(program: Program, plan: Plan) -> Program:
        tamper(program)
        return program

    with pytest.raises(PassError) as caught:
        rewrite(program, found, passes=(*PASSES[:until], saboteur))
    assert caught.value.name == "saboteur"
    assert caught.value.previous == tuple(p.__name__ for p in PASSES[:until])
    assert f"pass saboteur failed after ({', '.join(caught.value.previous)})" in str(caught.value)
    return str(caught.value)


def node(program: Program, name: str) -> fx.Node:
    return next(n for n in program.graph.graph.nodes if n.name.startswith(name))


def test_dropped_collective_is_caught() -> None:
    def drop(program: Program) -> None:
        node(program, "relu").update_arg(0, node(program, "mm"))

    text = broken(drop)
    assert "node relu takes mm as (R), and it has layout (P(sum))" in text


def test_half_a_move_is_caught() -> None:
    def drop(program: Program) -> None:
        node(program, "relu").update_arg(0, node(program, "all_reduce"))

    assert "node relu takes all_reduce" in broken(drop)


def note(node: fx.Node, **changes: Any) -> None:
    """Say something else of a node."""
    set_info(node, replace(info(node), **changes))


def test_layout_that_nobody_made_is_caught() -> None:
    def lie(program: Program) -> None:
        note(node(program, "mm"), layouts=((Split(0),),))

    assert "computes a local tensor of shape (4, 4), not (2, 4)" in broken(lie)


def test_wrong_argument_layout_is_caught() -> None:
    def lie(program: Program) -> None:
        note(node(program, "relu"), input_layouts=((Partial(),),))

    assert "node relu takes wait_tensor_default as (P(sum)), and it has layout (R)" in broken(lie, "insert_collectives")


def test_wrong_output_layout_is_caught() -> None:
    def lie(program: Program) -> None:
        note(node(program, "output"), input_layouts=((Split(1),),))

    assert "node output takes relu as (S(1.0))" in broken(lie, "insert_collectives")


def test_missing_layout_is_caught() -> None:
    def forget(program: Program) -> None:
        note(node(program, "mm"), layouts=())

    assert "node mm has no layout" in broken(forget, "annotate_layouts")


def test_wrong_local_shape_is_caught() -> None:
    def resize(program: Program) -> None:
        relu = node(program, "relu")
        relu.meta["val"] = relu.meta["val"].new_empty(3, 3)

    assert "node relu computes a local tensor of shape (3, 3), not (4, 4)" in broken(resize)


def test_malformed_graph_is_caught() -> None:
    def reorder(program: Program) -> None:
        node(program, "mm").append(
            node(program, "w") if any(n.name == "w" for n in program.graph.graph.nodes) else node(program, "arg")
        )

    broken(reorder, "annotate_layouts")


def test_local_arguments_that_do_not_fit_are_caught() -> None:
    program, _ = tiny()
    found = follow_plan(program, {"a": 2}, batch={"0": "S(1)"}, parameters={"w": "S(0)"})

    def saboteur(program: Program, plan: Plan) -> Program:
        first = program.placeholders[0]
        note(first, layouts=((Replicate(),),))
        return program

    with pytest.raises(
        PassError, match=r"pass localize_shapes failed after \(annotate_layouts, insert_coll.*\): node mm"
    ):
        rewrite(program, found, passes=(annotate_layouts, insert_collectives, _unchecked(saboteur), localize_shapes))


def _unchecked(step: Callable[[Program, Plan], Program]) -> Callable[[Program, Plan], Program]:
    def insert_collisions(program: Program, plan: Plan) -> Program:
        set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts",)))
        return step(program, plan)

    return insert_collisions


def test_plan_of_another_program() -> None:
    program, _ = tiny()
    other, _ = tiny(True)
    with pytest.raises(PlanError, match=r"plan is for another graph .*plan again"):
        rewrite(other, follow_plan(program, {"a": 2}))


# --- what verification catches: every one of these programs passes the checker, and is wrong

MEGATRON = {"up.weight": "R S(0)", "up.bias": "R S(0)", "down.weight": "R S(1)"}


def megatron(seed_passes: bool = True) -> tuple[Program, Dims, list[torch.Tensor], Plan, Program]:
    """Data parallel on one axis, split hidden units on the other; without buckets each gradient is reduced alone."""
    program, dims, values = models.captured("mlp")
    found = follow_plan(program, {"data": 2, "model": 2}, parameters=MEGATRON, batch={"0": "S(0) R", "1": "S(0) R"})
    passes = tuple(p for p in PASSES if seed_passes or p is not bucket_collectives)
    return program, dims, values, found, rewrite(program, found, passes=passes)


def error(mutate: Callable[[Program], None]) -> float:
    program, _, values, found, local = megatron(False)
    mutate(local)
    local.graph.graph.lint()
    local.graph.recompile()
    return compare(program, local, found, values, torch.float64).max_error


def reductions(program: Program, gradient: bool) -> list[fx.Node]:
    return [n for n in program.graph.graph.nodes if n.target in ALL_REDUCES and info(n).collective.gradient is gradient]


def test_the_plan_is_right_before_it_is_mutated() -> None:
    assert error(lambda local: None) < 1e-12
    local = megatron(False)[-1]
    assert len(reductions(local, False)) >= 2  # behind the second layer, and the loss
    assert len(reductions(local, True)) >= 4


def test_every_lost_reduction_is_seen() -> None:
    """Of an activation, of the loss, of each gradient."""
    for gradient in (False, True):
        for number in range(len(reductions(megatron(False)[-1], gradient))):

            def drop(local: Program, gradient: bool = gradient, number: int = number) -> None:
                reduced = reductions(local, gradient)[number]
                wait = next(iter(reduced.users))
                wait.replace_all_uses_with(reduced.args[0])
                for node in (wait, reduced):
                    local.graph.graph.erase_node(node)

            assert error(drop) > 1e-6, (gradient, number)


def test_every_gradient_reduced_twice_is_seen() -> None:
    for number in range(len(reductions(megatron(False)[-1], True))):

        def twice(local: Program, number: int = number) -> None:
            first = reductions(local, True)[number]
            wait = next(iter(first.users))
            with local.graph.graph.inserting_after(wait):
                again = local.graph.graph.call_function(c10d.all_reduce.default, (wait, *first.args[1:]))
            wait.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

        assert error(twice) > 1e-6, number


def test_swapped_axes_are_seen() -> None:
    def swap(local: Program) -> None:
        other = {"data": "model", "model": "data"}
        for n in local.graph.graph.nodes:
            position = 0 if n.target is axis_index else GROUP_ARGUMENT.get(n.target)
            if position is not None:
                n.update_arg(position, other[str(n.args[position])])

    assert error(swap) > 1e-6


def test_blocks_of_swapped_axes_are_seen() -> None:
    """The same graph on blocks that were cut for the axes in the other order."""
    program, _, values, found, local = megatron()
    turned = replace(found, axes=tuple(reversed(found.axes)))
    assert compare(program, local, turned, values, torch.float64).max_error > 1e-6


@pytest.mark.parametrize(("factor", "seen"), [(2.0, True), (1.0 + 1e-5, True), (1.0, False)])
def test_a_scaled_value_is_seen(factor: float, seen: bool) -> None:
    def scale(local: Program) -> None:
        wait = next(iter(reductions(local, False)[0].users))
        with local.graph.graph.inserting_after(wait):
            scaled = local.graph.graph.call_function(aten.mul.Scalar, (wait, factor))
        wait.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    assert (error(scale) > 1e-6) is seen


def test_maximum_instead_of_sum_is_seen() -> None:
    def change(local: Program) -> None:
        reductions(local, False)[0].update_arg(1, "max")

    assert error(change) > 1e-6


def test_replicas_that_differ_are_seen() -> None:
    """A result that is right on one rank only."""

    def shift(local: Program) -> None:
        graph = local.graph.graph
        output = local.output_node
        values = list(output.args[0])  # type: ignore[arg-type]
        with graph.inserting_before(output):
            index = graph.call_function(axis_index, ("model",))
            values[0] = graph.call_function(aten.add.Tensor, (values[0], index))
        output.args = (values,)

    assert error(shift) > 1e-6


# --- `plan`


def test_plan_defaults() -> None:
    model, batch = models.mlp()
    found = plan(model, batch, cluster="h100")
    assert found.axes == (("device", 8),)
    assert plan(model, batch, cluster="cpu").axes == (("device", 1),)
    with torch.device("meta"):
        meta = models.Mlp(16, 32)
    assert plan(meta, {k: v.to("meta") for k, v in batch.items()}, cluster="h100") == found


def test_plan_of_a_mesh_of_one_device_moves_nothing() -> None:
    model, batch = models.mlp()
    found = plan(model, batch, cluster=EAGER, axes={"a": 1})
    assert found.predicted.communication_bytes == {"a": 0.0}
    assert autopar.verify(model, batch, {"a": 1}, plan=found).max_error < 1e-12


def test_plan_errors() -> None:
    model, batch = models.mlp()
    with pytest.raises(ValueError, match=r"precision='int8': expected 'bf16'"):
        plan(model, batch, cluster="cpu", precision="int8")
    with pytest.raises(ValueError, match=r"neither a file nor a preset"):
        plan(model, batch, cluster="h1000")
    alone = autopar.Search(pins={"overlap": "none"})
    with pytest.raises(autopar.InfeasibleError, match=r"budget is .* are missing") as caught:
        plan(model, batch, cluster="cpu", axes={"a": 4}, memory=1000, search=alone)
    assert caught.value.needed is not None and caught.value.needed > 1000
    # The figure in the error is the smallest budget that does.
    found = plan(model, batch, cluster="cpu", axes={"a": 4}, memory=caught.value.needed, search=alone)
    used = found.predicted.memory_bytes
    assert used["parameters"] + used["gradients"] + used["optimizer"] <= caught.value.needed


@pytest.mark.slow
def test_memory_is_kept() -> None:
    model, batch = models.mlp(hidden=16)
    program = program_of(model, batch)
    free = solve(program, {"a": 4}, "cpu")
    whole = sum(free.predicted.memory_bytes.values())
    tight = solve(program, {"a": 4}, "cpu", memory=whole / 2)
    assert sum(tight.predicted.memory_bytes.values()) <= whole / 2
    assert tight.certificate.objective >= free.certificate.objective
    assert autopar.verify(model, batch, {"a": 4}, plan=tight).max_error < 1e-12
