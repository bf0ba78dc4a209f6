"""Plans that send in few bits on the emulated mesh, step by step against the recurrence in numpy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.ir.layout import Split
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.quantized import blocks, operators
from autopar.ir.quantized.operators import QUANTIZERS
from autopar.passes import DETERMINISTIC_PASSES
from autopar.verify.emulate import census
from autopar.verify.emulate_step import EmulatedStep
from autopar.verify.verify import global_values
from tests.ir.quantized.reference import Sharded, is_smaller

ROWS, STEPS = 16, 3


class Net(nn.Module):
    """Weights that are split along either dim, whole blocks and not, and some that are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(20, 48), nn.LayerNorm(48)
        self.odd = nn.Linear(48, 90)  # no axis divides its first dim
        self.last = nn.Linear(90, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        return (self.last(torch.tanh(self.odd(h))) - y).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(ROWS, 20, generator=g) for k in ("x", "y")}


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(net(), batch_of(0))


def planned(program: Program, axes: dict[str, int], quantized: dict[str, Any], **more: Any) -> Plan:
    search = autopar.Search(**{"recipe": "fsdp", **more}, quantized=quantized, inexact=("quantized",), padding=False)
    found = solve(program, axes, "h100", search=search, deterministic=True)
    return Plan.from_dict(found.to_dict())


def dims_of(plan: Plan, along: int) -> dict[str, int | None]:
    found = {name: layout[along] for name, layout in plan.parameters.items()}
    return {name: p.dim if isinstance(p, Split) else None for name, p in found.items()}


def worst(program: Program, plan: Plan, reference: Sharded, devices: int, passes: Any = DETERMINISTIC_PASSES) -> float:
    """The largest difference of losses and parameters of any step of AdamW."""
    local = rewrite(program, plan, passes=passes)
    assert {n.target for n in local.graph.graph.nodes} & set(QUANTIZERS)
    model, error = net().double(), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = {k: v.double() for k, v in batch_of(step).items()}
        values = [v.double() for v in global_values(program, model, batch)]
        outputs = EmulatedStep(program, local, plan, values, torch.float64).run()
        parameters = dict(model.named_parameters())
        for spec, whole in zip(program.outputs, outputs, strict=True):
            assert whole is not None and whole[1] == 0  # the same numbers on all devices
            if spec.kind == "gradient":
                parameters[spec.name].grad = whole[0]
            else:
                loss = float(whole[0])
        optimizer.step()
        rows = ROWS // devices
        parts = [{k: v[i * rows : (i + 1) * rows] for k, v in batch.items()} for i in range(devices)]
        expected = reference.step(parts, lambda m, b: m(**b))
        pairs = zip(model.parameters(), reference.model.parameters(), strict=True)
        error = max(error, abs(loss - expected), *(float((a - b).detach().abs().max()) for a, b in pairs))
    return error


def sharded(plan: Plan, parts: int, inner: int = 1, along: int = 0, **bits: int) -> Sharded:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    inside = dims_of(plan, 1) if inner > 1 else None
    return Sharded(net().double(), adamw, dims_of(plan, along), parts, inner, itemsize=4, inner_dims=inside, **bits)


