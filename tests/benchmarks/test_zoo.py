"""Every model family is captured, planned, and computes what one device would, with searched and random plans."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from benchmarks import models as table
from benchmarks.zoo import FAMILIES

# The cheapest ones; what the others have that no other test has is proven by the oracle.
ALWAYS = ("weight norm",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else (pytest.mark.slow, pytest.mark.deep)) for n in FAMILIES]
)
def test_family(name: str) -> None:
    row = table.measure(name)
    assert table.passed(row), row


@pytest.mark.deep
def test_lstm_is_captured_as_matrix_products() -> None:
    report = autopar.verify(*FAMILIES["lstm"](), table.AXES, plan="random")
    targets = {str(n.target) for n in report.program.graph.graph.nodes}
    assert "aten.mm.default" in targets
    assert not any("rnn" in t or "lstm" in t for t in targets)


def test_a_failing_family_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no weights | here\nmore")

    monkeypatch.setitem(FAMILIES, "broken", broken)
    row = table.measure("broken")
    assert not table.passed(row)
    assert table.line(row) == "| broken |  |  | no |  |  |  |  |  | **fails**: RuntimeError: no weights \\| here |"
    text = table.page({"broken": table.line(row)}, ["broken", "later"])
    assert "0 of 2 families pass" in text
    assert "| later |  |  |  |  |  |  |  |  | **not measured** |" in text
    (tmp_path / "page.md").write_text(text)
    assert table.known(tmp_path / "page.md", ["broken"]) == {"broken": table.line(row)}
