"""Files of a parallel module, on any plan, that transformers reads bit by bit; and read again under another plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, llama, token_batch


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


@pytest.mark.deep
@pytest.mark.distributed
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


def on_one(model: nn.Module) -> Any:
    from autopar.parallelize import parallelize

    return parallelize(model, None)


@pytest.mark.parametrize("build", [lambda: llama(tie=True, layers=1), mixtral])
def test_one_device_writes_the_same(build: Any, tmp_path: Path) -> None:
    from autopar import checkpoint

    model = build()
    model.save_pretrained(tmp_path / "by transformers")
    checkpoint.export_safetensors(tmp_path / "own", on_one(model), max_shard_size=SMALL)
    own, theirs = tensors_in(tmp_path / "own"), tensors_in(tmp_path / "by transformers")
    assert own.keys() == theirs.keys() and all(torch.equal(own[n], t) for n, t in theirs.items())
    sizes = [path.stat().st_size for path in (tmp_path / "own").glob("*.safetensors")]
    assert len(sizes) > 2 and min(sizes) < SMALL


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar import checkpoint

    left = tmp_path / "model.0a1b2c3d.partial"
    left.mkdir()  # by a writer that was killed
    written: list[int] = []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(offset)
        return write(descriptor, data, offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.export_safetensors(tmp_path / "model", on_one(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))))
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_files_do_not_have(tmp_path: Path) -> None:
    from autopar import checkpoint

    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'phases' is of torch\.complex128"):
        checkpoint.export_safetensors(tmp_path / "model", on_one(model))
