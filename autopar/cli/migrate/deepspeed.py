"""DeepSpeed's JSON configuration, https://www.deepspeed.ai/docs/config-json/, in autopar's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from autopar.cli.migrate.keys import (
    COUNT,
    FLAG,
    NO_COUNTERPART,
    NOT_NEEDED,
    NUMBER,
    PAIR,
    TEXT,
    Keys,
    Kind,
    Reasons,
    one_of,
)
from autopar.cli.migrate.setup import DDP, FSDP, ZERO1, ZERO2, Optimizer, Parallelism, Setup, on_devices

SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params", "tensor_parallel", "pipeline",
    "activation_checkpointing", "data_types",
)  # fmt: skip

_BUCKETS = NOT_NEEDED, "how large messages are follows from the layouts that are searched"
_MONITORS = NOT_NEEDED, "callbacks of the integrations, and `autopar run`, say how fast steps are"
_ELSEWHERE = NO_COUNTERPART, "it is no part of how a step is distributed; keep the script's own"
_NUMBERS = NO_COUNTERPART, "it changes the numbers of a step; autopar computes what one device would"

REASONS: Reasons = {
    "zero_optimization.*bucket_size": _BUCKETS,
    "zero_optimization.stage3_max_*": (NOT_NEEDED, "what is gathered when is searched, within the memory budget"),
    "zero_optimization.*param*persistence_threshold": (NOT_NEEDED, "small parameters are split like the others"),
    "zero_optimization.sub_group_size": (NOT_NEEDED, "the optimizer's step is torch's, over all parameters"),
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.contiguous_gradients": (NOT_NEEDED, "the memory budget counts gradients as they are stored"),
    "zero_optimization.overlap_comm": (
        NOT_NEEDED,
        "collectives run beside kernels where that is faster and fits; the pin overlap='none' turns it off",
    ),
    "zero_optimization.round_robin_gradients": (NOT_NEEDED, "nothing is offloaded gradient by gradient"),
    "zero_optimization.*gather*_on_model_save": (NOT_NEEDED, "full_state_dict() gathers, autopar.checkpoint does not"),
    "zero_optimization.*gather_fp16_weights*": (NOT_NEEDED, "full_state_dict() gathers, autopar.checkpoint does not"),
    "zero_optimization.load_from_fp32_weights": (NOT_NEEDED, "parameters are stored in float32"),
    "zero_optimization.elastic_checkpoint": (NOT_NEEDED, "checkpoints load on any mesh"),
    "zero_optimization.mics_hierarchical_params_gather": (NOT_NEEDED, "costs of links decide how gathers are made"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
    "zero_optimization.cpu_offload*": (NO_COUNTERPART, "an old spelling: write offload_optimizer and offload_param"),
    "zero_optimization.zero_quantized_nontrainable_weights": _NUMBERS,
    "zero_optimization.offload_optimizer.*": (NOT_NEEDED, "how copies to the host are made follows from the plan"),
    "activation_checkpointing.cpu_checkpointing": (
        NO_COUNTERPART,
        "the pin offload='search' lets the search offload what is saved where memory is short",
    ),
    "activation_checkpointing.*": (
        NOT_NEEDED,
        "checkpoints in the model's code are followed; the pin recompute='search' decides by itself instead",
    ),
    "fp16.auto_cast": (NOT_NEEDED, "floating tensors of the batch are cast"),
    "fp16.*": (NO_COUNTERPART, "losses are scaled by torch.amp.GradScaler in the loop, with arguments of its own"),
    "bf16.*": (NOT_NEEDED, "parameters, gradients and optimizer state are in float32"),
    "amp*": (NO_COUNTERPART, "apex is not followed; ask for precision='fp16' or 'bf16'"),
    "prescale_gradients": (NOT_NEEDED, "gradients are those of the whole batch's mean"),
    "gradient_predivide_factor": (NOT_NEEDED, "gradients are those of the whole batch's mean"),
    "sparse_gradients": (NO_COUNTERPART, "sparse gradients are an error: leave sparse=True of embeddings out"),
    "disable_allgather": _BUCKETS,
    "zero_allow_untested_optimizer": (NOT_NEEDED, "optimizers that compute element by element all work"),
    "zero_force_ds_cpu_optimizer": (NOT_NEEDED, "the optimizer is torch's"),
    "steps_per_print": _MONITORS,
    "wall_clock_breakdown": (NOT_NEEDED, "`autopar trace` and torch's profiler show the nodes of a step"),
    "memory_breakdown": (NOT_NEEDED, "a plan says what memory it takes, by category"),
    "dump_state": _MONITORS,
    "tensorboard*": _MONITORS,
    "wandb*": _MONITORS,
    "csv_monitor*": _MONITORS,
    "comet*": _MONITORS,
    "flops_profiler*": (NOT_NEEDED, "a plan counts what each module computes"),
    "comms_logger*": (NOT_NEEDED, "a plan counts what each axis sends"),
    "autotuning*": (NOT_NEEDED, "searching is what autopar does"),
    "checkpoint*": (NOT_NEEDED, "autopar.checkpoint.save and load work on any mesh"),
    "communication_data_type": (NOT_NEEDED, "gradients are added in float32 unless a precision is asked for"),
    "data_types.*": (NOT_NEEDED, "gradients are stored in float32, the parameters' dtype"),
    "aio*": (NO_COUNTERPART, "nothing is offloaded to disks"),
    "elasticity*": (NO_COUNTERPART, "a run has a fixed number of devices; checkpoints load on any other"),
    "scheduler*": (NO_COUNTERPART, "learning rates are set by the script: take a torch.optim.lr_scheduler"),
    "data_efficiency*": _ELSEWHERE,
    "curriculum_learning*": _ELSEWHERE,
    "dataloader_drop_last": _ELSEWHERE,
    "progressive_layer_drop*": _NUMBERS,
    "compression_training*": _NUMBERS,
    "quantize_training*": _NUMBERS,
    "sparse_attention*": _NUMBERS,
    "eigenvalue*": _NUMBERS,
    "tensor_parallel.*": (NOT_NEEDED, "what is split follows from the model's graph"),
    "pipeline.seed_layers": (NO_COUNTERPART, "initialise the model before it is distributed"),
    "pipeline.activation_checkpoint_interval": (
        NO_COUNTERPART,
        "blocks are not recomputed at an interval; the pin recompute='search' decides tensor by tensor",
    ),
    "pipeline.partition*": (NOT_NEEDED, "stages are cut for the shortest step; the pin stages takes names of modules"),
    "pipeline.*": (NOT_NEEDED, "what stages send in parts is decided for each value"),
    "seq_parallel_communication_data_type": (NOT_NEEDED, "values are sent as they are"),
}  # fmt: skip

_STAGE = one_of(0, 1, 2, 3)
_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_DEVICE = one_of("none", "cpu", "nvme")
_POSITIVE_OR_ZERO = Kind(Annotated[int, msgspec.Meta(ge=0, le=2**31)], "a whole number, 0 or more")


def of_deepspeed(keys: Keys, devices: int | None) -> Setup:
    """What a DeepSpeed configuration asks for; the rest is in the lists of ``keys``.

    Args:
        keys: of the file.
        devices: of the run; None: any number.

    Raises:
        ValueError: a value is wrong, or contradicts another.
    """
    compute, reduce = _precision(keys)
    pins = _offload(keys)
    data = _zero(keys)
    replicas, shards = _mics(keys, data)
    quantized = _quantized(keys, data)
    stages = _stages(keys)
    secondary = _secondary(keys, data, alone=replicas == 1 and stages == 1)
    parallelism = Parallelism(
        data=data,
        replicas=replicas,
        shards=shards,
        context=_size(keys, "sequence_parallel_size", "context", "attention changes the split, as Ulysses does"),
        tensor=_size(keys, "tensor_parallel.autotp_size", "tensor", "the model's graph says what is split"),
        stages=stages,
        pins=pins,
        quantized=quantized,
        secondary=secondary,
    )
    parallelism = on_devices(parallelism, devices, str(keys.file))
    count, rows = _microbatches(keys, parallelism, compute)
    if count > 1 or stages != 1:
        parallelism = replace(parallelism, pins={**pins, **_pipeline_pins(stages, count)})
    clip = keys.read("gradient_clipping", NUMBER)
    keys.translate("gradient_clipping", "clip_grad_norm_ in the loop, over all devices" if clip else "0 clips nothing")
    setup = Setup(parallelism, compute, reduce, _optimizer(keys), clip, _compile(keys), rows)
    keys.finish(REASONS)
    return setup


def _pipeline_pins(stages: int | str, count: int) -> dict[str, Any]:
    return {"microbatches": count, **({"schedule": "1f1b"} if isinstance(stages, int) and stages > 1 else {})}


def _precision(keys: Keys) -> tuple[str | None, str | None]:
    """The dtype to compute in, and the one in which gradients are added."""
    bf16, fp16 = (bool(keys.read(f"{name}.enabled", FLAG, False)) for name in ("bf16", "fp16"))
    if bf16 and fp16:
        raise ValueError(f"{keys.file}: bf16.enabled and fp16.enabled are both true; keep one")
    for name, on in (("bf16", bf16), ("fp16", fp16)):
        key = f"{name}.enabled"
        if on:
            keys.translate(key, f"precision={name!r}: computes in it, with parameters and sums in float32")
        else:
            keys.drop(key, "the model's own dtypes, as without it")
    compute = "bf16" if bf16 else "fp16" if fp16 else None
    asked = keys.read("communication_data_type", one_of(*_DTYPES))
    if compute is None or asked is None:
        return compute, None
    reduce = _DTYPES[asked]
    if reduce not in ("fp32", compute):
        keys.lack("communication_data_type", f"gradients made in {compute} are added in it or in float32, as here")
        return compute, None
    keys.translate("communication_data_type", f"gradients are added in {reduce}")
    return compute, reduce


def _zero(keys: Keys) -> str:
    """The recipe of a stage of ZeRO."""
    stage = keys.read("zero_optimization.stage", _STAGE, 0)
    scatters = keys.read("zero_optimization.reduce_scatter", FLAG, True)
    data = (DDP, ZERO1, ZERO2, FSDP)[stage]
    keys.translate("zero_optimization.stage", f"recipe {data!r}, or its role on the axis data")
    if stage == 2 and not scatters:
        keys.translate(
            "zero_optimization.reduce_scatter", "gradients are all-reduced, which is the role of recipe 'zero1'"
        )
        return ZERO1
    keys.drop("zero_optimization.reduce_scatter", f"recipe {data!r} says it")
    return data


def _mics(keys: Keys, data: str) -> tuple[int | None, int | None]:
    """Replicas and the shards of each: MiCS splits parameters within groups."""
    # DeepSpeed's own default, -1, is no group.
    key = "zero_optimization.mics_shard_size"
    size = keys.read(key, Kind(Annotated[int, msgspec.Meta(ge=-1, le=2**31)], "a whole number, or -1"), -1)
    if size < 1 or data != FSDP:
        keys.drop(key, "parameters are split over all devices" if size < 1 else "it is of stage 3 alone")
        return 1, None
    keys.translate(key, f"parameters are split in groups of {size}, as in recipe 'hsdp'")
    return None, size


def _quantized(keys: Keys, data: str) -> dict[str, int]:
    """Bits of what is gathered and reduced: ZeRO++."""
    found = {}
    for what, bits in (("weights", 8), ("gradients", 4)):
        key = f"zero_optimization.zero_quantized_{what}"
        if not keys.read(key, FLAG, False):
            keys.drop(key, "numbers are sent whole, as without it")
        elif data != FSDP:
            keys.lack(key, f"recipe {data!r} is not stage 3, of which alone DeepSpeed quantizes {what}")
        else:
            found[what] = bits
            keys.translate(key, f"quantized={{'data': {{{what!r}: {bits}}}}} with inexact=('quantized',)")
    return found


def _secondary(keys: Keys, data: str, *, alone: bool) -> int:
    """Devices of a node that share a copy of the parameters: ZeRO++'s hpZ."""
    key = "zero_optimization.zero_hpz_partition_size"
    size: int = keys.read(key, COUNT, 1)
    if size == 1:
        keys.drop(key, "a copy on one device is no partition, as without it")
    elif data != FSDP or not alone:
        keys.lack(key, "it is of stage 3 without mics_shard_size, and of no pipeline")
        return 1
    else:
        keys.translate(key, f"pin secondary='data', an axis of {size} within the axis node")
    return size


