"""torchtitan's TOML configuration, https://github.com/pytorch/torchtitan, in autopar's terms."""

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
    TEXT,
    Keys,
    Kind,
    Reasons,
    one_of,
)
from autopar.cli.migrate.setup import DDP, FSDP, ZERO2, Optimizer, Parallelism, Setup, on_devices

SECTIONS = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "checkpoint",
    "activation_checkpoint", "compile", "comm", "validation", "float8", "quantize",
)  # fmt: skip

_TRAINER = NOT_NEEDED, "it is of torchtitan's trainer, not of how a step is distributed; keep the script's own"
_FLOAT8 = NO_COUNTERPART, "float8 layers are asked for by hand: precision='fp8', inexact=('fp8',)"

REASONS: Reasons = {
    "job.*": _TRAINER,
    "profiling.*": (NOT_NEEDED, "torch's profiler and `autopar trace` show the nodes of a step"),
    "metrics.*": (NOT_NEEDED, "`autopar run` prints the figures; callbacks of the integrations log them"),
    "model.converters": (NO_COUNTERPART, "they change the model; float8, by hand: precision='fp8', inexact=('fp8',)"),
    "model.*": _TRAINER,
    "checkpoint.*": (NOT_NEEDED, "autopar.checkpoint.save and load work on any mesh"),
    "lr_scheduler.*": (NO_COUNTERPART, "learning rates are set by the script: take a torch.optim.lr_scheduler"),
    "optimizer.implementation": (NOT_NEEDED, "foreach and fused work as they are"),
    "optimizer.early_step_in_backward": (NO_COUNTERPART, "gradients are complete after the backward pass"),
    "training.enable_cpu_offload": (NO_COUNTERPART, "parameters stay on devices; see the pin offload"),
    "training.deterministic": (NOT_NEEDED, "deterministic=True of parallelize draws what one device would"),
    "training.gc_*": _TRAINER,
    "training.*": _TRAINER,
    "debug.*": _TRAINER,
    "validation.*": _TRAINER,
    "comm.init_timeout_seconds": (NOT_NEEDED, "`autopar run --timeout`"),
    "comm.train_timeout_seconds": (NOT_NEEDED, "timeout= of parallelize"),
    "comm.*": (NOT_NEEDED, "a rank that is gone is named in the others' errors"),
    "parallelism.disable_loss_parallel": (NOT_NEEDED, "a split vocabulary is gathered, or not, by its costs"),
    "parallelism.enable_async_tensor_parallel": (NOT_NEEDED, "products run in chunks beside collectives where faster"),
    "parallelism.enable_compiled_autograd": (NOT_NEEDED, "forward and backward are captured as one graph"),
    "parallelism.fsdp_disable_prefetch": (NOT_NEEDED, "the pin overlap='none' turns all overlap off"),
    "parallelism.context_parallel_rotate_method": (NOT_NEEDED, "gathered keys, a ring or exchanged heads: by cost"),
    "parallelism.context_parallel_load_balancer": (NOT_NEEDED, "causal blocks are balanced where that is faster"),
    "parallelism.pipeline_parallel_*_less_layers": (NOT_NEEDED, "stages are cut for the shortest step"),
    "parallelism.module_fqns_per_model_part": (NO_COUNTERPART, "the pin stages takes modules at which stages begin"),
    "activation_checkpoint.*": (NOT_NEEDED, "what is recomputed is decided tensor by tensor"),
    "compile.components": (NOT_NEEDED, "kernels between collectives are fused, of all modules"),
    "compile.backend": (NO_COUNTERPART, "pass it as compile= of parallelize"),
    "float8.*": _FLOAT8,
    "quantize.*": _FLOAT8,
    "mx.*": _FLOAT8,
    "fault_tolerance.*": (NO_COUNTERPART, "replica groups are asked for in the loop: autopar.integrations.torchft"),
    "experimental.*": _TRAINER,
}  # fmt: skip

_DTYPE = one_of("float32", "bfloat16", "float16")
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DEGREE = Kind(Annotated[int, msgspec.Meta(ge=-1, le=2**31)], "-1, or a whole number from 1 on")
_SCHEDULES = {
    "gpipe": ("gpipe", None), "1f1b": ("1f1b", None), "interleaved1f1b": ("interleaved", 2),
    "loopedbfs": ("looped-bfs", 2), "zbvzerobubble": ("zbv", 2), "dualpipev": ("dualpipe-v", 2),
}  # fmt: skip
"""torchtitan's schedules, ours, and how many stages a device has then."""


