"""DeepSpeed's JSON configuration, https://www.deepspeed.ai/docs/config-json/, in autopar's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from autopar.cli.migrate.deepspeed_optimizer import of_optimizer
from autopar.cli.migrate.deepspeed_reasons import REASONS
from autopar.cli.migrate.keys import COUNT, FLAG, NUMBER, Keys, Kind, one_of
from autopar.cli.migrate.setup import DDP, FSDP, MAX_NORM, PRECISION, ZERO1, ZERO2, Parallelism, Setup, on_devices

SECTIONS = (
    "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "bfloat16", "fp16",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params", "tensor_parallel", "pipeline",
    "activation_checkpointing", "data_types",
)  # fmt: skip

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
    optimizer, compiled = of_optimizer(keys), _compile(keys)
    left = [MAX_NORM] if keys.is_open("gradient_clipping") else []
    if compute is None and any(keys.is_open(f"{name}.enabled") for name in ("bf16", "bfloat16", "fp16")):
        left.append(PRECISION)
    scaler = _scaler(keys, compute)
    setup = Setup(parallelism, compute, reduce, optimizer, clip, compiled, rows, scaler, tuple(left))
    keys.finish(REASONS)
    return setup


def _pipeline_pins(stages: int | str, count: int) -> dict[str, Any]:
    return {"microbatches": count, **({"schedule": "1f1b"} if isinstance(stages, int) and stages > 1 else {})}


def _precision(keys: Keys) -> tuple[str | None, str | None]:
    """The dtype to compute in, and the one in which gradients are added."""
    on = {name: bool(keys.read(f"{name}.enabled", FLAG, False)) for name in ("bf16", "bfloat16", "fp16")}
    # An older spelling, which DeepSpeed still reads.
    bf16, fp16 = on["bf16"] or on["bfloat16"], on["fp16"]
    if bf16 and fp16:
        raise ValueError(f"{keys.file}: bf16.enabled and fp16.enabled are both true; keep one")
    for key, name in (("bf16.enabled", "bf16"), ("bfloat16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if on[key.partition(".")[0]]:
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
    whole = "zero_optimization"
    stage = keys.read(f"{whole}.stage", _STAGE, 0)
    if keys.has_value(whole):  # the oldest spelling: true or false in place of the table
        stage = int(keys.read(whole, Kind(bool, "a table of keys, or true or false"), False))
        keys.translate(whole, f"stage {stage}: recipe {(DDP, ZERO1)[stage]!r}, or its role on the axis data")
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


def offload_of(keys: Keys, name: str) -> dict[str, Any]:
    """The pin that offloads.

    Args:
        keys: of the file.
        name: of the key with the device, with ``{}`` for what is offloaded.
    """
    pins = {}
    for what in ("optimizer", "param"):
        key = name.format(what)
        device = keys.read(key, _DEVICE, "none")
        if device == "none":
            keys.drop(key, "nothing is offloaded, as without it")
        elif device == "nvme":
            keys.lack(
                key, "nothing is offloaded to disks; device 'cpu' of offload_optimizer is the pin offload='search'"
            )
        elif what == "param":
            keys.lack(
                key, "parameters stay on devices; the pin offload='search' offloads optimizer state and what is saved"
            )
        else:
            pins["offload"] = "search"
            keys.translate(key, "pin offload='search': optimizer state, and what is saved, where memory asks for it")
    return pins


def _offload(keys: Keys) -> dict[str, Any]:
    """The same, of all keys that speak of it."""
    pins = offload_of(keys, "zero_optimization.offload_{}.device")
    for key in keys:
        if key.startswith("zero_optimization.offload_param.") and key != "zero_optimization.offload_param.device":
            keys.lack(key, "parameters stay on devices")
    older = "zero_optimization.cpu_offload"
    if keys.read(older, FLAG, False):
        pins["offload"] = "search"
        keys.translate(older, "pin offload='search', as of offload_optimizer, which has taken its place")
    else:
        keys.drop(older, "nothing is offloaded, as without it")
    for key in (f"{older}_param", f"{older}_params"):
        keys.lack(key, "parameters stay on devices")
    return pins


def _scaler(keys: Keys, compute: str | None) -> dict[str, Any] | None:
    """Arguments of the loop's GradScaler, with DeepSpeed's defaults; None: there is none, whoever runs it."""
    power, window = "fp16.initial_scale_power", "fp16.loss_scale_window"
    first = keys.read(power, Kind(Annotated[int, msgspec.Meta(ge=0, le=64)], "a whole number from 0 to 64"), 16)
    steps: int = keys.read(window, COUNT, 1000)
    if compute != "fp16" and not (compute is None and keys.is_open("fp16.enabled")):
        for key in (power, window, "fp16.loss_scale"):
            keys.drop(key, "losses are not scaled")
        return None
    keys.translate(window, f"torch.amp.GradScaler(growth_interval={steps})")
    constant: float = keys.read("fp16.loss_scale", NUMBER, 0.0)
    if constant:
        keys.drop(power, "fp16.loss_scale says the scale")
    else:
        keys.translate(power, f"torch.amp.GradScaler(init_scale={2.0**first!r})")
        keys.drop("fp16.loss_scale", "0 is a scale that changes, as GradScaler's does")
    return {"init_scale": constant or 2.0**first, "growth_interval": steps}


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
    _require_whole(str(keys.file), whole, own, steps, parts)
    count = steps or 1
    if count > 1 and compute == "fp16":
        why = f"float16 has no microbatches: call the model {count} times before update(), on 1 / {count} of the loss"
        keys.lack("gradient_accumulation_steps", why)
        count = 1
    elif count > 1:
        keys.translate("gradient_accumulation_steps", f"pin microbatches={count}: one call computes them all")
    else:
        keys.drop("gradient_accumulation_steps", "a step has one microbatch")
    rows = None if own is None else own * count
    keys.translate("train_micro_batch_size_per_gpu", f"{rows} rows that a part of the batch passes in a call")
    if rows is None and whole is not None and parts is not None:
        rows = whole // parts // (steps or 1) * count
    if whole is not None and steps is None and own is not None and parts is None:
        keys.lack("train_batch_size", "how many microbatches it takes depends on the devices: give --devices")
    else:
        keys.translate("train_batch_size", "rows of all parts of the batch together")
    return count, rows


def _require_whole(file: str, whole: int | None, own: int | None, steps: int | None, parts: int | None) -> None:
    """Refuse sizes of a batch that contradict each other.

    Raises:
        ValueError: names them.
    """
    if whole is None or parts is None:
        return
    if own is not None and steps is not None and whole != own * steps * parts:
        raise ValueError(
            f"{file}: train_batch_size is {whole}, and train_micro_batch_size_per_gpu {own} x "
            f"gradient_accumulation_steps {steps} x {parts} parts of the batch is {own * steps * parts}; correct one"
        )
    if own is None and whole % (parts * (steps or 1)):
        times = f" x gradient_accumulation_steps {steps}" if steps else ""
        raise ValueError(
            f"{file}: train_batch_size {whole} is no multiple of {parts} parts of the batch{times}; give other "
            "--devices, or correct one"
        )


def _parts(parallelism: Parallelism) -> int | None:
    """Into how many parts the batch is split; None where that depends on the devices."""
    found = 1
    for axis, size in parallelism.axes.items():
        if axis in ("replica", "node", "data", "expert"):
            if size is None:
                return None
            found *= size
    return found


def _compile(keys: Keys) -> bool:
    on = False
    for key in [key for key in keys if key.startswith("compile.")]:
        if key == "compile.deepcompile":
            on = bool(keys.read(key, FLAG, False))
            keys.translate(key, "compile=True: kernels between collectives are fused" if on else "nothing is compiled")
        else:
            keys.lack(key, "compile=True takes inductor's defaults")
    return on
