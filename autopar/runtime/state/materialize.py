"""Models on the meta device: parameters from a function or from files, of which each rank keeps its part only."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType, is_held, local_shape, replicated
from autopar.runtime.dtensor import block_ranges, local_block, plain_type, stored, stored_block, to_local
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.parameters import checksum, lay_out

Init = Callable[[str, torch.Tensor], Any] | str | Path
BoundaryLayouts = Mapping[str, tuple[TensorType, Layout]]


def uninitialized(model: nn.Module) -> list[str]:
    """Names of parameters and persistent buffers that are still on the meta device."""
    named = list(model.named_parameters()) + _persistent(model)
    return [name for name, tensor in named if to_local(tensor).is_meta]


def materialize(
    model: nn.Module, init: Init | None, types: BoundaryLayouts, aliases: Mapping[str, str], place: MeshContext
) -> None:
    """Give meta parameters and buffers values; every rank calls it.

    Args:
        model: with DTensor parameters (plain ones where there is no mesh).
        init: ``init(name, tensor)`` fills one full CPU tensor, or a file or folder of safetensors.
        types: type and layout of each parameter.
        aliases: further names of tied parameters, by which a file may know them.
        place: where this rank is.

    Raises:
        AutoparError: ``init`` is missing, or it leaves out a tensor.
    """
    missing = uninitialized(model)
    rebuild_buffers(model, init if callable(init) else None, place.device)
    if not missing:
        return
    if init is None:
        raise AutoparError(
            f"parameter {missing[0]!r} is on the meta device ({len(missing)} tensors in all) and has no values: pass "
            "init= to autopar.parallelize (a function init(name, tensor), or a folder of safetensors), "
            "or call load_full_state_dict before the first step"
        )
    source = _Function(init) if callable(init) else _Files(Path(init), aliases)
    place.together(lambda: _fill(model, missing, source, types, place), "the initialization of the parameters")
    place.agree(
        source.digest, "the values that init= gave", "seed the random generator alike on every rank (torch.manual_seed)"
    )


def _fill(
    model: nn.Module, names: list[str], source: _Function | _Files, types: BoundaryLayouts, place: MeshContext
) -> None:
    tensors = {**dict(model.named_parameters()), **dict(_persistent(model))}
    for name in names:
        old = tensors[name]
        whole = (plain_type(old.shape, old.dtype), ())
        type_, layout = types.get(name, whole) if isinstance(old, nn.Parameter) else whole
        local = source.block(name, old.dtype, type_, layout, place).to(place.device)
        if isinstance(old, nn.Parameter):
            _place_parameter(old, local, type_, layout, place)
        else:
            _set(model, "_buffers", old, local)


def _place_parameter(
    old: nn.Parameter, local: torch.Tensor, type_: TensorType, layout: Layout, place: MeshContext
) -> None:
    if place.mesh is not None:
        lay_out(old, local, type_, layout or replicated(len(place.axes)), place)
    else:  # a meta parameter cannot take data of another device; swapping keeps its identity for an optimizer
        swap: Any = torch.utils.swap_tensors
        swap(old, nn.Parameter(local, requires_grad=old.requires_grad))


class _Function:
    """Values from ``init(name, tensor)``."""

    def __init__(self, fill: Callable[[str, torch.Tensor], Any]) -> None:
        self.fill = fill
        self.digest = ""

    def block(
        self, name: str, dtype: torch.dtype, type_: TensorType, layout: Layout, place: MeshContext
    ) -> torch.Tensor:
        full = torch.empty(type_.stored_shape, dtype=dtype)
        with torch.no_grad():
            self.fill(name, full)
        self.digest = checksum({self.digest + name: full})
        return stored_block(full, type_, layout, place.sizes, place.coordinates) if layout else full


class _Files:
    """Values from safetensors: one file, or a folder with an index or one file."""

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        self.path = path
        self.digest = ""
        self.files = _index(path)
        self.names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self.names.setdefault(name, []).append(alias)

    def block(
        self, name: str, dtype: torch.dtype, type_: TensorType, layout: Layout, place: MeshContext
    ) -> torch.Tensor:
        known = next((n for n in (name, *self.names.get(name, [])) if n in self.files), None)
        if known is None:
            raise AutoparError(
                f"{self.path} has no tensor {name!r}, which the model needs; it has {len(self.files)} tensors, "
                f"such as {', '.join(sorted(self.files)[:3])}; rename them, or pass a function as init="
            )
        if not is_held(layout, place.coordinates[: len(layout)]):
            return torch.empty((0, *local_shape(type_, layout, place.sizes)[1:]), dtype=dtype)
        with safe_open(self.files[known], framework="pt") as file:
            part = file.get_slice(known)
            if tuple(part.get_shape()) != type_.stored_shape:
                raise AutoparError(
                    f"tensor {known!r} in {self.files[known]} has shape {list(part.get_shape())}, the model's has "
                    f"{list(type_.stored_shape)}; the file belongs to another configuration"
                )
            if not type_.shape:
                scalar: torch.Tensor = file.get_tensor(known).to(dtype)
                return scalar
            ranges, rest = block_ranges(type_, layout, place.sizes[: len(layout)], place.coordinates[: len(layout)])
            there = zip(ranges, type_.stored_shape, strict=True)
            block: torch.Tensor = part[tuple(slice(min(r.start, n), min(r.stop, n)) for r, n in there)].to(dtype)
        if not rest:
            return block.contiguous()
        block = local_block(block, _within(type_, ranges), rest, place.sizes, place.coordinates)
        return stored(block, type_, layout, place.coordinates)


def _within(type_: TensorType, ranges: tuple[slice, ...]) -> TensorType:
    """The type of a hull: where a dim was cut, its leading factor is smaller."""
    dims = []
    for dim, cut in zip(type_.dims, ranges, strict=True):
        size = 1
        for f in dim:
            size *= f.size
        parts = size // max(cut.stop - cut.start, 1)
        dims.append((type(dim[0])(dim[0].name, dim[0].size // parts), *dim[1:]) if dim and parts > 1 else dim)
    return TensorType(type_.dtype, tuple(dims))


def _index(path: Path) -> dict[str, Path]:
    """File of each tensor."""
    if path.is_file() and path.suffix != ".json":
        return _names(path)
    index = path if path.suffix == ".json" else path / "model.safetensors.index.json"
    if index.is_file():
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / file for name, file in table.items()}
        lost = sorted({str(f) for f in files.values() if not f.is_file()})
        if lost:
            raise AutoparError(f"{index} names {lost[0]}, which does not exist; download all shards")
        return files
    single = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(single) != 1:
        raise AutoparError(
            f"init={str(path)!r}: expected a .safetensors file, or a folder with model.safetensors.index.json or one "
            f".safetensors file; {f'found {len(single)} files and no index' if path.exists() else 'it does not exist'}"
        )
    return _names(single[0])


def _names(path: Path) -> dict[str, Path]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except Exception as e:  # safetensors raises its own error type
        raise AutoparError(f"cannot read {path} as safetensors: {e}") from e


def rebuild_buffers(model: nn.Module, fill: Callable[[str, torch.Tensor], Any] | None, device: torch.device) -> None:
    """Compute the non-persistent buffers of a meta model anew: files do not have them."""
    for path, module in model.named_modules():
        lost = [n for n, b in module._buffers.items() if b is not None and b.is_meta and n in _volatile(module)]
        if not lost:
            continue
        fresh = _initialized(model, module)
        for name in lost:
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
            if name in vars(module):
                vars(module)[name] = module._buffers[name]
    _refresh_copies(model)


def _initialized(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """A copy of one module on the CPU with its buffers computed; None if nothing computes them."""
    shallow = copy.copy(module)
    shallow._parameters = {
        n: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        for n, p in module._parameters.items()
    }
    marks = {n: None if b is None else torch.empty(b.shape, dtype=b.dtype) for n, b in module._buffers.items()}
    shallow._buffers = dict(marks)
    shallow._modules = dict(module._modules)
    with torch.no_grad():
        if hasattr(model, "_init_weights"):
            before = {n: _mark(b) for n, b in marks.items()}
            initialize: Any = model._init_weights
            initialize(shallow)
            if all(not _marked(shallow._buffers[n], before[n]) for n in _volatile(module) if n in marks):
                return shallow
        for method in ("reset_buffers", "reset_parameters"):
            if hasattr(shallow, method):
                getattr(shallow, method)()
                return shallow
    return None


def _mark(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Fill with a pattern that no initialization leaves, to see whether it was written."""
    if buffer is None:
        return None
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max - 1)
    return buffer.clone()


def _marked(buffer: torch.Tensor | None, mark: torch.Tensor | None) -> bool:
    if buffer is None or mark is None or buffer.shape != mark.shape:
        return False
    if buffer.numel() == 0 or buffer.dtype == torch.bool:
        return False
    return bool(torch.equal(buffer.nan_to_num(0.123), mark.nan_to_num(0.123)))


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
    found = []
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in _volatile(module):
                found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _set(model: nn.Module, table: str, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a tensor wherever modules hold it."""
    for module in model.modules():
        for name, value in getattr(module, table).items():
            if value is old:
                getattr(module, table)[name] = new
