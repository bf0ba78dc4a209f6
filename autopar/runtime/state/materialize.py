"""Models on the meta device: parameters from a function or from files, of which each rank keeps its part only."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autopar.costs.read_file import MIB, brief, read_text
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType, is_held, local_shape, replicated
from autopar.runtime.dtensor import block_ranges, local_block, plain_type, stored, stored_block, to_local
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.parameters import ParameterLayouts, checksum, lay_out

LONGEST_NAME = 255
"""Bytes of a file's name: file systems take no more, and say so by an error of their own."""

MOST_BYTES = 64 * MIB
"""Of an index; that of a model of a thousand layers has one."""

Init = Callable[[str, torch.Tensor], Any] | str | Path
"""``init(name, tensor)`` that fills a full CPU tensor, or a file or folder of safetensors."""


def uninitialized(model: nn.Module) -> list[str]:
    """Names of parameters and persistent buffers that are still on the meta device."""
    named = list(model.named_parameters()) + _persistent(model)
    return [name for name, tensor in named if to_local(tensor).is_meta]


def materialize(
    model: nn.Module, init: Init | None, types: ParameterLayouts, aliases: Mapping[str, str], context: MeshContext
) -> None:
    """Give meta parameters and buffers values; every rank calls it.

    Args:
        model: with DTensor parameters (plain ones where there is no mesh).
        init: ``init(name, tensor)`` fills one full CPU tensor, or a file or folder of safetensors.
        types: type and layout of each parameter.
        aliases: further names of tied parameters, by which a file may know them.
        context: this rank's mesh context.

    Raises:
        AutoparError: ``init`` is missing, or it leaves out a tensor.
    """
    missing = uninitialized(model)
    # First, since it needs no `init` where modules compute their own buffers.
    rebuild_buffers(model, init if callable(init) else None, context.device)
    if not missing:
        return
    if init is None:
        raise AutoparError(
            f"parameter {missing[0]!r} is on the meta device ({len(missing)} tensors in all) and has no values: pass "
            "init= to autopar.parallelize (a function init(name, tensor), or a folder of safetensors), "
            "or call load_full_state_dict before the first step"
        )
    source = _Function(init) if callable(init) else _Files(Path(init), aliases)
    context.together(lambda: _fill(model, missing, source, types, context), "the initialization of the parameters")
    # Ranks keep shards alone: with different seeds these would be of different tensors, and nothing else would show it.
    context.agree(
        source.digest, "the values that init= gave", "seed the random generator alike on every rank (torch.manual_seed)"
    )


def _fill(
    model: nn.Module, names: list[str], source: _Function | _Files, types: ParameterLayouts, context: MeshContext
) -> None:
    tensors = {**dict(model.named_parameters()), **dict(_persistent(model))}
    for name in names:
        old = tensors[name]
        whole = (plain_type(old.shape, old.dtype), ())
        type_, layout = types.get(name, whole) if isinstance(old, nn.Parameter) else whole
        local = source.block(name, old.dtype, type_, layout, context).to(context.device)
        if isinstance(old, nn.Parameter):
            _initialize(old, local, type_, layout, context)
        else:
            _replace_buffer(model, old, local)


def _initialize(
    old: nn.Parameter, local: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext
) -> None:
    if context.mesh is not None:
        lay_out(old, local, type_, layout or replicated(len(context.axes)), context)
    else:  # a meta parameter cannot take data of another device; swapping keeps its identity for an optimizer
        swap: Any = torch.utils.swap_tensors
        swap(old, nn.Parameter(local, requires_grad=old.requires_grad))


class _Function:
    """Values from ``init(name, tensor)``."""

    def __init__(self, fill: Callable[[str, torch.Tensor], Any]) -> None:
        self.fill = fill
        self.digest = ""  # of all values so far, to compare ranks

    def block(
        self, name: str, dtype: torch.dtype, type_: TensorType, layout: Layout, context: MeshContext
    ) -> torch.Tensor:
        # The whole tensor on every rank, one at a time: a generator gives a shard its values only if all are drawn.
        full = torch.empty(type_.stored_shape, dtype=dtype)
        with torch.no_grad():
            self.fill(name, full)
        self.digest = checksum({self.digest + name: full})
        return stored_block(full, type_, layout, context.sizes, context.coordinates) if layout else full


