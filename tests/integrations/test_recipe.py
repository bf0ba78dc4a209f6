"""A training run from a TOML file: on four ranks, resumed on two by ``autopar run --config``, beside one device."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.integrations.recipe.schema import Schedule, read_recipe
from autopar.integrations.recipe.train import rate, train
from tests.distributed.launch import Ranks
from tests.distributed.models import loss_in_float64

ROOT = Path(__file__).resolve().parents[2]

TEXT = """
steps = 20
seed = 3

[model]
build = "tests.integrations.test_recipe:language"
arguments = {{ width = 32 }}

[data]
text = "{folder}/text.txt"
rows = 4
length = 16

[optimizer]
name = "adamw"
lr = 1e-2
weight_decay = 0.1
betas = [0.9, 0.95]
clip = 0.5

[schedule]
name = "cosine"
warmup = 4
least = 0.1

[metrics]
every = 1
file = "{folder}/{name}.jsonl"

[mesh]
{mesh}
"""

SAVED = """
[checkpoint]
folder = "{folder}/saved"
every = 10
export = "{folder}/{name} exported"
"""


def language(width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=16, n_embd=width, n_layer=1, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    model.loss_function = loss_in_float64
    return model


def written(folder: Path, name: str, mesh: str = "", saved: bool = False) -> Path:
    path = folder / f"{name}.toml"
    path.write_text((TEXT + (SAVED if saved else "")).format(folder=folder, name=name, mesh=mesh))
    return path


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def on_ranks(rank: int, path: str) -> None:
    train(read_recipe(path))


@pytest.mark.deep
@pytest.mark.distributed
def test_a_run_goes_on_with_other_ranks(four: Ranks, tmp_path: Path) -> None:
    letters = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(letters.choice("abcdefgh ") for _ in range(1000)))
    model = train(read_recipe(written(tmp_path, "one")))
    expected = lines(tmp_path, "one")
    assert [e["step"] for e in expected] == list(range(1, 21))
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.5 and expected[-1]["next_lr"] < 2e-3
    assert all(e["tokens_per_second"] > 0 for e in expected)

    four.run(on_ranks, str(written(tmp_path, "four", 'recipe = "fsdp"\naxes = { a = 4 }', saved=True)))
    assert [e["loss"] for e in lines(tmp_path, "four")] == pytest.approx([e["loss"] for e in expected], abs=1e-9)

    # As if it had been stopped before the last checkpoint.
    saved = tmp_path / "saved"
    shutil.rmtree(saved / (saved / "latest").read_text())
    path = written(tmp_path, "two", 'axes = { a = 2 }\nrecipe = "fsdp"', saved=True)
    command = [sys.executable, "-m", "autopar.cli", "run", "--nproc", "2", "--config", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path, "two")
    assert [e["step"] for e in found] == list(range(11, 21)) and "step 20: " in done.stdout
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in expected[10:]], abs=1e-9)
    from safetensors.torch import load_file

    for name in ("four exported", "two exported"):
        exported = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.allclose(t, model.state_dict()[n], atol=1e-9) for n, t in exported.items())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 20", "steps = 0", r"a\.toml: steps: expected `int` >= 1"),
        ("lr = 1e-2", 'lr = "high"', r"optimizer\.lr: expected `float`, got `str`"),
        ("clip = 0.5", "clips = 0.5", r"optimizer: object contains unknown field `clips`"),
        ('"cosine"', '"cosinus"', r"schedule\.name: invalid enum value 'cosinus'"),
        ("[model]\nbuild", "[model]\nbuilds", r"model: object contains unknown field"),
        ("[model]", '[model]\npretrained = "x"', r"model: give one of model\.build and model\.pretrained"),
        ("warmup = 4", "warmup = 20", r"schedule\.warmup: 20 is not less than steps"),
        ("betas = [0.9, 0.95]", "momentum = 0.9", r"optimizer\.momentum: it is of sgd"),
        ("[mesh]", '[mesh]\nmemory = "lots"', r"mesh\.memory: cannot read 'lots' as a size"),
        ("[mesh]", "[mesh]\naxes = { a = 0 }", r"mesh\.axes\[\.\.\.\]: expected `int` >= 1"),
        ("steps = 20", "steps = = 20", r"a\.toml is no TOML"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, "a")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (":language", ":languages", r"model\.build: tests\.integrations\.test_recipe has no function 'languages'"),
        (":language", ":lines", r"model\.arguments: .*:lines: missing a required argument: 'folder'"),
        ("tests.integrations.test_recipe:", "no.such:", r"model\.build: cannot import 'no\.such'"),
        ("length = 16", "length = 1600", r"data\.text: .*text\.txt has 10 tokens, which are fewer than 4 rows"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "text.txt").write_text("abcdefghij")
    path = written(tmp_path, "a")
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        train(read_recipe(path))


def test_rates() -> None:
    linear = rate(Schedule(name="linear", warmup=2, least=0.5), 7)
    assert [round(linear(i), 4) for i in range(8)] == [0.3333, 0.6667, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert rate(Schedule(name="cosine"), 3)(1) == pytest.approx(0.5)
    assert rate(Schedule(), 3)(2) == 1.0