def of_torchtitan(keys: Keys, devices: int | None) -> Setup:
    """What a torchtitan configuration asks for; the rest is in the lists of ``keys``.

    Args:
        keys: of the file.
        devices: of the run; None: any number.

    Raises:
        ValueError: a value is wrong, or contradicts another.
    """
    replicas = _degree(keys, "data_parallel_replicate", "replica", "parameters are replicated along it")
    expert = _degree(
        keys, "expert_parallel", "expert", "experts are split along it; what is no expert has a copy on each"
    )
    tensor = _degree(
        keys, "tensor_parallel", "tensor", "layers are split, and the sequence between them (role sequence)"
    )
    context = _degree(keys, "context_parallel", "context", "the sequence is split along it")
    stages = _degree(keys, "pipeline_parallel", "stage", "pipeline stages, pin stages")
    shards = _shards(keys, expert)
    compute, reduce = _precision(keys)
    _expert_tensor(keys, tensor)
    reshards = _reshards(keys, stages)
    split = shards != 1 or context > 1 or expert > 1
    parallelism = Parallelism(
        data=(FSDP if reshards else ZERO2) if split else DDP,
        replicas=replicas if split else 1,
        shards=shards if split else replicas,
        expert=expert,
        context=context,
        tensor=tensor,
        sequence=True,
        stages=stages,
        pins={**_recompute(keys), **_schedule(keys, stages)},
    )
    parallelism = on_devices(parallelism, devices, str(keys.file))
    clip = keys.read("training.max_norm", NUMBER, 1.0)
    keys.translate("training.max_norm", "clip_grad_norm_ in the loop, over all devices")
    rows = _rows(keys, parallelism)
    setup = Setup(_microbatched(keys, parallelism, rows), compute, reduce, _optimizer(keys), clip, _compile(keys), rows)
    keys.finish(REASONS)
    return setup


def _degree(keys: Keys, name: str, axis: str, how: str) -> int:
    key = f"parallelism.{name}_degree"
    size: int = keys.read(key, COUNT, 1)
    if size > 1:
        keys.translate(key, f"mesh axis {axis} of {size}: {how}")
    else:
        keys.drop(key, "one device is no axis")
    return size


