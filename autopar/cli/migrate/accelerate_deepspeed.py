"""What accelerate's own file says of DeepSpeed, where it names no JSON file of that."""

from __future__ import annotations

from autopar.cli.migrate.keys import NO_COUNTERPART, NOT_NEEDED, Keys, Reasons, one_of
from autopar.cli.migrate.setup import DDP, FSDP, ZERO1, ZERO2

SECTION = "deepspeed_config"
OFFLOAD = f"{SECTION}.offload_{{}}_device"
SCALER = {"init_scale": 2.0**16, "growth_interval": 1000}
"""Arguments of the loop's GradScaler: DeepSpeed's defaults, which accelerate leaves as they are."""

_ELSEWHERE = NOT_NEEDED, "distributed_type is another"
_LAUNCH = NOT_NEEDED, "`autopar run` and torchrun take it as an option"

REASONS: Reasons = {
    f"{SECTION}.deepspeed_config_file": _ELSEWHERE,
    f"{SECTION}.zero_stage": _ELSEWHERE,
    f"{SECTION}.gradient_*": _ELSEWHERE,
    f"{SECTION}.offload_*_device": _ELSEWHERE,
    f"{SECTION}.offload_*_nvme_path": (NO_COUNTERPART, "nothing is offloaded to disks"),
    f"{SECTION}.deepspeed_hostfile": _LAUNCH,
    f"{SECTION}.deepspeed_*_filter": _LAUNCH,
    f"{SECTION}.deepspeed_multinode_launcher": _LAUNCH,
    f"{SECTION}.deepspeed_moe_layer_cls_names": (NOT_NEEDED, "parameters are gathered one by one, not modules"),
    f"{SECTION}.zero3_init_flag": (NOT_NEEDED, "a model on the meta device takes init=, a file"),
    f"{SECTION}.zero3_save_16bit_model": (NOT_NEEDED, "full_state_dict() gathers, autopar.checkpoint does not"),
}


def data_of(keys: Keys) -> str:
    """The recipe of the data-parallel devices.

    Raises:
        ValueError: there is a file of DeepSpeed's own, which says it.
    """
    file = f"{SECTION}.deepspeed_config_file"
    if keys.has_value(file):
        raise ValueError(
            f"{keys.file}: DeepSpeed's own file says how the run is distributed: give autopar migrate its JSON file, "
            f"{file} = {keys.value(file)}"
        )
    key = f"{SECTION}.zero_stage"
    stage = keys.read(key, one_of(0, 1, 2, 3), 2)  # accelerate's default
    if key not in keys:
        keys.assumed.append(f"{key} = 2: recipe 'zero2'")
    data = (DDP, ZERO1, ZERO2, FSDP)[stage]
    keys.translate(key, f"recipe {data!r}")
    return data
