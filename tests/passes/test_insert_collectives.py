"""insert_collectives: the moves between what is made and what is needed, each once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.compiler import rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import Collective
from autopar.ir.program import Program
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.insert_collectives import insert_collectives
from autopar.search.options import Search
from autopar.verify.verify import compare
from tests import models
from tests.plans import follow_plan, hand_plan, show, tiny

PASSES = (annotate_layouts, insert_collectives)


def inserted(axes: dict[str, int], training: bool = False, **said: Any) -> Program:
    program, _ = tiny(training)
    return rewrite(program, hand_plan(program, axes, **said), passes=PASSES)


def collectives(program: Program) -> list[Collective]:
    return [info(n).collective for n in program.graph.graph.nodes if info(n).collective is not None]


def test_partial_is_reduced_in_front_of_a_nonlinear_operator() -> None:
    after = inserted(
        {"data": 2, "model": 2}, choices={"mm": "m.0 k.0", "relu": "a.0 R"}, batch={"0": "S(0) S(1)"},
        parameters={"w": "R S(0)"}, results={"0": "S(0) R"},
    )  # fmt: skip
    assert (
        show(after)
        == """\
w  # f32[w.0{model}, w.1]
batch0  # f32[batch{data}, w.0{model}]
mm = mm(batch0, w)  # f32[batch{data}, w.1] +sum{model}
all_reduce = all_reduce(mm, 'sum', 'model')  # all_reduce on model: 32 bytes
wait_tensor = wait_tensor(all_reduce)  # f32[batch{data}, w.1]
relu = relu(wait_tensor)  # f32[batch{data}, w.1]
return [relu]"""
    )


def test_every_other_kind_of_move() -> None:
    """A slice of the weight, a reduce-scatter behind a dim, an all-to-all."""
    after = inserted({"a": 2}, choices={"mm": "k.0", "relu": "b.0"}, batch={"0": "S(1)"}, results={"0": "S(0)"})
    assert (
        show(after)
        == """\
w  # f32[w.0, w.1]
batch0  # f32[batch, w.0{a}]
reshape = reshape(w, [1, 2, 16])
axis_index = axis_index('a')
select.int = select.int(reshape, 1, axis_index)
reshape.1 = reshape(select.int, [4, 4])
clone = clone(reshape.1)  # f32[w.0{a}, w.1]
mm = mm(batch0, clone)  # f32[batch, w.1] +sum{a}
reshape.2 = reshape(mm, [4, 2, 2])
permute = permute(reshape.2, [1, 0, 2])
reshape.3 = reshape(permute, [8, 2])
contiguous = contiguous(reshape.3)
reduce_scatter_tensor = reduce_scatter_tensor(contiguous, 'sum', 2, 'a')  # reduce_scatter on a: 64 bytes
wait_tensor = wait_tensor(reduce_scatter_tensor)
reshape.4 = reshape(wait_tensor, [4, 2])  # f32[batch, w.1{a}]
relu = relu(reshape.4)  # f32[batch, w.1{a}]
reshape.5 = reshape(relu, [1, 2, 4])
permute.1 = permute(reshape.5, [1, 0, 2])
reshape.6 = reshape(permute.1, [2, 4])
contiguous.1 = contiguous(reshape.6)
all_to_all_single = all_to_all_single(contiguous.1, [1, 1], [1, 1], 'a')  # all_to_all on a: 32 bytes
wait_tensor.1 = wait_tensor(all_to_all_single)
reshape.7 = reshape(wait_tensor.1, [2, 2, 2])
permute.2 = permute(reshape.7, [1, 0, 2])
reshape.8 = reshape(permute.2, [2, 4])
contiguous.2 = contiguous(reshape.8)  # f32[batch{a}, w.1]
return [contiguous.2]"""
    )


def test_a_part_does_not_keep_the_whole() -> None:
    """A gradient that is summed and cut down, to rows that lie together, takes the memory of these rows alone."""
    program, _ = tiny(True)
    plan = hand_plan(program, {"a": 2}, choices={"mm_1": "R"}, parameters={"w": "S(0)"})
    after = rewrite(program, plan)
    (gradient,) = (v for o, v in zip(after.outputs, after.output_values, strict=True) if o.kind == "gradient")
    value = gradient.meta["val"]
    assert value.shape == (4, 4)
    assert value.untyped_storage().nbytes() == value.nbytes


def test_relay_comes_first() -> None:
    after = inserted(
        {"a": 2}, choices={"mm": "k.0"}, consumer_layouts={"mm": "S(0)"}, batch={"0": "S(1)"}, parameters={"w": "S(0)"}
    )
    assert [c.kind for c in collectives(after)] == ["reduce_scatter", "all_gather"]


def test_nothing_to_do() -> None:
    program, _ = tiny(True)
    after = rewrite(program, hand_plan(program, {"a": 2}), passes=PASSES)
    assert [n.name for n in after.graph.graph.nodes] == [n.name for n in program.graph.graph.nodes]


def test_a_value_is_moved_once_for_all_its_users() -> None:
    """relu is wanted whole by threshold_backward and as a result."""
    after = inserted({"a": 2}, True, choices={"mm": "m.0", "relu": "a.0", "mm_1": "R"}, batch={"0": "S(0)"})
    gathers = [c for c in collectives(after) if c.kind == "all_gather"]
    assert len(gathers) == 2  # relu, and the batch for the weight's gradient
    gathered = [n for n in after.graph.graph.nodes if n.name.startswith("wait_tensor") and len(n.users) == 2]
    assert gathered


def test_gradients_are_marked() -> None:
    program, _ = tiny(True)
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)"}, results={"0": "S(0)"})
    after = rewrite(program, plan, passes=PASSES)
    assert collectives(after) == [Collective("all_reduce", "a", 128.0, 1, True)]


def test_forward_value_for_the_backward_pass_moves_there() -> None:
    after = inserted(
        {"a": 2}, True, choices={"mm": "m.0", "relu": "a.0", "t": "R"}, batch={"0": "S(0)"}, results={"0": "S(0)"}
    )
    tags = {n.meta.get("partitioner_tag") for n in after.graph.graph.nodes if info(n).collective is not None}
    assert tags == {"is_backward"}


def test_what_makes_a_gradient_smaller_comes_as_soon_as_it_is_known() -> None:
    """The second linear's gradient does not wait, whole, for the first one's."""
    program, _, values = models.captured("mlp")
    plan = replace(solve(program, {"a": 2}, "cpu", search=Search(recipe="fsdp")), overlap=False)
    after = rewrite(program, plan)
    order = list(after.graph.graph.nodes)
    last = max(i for i, n in enumerate(order) if n.target is torch.ops.aten.mm.default)
    scattered = [i for i, n in enumerate(order) if (c := info(n).collective) and c.kind == "reduce_scatter"]
    assert len(scattered) == 4
    assert sum(i < last for i in scattered) == 2
    assert compare(program, after, plan, values, torch.float64).max_error < 1e-12
