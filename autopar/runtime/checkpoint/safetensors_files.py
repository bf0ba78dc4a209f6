"""A model as the files that Hugging Face's libraries read: ``model-00001-of-00004.safetensors`` and so on, an index.

Ranks write files of their own at the same time. A tensor is gathered on all of them, copied to the host by the rank
whose file it is in, and written there by a thread. So a host needs room for a few tensors, and for no file or model.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.folders import PARTIAL, sync, write
from autopar.runtime.mesh import MeshContext

INDEX = "model.safetensors.index.json"

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Of the format, for each dtype."""

AHEAD = 2
"""Tensors that wait in host memory while one is being written."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Source:
    """Tensors that are made together.

    Attributes:
        targets: what they are, on the meta device, by name.
        make: their values, gathered on all ranks, which all call it.
    """

    targets: Tensors
    make: Callable[[], Tensors]

    @property
    def bytes(self) -> int:
        """In a file."""
        return sum(t.nbytes for t in self.targets.values())


@dataclass(frozen=True)
class File:
    """A file of whole tensors.

    Attributes:
        name: of the file.
        sources: whose tensors it has.
        header: of the format: its length, and dtype, shape and place of each tensor.
        offsets: where in the file each tensor begins.
        size: of the file in bytes.
    """

    name: str
    sources: tuple[Source, ...]
    header: bytes = field(repr=False)
    offsets: Mapping[str, int]
    size: int


def files_of(sources: Sequence[Source], max_shard_size: int) -> list[File]:
    """Sources in files of at most so many bytes, in their order; one that is larger has a file of its own.

    Raises:
        ValueError: a dtype is none that safetensors has.
    """
    groups: list[list[Source]] = [[]]
    for source in sources:
        if groups[-1] and sum(s.bytes for s in groups[-1]) + source.bytes > max_shard_size:
            groups.append([])
        groups[-1].append(source)
    if len(groups) == 1:
        return [_file("model.safetensors", groups[0])]
    return [_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _file(name: str, sources: Sequence[Source]) -> File:
    tensors = {n: t for s in sources for n, t in s.targets.items()}
    for n, t in tensors.items():
        if t.dtype not in CODES:
            raise ValueError(f"{n!r} is of {t.dtype}, which safetensors files do not have; pass dtype= to convert it")
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, {}
    # Large elements first, so that each tensor begins at a multiple of its elements' size.
    for n, t in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        place = [position, position + t.nbytes]
        entries[n] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": place}
        starts[n], position = position, place[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return File(name, tuple(sources), header, {n: len(header) + at for n, at in starts.items()}, len(header) + position)


def write_files(files: Sequence[File], folder: Path, context: MeshContext, total_parameters: int) -> Path:
    """Write the files to a new folder, which is there when all of them are on the disk; every rank calls it.

    Raises:
        AutoparError: the folder is there already, or something could not be written.
        RankError: a rank failed, or is gone.
    """

    def begin() -> str:
        if folder.exists():
            raise AutoparError(f"{folder} is there already: give the name of a new folder, or delete it first")
        _delete_left_over(folder)
        name = f"{folder.name}.{secrets.token_hex(4)}{PARTIAL}"
        (folder.parent / name).mkdir(parents=True)
        return name

    partial = folder.parent / context.decide(begin, "making the folder of safetensors")
    try:
        context.together(lambda: _write_own(files, partial, context), "writing safetensors")
        context.decide(lambda: _publish(files, partial, folder, total_parameters), "publishing safetensors")
    except BaseException:
        if context.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _delete_left_over(folder: Path) -> None:
    """What killed writers of the same folder have left."""
    for path in folder.parent.glob("*" + PARTIAL):
        name, _, token = path.name.removesuffix(PARTIAL).rpartition(".")
        if name == folder.name and len(token) == 8 and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _write_own(files: Sequence[File], folder: Path, context: MeshContext) -> None:
    world = 1 if context.mesh is None else context.mesh.size()
    writer = _Writer(folder)
    try:
        for index, source in _in_turns(files, world):
            made = source.make()
            if index % world == context.rank:
                writer.put(files[index], made, source.targets)
            del made
    finally:
        writer.end()


def _in_turns(files: Sequence[File], world: int) -> Iterator[tuple[int, Source]]:
    """Sources of one file of each rank in turns, so that all ranks have something to write at the same time."""
    for first in range(0, len(files), world):
        numbered = [[(i, s) for s in files[i].sources] for i in range(first, min(first + world, len(files)))]
        for turn in zip_longest(*numbered):
            yield from (each for each in turn if each is not None)


class _Writer:
    """Writes tensors in a thread, while further ones are gathered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: queue.Queue[tuple[File, str, torch.Tensor] | None] = queue.Queue(AHEAD)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autopar-safetensors", daemon=True)
        self._thread.start()

    def put(self, file: File, made: Tensors, targets: Tensors) -> None:
        for name, target in targets.items():
            tensor = made[name].detach()
            assert tensor.shape == target.shape and tensor.dtype == target.dtype, name
            # A copy even of what is on the host: views of one tensor would keep all of it.
            self._waiting.put((file, name, tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)))

    def end(self) -> None:
        """Wait until all is on the disk.

        Raises:
            OSError: it is not.
        """
        self._waiting.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        opened: dict[str, int] = {}
        try:
            while (item := self._waiting.get()) is not None:
                # After an error nothing is written, but the queue is emptied: ranks go on gathering.
                if self._error is None:
                    try:
                        self._write(opened, *item)
                    except Exception as e:
                        self._error = e
        finally:
            for descriptor in opened.values():
                try:
                    os.fsync(descriptor)
                    os.close(descriptor)
                except OSError as e:
                    self._error = self._error or e

    def _write(self, opened: dict[str, int], file: File, name: str, tensor: torch.Tensor) -> None:
        if file.name not in opened:
            opened[file.name] = os.open(self._folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            _write_all(opened[file.name], file.header, 0)
        data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        _write_all(opened[file.name], data, file.offsets[name])


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while len(rest):
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _publish(files: Sequence[File], partial: Path, folder: Path, total_parameters: int) -> None:
    for file in files:
        path = partial / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            raise AutoparError(
                f"{path} has {size} of {file.size} bytes as rank 0 sees it: give a folder on a file system that all "
                "ranks share"
            )
    if len(files) > 1:
        places = {name: file.name for file in files for name in file.offsets}
        total = sum(source.bytes for file in files for source in file.sources)
        found = {"metadata": {"total_parameters": total_parameters, "total_size": total}, "weight_map": places}
        write(partial / INDEX, json.dumps(found, indent=2, sort_keys=True) + "\n")
    sync(partial)
    partial.rename(folder)
    sync(folder.parent)