class _Files:
    """Values from safetensors: one file, or a folder with an index or one file."""

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        self.path = path
        self.digest = ""  # ranks read the same file
        self.files = _file_of_each(path)
        self.aliases: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self.aliases.setdefault(name, []).append(alias)

    def block(
        self, name: str, dtype: torch.dtype, type_: TensorType, layout: Layout, context: MeshContext
    ) -> torch.Tensor:
        # safetensors files have tied parameters once, under whichever name their writer chose.
        known = next((n for n in (name, *self.aliases.get(name, [])) if n in self.files), None)
        if known is None:
            raise AutoparError(
                f"{self.path} has no tensor {name!r}, which the model needs; it has {len(self.files)} tensors, "
                f"such as {', '.join(map(brief, sorted(self.files)[:3]))}; rename them, or pass a function as init="
            )
        if not is_held(layout, context.coordinates[: len(layout)]):
            return torch.empty((0, *local_shape(type_, layout, context.sizes)[1:]), dtype=dtype)
        with _opened(self.files[known]) as file:
            part = file.get_slice(known)
            if tuple(part.get_shape()) != type_.stored_shape:
                raise AutoparError(
                    f"tensor {known!r} in {self.files[known]} has shape {list(part.get_shape())}, the model's has "
                    f"{list(type_.stored_shape)}; the file belongs to another configuration"
                )
            if not type_.shape:
                scalar: torch.Tensor = file.get_tensor(known).to(dtype)
                return scalar
            # A file is read in ranges. What ranges cannot express, a split inside a fused dim, is cut from the hull.
            ranges, rest = block_ranges(type_, layout, context.sizes[: len(layout)], context.coordinates[: len(layout)])
            # Ranges count padding, which files do not have: a range may end after the tensor, or begin there.
            in_file = zip(ranges, type_.stored_shape, strict=True)
            block: torch.Tensor = part[tuple(slice(min(r.start, n), min(r.stop, n)) for r, n in in_file)].to(dtype)
        if not rest:
            return block.contiguous()
        block = local_block(block, _type_of_hull(type_, ranges), rest, context.sizes, context.coordinates)
        return stored(block, type_, layout, context.coordinates)