def _shards(keys: Keys, expert: int) -> int | None:
    """Devices of the axis data; those that split experts are taken from them."""
    key = "parallelism.data_parallel_shard_degree"
    size = keys.read(key, _DEGREE, -1)
    if size == 0:
        raise keys.wrong(key, _DEGREE.expected)
    if key not in keys:
        keys.assumed.append("parallelism.data_parallel_shard_degree: -1, the devices that are left")
    keys.translate(key, "mesh axis data: parameters are split along it" if size != 1 else "there is no axis data")
    if size == -1:
        return None
    if size % expert:
        raise ValueError(
            f"{keys.file}: parallelism.expert_parallel_degree {expert} does not divide data_parallel_shard_degree "
            f"{size}, and no devices of the axis context are taken for experts; correct one"
        )
    return int(size // expert)


def _expert_tensor(keys: Keys, tensor: int) -> None:
    key = "parallelism.expert_tensor_parallel_degree"
    size = keys.read(key, COUNT, 1)
    if size in (1, tensor):
        keys.drop(key, "costs decide whether an expert's layers are split along the axis tensor")
    else:
        keys.lack(key, "experts are split along the axis tensor as other layers, or not at all")


def _reshards(keys: Keys, stages: int) -> bool:
    key = "parallelism.fsdp_reshard_after_forward"
    policy = keys.read(key, one_of("default", "always", "never"), "default")
    again = policy == "always" or (policy == "default" and stages == 1)
    keys.translate(key, f"parameters are gathered {'again in' if again else 'once, and saved for'} the backward pass")
    return again


def _recompute(keys: Keys) -> dict[str, str]:
    key = "activation_checkpoint.mode"
    mode = keys.read(key, one_of("none", "selective", "full", "memory_budget"), "selective")
    if key not in keys:
        keys.assumed.append("activation_checkpoint.mode: selective")
    keys.translate(key, "pin recompute='search': tensors are recomputed where memory is short" if mode != "none" else
                   "no pin: parameters alone are gathered again")  # fmt: skip
    return {} if mode == "none" else {"recompute": "search"}


def _schedule(keys: Keys, stages: int) -> dict[str, Any]:
    key, table = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"
    given, file = keys.read(key, TEXT, "1F1B"), keys.read(table, TEXT, "")
    cuts, layers = "parallelism.pipeline_parallel_split_points", "parallelism.pipeline_parallel_layers_per_stage"
    if stages == 1:
        for name in (key, table, cuts, layers):
            keys.drop(name, "there is no pipeline")
        return {}
    keys.lack(layers, "stages are cut for the shortest step; the pin stages takes the modules at which they begin")
    keys.lack(cuts, "give the pin stages these names, in place of a number")
    if file:
        keys.lack(table, "give the file to the pin schedule, in the form of docs/pipelines.md")
    else:
        keys.drop(table, "it is empty")
    if given.lower() not in _SCHEDULES:
        keys.lack(
            key,
            f"the pin schedule takes gpipe, 1f1b, interleaved, looped-bfs, zbv or dualpipe-v, not {given[:40]!r}",
        )
        return {}
    name, virtual = _SCHEDULES[given.lower()]
    keys.translate(key, f"pin schedule={name!r}" + (f", with {virtual} stages on each device" if virtual else ""))
    return {"schedule": name, **({"virtual": virtual} if virtual else {})}


def _rows(keys: Keys, parallelism: Parallelism) -> int | None:
    """Rows that a part of the batch passes in a call."""
    local, whole = "training.local_batch_size", "training.global_batch_size"
    older = "training.batch_size"
    rows: int | None = keys.read(local, COUNT) or keys.read(older, COUNT)
    for key in (local, older):
        keys.translate(key, "rows that a part of the batch passes in a call")
    total = keys.read(whole, _DEGREE, -1)
    if total < 1:
        keys.drop(whole, "it follows from the rows of each part")
    else:
        keys.lack(
            whole, "call the model as often as it takes before optimizer.step(), or pass all its rows in one call"
        )
    return rows


def _microbatched(keys: Keys, parallelism: Parallelism, rows: int | None) -> Parallelism:
    key = "parallelism.pipeline_parallel_microbatch_size"
    size = keys.read(key, COUNT)
    if parallelism.stages == 1 or size is None or rows is None:
        keys.drop(
            key, "there is no pipeline" if parallelism.stages == 1 else "how many microbatches there are is searched"
        )
        return parallelism
    if rows % size:
        raise ValueError(
            f"{keys.file}: {key} {size} does not divide the {rows} rows of a part of the batch; correct one"
        )
    keys.translate(key, f"pin microbatches={rows // size}")
    return replace(parallelism, pins={**parallelism.pins, "microbatches": rows // size})


def _precision(keys: Keys) -> tuple[str | None, str | None]:
    """The dtype to compute in, bfloat16 unless told, and the one in which gradients are added."""
    own, param, reduce = "training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce"
    found = _SHORT[keys.read(param, _DTYPE, "bfloat16")]
    added = _SHORT[keys.read(reduce, _DTYPE, "float32")]
    if param not in keys:
        keys.assumed.append("training.mixed_precision_param: bfloat16")
    stored = keys.read(own, _DTYPE, "float32")
    if stored == "float32":
        keys.drop(own, "parameters are stored in the model's own dtype, which this is")
    else:
        keys.lack(own, f"make the model in {stored} and leave precision= out: parameters are then stored in it")
    keys.translate(param, f"precision={found!r}" if found != "fp32" else "no precision=: the model's own dtypes")
    if found == "fp32" or added not in ("fp32", found):
        keys.drop(reduce, "gradients are added in float32, which is more exact")
        return (None, None) if found == "fp32" else (found, None)
    keys.translate(reduce, f"gradients are added in {added}")
    return found, added


_DEFAULTS = {"lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def _optimizer(keys: Keys) -> Optimizer | None:
    """Torch's optimizer, with torchtitan's defaults."""
    if not any(key.startswith("optimizer.") for key in keys):
        return None
    name = keys.read("optimizer.name", one_of("Adam", "AdamW"), "AdamW")
    keys.translate("optimizer.name", f"torch.optim.{name}; its state counts in the budget")
    values = {argument: keys.read(f"optimizer.{argument}", NUMBER, default) for argument, default in _DEFAULTS.items()}
    for argument in ("beta1", "beta2"):
        if not values[argument] < 1:
            raise keys.wrong(f"optimizer.{argument}", "a number from 0 to less than 1")
    for argument in values:
        keys.translate(f"optimizer.{argument}", f"an argument of torch.optim.{name}")
    arguments = {"lr": values["lr"], "betas": (values["beta1"], values["beta2"]), "eps": values["eps"]}
    return Optimizer(name, {**arguments, "weight_decay": values["weight_decay"]}, name.lower())


def _compile(keys: Keys) -> bool:
    older = "training.compile"
    on = bool(keys.read("compile.enable", FLAG, False) or keys.read(older, FLAG, False))
    for key in ("compile.enable", older):
        keys.translate(key, "compile=True: kernels between collectives are fused" if on else "nothing is compiled")
    return on