@pytest.mark.parametrize(
    "bits",
    [
        {"weights": 8, "gradients": 4},
        *(pytest.param(b, marks=pytest.mark.deep) for b in ({"weights": 4}, {"gradients": 8})),
    ],
)
def test_equals_the_recurrence(program: Program, bits: dict[str, int]) -> None:
    plan = planned(program, {"gpu": 4}, {"gpu": bits})
    assert set(dims_of(plan, 0).values()) >= {0, 1}
    reference = sharded(plan, 4, **bits)
    assert worst(program, plan, reference, 4) < 1e-10
    assert reference.reached == set(bits)
    # Verification sends all numbers whole, and the graph is right; and then in few bits, as the recurrence has them.
    report = autopar.verify(net(), batch_of(0), {"gpu": 4}, plan=plan)
    assert report.max_error < 1e-9 and "first.weight in few bits" in report.errors
    assert 1e-4 < max(report.lost.values()) < 0.5
    exact = planned(program, {"gpu": 4}, {})
    assert worst_apart(program, plan, exact) > 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        lambda payloads, count, bits: blocks.sum_of(list(payloads)[:-1], count, bits),  # one device is left out
        lambda payloads, count, bits: blocks.sum_of([p.roll(1) for p in payloads], count, bits),  # a byte too far
    ],
)
def test_verification_finds_wrong_messages(program: Program, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    plan = planned(program, {"gpu": 4}, {"gpu": {"gradients": 8}})
    monkeypatch.setattr(operators, "sum_of", wrong)
    report = autopar.verify(net(), batch_of(0), {"gpu": 4}, plan=plan)
    # The whole numbers of the same graph are right: only the second comparison can find it.
    assert max(e for n, e in report.errors.items() if not n.endswith("in few bits")) < 1e-9
    assert report.worst.endswith("in few bits") and report.max_error > 1e-3
    assert "gradient" in str(report.first_difference)


def worst_apart(program: Program, plan: Plan, other: Plan) -> float:
    """How far gradients of two plans are apart."""
    values = [v.double() for v in global_values(program, net(), batch_of(0))]
    runs = [
        EmulatedStep(program, rewrite(program, p, passes=DETERMINISTIC_PASSES), p, values, torch.float64).run()
        for p in (plan, other)
    ]
    return max(float((a[0] - b[0]).abs().max()) for a, b in zip(*runs, strict=True) if a and b)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("inner", "microbatches"), [(0, 1), (4, 1), *(pytest.param(n, 2, marks=pytest.mark.deep) for n in (0, 4))]
)
def test_two_axes_are_reduced_innermost_first(program: Program, inner: int, microbatches: int) -> None:
    """The reduction within a node is whole, or in few bits as well."""
    pins = {"odd.weight": ("S(1)", "S(1)"), "microbatches": microbatches}
    bits = {"weights": 8, "gradients": 8}
    quantized: dict[str, Any] = {"node": bits, **({"gpu": {"gradients": inner}} if inner else {})}
    axes = {"node": 2, "gpu": 2}
    plan = planned(program, axes, quantized, pins=pins)
    reference = sharded(plan, 2, 2, inner_gradients=inner, **bits)
    assert worst(program, plan, reference, 4) < 1e-10 and reference.reached == set(bits)
    assert autopar.verify(net(), batch_of(0), axes, plan=plan).max_error < 1e-9


def test_three_axes(program: Program) -> None:
    """Of small gradients, too, which whole numbers would take less long to reduce: those get around few bits."""
    pins = {"odd.weight": ("S(1)",) * 3, "last.weight": ("S(1)", "S(0)", "S(0)"), "*.bias": ("R",) * 3}
    axes, bits = {"pod": 2, "node": 2, "gpu": 2}, {"gradients": 8}
    plan = planned(program, axes, {"pod": bits}, pins=pins)
    reference = sharded(plan, 2, 4, **bits)
    assert worst(program, plan, reference, 8) < 1e-10 and reference.reached == set(bits)


