"""Checkpoints: `save` and `load` a training run, on any mesh and under any plan; or state dicts for torch's own.

::

    autopar.checkpoint.save(folder, model, optimizer, step=100, scheduler=scheduler, extra={"epoch": 3})

    found = autopar.checkpoint.load(folder, model, optimizer, scheduler=scheduler)  # after a new parallelize()
    start = found.step + 1

Tensors are safetensors, written and read in parallel by `torch.distributed.checkpoint`; everything else is JSON.
Parameters split inside a fused dim are `_StridedShard`, which that library refuses to save and loads wrongly. A
`ParallelModule`'s own ``state_dict()`` therefore holds plain shards; `state_dict` here does the same for the optimizer.
"""

from autopar.checkpoint.plain_files import export_safetensors, torch_save
from autopar.checkpoint.run import Loaded, Saving, load, save
from autopar.checkpoint.state_dicts import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_state_dict,
    state_dict,
)

__all__ = [
    "Loaded",
    "Saving",
    "export_safetensors",
    "full_optimizer_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_state_dict",
    "save",
    "state_dict",
    "torch_save",
]
