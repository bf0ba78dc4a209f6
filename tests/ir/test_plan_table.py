import dataclasses
import re

import pytest

from autopar.ir.plan import Predicted
from autopar.ir.plan_table import format_seconds, format_share, plan_table
from tests.explain.tables.stand_ins import hand_made_plan


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_asked_for_and_nothing_is_cut(width: int) -> None:
    deep = "model.encoder.block.layers.*.attention.self_attention.query_projection.inner"
    text = plan_table(hand_made_plan(module=deep), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    columns = re.sub(r"\s", "", text)
    assert deep[:6] in columns
    assert columns.isascii() or set(columns) - set(map(chr, range(128))) <= {"─", "━"}


def test_the_table_says_what_a_person_asks() -> None:
    text = plan_table(hand_made_plan())
    for expected in (
        "node=32, gpu=8 (256 devices)",
        "h100: NVIDIA H100 SXM; node over InfiniBand NDR, gpu over NVLink 4",
        "adamw",
        "weight  f32[hidden, ffn{gpu}]",
        "layers.*.mlp.down_proj x32",
        "compute 10 ms, communication 2.5 ms",
        "3.0 MiB sent per device; 5 all-reduce",
        "1.0 MiB sent per device; 7 all-gather, 2 reduce-scatter",
        "4.0 GiB: parameters 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB, buffers 512 B",
        "lower bound  12.2 ms",
        "2.4%",
        "one layout per tensor on every axis; no pipelines",
        "exact elimination",
    ):
        assert expected in text, expected
    assert "optimal" not in text


def test_a_plan_without_prediction_and_without_a_bound() -> None:
    plan = dataclasses.replace(hand_made_plan(lower_bound=0.0), predicted=Predicted(), modules=())
    text = plan_table(plan)
    assert "predicted step" not in text
    assert "no lower bound was proved" in text
    assert "100%" in text


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (70 * 2**30, "1.0 GiB more per device would save about 100 us per step (0.8%)"),
        (6 * 2**30, "128.0 MiB more per device would save about 12.5 us per step (0.1%)"),
    ],
)
def test_the_price_of_memory(held: float, expected: str) -> None:
    plan = hand_made_plan()
    assert "price of memory" not in plan_table(plan)
    certificate = dataclasses.replace(plan.certificate, memory_price=1e-4 / 2**30)
    predicted = dataclasses.replace(plan.predicted, peak_bytes={"activations": held})
    tight = dataclasses.replace(plan, certificate=certificate, predicted=predicted)
    assert f"price of memory  {expected}" in plan_table(tight)


def test_an_unknown_method_is_printed_as_it_is() -> None:
    assert "branch and bound" in plan_table(hand_made_plan(method="branch and bound"))


def test_print_uses_the_table() -> None:
    plan = hand_made_plan()
    assert str(plan) == plan_table(plan)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.0, "1 s"), (123.4, "123 s"), (0.99996, "1 s"), (0.0005, "500 us"), (3e-9, "3 ns")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_gap_is_never_rounded_to_zero() -> None:
    assert format_share(1e-9) != "0%"
    assert format_share(0.0) == "0%"
