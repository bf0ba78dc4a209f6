"""accelerate's configuration of FSDP, https://huggingface.co/docs/accelerate/usage_guides/fsdp, in autopar's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.cli.migrate import accelerate_deepspeed as deepspeed
from autopar.cli.migrate.deepspeed import offload_of
from autopar.cli.migrate.keys import COUNT, FLAG, NO_COUNTERPART, NOT_NEEDED, NUMBER, Keys, Reasons, one_of
from autopar.cli.migrate.setup import DDP, FSDP, ZERO2, Parallelism, Setup, on_devices

SECTIONS = ("fsdp_config", "parallelism_config", deepspeed.SECTION)

_LAUNCH = NOT_NEEDED, "`autopar run` and torchrun take it as an option"
_SCRIPT = NOT_NEEDED, "nothing of a step depends on it"
_WRAPPING = NOT_NEEDED, "what is gathered together is decided for each parameter, not by wrapped modules"

REASONS: Reasons = {
    "compute_environment": _LAUNCH,
    "machine_rank": _LAUNCH,
    "main_process_*": _LAUNCH,
    "main_training_function": _LAUNCH,
    "rdzv_*": _LAUNCH,
    "same_network": _LAUNCH,
    "gpu_ids": _LAUNCH,
    "debug": _LAUNCH,
    "enable_cpu_affinity": _LAUNCH,
    "use_cpu": (NOT_NEEDED, "autopar.mesh(device=...) says it"),
    "tpu_*": (NO_COUNTERPART, "TPUs are not among the devices"),
    "downcast_bf16": (NO_COUNTERPART, "it is of TPUs, which are not among the devices"),
    "commands": _LAUNCH,
    "command_file": _LAUNCH,
    "dynamo_config*": (NO_COUNTERPART, "compile=True of parallelize takes inductor's defaults"),
    "fp8_config*": (
        NO_COUNTERPART,
        "float8 layers are asked for by hand: precision='fp8' with Search(inexact=('fp8',))",
    ),
    "fsdp_config.fsdp_auto_wrap_policy": _WRAPPING,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _WRAPPING,
    "fsdp_config.fsdp_min_num_params": _WRAPPING,
    "fsdp_config.min_num_params": _WRAPPING,
    "fsdp_config.transformer_layer_cls_to_wrap": _WRAPPING,
    "fsdp_config.backward_prefetch*": (NOT_NEEDED, "collectives run beside kernels where that is faster and fits"),
    "fsdp_config.fsdp_backward_prefetch*": (NOT_NEEDED, "collectives run beside kernels where that is faster and fits"),
    "fsdp_config.fsdp_forward_prefetch": (NOT_NEEDED, "collectives run beside kernels where that is faster and fits"),
    "fsdp_config.fsdp_use_orig_params": (NOT_NEEDED, "parameters always keep their names, shapes and dtypes"),
    "fsdp_config.fsdp_sync_module_states": (NOT_NEEDED, "every rank has rank 0's values after parallelize"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": (NOT_NEEDED, "a model on the meta device takes init=, a file"),
    "fsdp_config.fsdp_state_dict_type": (NOT_NEEDED, "full_state_dict() is whole; autopar.checkpoint writes shards"),
    "fsdp_config.fsdp_ignored_modules": (NO_COUNTERPART, 'pin the names of their parameters to "R"'),
    "fsdp_config.fsdp_limit_all_gathers": (NOT_NEEDED, "the memory budget counts what is gathered"),
    "parallelism_config.parallelism_config_cp_*": (NOT_NEEDED, "costs decide how attention goes on"),
    "parallelism_config.parallelism_config_sp_*": (NOT_NEEDED, "costs decide how attention goes on"),
    **deepspeed.REASONS,
}

_STRATEGIES = {
    "1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2",
}  # fmt: skip
_RECIPES = {
    "FULL_SHARD": FSDP,
    "SHARD_GRAD_OP": ZERO2,
    "NO_SHARD": DDP,
    "HYBRID_SHARD": FSDP,
    "HYBRID_SHARD_ZERO2": ZERO2,
}
_DEEPSPEED = "DEEPSPEED"
_KINDS = ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO", _DEEPSPEED, "MEGATRON_LM", "TPU", "XLA")


def of_accelerate(keys: Keys, devices: int | None) -> Setup:
    """What an accelerate configuration asks for; the rest is in the lists of ``keys``.

    Args:
        keys: of the file.
        devices: of the run; None: as many as the file says, or any number.

    Raises:
        ValueError: a value is wrong, or contradicts another.
    """
    kind = _kind(keys)
    machines, processes = keys.read("num_machines", COUNT, 1), keys.read("num_processes", COUNT)
    if processes is not None and processes % machines:
        raise ValueError(
            f"{keys.file}: num_processes {processes} is no multiple of num_machines {machines}; correct one"
        )
    count = devices or processes
    keys.translate("num_processes", "the devices of the mesh" if count == processes else f"--devices {devices} instead")
    data, hybrid = _data(keys, kind)
    replicas: int | None = 1
    shards: int | None = None
    if hybrid and count is not None and machines > 1 and count % machines == 0:
        replicas, shards = machines, count // machines
        keys.translate("num_machines", f"replicas: parameters are split over the {shards} devices of each")
    elif hybrid and machines > 1:
        replicas = machines
        keys.translate("num_machines", "replicas: parameters are split over the devices of each")
    else:
        keys.drop("num_machines", "costs of links decide what is sent between nodes")
    sizes = {name: _size(keys, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    if sizes["dp_replicate"] or sizes["dp_shard"]:
        replicas, shards = sizes["dp_replicate"] or 1, sizes["dp_shard"]
    parallelism = Parallelism(
        data=data,
        replicas=replicas,
        shards=shards,
        tensor=sizes["tp"] or 1,
        context=(sizes["cp"] or 1) * (sizes["sp"] or 1),
        pins=_pins(keys) | (offload_of(keys, deepspeed.OFFLOAD) if kind == _DEEPSPEED else {}),
    )
    parallelism = on_devices(parallelism, count, str(keys.file))
    key = _key(keys, kind, "gradient_clipping")
    clip = keys.read(key, NUMBER)
    keys.translate(key, "clip_grad_norm_ in the loop, over all devices")
    compute = _precision(keys)
    parallelism = _accumulated(keys, parallelism, compute, _key(keys, kind, "gradient_accumulation_steps"))
    keys.finish(REASONS)
    scaler = deepspeed.SCALER if kind == _DEEPSPEED else {}
    return Setup(parallelism, compute, clip=clip, scaler=scaler if compute == "fp16" else None)


def _key(keys: Keys, kind: str, name: str) -> str:
    """Of a value that accelerate reads in its section of DeepSpeed, where that decides.

    Raises:
        ValueError: the file has another one besides.
    """
    inside = f"{deepspeed.SECTION}.{name}"
    if kind != _DEEPSPEED or inside not in keys:
        return name
    if name in keys and keys.value(name) != keys.value(inside):
        raise ValueError(f"{keys.file}: {name} and {inside} differ; keep one")
    keys.drop(name, f"{inside} says it")
    return inside


def _kind(keys: Keys) -> str:
    kind: str = keys.read("distributed_type", one_of(*_KINDS), "FSDP" if _has_fsdp(keys) else "NO")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO", _DEEPSPEED):
        where = {
            "MEGATRON_LM": "docs/migration.md has a table of Megatron-LM's arguments",
        }.get(kind, "devices are GPUs and CPUs")
        raise ValueError(f"{keys.file}: distributed_type is {kind}, of which this file says little: {where}")
    more = {"FSDP": "fsdp_config says more", _DEEPSPEED: f"{deepspeed.SECTION} says more"}
    keys.translate("distributed_type", more.get(kind, "recipe 'ddp'"))
    return kind


def _has_fsdp(keys: Keys) -> bool:
    return any(key.startswith("fsdp_config.") for key in keys)


def _data(keys: Keys, kind: str) -> tuple[str, bool]:
    """The recipe of the data-parallel devices, and whether each node has a copy."""
    version = keys.read("fsdp_config.fsdp_version", one_of(1, 2), 1)
    keys.drop("fsdp_config.fsdp_version", "both versions split parameters alike")
    again, shards = "fsdp_config.fsdp_reshard_after_forward", _spelled(keys, "sharding_strategy")
    strategy = _strategy(keys, shards, "FULL_SHARD")
    value = keys.value(again) if again in keys else None
    # In version 1 this key may have the strategy's name.
    older = _strategy(keys, again, strategy) if isinstance(value, str) else strategy
    if kind != "FSDP":
        for key in (again, shards):
            keys.drop(key, f"distributed_type is {kind}")
        return (deepspeed.data_of(keys) if kind == _DEEPSPEED else DDP), False
    if version == 1:
        strategy = strategy if shards in keys else older
        says = f"recipe {_RECIPES[strategy]!r}" + (", with a copy on each node" if "HYBRID" in strategy else "")
        keys.translate(shards, says)
        if isinstance(value, str) and shards not in keys:
            keys.translate(again, says)
        else:
            keys.drop(again, "fsdp_sharding_strategy says it in version 1")
        return _RECIPES[strategy], "HYBRID" in strategy
    if isinstance(value, str):
        raise keys.wrong(again, "true or false")
    reshards = keys.read(again, FLAG, True)
    data = FSDP if reshards else ZERO2
    keys.translate(
        again, f"recipe {data!r}: gathered {'again in' if reshards else 'once, and saved for'} the backward pass"
    )
    keys.drop(shards, "version 2 takes fsdp_reshard_after_forward instead")
    return data, False


def _spelled(keys: Keys, name: str) -> str:
    """A key of the section, as the file has it: the oldest ones leave out what all begin with now."""
    older, now = f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"
    return older if older in keys and now not in keys else now


def _strategy(keys: Keys, key: str, default: str) -> str:
    """A strategy by its name, or by the number that older files have."""
    value = keys.value(key) if key in keys else None
    if isinstance(value, int) and not isinstance(value, bool) and str(value)[:2] in _STRATEGIES:
        return _STRATEGIES[str(value)]
    names = (*_STRATEGIES.values(), *_STRATEGIES)
    if key == "fsdp_config.fsdp_reshard_after_forward" and not isinstance(value, str):
        return default
    found: str = keys.read(key, one_of(*names), default)
    return _STRATEGIES.get(found, found)


def _size(keys: Keys, name: str) -> int | None:
    key = f"parallelism_config.parallelism_config_{name}_size"
    size: int | None = keys.read(key, COUNT)
    axes = {"dp_replicate": "replica", "dp_shard": "data", "tp": "tensor", "cp": "context", "sp": "context"}
    if size == 1:
        keys.drop(key, "one device is no axis")
    else:
        keys.translate(key, f"mesh axis {axes[name]}")
    return size


def _pins(keys: Keys) -> dict[str, Any]:
    """Pins of recomputation; offload of parameters has none."""
    pins = {}
    key = "fsdp_config.fsdp_activation_checkpointing"
    if keys.read(key, FLAG, False):
        pins["recompute"] = "search"
        keys.translate(key, "pin recompute='search': tensors are recomputed where memory is short")
    else:
        keys.drop(key, "checkpoints in the model's code are followed")
    key = _spelled(keys, "offload_params")
    if keys.read(key, FLAG, False):
        keys.lack(
            key, "parameters stay on devices; the pin offload='search' offloads optimizer state and what is saved"
        )
    else:
        keys.drop(key, "parameters stay on devices")
    return pins


def _precision(keys: Keys) -> str | None:
    """The dtype to compute in."""
    words = one_of("no", "fp16", "bf16", "fp8", False)
    mixed = keys.read("mixed_precision", words, "no")
    policy = keys.read("fsdp_config.fsdp_mixed_precision_policy", one_of("no", "fp16", "bf16", "fp8", "fp32", False))
    keys.translate("fsdp_config.fsdp_mixed_precision_policy", "precision: it wins over mixed_precision")
    found = {False: "no", "fp32": "no"}.get(policy or mixed, policy or mixed)
    if mixed == "fp8" or found == "fp8":
        keys.lack(
            "mixed_precision",
            "float8 layers change the numbers: ask for them by hand, precision='fp8' with Search(inexact=('fp8',))",
        )
        return None
    if found == "no":
        keys.drop("mixed_precision", "the model's own dtypes")
        return None
    scaler = "; the loop takes torch.amp.GradScaler" if found == "fp16" else ""
    keys.translate(
        "mixed_precision", f"precision={found!r}: computes in it, with parameters and sums in float32{scaler}"
    )
    return str(found)


def _accumulated(keys: Keys, parallelism: Parallelism, compute: str | None, key: str) -> Parallelism:
    steps = keys.read(key, COUNT, 1)
    if steps > 1 and compute == "fp16":
        keys.lack(key, "float16 has no microbatches: call the model so often before optimizer.step(), or take bf16")
    elif steps > 1:
        keys.translate(key, f"pin microbatches={steps}: one call computes them all")
        return replace(parallelism, pins={**parallelism.pins, "microbatches": steps})
    else:
        keys.drop(key, "a step has one microbatch")
    return parallelism