def _offload(keys: Keys) -> dict[str, Any]:
    """The pin that offloads."""
    pins = {}
    for what in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{what}.device"
        device = keys.read(key, _DEVICE, "none")
        if device == "none":
            keys.drop(key, "nothing is offloaded, as without it")
        elif device == "nvme":
            keys.lack(
                key, "nothing is offloaded to disks; device 'cpu' of offload_optimizer is the pin offload='search'"
            )
        elif what == "offload_param":
            keys.lack(
                key, "parameters stay on devices; the pin offload='search' offloads optimizer state and what is saved"
            )
        else:
            pins["offload"] = "search"
            keys.translate(key, "pin offload='search': optimizer state, and what is saved, where memory asks for it")
    for key in keys:
        if key.startswith("zero_optimization.offload_param.") and key != "zero_optimization.offload_param.device":
            keys.lack(key, "parameters stay on devices")
    return pins


def _stages(keys: Keys) -> int | str:
    """Stages of the pipeline."""
    key = "pipeline.stages"
    if key not in keys:
        return 1
    if keys.value(key) == "auto":
        keys.translate(key, "pin stages='search': as many as are fastest, or none")
        return "search"
    stages: int = keys.read(key, COUNT, 1)
    keys.translate(key, f"pin stages={stages}, on an axis of its own, with schedule 1f1b")
    return stages


