import json

from autopar.costs.cluster import PRESETS
from autopar.explain.tables import doctor


def test_facts_are_plain_data_and_the_table_names_them() -> None:
    facts = json.loads(json.dumps(doctor.examine()))
    text = doctor.doctor_table(facts)
    assert max(map(len, text.splitlines())) <= 100
    assert facts["packages"]["torch"] in text
    assert all(f"preset {name}" in text for name in PRESETS)


def test_what_is_missing_comes_with_its_remedy() -> None:
    facts = doctor.examine()
    facts["packages"]["highspy"] = None
    facts["backends"] = []
    found = doctor._missing(facts)
    assert "highspy: pip install highspy" in found
    assert any("torch.distributed" in line for line in found)
