"""Rules found by running operators: they are what one would write, and what is wrong does not survive."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.node import map_aggregate

import autopar
from autopar.errors import MissingRuleError
from autopar.rules.discover import search as discovery
from autopar.rules.discover.search import discover
from autopar.rules.discover.trials import DiscoveryCall, shrunk
from autopar.rules.discover.write import Findings, JointDims, write_rule
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Rule, Spec

aten = torch.ops.aten


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def places(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def found(target: Any, *args: Any, outputs: Any = None, **kwargs: Any) -> Rule:
    """The discovered rule of a call with real tensors."""
    result = target(*args, **kwargs) if outputs is None else outputs
    results = result if isinstance(result, tuple | list) else (result,)

    def spec(t: Any) -> Any:
        return Spec(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t

    return discover(DiscoveryCall(target, map_aggregate((args, kwargs), spec), tuple(map(spec, results))))


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_known", {})
    monkeypatch.setattr(discovery, "_discovered", {})


BOTH = ((0,), (1,))


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.mm.default, (x(64, 32), x(32, 16)), Rule("ab,bc->ac", reduce="b", linear=BOTH)),
        (aten.mm.default, (x(64, 64), x(64, 64)), Rule("ab,bc->ac", reduce="b", linear=BOTH)),
        (aten.add.Tensor, (x(64, 32), x(32)), Rule("ab,b->ab", linear=((0, 1),))),
        (aten.mul.Tensor, (x(64, 1), x(64, 32)), Rule("a1,ab->ab", linear=BOTH)),
        (aten._softmax.default, (x(8, 16, 32), 1, False), Rule("abc->abc", blocked="b")),
        (aten.sum.dim_IntList, (x(8, 16, 32), [1]), Rule("abc->ac", reduce="b", linear=((0,),))),
        (aten.expand.default, (x(1, 16), [8, 16]), Rule("1a->ba", blocked="b", linear=((0,),), shapes=(1,))),
        (aten.embedding.default, (x(96, 32), places(96, 4, 16)), Rule("ab,cd->cdb", blocked="a", linear=((0,),))),
        (aten.native_layer_norm.default, (x(8, 32), [32], x(32), None, 1e-5), Rule("ab,b->ab,a1,a1", blocked="b")),
        (aten.linalg_cross.default, (x(64, 3), x(64, 3)), Rule("ab,ab->ab", blocked="b", linear=BOTH)),
        (aten.pixel_shuffle.default, (x(8, 64, 4, 4), 2), "a(bc)de->ab(df)(eg)"),
        (aten.eq.Tensor, (x(8, 4), x(8, 4)), Rule("ab,ab->ab")),
        (aten.count_nonzero.default, (x(8, 4),), Rule("ab->.", reduce="ab")),
    ],
    ids=lambda v: str(v) if callable(v) else "",
)
def test_operators_whose_rules_are_known(target: Any, args: tuple[Any, ...], expected: Rule | str) -> None:
    rule = found(target, *args)
    if isinstance(expected, str):
        assert rule.equation == expected
        return
    for name in ("equation", "reduce", "keep", "blocked", "linear", "shapes", "scaled"):
        assert getattr(rule, name) == getattr(expected, name), name


def test_a_number_that_counts_elements_becomes_local() -> None:
    rule = found(aten.embedding_dense_backward.default, x(4, 16, 32), places(96, 4, 16), 96, -1, False)
    assert (rule.equation, rule.reduce, rule.blocked) == ("abc,ab->dc", "ab", "d")

    @torch.library.custom_op("autopar_tests::mean_rows", mutates_args=())
    def mean_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
        assert t.shape[0] == rows
        return t + 0

    rule = found(torch.ops.autopar_tests.mean_rows.default, x(64, 16), 64)
    assert rule.equation == "ab->ab"
    assert dict(rule.scaled) == {1: "a"}


def test_constants_in_a_kernel_do_not_fool_it() -> None:
    """Small sizes look separable; the real ones, or elements taken alternately, show that they are not."""

    @torch.library.custom_op("autopar_tests::first_hundred", mutates_args=())
    def first_hundred(t: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(t.shape[0]) < 100, t, 0)

    @torch.library.custom_op("autopar_tests::pairs", mutates_args=())
    def pairs(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(0, (-1, 2)).flip(1).flatten()

    assert found(torch.ops.autopar_tests.first_hundred.default, x(256)).blocked == "a"
    assert found(torch.ops.autopar_tests.pairs.default, x(256)).blocked == "a"


def test_operators_that_act_on_large_or_tiny_values_alone() -> None:
    """Below a clipped norm, and above the least one, they look separable."""

    @torch.library.custom_op("autopar_tests::clipped", mutates_args=())
    def clipped(t: torch.Tensor) -> torch.Tensor:
        return t * (200 / t.norm(dim=1, keepdim=True)).clamp(max=1)

    @torch.library.custom_op("autopar_tests::lifted", mutates_args=())
    def lifted(t: torch.Tensor) -> torch.Tensor:
        return t / t.norm(dim=0, keepdim=True).clamp(max=0.01) * 0.01

    assert found(torch.ops.autopar_tests.clipped.default, x(64, 32)).blocked == "b"
    assert found(torch.ops.autopar_tests.lifted.default, x(64, 32)).blocked == "a"


def test_what_no_trial_can_cut_is_not_split() -> None:
    """A dim of 3 must stay 3 for this operator to run, and cannot be cut in two."""
    assert found(aten.linalg_cross.default, x(16, 3), x(16, 3)).blocked == "b"

    @torch.library.custom_op("autopar_tests::rgb", mutates_args=())
    def rgb(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, 3) * 2

    assert found(torch.ops.autopar_tests.rgb.default, x(16, 3)).blocked == "b"


def test_a_constant_output_proves_nothing() -> None:
    """No two random numbers are equal, in any part of them."""

    @torch.library.custom_op("autopar_tests::repeats", mutates_args=())
    def repeats(t: torch.Tensor) -> torch.Tensor:
        return (t == 17.0).any(0)

    @torch.library.custom_op("autopar_tests::dead_zone", mutates_args=())
    def dead_zone(t: torch.Tensor) -> torch.Tensor:
        return (t.abs() - 1000.0).relu() / t.shape[0]

    assert found(torch.ops.autopar_tests.repeats.default, x(64, 32)).blocked == "a"
    assert found(torch.ops.autopar_tests.dead_zone.default, x(64, 32)).blocked == "ab"


def test_what_cannot_run_is_replicated(caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("autopar_tests::refuses", mutates_args=())
    def refuses(t: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    with caplog.at_level(logging.INFO, "autopar"):
        rule = found(torch.ops.autopar_tests.refuses.default, x(8, 4), outputs=x(8, 4))
    assert (rule.equation, rule.blocked, rule.linear) == ("ab->ab", "ab", ())
    assert "autopar_tests.refuses is replicated on every device" in caplog.text
    assert "no such kernel" in caplog.text


def test_random_and_writing_operators_are_refused() -> None:
    @torch.library.custom_op("autopar_tests::noise", mutates_args=())
    def noise(t: torch.Tensor) -> torch.Tensor:
        return t + torch.rand_like(t)

    @torch.library.custom_op("autopar_tests::quiet_write", mutates_args=())
    def quiet_write(t: torch.Tensor) -> torch.Tensor:
        t.mul_(2)
        return t + 1

    for target, reason in (
        (torch.ops.autopar_tests.noise.default, "random"),
        (aten.bernoulli.default, "random"),
        (torch.ops.autopar_tests.quiet_write.default, "writes to its arguments"),
        (aten.add_.Tensor, "writes to its arguments"),
    ):
        args = (torch.rand(4), torch.rand(4)) if target is aten.add_.Tensor else (torch.rand(4),)
        with pytest.raises(MissingRuleError, match=reason):
            found(target, *args, outputs=x(4))


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    found(aten.mm.default, x(8, 4), x(4, 6))
    assert torch.equal(before, torch.get_rng_state())


def test_found_once_for_calls_that_are_alike(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        first = found(aten.mm.default, x(64, 32), x(32, 16))
        monkeypatch.setattr(discovery, "_find", lambda *_: pytest.fail("searched again"))
        assert found(aten.mm.default, x(64, 32), x(32, 16)) is first
        assert found(aten.mm.default, x(96, 48), x(48, 24)).equation == first.equation
    assert caplog.text.count('discovered aten.mm: "ab,bc->ac" linear (0),(1) on 15 samples') == 2
    assert [d.target for d in discovery.discovered()] == ["aten.mm.default"] * 2


def test_sizes_keep_their_order_and_multiples() -> None:
    pool = (4, 12, 20, 28)
    assert shrunk([3, 50, 100, 4096], pool) == {3: 4, 50: 12, 100: 24, 4096: 28}
    assert shrunk([3, 50], pool, unchanged=4) == {3: 3, 50: 4}


def test_findings_are_written_for_any_sizes() -> None:
    letter = JointDims(((0, 0), (1, 0)), ((0, 1),), "keep", "rows")
    rule = write_rule(Findings((letter,), ((0,),)), [(8, 3), (4,)], [(5, 4), None, (1,)])
    assert rule.equation == "(ab)c,a->da,_,1"
    assert (rule.keep, rule.blocked, dict(rule.scaled)) == ("a", "bcd", {"rows": "a"})
    assert write_rule(Findings((letter,)), [(8, 3), (4,)], [(5, 4)], alternating=True).keep == "ab"
    with pytest.raises(autopar.InvalidRuleError, match="no letter in common"):
        write_rule(Findings((letter,)), [(7, 3), (4,)], [(5, 4)])


def test_a_kernel_that_reads_behind_a_part_is_caught() -> None:
    """`as_strided` sees all of a storage, whatever part of it the tensor is."""
    rule = Rule("(ab)->c", keep="a", blocked="bc", sizes={"a": 4})
    whole = x(2).repeat(4)
    assert check_rule(aten.as_strided.default, (whole, [2], [1], 0), {}, rule=rule, pairs=False)
    with pytest.raises(autopar.InvalidRuleError, match="the largest difference is inf"):
        check_rule(aten.as_strided.default, (whole, [6], [1], 0), {}, rule=rule, pairs=False)


@torch.library.custom_op("autopar_tests::soft_gate", mutates_args=())
def soft_gate(t: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return t * gate.sigmoid()


@torch.library.custom_op("autopar_tests::soft_gate_backward", mutates_args=())
def soft_gate_backward(grad: torch.Tensor, t: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = gate.sigmoid()
    return grad * s, (grad * t * s * (1 - s)).sum(0)


soft_gate.register_fake(lambda t, gate: torch.empty_like(t))
soft_gate_backward.register_fake(lambda grad, t, gate: (torch.empty_like(t), torch.empty_like(gate)))
soft_gate.register_autograd(
    lambda ctx, grad: soft_gate_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 16), nn.Parameter(torch.zeros(16))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return soft_gate(self.linear(t), self.gate).square().mean()


@pytest.mark.parametrize("plan", [None, "random"])
def test_a_model_with_a_custom_operator(plan: str | None) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Gated(), (torch.randn(16, 8),), {"a": 2, "b": 2}, plan=plan)
    assert report.max_error < 1e-10
    rules = {d.target: d.rule for d in discovery.discovered()}
    backward = rules["autopar_tests.soft_gate_backward.default"]
    assert (backward.equation, backward.reduce, backward.linear) == ("ab,ab,b->ab,b", "a", ((0,),))
