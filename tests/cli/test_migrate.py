"""`autopar migrate`: what configurations mean, every key in one list, faults by file and key, and broken files."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import autopar
from autopar import cli
from autopar.cli.migrate import Migration, migrate
from autopar.cli.migrate.keys import LISTS, NO_COUNTERPART, NOT_NEEDED, TRANSLATED

DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "overlap_comm": True, "reduce_bucket_size": 5e8, "zero_quantized_weights": True,
        "zero_quantized_gradients": False, "zero_hpz_partition_size": 8,
    },
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}, "gradient_clipping": 1.0,
    "communication_data_type": "bf16", "tensor_parallel": {"autotp_size": 2},
    "activation_checkpointing": {"profile": True},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "freeze_step": 100}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, "flops_profilr": {"enabled": True},
}  # fmt: skip

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_use_orig_params: true
mixed_precision: bf16
machine_rank: 0
num_machines: 2
num_processes: 16
"""

TORCHTITAN = """\
[job]
dump_folder = "./outputs"
[model]
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 8
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""

FILES = {"ds.json": json.dumps(DEEPSPEED), "fsdp.yaml": ACCELERATE, "titan.toml": TORCHTITAN}


def of(folder: Path, name: str, text: str, devices: int | None = None) -> Migration:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return migrate(file, devices)


def zero(stage: int, **more: Any) -> str:
    return json.dumps({"zero_optimization": {"stage": stage}, **more})


def fsdp(strategy: str, more: str = "") -> str:
    return f"distributed_type: FSDP\nfsdp_config:\n  {strategy}\nnum_machines: 2\nnum_processes: 4\n{more}"


SEVERAL = {"replica": "data", "data": "shard", "tensor": "sequence"}


@pytest.mark.parametrize(
    ("name", "text", "devices", "axes", "search"),
    [
        ("a.json", "{}", 4, {"data": 4}, {"recipe": "ddp"}),
        ("a.json", zero(0), 4, {"data": 4}, {"recipe": "ddp"}),
        ("a.json", zero(1), 4, {"data": 4}, {"recipe": "zero1"}),
        ("a.json", zero(2), None, {"data": None}, {"recipe": "zero2"}),
        ("a.json", '{"zero_optimization": {"stage": 2, "reduce_scatter": false}}', 4, {"data": 4}, {"recipe": "zero1"}),
        ("a.json", zero(3), 4, {"data": 4}, {"recipe": "fsdp"}),
        ("a.json", '{"zero_optimization": true}', 4, {"data": 4}, {"recipe": "zero1"}),
        ("a.json", '{"zero_optimization": {"stage": 2, "cpu_offload": true}}', 4, {"data": 4},
         {"recipe": "zero2", "pins": {"offload": "search"}}),
        ("a.json", '{"zero_optimization": {"stage": 3, "mics_shard_size": 2}}', 4, {"replica": 2, "data": 2},
         {"recipe": "hsdp"}),
        ("a.json", json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_weights": True,
                                                     "zero_quantized_gradients": True}}), 4, {"data": 4},
         {"recipe": "fsdp", "quantized": {"data": {"weights": 8, "gradients": 4}}, "inexact": ("quantized",)}),
        ("a.json", json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}), 8,
         {"node": 4, "data": 2}, {"recipe": "fsdp", "pins": {"secondary": "data"}}),
        ("a.json", zero(3, sequence_parallel_size=2), 4, {"data": 2, "context": 2},
         {"roles": {"data": "shard", "context": "context"}}),
        ("a.json", zero(1, tensor_parallel={"autotp_size": 2}), None, {"data": None, "tensor": 2},
         {"roles": {"data": "optimizer", "tensor": "tensor"}}),
        ("a.json", zero(1, pipeline={"stages": 2}, gradient_accumulation_steps=4), 4, {"stage": 2, "data": 2},
         {"roles": {"data": "optimizer"},
          "pins": {"stages": 2, "stage_axis": "stage", "microbatches": 4, "schedule": "1f1b"}}),
        ("a.json", zero(0, train_batch_size=32, train_micro_batch_size_per_gpu=2), 4, {"data": 4},
         {"recipe": "ddp", "pins": {"microbatches": 4}}),
        ("a.json", zero(0, fp16={"enabled": True}, gradient_accumulation_steps=4), 4, {"data": 4}, {"recipe": "ddp"}),
        ("a.yml", fsdp("fsdp_sharding_strategy: FULL_SHARD"), None, {"data": 4}, {"recipe": "fsdp"}),
        ("a.yaml", fsdp("fsdp_sharding_strategy: 2"), None, {"data": 4}, {"recipe": "zero2"}),
        ("a.yaml", fsdp("sharding_strategy: 2\n  min_num_params: 9"), None, {"data": 4}, {"recipe": "zero2"}),
        ("a.yaml", fsdp("fsdp_reshard_after_forward: NO_SHARD"), None, {"data": 4}, {"recipe": "ddp"}),
        ("a.yaml", fsdp("fsdp_sharding_strategy: HYBRID_SHARD"), None, {"replica": 2, "data": 2}, {"recipe": "hsdp"}),
        ("a.yaml", fsdp("fsdp_version: 2\n  fsdp_reshard_after_forward: false"), 8, {"data": 8}, {"recipe": "zero2"}),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 4\n", None, {"data": 4}, {"recipe": "ddp"}),
        ("a.json", json.dumps({"distributed_type": "FSDP", "fsdp_config": {}, "num_processes": 4}), None, {"data": 4},
         {"recipe": "fsdp"}),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = 'none'", 4,
         {"data": 2, "tensor": 2}, {"roles": {"data": "shard", "tensor": "sequence"}}),
        ("a.toml", "[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4", None,
         {"data": 4}, {"recipe": "ddp", "pins": {"recompute": "search"}}),
        ("a.toml", "[parallelism]\ndata_parallel_shard_degree = 4\nexpert_parallel_degree = 2", 4,
         {"data": 2, "expert": 2}, {"roles": {"data": "shard", "expert": "expert"}, "pins": {"recompute": "search"}}),
        ("titan.toml", TORCHTITAN, 16, {"stage": 2, "replica": 2, "data": 2, "tensor": 2},
         {"roles": SEVERAL, "pins": {"stages": 2, "stage_axis": "stage", "recompute": "search",
                                     "schedule": "interleaved", "virtual": 2, "microbatches": 4}}),
    ],
)  # fmt: skip
def test_what_a_file_means(
    name: str, text: str, devices: int | None, axes: dict[str, int], search: dict[str, Any], tmp_path: Path
) -> None:
    found = of(tmp_path, name, text, devices)
    assert (found.setup.parallelism.axes, found.setup.parallelism.arguments) == (axes, search)
    assert list(found.setup.parallelism.axes) == list(axes)


def leaves(tree: Any, prefix: str = "") -> set[str]:
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]}
    return set().union(*(leaves(value, f"{prefix}{key}.") for key, value in tree.items()))


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_in_one_list(name: str, tmp_path: Path) -> None:
    found = of(tmp_path, name, FILES[name])
    tree = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[name.split(".")[1]](FILES[name])
    listed = [key for rows in found.keys.lists.values() for key in rows]
    assert sorted(listed) == sorted(leaves(tree))
    assert all(says for rows in found.keys.lists.values() for says in rows.values())
    # And each of them is printed.
    output = CliRunner().invoke(cli.app, ["migrate", str(tmp_path / name)]).output
    assert all(f"#   {key} = " in output for key in listed)


def test_which_list(tmp_path: Path) -> None:
    lists = of(tmp_path, "ds.json", FILES["ds.json"]).keys.lists
    assert {
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "communication_data_type",
        "gradient_accumulation_steps",
        "tensor_parallel.autotp_size",
        "optimizer.params.lr",
    } <= set(lists[TRANSLATED])
    assert {
        "fp16.enabled",
        "fp16.loss_scale",
        "zero_optimization.zero_quantized_gradients",
        "steps_per_print",
        "zero_optimization.offload_optimizer.pin_memory",
    } <= set(lists[NOT_NEEDED])
    assert set(lists[NO_COUNTERPART]) == {
        "zero_optimization.zero_quantized_weights", "zero_optimization.zero_hpz_partition_size", "optimizer.type",
        "optimizer.params.freeze_step", "scheduler.type", "scheduler.params.warmup_num_steps", "flops_profilr.enabled",
    }  # fmt: skip
    assert "does not know this key" in lists[NO_COUNTERPART]["flops_profilr.enabled"]


def test_what_changes_numbers_or_is_no_key_is_said(tmp_path: Path) -> None:
    given = {
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
        "pipeline": {"pipeline_parallel_size": 4, "chunks": 2},
        "optimizer": {"type": "Adam", "params": {"bias_correction": False, "amsgrad": True, "max_grad_norm": 1.0}},
        "tensor_parallel": {"tp_size": 2},
        "micro_batch_size_per_gpu": 1,
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": True}},
    }
    found = of(tmp_path, "a.json", json.dumps(given))
    lacks = found.keys.lists[NO_COUNTERPART]
    assert set(lacks) == {
        "bf16.bf16_optimizer_states", "pipeline.pipeline_parallel_size", "pipeline.chunks", "tensor_parallel.tp_size",
        "optimizer.params.bias_correction", "optimizer.params.max_grad_norm", "micro_batch_size_per_gpu",
        "zero_optimization.offload_optimizer.ratio",
    }  # fmt: skip
    assert "corrects the bias" in lacks["optimizer.params.bias_correction"]
    assert "did you mean train_micro_batch_size_per_gpu?" in lacks["micro_batch_size_per_gpu"]
    assert found.setup.optimizer is not None and found.setup.optimizer.arguments["amsgrad"] is True
    older = of(tmp_path, "a.json", json.dumps({"bfloat16": {"enabled": True}}))
    assert older.setup.compute == "bf16" and not older.keys.lists[NO_COUNTERPART]


def test_float16_that_the_trainer_decides_scales_its_losses(tmp_path: Path) -> None:
    given = {"fp16": {"enabled": "auto", "initial_scale_power": 8, "loss_scale_window": 500}, "gradient_clipping": 1}
    found = of(tmp_path, "a.json", json.dumps(given))
    assert set(found.keys.lists[TRANSLATED]) >= {"fp16.initial_scale_power", "fp16.loss_scale_window"}
    names: dict[str, Any] = {"__builtins__": __builtins__}
    exec(compile(found.script, "a.py", "exec"), names)
    assert not names["scaler_of"]("bf16").is_enabled()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before, scaler = model.weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(torch.ones(1, 2)).sum() * 1e3).backward()
    names["update"](model, optimizer, scaler)
    assert float((before - model.weight.detach()).norm()) == pytest.approx((4 / 6) ** 0.5, rel=1e-4)


def test_accelerates_own_section_of_deepspeed(tmp_path: Path) -> None:
    """As `accelerate config` writes it, which names no file of DeepSpeed's."""
    section = {
        "deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_init_flag": True, "zero_stage": 3,
        "zero3_save_16bit_modle": True,
    }  # fmt: skip
    given = {"distributed_type": "DEEPSPEED", "deepspeed_config": section, "mixed_precision": "bf16"}
    found = of(tmp_path, "a.yaml", yaml.safe_dump({**given, "num_processes": 8}))
    assert found.setup.parallelism.axes == {"data": 8} and found.setup.clip == 1 and found.setup.compute == "bf16"
    assert found.setup.parallelism.arguments == {"recipe": "fsdp", "pins": {"offload": "search", "microbatches": 4}}
    inside = "deepspeed_config."
    assert set(found.keys.lists[NOT_NEEDED]) == {
        inside + n for n in ("deepspeed_multinode_launcher", "zero3_init_flag")
    }
    lacks = found.keys.lists[NO_COUNTERPART]
    assert set(lacks) == {f"{inside}offload_param_device", f"{inside}zero3_save_16bit_modle"}
    assert f"did you mean {inside}zero3_save_16bit_model?" in lacks[f"{inside}zero3_save_16bit_modle"]
    half = of(tmp_path, "a.yaml", "distributed_type: DEEPSPEED\nmixed_precision: fp16\n")
    assert half.setup.scaler == {"init_scale": 65536.0, "growth_interval": 1000}
    assert half.setup.parallelism.data == "zero2" and "zero_stage = 2" in half.keys.assumed[0]


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled")
def test_float16_scales_its_losses(tmp_path: Path) -> None:
    found = of(
        tmp_path, "a.json", json.dumps({"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 1})
    )
    assert found.to_dict()["scaler"] == {"init_scale": 256.0, "growth_interval": 1000}
    names: dict[str, Any] = {"__builtins__": __builtins__}
    exec(compile(found.script, "a.py", "exec"), names)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = names["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum() * 1e3).backward()
    names["update"](model, optimizer)
    assert float((before - model.weight.detach()).norm()) == pytest.approx(
        (4 / 6) ** 0.5, rel=1e-4
    )  # of six gradients that are alike, clipped to 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "a.txt: autopar migrate reads"),
        ("a.json", "[]", "a.json is a list; write a table"),
        ("a.json", "{", "a.json cannot be read: Expecting property name"),
        ("a.json", '{"a": 1, "a": 2}', "a.json cannot be read: key 'a' is there twice: keep one"),
        ("a.json", "[" * 100_000, "a.json cannot be read: "),
        ("a.json", '{"a":' * 40 + "1" + "}" * 40, "16 tables deep"),
        ("a.json", f'{{"a": "{"x" * 2**20}"}}', "has more than 1048576 bytes"),
        ("a.json", zero(7), 'a.json: zero_optimization.stage is 7; write 0, 1, 2 or 3'),
        ("a.json", '{"zero_optimization": 1}', "zero_optimization is 1; write a table of keys, or true or false"),
        ("a.json", '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "are both true; keep one"),
        ("a.json", zero(0, train_batch_size=9, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1),
         "train_batch_size is 9, and train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 1 x 4 parts"),
        ("a.json", zero(0, tensor_parallel={"autotp_size": 3}), "asks for tensor 3 devices, and there are 4"),
        ("a.yaml", "a: &x [1]\nb: *x\n", "line 2 has an alias (*x): write it out"),
        ("a.yaml", "a: 1\na: 2\n", "key 'a' is there twice"),
        ("a.yaml", "1: 2\n", "key 1 in the file is no text; quote it"),
        ("a.yaml", "a: [1\n", "a.yaml cannot be read: while parsing"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: z3.json\n",
         "give autopar migrate its JSON file, deepspeed_config.deepspeed_config_file = z3.json"),
        ("a.yaml", "distributed_type: DEEPSPEED\ngradient_accumulation_steps: 2\ndeepspeed_config:\n"
         "  gradient_accumulation_steps: 4\n", "gradient_accumulation_steps differ; keep one"),
        ("a.json", '{"limit_all_gathers": true, "xla": false}', "no key is one of DeepSpeed's"),
        ("a.yaml", fsdp("fsdp_sharding_strategy: FULL"),
         'fsdp_config.fsdp_sharding_strategy is "FULL"; write "FULL_SHARD"'),
        ("a.yaml", "num_machines: 3\nnum_processes: 4\n", "num_processes 4 is no multiple of num_machines 3"),
        ("a.toml", "a = ", "a.toml cannot be read: Invalid value"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0", "tensor_parallel_degree is 0; write a whole"),
        ("a.toml", "[parallelism]\ndata_parallel_shard_degree = 4\nexpert_parallel_degree = 3",
         "expert_parallel_degree 3 does not divide data_parallel_shard_degree 4"),
        ("a.json", zero(0, fp16={"enabled": True}, pipeline={"stages": 2}), "asks for pipeline stages in float16"),
        ("a.toml", "[optimizer]\nbeta1 = 1.0", "optimizer.beta1 is 1.0; write a number from 0 to less than 1"),
    ],
)  # fmt: skip
def test_faults(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        of(tmp_path, name, text, 4)
    assert says in str(caught.value)
    found = CliRunner().invoke(cli.app, ["migrate", str(tmp_path / name), "--devices", "4"])
    assert found.exit_code == 2 and found.stdout == "" and len(found.stderr.splitlines()) == 1


WRONG = [None, True, -1, 0, 2, 10**30, 1.5, float("nan"), "", "auto", "x" * 200, [], [1, [2]], {}, {"a": {"b": 1}}]


def changed(text: str, draw: random.Random) -> str:
    """Characters replaced, lost, doubled or in other places."""
    characters = list(text)
    for _ in range(draw.randint(1, 3)):
        at, other = draw.randrange(len(characters)), draw.randrange(len(characters))
        piece = characters[at : at + draw.randint(1, 12)]
        new = [piece * 2, [], [draw.choice("{}[]:,\"'0-=&*!\n\t\\é\x00 ")], characters[other : other + 8]]
        characters[at : at + len(piece)] = draw.choice(new)
    return "".join(characters)


def replaced(tree: Any, draw: random.Random) -> Any:
    """A value, or a table, is something else."""
    keys = [*leaves(tree)]
    path = draw.choice(keys).split(".")
    path = path[: draw.randint(1, len(path))]
    inside = tree
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = draw.choice(WRONG)
    return tree


def other_line(text: str, draw: random.Random) -> str:
    """A value of a TOML file is something else."""
    lines = text.splitlines()
    at = draw.choice([number for number, line in enumerate(lines) if "=" in line])
    value = draw.choice(
        ["true", "-1", "0", "3", "1" + "0" * 30, "1.5", "nan", '""', '"auto"', "[]", "[1, [2]]", "{a = 1}"]
    )
    return "\n".join([*lines[:at], lines[at].partition("=")[0] + "= " + value, *lines[at + 1 :]])


def broken(name: str, draw: random.Random) -> str:
    """One of the files with another value, or other characters."""
    text = FILES[name]
    if draw.random() < 0.3:
        return changed(text, draw)
    if name == "titan.toml":
        return other_line(text, draw)
    tree = replaced(json.loads(text) if name == "ds.json" else yaml.safe_load(text), draw)
    return json.dumps(tree) if name == "ds.json" else yaml.safe_dump(tree)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FILES)
def test_broken_files_are_errors_or_plans(name: str, tmp_path: Path) -> None:
    draw, read, refused = random.Random(name), 0, 0
    for _ in range(500):
        text = broken(name, draw)
        try:
            found = of(tmp_path, name, text, draw.choice([None, 1, 6, 16]))
        except ValueError as error:
            refused += 1
            assert name in str(error) and len(str(error)) < 1000
            continue
        read += 1
        listed = [key for rows in found.keys.lists.values() for key in rows]
        assert sorted(listed) == sorted(found.keys)
        compile(found.script, name, "exec")
        json.dumps(found.to_dict())
    assert read > 30 and refused > 30


def test_what_the_trainer_decides_is_an_argument(tmp_path: Path) -> None:
    """Of the printed functions, and no value that the file does not have."""
    given = {
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": "auto"}},
    }  # fmt: skip
    found = of(tmp_path, "ds.json", json.dumps(given))
    scope: dict[str, Any] = {}
    exec(compile(found.script, "ds.py", "exec"), scope)
    module = torch.nn.Linear(2, 1)
    optimizer = scope["optimizer_of"](module, lr=0.5, weight_decay=0.25)
    assert {k: optimizer.defaults[k] for k in ("lr", "betas", "weight_decay")} == {
        "lr": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.25,
    }  # fmt: skip
    module(torch.full((1, 2), 100.0)).sum().backward()
    before = module.weight.detach().clone()
    scope["update"](module, optimizer, max_norm=0.0)
    assert torch.allclose(module.weight.detach(), before * (1 - 0.5 * 0.25))
    assert "precision=precision" in found.script
    said = found.to_dict()
    assert (said["precision"], said["clip_grad_norm"], said["optimizer"]["lr"]) == ("auto", "auto", "auto")


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 4}])
def test_a_batch_that_its_parts_do_not_divide(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_batch_size 20 is no multiple of 8 parts of the batch"):
        of(tmp_path, "ds.json", json.dumps({"train_batch_size": 20, **given}), 8)


def test_the_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(tmp_path, "ds.json", FILES["ds.json"])
    monkeypatch.setenv("WORLD_SIZE", "8")
    names: dict[str, Any] = {}
    exec(compile(found.script, "ds.py", "exec"), names)
    assert names["axes"] == {"data": 4, "tensor": 2}
    assert names["search"] == found.setup.search == autopar.Search(
        roles={"data": "shard", "tensor": "tensor"}, pins={"offload": "search", "microbatches": 4}
    )  # fmt: skip
    assert found.to_dict()["rows"] == 16 and found.setup.reduce == "bf16"
    assert "precision=autopar.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)" in found.script
    model = torch.nn.Linear(2, 2)
    optimizer = names["optimizer_of"](model)
    assert (type(optimizer), optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (
        torch.optim.AdamW,
        3e-4,
        0,
    )
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    names["update"](model, optimizer)
    assert not torch.equal(before, model.weight)


def test_json_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TORCHTITAN, encoding="utf-8")
    output = CliRunner().invoke(cli.app, ["migrate", str(tmp_path / "titan.toml"), "--devices", "16", "--json"])
    facts = json.loads(output.stdout)
    assert facts["axes"] == {"stage": 2, "replica": 2, "data": 2, "tensor": 2} and facts["compile"] is True
    assert set(facts["keys"]) == set(LISTS) and facts["precision"] == {"compute": "bf16", "reduce": "fp32"}
    assert facts["keys"][NO_COUNTERPART] == [
        {
            "key": "model.converters",
            "value": '["float8"]',
            "says": "they change the model; float8, by hand: precision='fp8', inexact=('fp8',)",
        }
    ]
