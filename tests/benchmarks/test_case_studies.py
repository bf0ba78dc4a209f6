"""The case studies with few layers, few experts and short sequences, on the code path of the large ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.compiler import program_to_plan
from benchmarks import case_studies

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": (
        "DeepseekV3Config",
        {"num_hidden_layers": 7, "first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 8,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    ),
    "mixtral-8x22b": ("MixtralConfig", {"num_hidden_layers": 5, "num_local_experts": 4}),
}  # fmt: skip
"""Configurations whose classes the cases take, and what is smaller in them."""


def shrink(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of two nodes and few sequences; of long ones as many as are more positions than are looked at."""
    if case not in MIXTURES:
        monkeypatch.setitem(case_studies.LLAMAS, case, (5, 64, 128, 8, 2, 256, 2**14 + 2**10))
        return
    import transformers  # the module that the case gets: other tests may have imported it anew

    name, small = MIXTURES[case]
    whole = getattr(transformers, name)
    monkeypatch.setattr(transformers, name, lambda **given: whole(**{**given, **SMALL, **small}))
    monkeypatch.setitem(case_studies.MIXTURES, case, (2, 16, 32))


@pytest.mark.deep
@pytest.mark.parametrize("case", ["deepseek-v3", "llama3-405b-131k"])
def test_blocks_are_left_out(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dense ones come before mixtures, too; and of long sequences no mask is left, nor a formula."""
    shrink(case, monkeypatch)
    model, batch, _, _, _ = case_studies.task(case)
    program = program_to_plan(model, batch)
    assert program.repeat is not None
    assert (program.repeat.lead, program.repeat.blocks) == ((2, 5) if case == "deepseek-v3" else (0, 5))
    attention = [str(n.target) for n in program.sources if "autopar.attention" in str(n.target)]
    assert attention and not any("masked" in target for target in attention)


@pytest.mark.deep
@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral-8x22b", "llama3-405b-131k"])
def test_case(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stages or without, whichever is found: within the budget, and not below its bound."""
    shrink(case, monkeypatch)
    found = case_studies.measure(case, 10.0, None, flat=False)
    assert 0 < found["lower_bound_s"] <= found["step_s"] < math.inf
    assert math.prod(found["axes"].values()) == 16
    assert sum(found["peak_GiB"].values()) < 67
