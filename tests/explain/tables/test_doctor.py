import json
from types import SimpleNamespace

import pytest
import torch

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


def test_devices_have_their_presets_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NVIDIA L4": 22, "NVIDIA GeForce RTX 4090": 24}
    reported = [SimpleNamespace(name=name, total_memory=gib * 2**30) for name, gib in names.items()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", reported.__getitem__)
    facts = doctor.examine()
    assert [d["preset"] for d in facts["devices"]] == ["l4", None]
    text = " ".join(doctor.doctor_table(facts).split())
    assert "NVIDIA L4, 22.0 GiB, preset l4; NVIDIA GeForce RTX 4090, 24.0 GiB, of no preset" in text
    assert any("a preset of NVIDIA GeForce RTX 4090: cluster=" in line for line in facts["missing"])
