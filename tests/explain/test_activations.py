"""Why a tensor is saved or recomputed, and what a little more memory would save."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, program_to_plan, rewrite, solve
from autopar.explain.activations import activations
from autopar.explain.tables.activations import activations_dict, activations_table
from autopar.ir.graph import is_backward
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import liveness
from autopar.parallelize import parallelize
from autopar.search.options import Search
from tests import models

BLOCKS, MIB = 6, 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@cache
def captured(whole: bool) -> Program:
    with torch.device("meta"):
        model, batch = Blocks(), (torch.empty(8192, 256),)
    return program_of(model, batch) if whole else program_to_plan(model, batch)


@cache
def solved(memory: int, whole: bool = False) -> Plan:
    """On one device; by how much memory is short decides what is recomputed."""
    search = Search(recipe="ddp", pins={"recompute": "search"})  # little but states to search
    return solve(captured(whole), {"gpu": 1}, "h100", memory=memory * MIB, search=search)


@pytest.mark.slow
def test_the_price_is_what_more_memory_saves() -> None:
    less, more = solved(420), solved(480)
    saved = less.certificate.objective - more.certificate.objective
    room = sum(more.predicted.peak_bytes.values()) - sum(less.predicted.peak_bytes.values())
    assert saved > 0 and room > 0
    # Between the two only the number of blocks that recompute the same differs, so that the frontier is a line there.
    assert saved == pytest.approx(less.certificate.memory_price * room, rel=0.3)
    assert solved(5000).certificate.memory_price == 0.0


@pytest.mark.some(1)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_recomputed_is_worth_it(whole: bool) -> None:
    plan, program = solved(420, whole), captured(whole)
    assert (program.repeat is None) == whole
    tensors = activations(program, plan, "blocks")
    states = {t.state for t in tensors}
    assert states == {"not saved", "saved", "recomputed"}
    for tensor in tensors:
        assert tensor.worth == pytest.approx(tensor.size * plan.certificate.memory_price)
        if tensor.state == "recomputed":
            assert tensor.seconds <= tensor.worth * (1 + 1e-6), tensor
        if tensor.why == "its bytes are worth less":
            assert tensor.seconds > tensor.worth
    acts = [t for t in tensors if t.name == "blocks.*.act (gelu)"]
    assert sum(t.count for t in acts) == BLOCKS
    assert {t.state for t in acts} == {"recomputed", "saved"}
    assert {t.size for t in acts} == {8192 * 1024 * 4}
    saved_act = next(t for t in acts if t.state == "saved")
    assert saved_act.why == "equal cost at this price: the rest of the budget decides"
    assert next(t for t in acts if t.state == "recomputed").why == "from blocks.*.up (add), which is saved"


def test_what_is_saved_adds_up_to_what_the_graph_saves() -> None:
    program, plan = captured(True), solved(420, True)
    held = sum(
        t.size * t.count for name in ("first", "blocks") for t in activations(program, plan, name) if t.state == "saved"
    )
    local = rewrite(program, plan)
    changes = [c for c in liveness(local, plan) if c.node is not None and c.category == "activations"]
    made = sum(c.size for c in changes if c.starts and not is_backward(c.node))  # type: ignore[arg-type]
    assert held == pytest.approx(made, rel=0.02)


@pytest.mark.slow
def test_parameters_are_re_gathered() -> None:
    program = captured(True)
    plan = solve(program, {"gpu": 8}, "h100", memory=70 * MIB, search=Search(recipe="fsdp", pins={"microbatches": 1}))
    (weight,) = activations(program, plan, "blocks.1.up.weight")
    assert weight.name == "blocks.*.up.weight, gathered"
    assert weight.state == "re-gathered"
    assert weight.size == 256 * 1024 * 4
    assert weight.why == "from parameters or the batch"
    assert 0 < weight.seconds <= weight.worth * (1 + 1e-6)


@pytest.mark.parametrize(("gap", "expected"), [(0.5, "is within the plan's gap"), (0.0, "space does not have it")])
def test_what_would_pay_is_set_beside_the_gap(gap: float, expected: str) -> None:
    """At a higher price than the plan was found at, what it saves would pay to be recomputed."""
    plan = solved(420)
    own = plan.certificate
    bound, price = own.objective * (1 - gap), 1.5 * own.memory_price
    plan = replace(plan, certificate=replace(own, memory_price=price, lower_bound=bound))
    found = [t for t in activations(captured(False), plan, "blocks") if "would save" in t.why]
    assert found
    for tensor in found:
        assert tensor.why.endswith(expected)
        assert tensor.seconds < tensor.worth


def test_without_a_budget_nothing_is_worth_anything() -> None:
    program, _, _ = models.captured("mlp")
    plan = solve(program, {"a": 2}, "h100")
    tensors = activations(program, plan, "relu")
    assert {t.state for t in tensors} <= {"saved", "not saved"}
    assert {t.why for t in tensors if t.state == "saved"} == {"memory is not short"}
    assert "price of memory" not in activations_table(plan, tensors)
    with pytest.raises(ValueError, match=r"'upp'; there are .*up"):
        activations(program, plan, "upp")


def test_the_table_says_what_decides() -> None:
    plan = solved(420)
    tensors = activations(captured(False), plan, "blocks.3.act")
    text = activations_table(plan, tensors)
    assert "more per device would save about" in text
    assert f"gelu) x{tensors[0].count} " in text
    assert "recomputed: takes" in text and "its bytes are worth" in text.replace("\n", " ")
    facts = activations_dict("act", plan, tensors)
    assert facts["memory_price"] == plan.certificate.memory_price
    assert [t["state"] for t in facts["tensors"]] == [t.state for t in tensors]


def test_a_module_explains_itself() -> None:
    model, batch = models.mlp()
    model = parallelize(model, None, batch)
    text = model.explain("up")
    assert "up.weight" in text
    assert "for the backward pass" in text
    assert "memory is not short" in model.explain("relu")
