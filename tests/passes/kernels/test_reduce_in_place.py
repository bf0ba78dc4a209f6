"""reduce_in_place: all-reduces overwrite what dies with them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.ops.collectives import IN_PLACE, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory
from autopar.passes import PASSES
from autopar.passes.kernels.reduce_in_place import reduce_in_place
from autopar.search.options import MICROBATCHES, Search
from autopar.search.random_plan import random_plan
from autopar.verify.verify import compare
from tests import models
from tests.plans import follow_plan, hand_plan, show, tiny

AT = PASSES.index(reduce_in_place)


class Square(nn.Module):
    """One parameter of 128 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(64, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x).square().mean()


def reductions(program: Program) -> tuple[int, int]:
    """How many all-reduces copy, and how many write in place."""
    targets = [n.target for n in program.graph.graph.nodes]
    return sum(t in IN_PLACE for t in targets), sum(t in IN_PLACE.values() for t in targets)


def test_before_and_after() -> None:
    program, _ = tiny(True)
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)"}, results={"0": "S(0)"})
    assert "= all_reduce(mm.1, 'sum', 'a')" in show(rewrite(program, plan, passes=PASSES[:AT]))
    after = rewrite(program, plan)
    assert "= all_reduce_(mm.1, 'sum', 'a')" in show(after)
    program, _, _ = models.captured("mlp")
    plan = follow_plan(program, {"a": 4}, batch={"0": "S(0)", "1": "S(0)"})
    assert reductions(rewrite(program, plan))[1] == 2  # a bucket of all gradients, and the loss


def test_what_is_read_afterwards_is_copied() -> None:
    """The sum's terms go into something else, too."""
    program, _ = tiny()
    plan = hand_plan(program, {"a": 2}, choices={"mm": "k.0"}, batch={"0": "S(1)"}, parameters={"w": "S(0)"})

    def read_again(after: bool) -> Any:
        def insert(program: Program, plan: Plan) -> Program:
            graph = program.graph.graph
            (reduced,) = (n for n in graph.nodes if n.target is c10d.all_reduce.default)
            (wait,) = reduced.users
            with graph.inserting_after(wait) if after else graph.inserting_before(reduced):
                value: Any = reduced.args[0]
                other = graph.call_function(torch.ops.aten.neg.default, (value,))
            (relu,) = wait.users
            with graph.inserting_before(relu):
                total = graph.call_function(torch.ops.aten.add.Tensor, (wait, other))
            relu.update_arg(0, total)
            for node in (other, total):
                node.meta = dict(wait.meta)
            return program

        return insert

    for after in (True, False):
        passes = (*PASSES[:AT], read_again(after))
        local = rewrite(program, plan, passes=passes)
        assert reductions(reduce_in_place(local, plan)) == ((1, 0) if after else (0, 1))


def test_views_and_conditional_copies_may_be_inputs() -> None:
    """Of a parameter that is reduced, or of what may be a view of one, a copy is taken."""
    program, _ = tiny()
    plan = hand_plan(program, {"a": 2})

    def reduce_input(through: Any) -> Any:
        def insert(program: Program, plan: Plan) -> Program:
            graph = program.graph.graph
            mm = next(n for n in graph.nodes if n.name == "mm")
            weight: Any = mm.args[1]
            with graph.inserting_before(mm):
                value = through(graph, weight)
                total = graph.call_function(c10d.all_reduce.default, (value, "max", "a"))
                wait = graph.call_function(c10d.wait_tensor.default, (total,))
            mm.update_arg(1, wait)
            for node in (value, total, wait):
                node.meta = {**weight.meta, **node.meta}
            return program

        return insert

    def contiguous(graph: fx.Graph, weight: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.aten.contiguous.default, (weight,))

    for through in (lambda _, weight: weight, contiguous):
        local = rewrite(program, plan, passes=(*PASSES[:AT], reduce_input(through)))
        assert reductions(reduce_in_place(local, plan)) == (1, 0)


def test_microbatches_and_stages_are_left_alone() -> None:
    program, _, _ = models.captured("mlp")
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)", "1": "S(0)"})
    whole = rewrite(program, plan)
    assert reductions(whole)[1] > 0
    in_parts = solve(program, {"a": 2}, "cpu", search=Search(recipe="ddp", pins={MICROBATCHES: 2}))
    assert reductions(rewrite(program, in_parts))[1] == 0


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("mlp", 0),
        ("gpt2", 1),
        *(pytest.param("mlp", seed, marks=pytest.mark.deep) for seed in (1, 2, 3)),
        *(pytest.param("llama", seed, marks=pytest.mark.deep) for seed in range(4)),
        *(pytest.param("gpt2", seed, marks=pytest.mark.deep) for seed in (0, 2, 3)),
    ],
)
def test_random_plans(name: str, seed: int) -> None:
    """The emulator spoils what is overwritten: who still reads it gets a wrong result."""
    program, dims, values = models.captured(name)
    plan = random_plan(program, dims, {"a": 2, "b": 2}, follow_plan(program, {}).cluster, seed, recompute=True)
    plan = replace(plan, fingerprint=program.fingerprint)
    assert compare(program, rewrite(program, plan), plan, values, torch.float64).max_error < 1e-10


def test_the_emulator_spoils_what_is_overwritten() -> None:
    program, _, values = models.captured("mlp")
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)", "1": "S(0)"})

    def overwrite_all(program: Program, plan: Plan) -> Program:
        graph = program.graph.graph
        for node in [n for n in graph.nodes if n.target in IN_PLACE]:
            node.target = IN_PLACE[node.target]
            (wait,) = node.users
            with graph.inserting_after(wait):
                again = graph.call_function(torch.ops.aten.add.Tensor, (wait, node.args[0]))
            again.meta = dict(node.meta)
            wait.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)
        return program

    local = rewrite(program, plan, passes=(*PASSES[:AT], overwrite_all))
    assert not compare(program, local, plan, values, torch.float64).max_error < 1e9


def test_the_peak_falls_by_the_copy() -> None:
    """Data parallel, and one parameter: its gradient is there twice while it is reduced."""
    program = program_of(Square(), (torch.randn(4, 64),))
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)"})
    before, after = (peak_memory(rewrite(program, plan, passes=passes), plan) for passes in (PASSES[:AT], PASSES))
    gradients = sum(
        n.meta["val"].nbytes for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "parameter"
    )
    assert sum(before.values()) - sum(after.values()) == pytest.approx(gradients, rel=0.05)
