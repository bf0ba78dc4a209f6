"""Why does a tensor lie as it does? Its other placements, solved again."""

from functools import cache

import pytest
import torch

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.explain.tables.difference import difference, difference_table
from autopar.explain.tables.why_not import answers_dict, answers_table
from autopar.explain.why_not import alternatives, ask, layout_in, parse_wanted, tensor_of
from autopar.ir.layout import parse_placement
from autopar.ir.plan import Plan
from autopar.verify.verify import compare
from tests import models

AXES = {"data": 2, "model": 2}


@cache
def solved() -> Plan:
    """The best plan of the smallest model, of which most tests here ask."""
    return solve(models.captured("mlp")[0], AXES, "h100")


@pytest.mark.slow
def test_an_answer_is_the_best_plan_with_the_placement() -> None:
    program, _, values = models.captured("mlp")
    found = solved()
    for wanted in ({"model": "Shard(1)"}, {"data": "S(0)", "model": "R"}):
        answer = ask(program, found, "up.weight", wanted)
        assert answer.plan is not None
        pin = [wanted.get(axis) for axis in AXES]
        same = solve(program, AXES, "h100", search=autopar.Search(pins={"up.weight": pin}))
        assert answer.plan.parameters == same.parameters
        for axis, placement in wanted.items():
            expected = parse_placement(placement.replace("Shard", "S"))
            assert answer.plan.parameters["up.weight"][list(AXES).index(axis)] == expected
        assert answer.plan.certificate.objective >= found.certificate.objective * (1 - 1e-3)
        local = rewrite(program, answer.plan)
        assert compare(program, local, answer.plan, values, torch.float64).max_error < 1e-12


def test_what_is_chosen_already_costs_nothing_more() -> None:
    program, _, _ = models.captured("mlp")
    found = solved()
    chosen = {axis: str(p) for axis, p in zip(AXES, layout_in(found, "batch.0"), strict=True)}
    answer = ask(program, found, "batch.0", chosen)
    assert answer.plan is not None
    assert answer.plan.predicted.step_seconds == pytest.approx(found.predicted.step_seconds, rel=1e-3)


def test_alternatives_are_all_others_on_one_axis() -> None:
    program, _, _ = models.captured("mlp")
    found = solve(program, AXES, "h100", search=autopar.Search(pins={"up.weight": ("S(1)", "R")}))
    assert alternatives(program, found, "up.weight") == [
        {"data": "R"},
        {"data": "S(0.0)"},
        {"model": "S(0.0)"},
        {"model": "S(1.0)"},
    ]


@pytest.mark.slow
def test_what_blocks_a_placement_is_said() -> None:
    program, _, _ = models.captured("mlp", hidden=12)
    found = solve(program, {"a": 8}, "h100")
    whole = solve(program, {"a": 8}, "h100", search=autopar.Search(recipe="ddp"))
    tight = 0.4 * sum(whole.predicted.memory_bytes.values())  # the weight alone is about a half
    blocked = ask(program, found, "up.weight", {"a": "R"}, memory=tight)
    assert blocked.plan is None and "more than the budget of" in blocked.reason
    indivisible = ask(program, found, "batch.0", {"a": "S(1)"})
    assert indivisible.plan is None and "must divide" in indivisible.reason
    table = answers_table("up.weight", "R@a", found, [blocked, indivisible])
    assert "blocked" in table and "S(1)@a" in table
    rows = answers_dict("up.weight", "R@a", found, [blocked, indivisible])["answers"]
    assert [row["wanted"] for row in rows] == [{"a": "R"}, {"a": "S(1)"}]
    assert all("difference" not in row and row["blocked"] for row in rows)


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("up.wieght", {"data": "R"}, "up.weight"),
        ("up.weight", {"dta": "R"}, "the mesh's: data, model"),
        ("up.weight", {"data": "S(2)"}, "has 2 dims"),
        ("up.weight", {"data": "shard"}, "is no placement"),
        ("up.weight", {"data": "P(sum)"}, "cannot be Partial"),
    ],
)
def test_wrong_questions(name: str, wanted: dict[str, str], message: str) -> None:
    program, _, _ = models.captured("mlp")
    found = solved()
    with pytest.raises(ValueError, match=message):
        ask(program, found, name, wanted)


@pytest.mark.slow
def test_names_of_tied_parameters() -> None:
    program, _, _ = models.captured("gpt2", layers=2, seq=4)
    alias, own = next(iter(program.aliases.items()))
    assert tensor_of(program, alias) == tensor_of(program, own)


@pytest.mark.parametrize("text", ["Shard(1)", "@data", "R@data,"])
def test_wanted_names_placement_and_axis(text: str) -> None:
    with pytest.raises(ValueError, match="PLACEMENT@AXIS"):
        parse_wanted(text, AXES)
    assert parse_wanted("Shard(1)", ["gpu"]) == {"gpu": "Shard(1)"}