def _type_of_hull(type_: TensorType, ranges: tuple[slice, ...]) -> TensorType:
    """The type of a range of a tensor: where a dim was cut, its leading factor is smaller."""
    dims = []
    for dim, cut in zip(type_.dims, ranges, strict=True):
        size = 1
        for f in dim:
            size *= f.size
        parts = size // max(cut.stop - cut.start, 1)
        dims.append((type(dim[0])(dim[0].name, dim[0].size // parts), *dim[1:]) if dim and parts > 1 else dim)
    return TensorType(type_.dtype, tuple(dims))


def _file_of_each(path: Path) -> dict[str, Path]:
    """The file of each tensor, by its name."""
    if path.is_file() and path.suffix != ".json":
        return _names_in(path)
    index = path if path.suffix == ".json" else path / "model.safetensors.index.json"
    if index.is_file():
        return _files_of_index(index)
    single = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(single) != 1:
        raise AutoparError(
            f"init={str(path)!r}: expected a .safetensors file, or a folder with model.safetensors.index.json or one "
            f".safetensors file; {f'found {len(single)} files and no index' if path.exists() else 'it does not exist'}"
        )
    return _names_in(single[0])


@dataclass(frozen=True)
class _Index:
    """What an index holds, besides what nobody reads."""

    weight_map: dict[str, str]


def _files_of_index(index: Path) -> dict[str, Path]:
    """The file of each tensor, which is beside the index.

    Raises:
        AutoparError: the index is malformed, or names a file that is missing or elsewhere.
    """
    try:
        table = msgspec.json.decode(read_text(index, MOST_BYTES), type=_Index).weight_map
    except (ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise AutoparError(f"{index} is no index of safetensors: {brief(str(e))}; download it again") from e
    files = {name: _beside(index, name) for name in sorted(set(table.values()))}
    return {name: files[file] for name, file in table.items()}


def _beside(index: Path, name: str) -> Path:
    """The file of this name in the folder of the index, which must not lead out of it."""
    file = index.parent / name
    if name != Path(name).name or "\\" in name or "\0" in name or len(os.fsencode(name)) > LONGEST_NAME:
        raise AutoparError(
            f"{index} names {brief(name)!r}, which is no name of a file beside it; download the folder again"
        )
    # The cache of Hugging Face has links in the folder of a revision, into the blobs of the same model.
    blobs = index.parent.resolve().parent.parent / "blobs"
    if file.is_symlink() and file.resolve().parent != blobs:
        raise AutoparError(f"{index} names {name!r}, which is a link to {file.resolve()}; copy the file itself there")
    if not file.is_file():
        raise AutoparError(f"{index} names {file}, which does not exist; download all shards")
    return file


def _names_in(path: Path) -> dict[str, Path]:
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of safetensors.

    Raises:
        AutoparError: it is none, or does not have a tensor that is read from it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as e:
        raise AutoparError(f"cannot read {path} as safetensors: {brief(str(e))}; download it again") from e


def rebuild_buffers(model: nn.Module, fill: Callable[[str, torch.Tensor], Any] | None, device: torch.device) -> None:
    """Compute the non-persistent buffers of a meta model, such as rotary frequencies: files do not have them."""
    for path, module in model.named_modules():
        missing = [n for n, b in module._buffers.items() if b is not None and b.is_meta and n in _volatile(module)]
        if not missing:
            continue
        fresh = _initialized(model, module)
        for name in missing:
            old = module._buffers[name]
            assert old is not None
            if fresh is not None:
                value = fresh._buffers[name]
                assert value is not None
            elif fill is not None:
                value = torch.empty(old.shape, dtype=old.dtype)
                fill(f"{path}.{name}" if path else name, value)
            else:
                raise AutoparError(
                    f"buffer {path}.{name} is on the meta device, no file has it, and {type(module).__name__} has "
                    "no reset_parameters() or reset_buffers() that computes it; add one, or pass a function as init="
                )
            module._buffers[name] = value.to(device)
            # Some modules shadow a buffer by a plain attribute, which `self.name` finds first.
            if name in vars(module):
                vars(module)[name] = module._buffers[name]
    _refresh_copies(model)


def _initialized(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """A copy of one module on the CPU with its buffers computed; None if nothing computes them."""
    # Initializers write parameters as well, which are none of their business here: a copy has its own tables.
    shallow = copy.copy(module)
    shallow._parameters = {
        n: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        for n, p in module._parameters.items()
    }
    empty = {n: None if b is None else torch.empty(b.shape, dtype=b.dtype) for n, b in module._buffers.items()}
    shallow._buffers = dict(empty)
    shallow._modules = dict(module._modules)
    with torch.no_grad():
        # transformers' models have one initializer for modules of all classes. It skips those that it does not know,
        # which shows only in that it leaves their buffers as they were.
        if hasattr(model, "_init_weights"):
            patterns = {n: _fill_with_pattern(b) for n, b in empty.items()}
            initialize: Any = model._init_weights
            initialize(shallow)
            if all(not _has_pattern(shallow._buffers[n], patterns[n]) for n in _volatile(module) if n in empty):
                return shallow
        for method in ("reset_buffers", "reset_parameters"):
            if hasattr(shallow, method):
                getattr(shallow, method)()
                return shallow
    return None


def _fill_with_pattern(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Fill with values that no initialization leaves, to see whether it was written; a copy of them."""
    if buffer is None:
        return None
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max - 1)
    return buffer.clone()


def _has_pattern(buffer: torch.Tensor | None, pattern: torch.Tensor | None) -> bool:
    if buffer is None or pattern is None or buffer.shape != pattern.shape:
        return False
    # Of booleans no value is unlikely; they count as written.
    if buffer.numel() == 0 or buffer.dtype == torch.bool:
        return False
    return bool(torch.equal(buffer.nan_to_num(0.123), pattern.nan_to_num(0.123)))  # NaN is not equal to itself


def _refresh_copies(model: nn.Module) -> None:
    """Plain meta tensors that modules keep beside a buffer (``original_inv_freq``) follow the buffer of that name."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            source = module._buffers.get(name.removeprefix("original_"))
            if isinstance(value, torch.Tensor) and value.is_meta and source is not None and source.shape == value.shape:
                setattr(module, name, source)


def _volatile(module: nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def _persistent(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in _volatile(module):
                named.append((f"{path}.{name}" if path else name, buffer))
    return named


def _replace_buffer(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a buffer in every module that has it."""
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is old:
                module._buffers[name] = new
