"""Which adapters `save_pretrained` gathers, of a library that stands for PEFT."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.module import copies

State = dict[str, torch.Tensor]


def by_name(state: State) -> State:
    return {n: t for n, t in state.items() if "adapter" in n}


def by_ranks(state: State) -> State:
    """As AdaLoRA's, which leaves out the ranks that it has pruned."""
    return {n: t[torch.tensor([True, False]).to(t.device)] for n, t in by_name(state).items()}


def by_values(state: State) -> State:
    return {n: t for n, t in by_name(state).items() if float(t.sum()) > 0}


class Adapted(nn.Module):
    """A base with an adapter, which is saved alone."""

    peft_config: ClassVar[dict[str, Any]] = {"default": SimpleNamespace(is_prompt_learning=False)}

    def __init__(self, choose: Callable[[State], State]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter, self.choose = nn.Linear(4, 2), nn.Linear(4, 2), choose
        nn.init.ones_(self.adapter.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.adapter(x)).square().mean()

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.choose(self.state_dict()), Path(folder) / "adapter.pt")


@pytest.mark.parametrize("choose", [by_name, by_ranks, by_values])
def test_what_is_saved(choose: Callable[[State], State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(model: Adapted, state_dict: State, **_: Any) -> State:
        return model.choose(state_dict)

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=Adapted, get_peft_model_state_dict=chosen))
    model: Any = parallelize(Adapted(choose), None, (torch.ones(2, 4),))
    copies.save(model, "save_pretrained", model._autopar.original.save_pretrained, str(tmp_path))
    found, expected = torch.load(tmp_path / "adapter.pt"), choose(Adapted(choose).state_dict())
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_prompts_are_not_computed_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tuning calls its encoder, whose parameters are on the mesh: rank 0 alone would wait for the others."""

    def computed(*_: Any, **__: Any) -> State:
        raise AssertionError("called on one rank")

    class Prompted(Adapted):
        peft_config: ClassVar[dict[str, Any]] = {"default": SimpleNamespace(is_prompt_learning=True)}

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=Prompted, get_peft_model_state_dict=computed))
    model: Any = parallelize(Prompted(by_name), None, (torch.ones(2, 4),))
    copies.save(model, "save_pretrained", model._autopar.original.save_pretrained, str(tmp_path))
    assert set(torch.load(tmp_path / "adapter.pt")) == {"adapter.weight", "adapter.bias"}
