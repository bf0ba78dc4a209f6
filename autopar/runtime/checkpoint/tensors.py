"""Tensors of checkpoints as safetensors, which `torch.distributed.checkpoint` writes and reads, each rank its part."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from autopar._torch_compat import set_group_timeout
from autopar.errors import AutoparError
from autopar.runtime.mesh import MeshContext

WRITING = timedelta(hours=1)
"""How long ranks wait for each other's files."""


def group_of(context: MeshContext) -> Any:
    """A Gloo group of the ranks: files are written while the others communicate; None where there is one rank."""
    if context.mesh is None or context.control is None:
        return None
    group = context.control.new_group(context.mesh.mesh.flatten().tolist(), "checkpoints")
    set_group_timeout(WRITING, group)  # from now on: a rank that does not come to make it is gone
    return group


def start_writing(
    context: MeshContext, group: Any, tensors: dict[str, torch.Tensor], folder: Path, *, wait: bool
) -> Future[Any]:
    """Write this rank's part; the result is there when those of all ranks are.

    Args:
        context: of the ranks.
        group: of `group_of`.
        tensors: by name; ranks may have further plain ones.
        folder: that is there.
        wait: False: copy everything to the host, and write in the background.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    if wait:
        done: Future[Any] = Future()
        try:
            _write(context, group, tensors, writer)
            done.set_result(None)
        except Exception as e:
            done.set_exception(e)
        return done
    if context.mesh is None:  # which torch's function is not for
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return _background.submit(_write, context, group, copies, writer)
    with context.during("copying a checkpoint to the host"):
        started: Any = async_save(tensors, storage_writer=writer, process_group=group)
    future: Future[Any] = started
    return future


_background = ThreadPoolExecutor(1, "autopar-checkpoint")


def _write(context: MeshContext, group: Any, tensors: dict[str, torch.Tensor], writer: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with context.during("writing a checkpoint"), _plainly("written"):
        save(tensors, storage_writer=writer, process_group=group, no_dist=context.mesh is None)


@contextmanager
def _plainly(done: str) -> Iterator[None]:
    """The library's own error, which is no `Exception`, as one that says which rank had which."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            yield
    except CheckpointException as e:
        ranks = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in e.failures.items())
        raise AutoparError(f"the checkpoint could not be {done}: {ranks}") from e


def result_of(written: Future[Any], seconds: float) -> None:
    """Wait until all files are written.

    Raises:
        AutoparError: one is not.
    """
    with _plainly("written"):
        written.result(seconds)


def read_into(context: MeshContext, group: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors with those of the same names, whatever parts they were saved in."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader: Any = HuggingFaceStorageReader(str(folder))
    with context.during("reading a checkpoint"), _plainly("read"):
        load(tensors, storage_reader=reader, process_group=group, no_dist=context.mesh is None)
