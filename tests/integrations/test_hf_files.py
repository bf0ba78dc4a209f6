"""Files of a parallel module, on any plan, that transformers reads bit by bit; and read again under another plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, llama, token_batch

pytestmark = [pytest.mark.distributed, pytest.mark.deep]  # tests/distributed/test_checkpoint_files.py has a quick one


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False, experts_implementation="batched_mm",
    )  # fmt: skip
    return MixtralForCausalLM(config)


STRIDED = {"*.c_attn.weight": ("S(1.1)",), "*.c_attn.bias": ("S(0.1)",), "*.c_fc.weight": ("S(0)",)}
SMALL = 9000
"""Bytes of a file, so that small models have several."""

MODELS: dict[str, tuple[Any, list[tuple[tuple[int, ...], dict[str, Any]]]]] = {
    "tied llama in stages": (lambda: llama(tie=True), [((2, 2), {"pins": {"stages": 2}}), ((4,), {"recipe": "fsdp"})]),
    "gpt2 split in heads": (gpt2, [((4,), {"pins": STRIDED}), ((2, 2), {"recipe": "random", "seed": 3})]),
    "mixtral": (mixtral, [((2, 2), {"recipe": "random", "seed": 1}), ((4,), {"recipe": "fsdp"})]),
}


def written(rank: int, case: str, folder: str) -> None:
    """One plan's files, those of a second plan that has loaded them, and those of a copy in another dtype."""
    from transformers import AutoModelForCausalLM

    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    build, plans = MODELS[case]
    model = build()
    for i, (sizes, search) in enumerate(plans):
        options = {"search": Search(**search), "timeout": WAIT}
        parallel = parallelize(model, mesh_of(*sizes), token_batch(0), **options)  # type: ignore[arg-type]
        place = checkpoint.export_safetensors(f"{folder}/{i}", parallel, max_shard_size=SMALL)
        if rank == 0:
            parallel.config.save_pretrained(place)
        torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(place, experts_implementation="batched_mm")
    checkpoint.export_safetensors(f"{folder}/half", parallel, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="is there already"):
        checkpoint.export_safetensors(f"{folder}/half", parallel)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})
    return found


@pytest.mark.parametrize("case", MODELS)
def test_from_pretrained_reads_what_ranks_write(four: Ranks, tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    expected = MODELS[case][0]()
    expected.save_pretrained(tmp_path / "by transformers", max_shard_size=SMALL)
    own = tensors_in(tmp_path / "by transformers")
    four.run(written, case, str(tmp_path))
    for name in ("0", "1", "half"):
        found = tensors_in(tmp_path / name)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[n], t if name != "half" else t.to(torch.bfloat16)) for n, t in own.items())
    index = json.loads((tmp_path / "0" / "model.safetensors.index.json").read_text())
    theirs = json.loads((tmp_path / "by transformers" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == theirs["metadata"] and index["weight_map"].keys() == theirs["weight_map"].keys()
    files = {path.name: path for path in (tmp_path / "0").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files.keys() and len(files) > 4
    assert [p.name for p in (tmp_path / "half").iterdir()] == ["model.safetensors"]
    assert not list(tmp_path.glob("*.partial"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "0", experts_implementation="batched_mm")
    assert read.dtype == expected.dtype
    state = read.state_dict()
    assert all(torch.equal(state[n], t) for n, t in expected.state_dict().items())
