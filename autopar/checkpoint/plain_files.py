"""Files of whole tensors: for Hugging Face's ``from_pretrained``, and those of `torch.save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.arguments import PARALLEL
from autopar.costs.arguments import PATH, SIZE, require
from autopar.costs.memory import parse_bytes
from autopar.module.low_communication.worker_folders import worker_folder
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint.pretrained_names import file_tensors, numbers
from autopar.runtime.checkpoint.safetensors_files import Source, files_of, write_files
from autopar.runtime.checkpoint.whole import gathered_values, write_file
from autopar.runtime.state.parameters import gathered


def export_safetensors(
    folder: str | Path,
    model: ParallelModule,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write the model as files that Hugging Face's ``from_pretrained`` reads; every rank calls it.

    Tensors are whole, under the names of the original model; a model of transformers has the names of its own files, of
    tied tensors one. Each rank writes files of its own, and its host needs room for a few tensors. ``config.json`` and
    the tokenizer are written to the same folder by ``model.config.save_pretrained`` and the tokenizer's.

    Args:
        folder: a new one, on a file system that all ranks see: it is there when it is whole. Workers that train apart
            write one each in it, ``worker-0`` and so on.
        model: on any mesh, under any plan.
        dtype: of floating-point tensors; None: as they are.
        max_shard_size: of a file. One tensor, with what transformers makes of it, is in one file even if it is larger.

    Returns:
        The folder.

    Raises:
        AutoparError: the folder is there already, or could not be written.
        ValueError: an argument is wrong, or a tensor has a dtype that the format has not.
        RankError: a rank is gone, or at something else.
    """
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    require(
        folder=(folder, PATH), model=(model, PARALLEL),
        dtype=(dtype, lambda v: None if v in (None, *floats) else f"None or one of {', '.join(map(str, floats))}"),
        max_shard_size=(max_shard_size, SIZE),
    )  # fmt: skip
    session = model._autopar
    session.require_values()
    tensors, context, types = model._own_tensors(), session.context, session.types()
    groups, conversion = file_tensors(session.original, tensors)

    def made(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        whole = gathered({n: tensors[n] for n in names}, types, context)
        return conversion({n: _as(t, dtype) for n, t in whole.items()})

    def source(names: Sequence[str]) -> Source:
        meta = {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names}
        return Source(conversion({n: _as(t, dtype) for n, t in meta.items()}), lambda: made(names))

    files = files_of([source(names) for names in groups], parse_bytes(max_shard_size))
    with session.together("checkpoint.export_safetensors()"), torch.no_grad():
        return write_files(files, worker_folder(Path(folder), model), context, numbers(tensors.values()))


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def torch_save(checkpoint: Any, path: str | Path, model: ParallelModule) -> None:
    """`torch.save` of what one device would have, for scripts that write a file of their own; every rank calls it.

    Rank 0 writes, with a whole tensor for each of those on the mesh, for which its host must have room; the file
    replaces an older one when all of it is on the disk. It is loaded as on one device: ``model.load_state_dict`` and
    ``optimizer.load_state_dict`` take whole tensors, before `autopar.parallelize` and after.

    Args:
        checkpoint: anything that `torch.save` takes, with ``model.state_dict()`` and ``optimizer.state_dict()`` in any
            dicts, lists and tuples; of the same structure on every rank.
        path: of the file.
        model: whose parameters, and whose optimizers' state, are in ``checkpoint``.

    Raises:
        ValueError: an argument is wrong.
        OSError: rank 0 cannot write the file; on every rank.
    """
    require(path=(path, PATH), model=(model, PARALLEL))
    context = model._autopar.context
    with model._autopar.together("checkpoint.torch_save()"):
        whole_values = gathered_values(checkpoint, model.parameters(), context)
    context.decide(lambda: write_file(whole_values, Path(path)), "checkpoint.torch_save()")