def test_pins_leave_axes_to_the_search() -> None:
    program, _, _ = models.captured("mlp")
    free = solved()
    half = solve(program, AXES, "h100", search=autopar.Search(pins={"up.weight": ("S(1)", None)}))
    whole = solve(program, AXES, "h100", search=autopar.Search(pins={"up.weight": ("S(1)", "R")}))
    assert str(half.parameters["up.weight"][0]) == "S(1.0)"
    objectives = [plan.certificate.objective for plan in (free, half, whole)]
    assert objectives[0] <= objectives[1] * 1.001 and objectives[1] <= objectives[2] * 1.001


@pytest.mark.deep
def test_open_pins_of_tied_layers_hold_for_all() -> None:
    program, _, _ = models.captured("gpt2", layers=2, seq=4)
    first, second = (f"transformer.h.{n}.mlp.c_fc.bias" for n in (0, 1))
    pins = {first: ("S(0)", None), second: (None, "S(0)")}
    plan = solve(program, {"a": 2, "b": 2}, "cpu", search=autopar.Search(pins=pins))
    assert [str(p) for p in plan.parameters[first]] == ["S(0.0)", "S(0.0)"]
    assert plan.parameters[second] == plan.parameters[first]
    with pytest.raises(autopar.errors.InfeasibleError, match="satisfies what is pinned"):
        solve(
            program, {"a": 2, "b": 2}, "cpu", search=autopar.Search(pins={first: ("S(0)", None), second: ("R", None)})
        )


def test_an_open_pin_says_nothing_against_a_role() -> None:
    program, _, _ = models.captured("mlp")
    search = autopar.Search(recipe="megatron", roles={"model": "tensor"}, pins={"up.weight": ("S(1)", None)})
    plan = solve(program, AXES, "h100", search=search)
    assert [str(p) for p in plan.parameters["up.weight"]] == ["S(1.0)", "S(0.0)"]


def test_a_random_plan_wants_whole_pins() -> None:
    program, _, _ = models.captured("mlp")
    search = autopar.Search(recipe="random", pins={"up.weight": ("S(1)", None)})
    with pytest.raises(ValueError, match=r"'up\.weight' leaves axes open"):
        solve(program, AXES, "h100", search=search)


@pytest.mark.slow
def test_differences_of_two_plans() -> None:
    program, _, _ = models.captured("gpt2", layers=2, seq=4)
    axes = {"a": 2, "b": 2}
    ddp = solve(program, axes, "h100", search=autopar.Search(recipe="ddp"))
    fsdp = solve(program, axes, "h100", search=autopar.Search(recipe="fsdp"), optimizer="sgd")
    assert difference(ddp, ddp)["same"] is True
    assert difference(ddp, ddp)["layouts"] == difference(ddp, ddp)["modules"] == []
    found = difference(ddp, fsdp)
    assert found["same"] is False
    assert found["about"] == {"optimizer": ("adamw", "sgd")}
    seconds = (ddp.predicted.step_seconds, fsdp.predicted.step_seconds)
    assert tuple(found["figures"]["step_seconds"]) == seconds
    rows = {row["name"]: row for row in found["layouts"]}
    weight = rows["transformer.h.*.mlp.c_fc.weight"]
    assert weight["instances"] == 2
    assert weight["layouts"][0] == "R@a R@b" and "S(" in weight["layouts"][1]
    assert not any(name.startswith("batch") for name in rows)
    sent = {row["path"]: row["communication_bytes"] for row in found["modules"]}
    total = sum(fsdp.predicted.communication_bytes.values()) - sum(ddp.predicted.communication_bytes.values())
    assert sum(pair[1] - pair[0] for pair in sent.values()) == pytest.approx(total)
    table = difference_table(ddp, fsdp, ("ddp", "fsdp"), width=90)
    assert max(map(len, table.splitlines())) <= 90
    assert "transformer.h.*.mlp.c_fc.weight x2" in "".join(table.split("\n"))


class Attending(torch.nn.Module):
    """Causal attention to so many keys."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.qkv, self.keys = torch.nn.Linear(8, 24), keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = (t[:, :, : self.keys] for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.some(1)
@pytest.mark.parametrize("keys", [8, 4])
def test_attention_that_cannot_go_round_in_a_ring(keys: int) -> None:
    program = program_of(Attending(keys), (torch.randn(1, 8, 8),))
    found = solve(program, {"a": 2}, "h100")
    answer = ask(program, found, "batch.0", {"a": "S(1)"})
    reason = f"its mask is causal, of 8 queries and {keys} keys"
    expected = f"attention in the model cannot go round in a ring: {reason}" if keys == 4 else ""
    assert answer.note == expected
    assert ask(program, found, "batch.0", {"a": "R"}).note == ""
    assert (expected in " ".join(answers_table("batch.0", "R", found, [answer]).split())) is True
    assert ("note" in answers_dict("batch.0", "R", found, [answer])["answers"][0]) is (keys == 4)
