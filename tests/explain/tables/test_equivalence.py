import json
from types import SimpleNamespace

import torch

from autopar.explain.tables.equivalence import LONGEST, agrees, equivalence_dict, equivalence_table
from tests.explain.tables.stand_ins import hand_made_plan


def outcome(errors: dict[str, float]) -> SimpleNamespace:
    loss = torch.tensor(1.25, dtype=torch.float64)
    return SimpleNamespace(
        loss=loss, reference_loss=loss, errors=errors, plan=hand_made_plan(), reference="eager", note="", lost={},
        first_difference="aten.mm (node mm)",
    )  # fmt: skip


def test_the_worst_comes_first_and_what_is_left_out_is_counted() -> None:
    errors = {f"layers.{i}.weight": i * 1e-16 for i in range(LONGEST + 5)}
    text = equivalence_table(outcome(errors), 1e-9)
    names = [line.split()[0] for line in text.splitlines() if line.strip().startswith("layers.")]
    assert names[0] == f"layers.{LONGEST + 4}.weight"
    assert len(names) == LONGEST
    assert "5 tensors with smaller errors" in text
    assert "verdict   equal" in text


def test_what_is_not_a_number_is_a_difference_and_valid_json() -> None:
    report = outcome({"a": 1.0, "b": float("nan"), "c": float("inf")})
    assert not agrees(report, 2.0)
    facts = json.loads(json.dumps(equivalence_dict(report, 2.0), allow_nan=False))
    assert list(facts["errors"].items()) == [("b", "nan"), ("c", "inf"), ("a", 1.0)]
    assert "DIFFERENT: largest error nan (b)" in equivalence_table(report, 2.0)


def test_the_tolerance_itself_is_still_equal() -> None:
    assert agrees(outcome({"a": 1e-9}), 1e-9)
    assert not agrees(outcome({"a": 1.1e-9}), 1e-9)
    assert agrees(outcome({}), 0.0)
    assert "nothing to compare" in equivalence_table(outcome({}), 0.0)


def test_the_first_difference_is_named_where_there_is_one() -> None:
    assert equivalence_dict(outcome({"a": 1.0}), 1e-9)["first_difference"] == "aten.mm (node mm)"
    assert "first     aten.mm (node mm)" in equivalence_table(outcome({"a": 1.0}), 1e-9)
    assert equivalence_dict(outcome({"a": 0.0}), 1e-9)["first_difference"] is None
    assert "aten.mm" not in equivalence_table(outcome({"a": 0.0}), 1e-9)