def _size(keys: Keys, key: str, axis: str, how: str) -> int:
    size: int = keys.read(key, _POSITIVE_OR_ZERO, 1)
    if size > 1:
        keys.translate(key, f"mesh axis {axis} of {size}: {how}")
    else:
        keys.drop(key, "one device is no axis")
    return max(1, size)


def _microbatches(keys: Keys, parallelism: Parallelism, compute: str | None) -> tuple[int, int | None]:
    """How many microbatches a step has, and how many rows a rank passes."""
    whole, own, steps = (
        keys.read(key, COUNT)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    parts = _parts(parallelism)
    if whole is not None and own is not None and steps is None and parts is not None:
        if whole % (own * parts):
            raise ValueError(
                f"{keys.file}: train_batch_size {whole} is no multiple of train_micro_batch_size_per_gpu {own} on "
                f"{parts} parts of the batch; give other --devices, or correct one"
            )
        steps = whole // (own * parts)
    if None not in (whole, own, steps, parts) and whole != own * steps * parts:
        raise ValueError(
            f"{keys.file}: train_batch_size is {whole}, and train_micro_batch_size_per_gpu {own} x "
            f"gradient_accumulation_steps {steps} x {parts} parts of the batch is {own * steps * parts}; correct one"
        )
    count = steps or 1
    if count > 1 and compute == "fp16":
        why = "float16 has no microbatches: call the model so often before optimizer.step(), or take bf16"
        keys.lack("gradient_accumulation_steps", why)
        count = 1
    elif count > 1:
        keys.translate("gradient_accumulation_steps", f"pin microbatches={count}: one call computes them all")
    else:
        keys.drop("gradient_accumulation_steps", "a step has one microbatch")
    rows = None if own is None else own * count
    keys.translate("train_micro_batch_size_per_gpu", f"{rows} rows that a part of the batch passes in a call")
    if rows is None and whole is not None and parts is not None and whole % parts == 0:
        rows = whole // parts // (steps or 1) * count
    if whole is not None and steps is None and own is not None and parts is None:
        keys.lack("train_batch_size", "how many microbatches it takes depends on the devices: give --devices")
    else:
        keys.translate("train_batch_size", "rows of all parts of the batch together")
    return count, rows


def _parts(parallelism: Parallelism) -> int | None:
    """Into how many parts the batch is split; None where that depends on the devices."""
    found = 1
    for axis, size in parallelism.axes.items():
        if axis in ("replica", "node", "data", "expert"):
            if size is None:
                return None
            found *= size
    return found


_CLASSES = {
    "adam": ("AdamW", "adamw"), "adamw": ("AdamW", "adamw"), "sgd": ("SGD", "sgd"), "adagrad": ("Adagrad", "adagrad"),
    "onebitadam": ("AdamW", "adamw"), "zerooneadam": ("AdamW", "adamw"),
}  # fmt: skip
"""Optimizers of DeepSpeed, torch's that does the same, and what its state counts as."""

_COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")
_ASKED_FOR = "autopar.CompressedGradients(method='onebit') and the role compressed"
_ARGUMENTS = {"lr": NUMBER, "betas": PAIR, "eps": NUMBER, "weight_decay": NUMBER, "momentum": NUMBER, "nesterov": FLAG}
_OF_CLASS = {"AdamW": "lr betas eps weight_decay", "Adam": "lr betas eps weight_decay",
             "SGD": "lr momentum weight_decay nesterov", "Adagrad": "lr eps weight_decay"}  # fmt: skip


def _optimizer(keys: Keys) -> Optimizer | None:
    """Torch's optimizer that does what DeepSpeed's would."""
    given = keys.read("optimizer.type", TEXT)
    if given is None:
        return None
    kind = given.lower()
    if kind not in _CLASSES:
        compressed = (
            f"compresses gradients, which is asked for: {_ASKED_FOR}"
            if kind in _COMPRESSED
            else "is none of torch.optim"
        )
        keys.lack(
            "optimizer.type", f"it {compressed}; pass an optimizer of your own, and optimizer= whose state is as large"
        )
        for key in [key for key in keys if key.startswith("optimizer.params.")]:
            keys.lack(key, "an argument of that optimizer")
        return None
    name, state = _CLASSES[kind]
    params = "optimizer.params."
    # DeepSpeed's "Adam" decays weights as AdamW does unless adam_w_mode is false.
    if kind == "adam" and not keys.read(f"{params}adam_w_mode", FLAG, True):
        name, state = "Adam", "adam"
    arguments: dict[str, Any] = {}
    for argument in _OF_CLASS[name].split():
        value = keys.read(params + argument, _ARGUMENTS[argument])
        if value is not None:
            arguments[argument] = tuple(value) if isinstance(value, list) else value
            keys.translate(params + argument, f"torch.optim.{name}({argument}=...)")
    if name == "AdamW":
        # DeepSpeed's default; torch's is 0.01.
        arguments.setdefault("weight_decay", 0.01 if keys.read(f"{params}torch_adam", FLAG, False) else 0.0)
    arguments.setdefault("lr", 1e-3)
    if name == "SGD" and arguments.get("momentum"):
        state = "sgd-momentum"
    if kind in _COMPRESSED:
        keys.lack("optimizer.type", f"torch.optim.{name} sends whole gradients; for 1 bit see {_ASKED_FOR}")
    else:
        keys.translate("optimizer.type", f"torch.optim.{name}; its state counts in the budget")
    for key in [key for key in keys if key.startswith(params) and key[len(params) :] not in arguments]:
        known = key[len(params) :] in ("adam_w_mode", "torch_adam", "bias_correction", "fused", "foreach")
        if known and keys.value(key) not in ("auto", None):
            keys.drop(key, f"torch.optim.{name} is chosen by it, or does it by itself")
        else:
            keys.lack(key, f"torch.optim.{name} has no such argument")
    return Optimizer(name, arguments, state)


def _compile(keys: Keys) -> bool:
    on = False
    for key in [key for key in keys if key.startswith("compile.")]:
        if key == "compile.deepcompile":
            on = bool(keys.read(key, FLAG, False))
            keys.translate(key, "compile=True: kernels between collectives are fused" if on else "nothing is compiled")
        else:
            keys.lack(key, "compile=True takes inductor's defaults")
    return on
