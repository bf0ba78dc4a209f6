"""Files of weights: what an index may name, and that whatever else it says is a plain error."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.state.materialize import _file_of_each

INDEX = "model.safetensors.index.json"
BATCH = (torch.ones(2, 4),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "snapshots" / "revision"
    found.mkdir(parents=True)
    save_file({"weight": torch.full((4, 4), 2.0)}, found / "a.safetensors")
    save_file({"bias": torch.ones(4)}, found / "b.safetensors")
    return found


def write(folder: Path, table: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 80}, "weight_map": table}))


def filled(init: Path) -> autopar.parallelize:  # type: ignore[valid-type]
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    return autopar.parallelize(model, None, BATCH, init=init, loss_fn=lambda output, batch: output.sum())


def test_an_index_names_files_beside_it(folder: Path) -> None:
    write(folder, {"weight": "a.safetensors", "bias": "b.safetensors"})
    for init in (folder, folder / INDEX):
        model: Any = filled(init)
        model(*BATCH)
        torch.testing.assert_close(model.weight, torch.full((4, 4), 2.0))


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/passwd",
        "x/../a.safetensors",
        "..",
        ".",
        "",
        "x/a.safetensors",
        "a\0",
        "..\\a",
        "x" * 256,
    ],
)
def test_names_do_not_lead_out_of_the_folder(folder: Path, name: str) -> None:
    save_file({"weight": torch.ones(4, 4)}, folder.parent / "a.safetensors")
    (folder / "x").mkdir()
    write(folder, {"weight": name})
    with pytest.raises(AutoparError, match=r"index\.json names .*; download"):
        _file_of_each(folder)


def test_links_lead_nowhere_but_into_the_blobs_of_the_model(folder: Path, tmp_path: Path) -> None:
    """As the cache of Hugging Face has them."""
    (tmp_path / "blobs").mkdir()
    (folder / "a.safetensors").rename(tmp_path / "blobs" / "3f9a")
    (folder / "a.safetensors").symlink_to("../../blobs/3f9a")
    write(folder, {"weight": "a.safetensors"})
    assert _file_of_each(folder) == {"weight": folder / "a.safetensors"}
    (folder / "a.safetensors").unlink()
    (tmp_path / "blobs" / "3f9a").rename(tmp_path / "3f9a")
    (folder / "a.safetensors").symlink_to("../../3f9a")
    with pytest.raises(AutoparError, match=r"names 'a\.safetensors', which is a link to .*3f9a; copy the file itself"):
        _file_of_each(folder)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"weight": 1}}', '{"weight_map": null}',
        '{"weight_map": {"weight": ["a"]}}', "[" * 100_000, '{"weight_map": ' * 20_000, '"\\ud800"', "\ufeff{}", "NaN",
    ],
)  # fmt: skip
def test_a_malformed_index_is_a_plain_error(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(AutoparError, match=r"index\.json is no index of safetensors: .*; download it again"):
        _file_of_each(folder)


def test_an_index_that_is_no_text_or_too_large(folder: Path) -> None:
    (folder / INDEX).write_bytes(b"\xff\xfe")
    with pytest.raises(AutoparError, match="not a text file in UTF-8"):
        _file_of_each(folder)
    with (folder / INDEX).open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(AutoparError, match=r"has \d+ bytes, more than"):
        _file_of_each(folder)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    with pytest.raises(AutoparError, match="found 2 files and no index"):
        _file_of_each(folder)


def test_shards_that_lack_what_the_index_says(folder: Path) -> None:
    write(folder, {"weight": "b.safetensors", "bias": "b.safetensors"})
    with pytest.raises(AutoparError, match=r"cannot read .*b\.safetensors as safetensors: .*weight.*; download"):
        filled(folder)
    write(folder, {"weight": "c.safetensors"})
    with pytest.raises(AutoparError, match=r"c\.safetensors, which does not exist; download all shards"):
        filled(folder)


@pytest.mark.slow
def test_damaged_shards_are_plain_errors(folder: Path) -> None:
    draw, whole = random.Random(0), (folder / "a.safetensors").read_bytes()
    write(folder, {"weight": "a.safetensors", "bias": "b.safetensors"})
    for _ in range(16):
        i, data = draw.randrange(len(whole)), bytearray(whole)
        data[i] = draw.randrange(256)
        (folder / "a.safetensors").write_bytes(bytes(data[: draw.choice([len(data), i])]))
        try:
            filled(folder)
        except AutoparError as e:
            assert "a.safetensors" in str(e) or "weight" in str(e), e
