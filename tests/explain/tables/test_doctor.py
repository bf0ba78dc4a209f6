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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: reported[getattr(d, "index", d)])
    facts = doctor.examine()
    assert [d["preset"] for d in facts["devices"]] == ["l4", None]
    text = " ".join(doctor.doctor_table(facts).split())
    assert "NVIDIA L4, 22.0 GiB, preset l4; NVIDIA GeForce RTX 4090, 24.0 GiB, of no preset" in text
    assert any("a preset of NVIDIA GeForce RTX 4090: cluster=" in line for line in facts["missing"])


def test_the_default_budget_has_its_terms_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = doctor.examine()["default_budget"]
    assert facts["budget"] == facts["memory"] - sum(t["size"] for t in facts["set_aside"])
    assert "default budget" in doctor.doctor_table(doctor.examine())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    reported = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.1 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: reported)
    text = " ".join(doctor.doctor_table(doctor.examine()).split())
    assert "memory 79.1 GiB, each of 8 on a mesh of one axis" in text
    assert "- process 600.0 MiB: CUDA context with its kernels" in text
    assert "- communicators 294.0 MiB: buffers of 1 communicator " in text
    assert "default budget 74.1 GiB; 294.0 MiB less for each further communicator" in text