def test_bytes_between_nodes_are_of_what_a_node_has_added_up(program: Program) -> None:
    pins = {"odd.weight": ("S(1)", "S(1)")}
    plan = planned(program, {"node": 2, "gpu": 4}, {"node": {"gradients": 8}}, pins=pins)
    cut = {name: (dims_of(plan, 0)[name], dims_of(plan, 1)[name]) for name, _ in net().named_parameters()}
    # Of a parameter that is cut over all devices each sends its shard of the other node's, and no more.
    shards = [p.numel() // 8 for n, p in net().named_parameters() if None not in cut[n]]
    small = [-(-count // 256) * 260 for count in shards if is_smaller(count, 4, 8)]
    assert len(small) == 3
    counted = census(rewrite(program, plan, passes=DETERMINISTIC_PASSES))["node"]["all_to_all"]
    assert counted == (3, pytest.approx(sum(small)))


@pytest.mark.deep
def test_stages(program: Program) -> None:
    pins = {"stages": 2, "stage_axis": "stage", "microbatches": 2}
    bits = {"weights": 8, "gradients": 4}
    axes = {"stage": 2, "gpu": 2}
    plan = planned(program, axes, {"gpu": bits}, recipe=None, roles={"gpu": "shard"}, pins=pins)
    assert len(plan.stages) == 2 and plan.quantized[0].axis == "gpu"
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    assert {n.target for n in local.graph.graph.nodes} >= set(QUANTIZERS)
    assert autopar.verify(net(), batch_of(0), axes, plan=plan).max_error < 1e-9


def test_bytes_are_those_of_the_message(program: Program) -> None:
    bits = {"weights": 8, "gradients": 4}
    plan, exact = (planned(program, {"gpu": 4}, q) for q in ({"gpu": bits}, {}))
    found = {"all_gather": 0.0, "all_to_all": 0.0, "reduce_scatter": 0.0}
    cut = dims_of(plan, 0)
    shards = {name: p.numel() // 4 for name, p in net().named_parameters() if cut[name] is not None}
    for count in shards.values():
        for kind, own in (("all_gather", 8), ("all_to_all", 4)):
            small = is_smaller(count, 4, own)
            size = -(-count // 256) * (256 * own // 8 + 4) if small else 4 * count
            found[kind if small or kind == "all_gather" else "reduce_scatter"] += 3 * size
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    counted = {kind: sent for kind, (_, sent) in census(local)["gpu"].items() if kind != "all_reduce"}
    assert counted == pytest.approx(found)
    sent, whole = (p.predicted.communication_bytes["gpu"] for p in (plan, exact))
    assert sent - sum(found.values()) == pytest.approx(whole - 2 * sum(3 * 4 * n for n in shards.values()))


def test_a_plan_says_what_is_not_exact(program: Program, tmp_path: Any) -> None:
    plan = planned(program, {"gpu": 4}, {"gpu": {"weights": 8, "gradients": 4}})
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.quantized == plan.quantized and again.quantized[0].bits("gradients") == 4
    for text in (plan.certificate.space, " ".join(plan.summary().split())):
        assert "gathers of parameters in 8 bits (off by at most max |x| / 254 of its block of 256)" in text
        assert "reductions of gradients in 4 bits (off by at most max |x| / 14" in text
        assert "not equal to exact training" in text
    assert "bits" not in planned(program, {"gpu": 4}, {}).certificate.space


@pytest.mark.parametrize(
    ("quantized", "message"),
    [
        ({"gpu": {}}, "quantized= has {} for axis 'gpu': expected bits by what is sent"),
        ({"gpu": 8}, "quantized= has 8 for axis 'gpu'"),
        ({"gpu": {"activations": 8}}, "expected bits by what is sent, such as"),
        ({"gpu": {"weights": 6}}, "has 6 bits for weights along axis 'gpu': expected 8 or 4"),
        ({"gpu": {"weights": True}}, "has True bits for weights"),
    ],
)
def test_what_is_no_choice(quantized: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        autopar.Search(quantized=quantized, inexact=("quantized",))


def test_few_bits_are_asked_for(program: Program) -> None:
    asked: Any = {"gpu": {"weights": 8}}
    with pytest.raises(ValueError, match=r"not equal to exact training; ask for that with inexact=\('quantized',\)"):
        autopar.Search(quantized=asked)
    search = autopar.Search(recipe="fsdp", quantized={"dc": {"weights": 8}}, inexact=("quantized",))
    with pytest.raises(ValueError, match=r"quantized= names axis 'dc', along which no parameter is gathered"):
        search.require_axes({"gpu": 4})
    staged = autopar.Search(
        quantized={"stage": {"weights": 8}}, inexact=("quantized",), pins={"stages": 2, "stage_axis": "stage"}
    )
    with pytest.raises(ValueError, match=r"names axis 'stage', .* there are gpu"):
        staged.require_axes({"stage": 2, "gpu": 2})
    with pytest.raises(InfeasibleError, match="weights in 8 bits along axis 'gpu', and the plan has none"):
        planned(program, {"gpu": 4}, asked, recipe="ddp")


class Products(nn.Module):
    """Weights that are read in float8 alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) - x).square().mean()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("precision", "size", "bits", "remedy"),
    [
        ("fp8", 256, {"weights": 8}, "in float8 when they are sent, .*; leave 'weights' out for this axis"),
        ("fp8-delayed", 256, {"weights": 4, "gradients": 8}, "leave 'weights' out for this axis, or precision='fp8'"),
        (None, 4, {"gradients": 8}, "would be more bytes than what is sent; leave 'gradients' out for this axis"),
    ],
)
def test_the_remedy_where_nothing_becomes_smaller(
    precision: str | None, size: int, bits: dict[str, int], remedy: str
) -> None:
    def found(quantized: dict[str, int], precision: str | None) -> Plan:
        asked: Any = {"gpu": quantized} if quantized else {}
        search = autopar.Search(recipe="fsdp", quantized=asked, inexact=("quantized", "fp8"))
        batch = (torch.zeros(64, size),)
        return autopar.plan(Products(size), batch, cluster="h100", axes={"gpu": 2}, search=search, precision=precision)

    with pytest.raises(InfeasibleError, match=f"along axis 'gpu', and the plan has none .*{remedy}"):
        found(bits, precision)
    left = {what: n for what, n in bits.items() if f"'{what}'" not in remedy}
    assert [q.what for q in found(left, precision).quantized] == ([tuple(left)] if left else [])
    if precision is not None:
        assert found(bits, None).quantized[0].what == tuple(bits)


def test_all_reduces_are_a_reduction_in_few_bits_and_a_gather(program: Program) -> None:
    plan = planned(program, {"gpu": 4}, {"gpu": {"gradients": 4}}, recipe="ddp")
    dims: dict[str, int | None] = {}
    for name, parameter in net().named_parameters():
        divided = [d for d, n in enumerate(parameter.shape) if n % 4 == 0]
        dims[name] = divided[0] if divided else None
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    assert census(local)["gpu"]["all_to_all"][0] > 0 and census(local)["gpu"]["all_gather"][0] > 0

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    reference = Sharded(net().double(), adamw, dims, 4, gradients=4, itemsize=4)
    assert worst(program, plan, reference, 4) < 1e-10 and reference.reached == {"gradients"}
