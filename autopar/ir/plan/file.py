"""What reads and writes plan files: plain data of a plan, in types that JSON has, and a plan of such data.

What a file says is checked as it is read: types, numbers, and that its parts fit together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autopar.costs.cluster import Cluster
from autopar.costs.mixed.shares import Shares
from autopar.costs.read_file import MIB, brief, read_text
from autopar.errors import PlanError
from autopar.ir.layout import At, Layout, Partial, Replicate, Split, parse_placement
from autopar.ir.plan import (
    BY_AXES,
    INTERRUPTED,
    LAGRANGIAN,
    MEMORY_REPAIR,
    PER_USE,
    TIME_LIMIT,
    Certificate,
    ModuleRow,
    Pipeline,
    Plan,
    Predicted,
    Ranges,
    Scatter,
    Stage,
)
from autopar.ir.quantized.axes import QuantizedAxis

VERSION = 2
"""Of the format that `Plan.save` writes; `Plan.load` reads version 1, too."""

MOST_BYTES = 256 * MIB
"""Of a plan file; that of a model of a thousand layers has a few."""

_LAYOUTS = ("parameters", "batch", "results", "consumer_layouts")


def to_data(plan: Plan) -> dict[str, Any]:
    """Plain data of a plan, as `Plan.save` writes it."""
    data: dict[str, Any] = {"autopar_plan": VERSION, "torch": plan.torch, "fingerprint": plan.fingerprint}
    data["axes"] = dict(plan.axes)
    data["optimizer"] = plan.optimizer
    # The whole cluster, not its name: presets change, and the plan's redistributions depend on its links.
    data["cluster"] = plan.cluster.to_toml()
    for name in _LAYOUTS:
        data[name] = {k: [str(p) for p in v] for k, v in getattr(plan, name).items()}
    data["choices"] = {k: list(v) for k, v in plan.choices.items()}
    data["microbatches"] = plan.microbatches
    data["shares"] = None if plan.shares is None else asdict(plan.shares)
    certificate = {**asdict(plan.certificate), "gap": plan.certificate.gap}
    data["certificate"] = {name: value for name, value in certificate.items() if name != "claimed"}
    data["predicted"] = asdict(plan.predicted)
    data["modules"] = [asdict(m) for m in plan.modules]
    data["stages"] = [list(s.modules) for s in plan.stages]
    if any(s.group for s in plan.stages):
        data["stage_groups"] = [s.group for s in plan.stages]
    data["pipeline"] = None if plan.pipeline is None else asdict(plan.pipeline)
    data["overlap"] = plan.overlap
    data["fused"] = plan.fused
    data["scatter"] = None if plan.scatter is None else asdict(plan.scatter)
    data["workers"], data["worker_role"] = dict(plan.workers), plan.worker_role
    data["quantized"] = [asdict(q) for q in plan.quantized]
    data["secondary"] = list(plan.secondary)
    data["expert_load"] = list(plan.expert_load)
    data["float8"] = plan.float8
    data["forced_consumer_layouts"] = list(plan.forced_consumer_layouts)
    data["padding"] = {name: list(shape) for name, shape in plan.padding.items()}
    for name in ("recompute", "offload"):
        data[name] = {key: [list(r) for r in ranges] for key, ranges in getattr(plan, name).items()}
    return data


def read_plan_file(path: str | Path) -> Plan:
    """Read what `Plan.save` wrote.

    Raises:
        PlanError: the file is missing, no regular file, corrupt or of another version; names the file and the
            reason.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as e:
        raise PlanError(f"cannot read plan file {path}: {e.strerror}") from e
    except ValueError as e:
        raise PlanError(f"plan file {e}") from e
    try:
        return from_data(json.loads(text))
    except RecursionError as e:
        raise PlanError(f"plan file {path} is corrupt: nested too deep; save it again with Plan.save") from e
    except ValueError as e:
        raise PlanError(f"plan file {path} is corrupt: {e}; save it again with Plan.save") from e
    except PlanError as e:
        raise PlanError(f"plan file {path}: {e}") from e


def from_data(data: Any) -> Plan:
    """Inverse of `to_data`.

    Raises:
        PlanError: a key is missing or wrong, or the version is another one.
    """
    if not isinstance(data, dict) or "autopar_plan" not in data:
        raise PlanError("this is no plan of autopar; save one with Plan.save or `autopar plan --save`")
    if data["autopar_plan"] not in (1, VERSION):
        raise PlanError(
            f"version {brief(str(data['autopar_plan']))} of the format, this autopar reads 1 to {VERSION}; plan again"
        )
    try:
        return _parse(_of_version_1(data) if data["autopar_plan"] == 1 else data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError) as e:
        raise PlanError(f"corrupt: {type(e).__name__}: {brief(str(e))}; save it again with Plan.save") from e


_METHODS = {
    "fold": "elimination",
    "messages": "dual ascent",
    "prices": LAGRANGIAN,
}
"""What closed a search, in version 1 and now."""

_SAME = ("ilp", "multiplier", BY_AXES, TIME_LIMIT, INTERRUPTED, "random", "")
"""Methods that have kept their names. The only other one of version 1 is memory repair."""


def _of_version_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data of version 1 in the words of version 2."""

    def renamed(name: str) -> str:
        if name.startswith("each relay "):
            return f"{PER_USE}consumer {name.removeprefix('each relay ')}"
        return f"consumer {name.removeprefix('relay ')}" if name.startswith("relay ") else name

    former = {"relays": "consumer_layouts", "held": "forced_consumer_layouts"}
    # Version 1 called consumer layouts relays.
    found = {former.get(key, key): value for key, value in data.items()}
    for key in ("recompute", "offload"):
        found[key] = {renamed(name): ranges for name, ranges in data.get(key, {}).items()}
    method = data["certificate"]["method"]
    found["certificate"] = {
        **data["certificate"],
        "method": _METHODS.get(method, method if method in _SAME else MEMORY_REPAIR),
    }
    return found


_Layouts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _File:
    """What a file holds, in the types that JSON has; entries with a default are absent from older ones."""

    axes: Mapping[str, Annotated[int, msgspec.Meta(ge=1, lt=2**31)]]
    cluster: str
    parameters: _Layouts
    batch: _Layouts
    results: _Layouts
    consumer_layouts: _Layouts
    choices: Mapping[str, tuple[str, ...]]
    optimizer: str
    fingerprint: str
    torch: str
    certificate: Certificate
    predicted: Predicted
    modules: tuple[ModuleRow, ...]
    stages: Annotated[tuple[Annotated[tuple[str, ...], msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    shares: Shares | None = None
    overlap: bool = False
    fused: bool = False
    pipeline: Pipeline | None = None
    scatter: Scatter | None = None
    stage_groups: tuple[str, ...] = ()
    padding: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    forced_consumer_layouts: tuple[str, ...] = ()
    workers: Mapping[str, Annotated[int, msgspec.Meta(ge=1, lt=2**31)]] = field(default_factory=dict)
    worker_role: Literal["local", "compressed", "stale"] = "local"
    quantized: tuple[QuantizedAxis, ...] = ()
    secondary: tuple[str, ...] = ()
    expert_load: tuple[float, ...] = ()
    float8: str = ""
    recompute: Ranges = field(default_factory=dict)
    offload: Ranges = field(default_factory=dict)


def _parse(data: dict[str, Any]) -> Plan:
    file = msgspec.convert(data, _File)
    for name, known in (("certificate", {"gap", *_names(Certificate)}), ("predicted", _names(Predicted))):
        if set(data[name]) - known:
            raise ValueError(f"{name} has {sorted(set(data[name]) - known)[0]!r}, which it does not have here")
    _check_numbers(asdict(file), "")
    layouts: dict[str, Any] = {
        name: {k: tuple(map(parse_placement, v)) for k, v in getattr(file, name).items()} for name in _LAYOUTS
    }
    # Here rather than as an index error in a pass.
    wrong = [f"{name} {k}" for name in _LAYOUTS for k, v in layouts[name].items() if len(v) != len(file.axes)]
    wrong += [f"choices {k}" for k, v in file.choices.items() if len(v) != len(file.axes)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} does not have one placement for each of {len(file.axes)} axes")
    certificate = file.certificate
    for name, bound in (("lower_bound", certificate.lower_bound), ("checked", certificate.checked or 0.0)):
        # Bounds are rounded in the search's units.
        if bound > certificate.objective * (1 + 1e-6):
            raise ValueError(f"certificate.{name} is {bound}, and the plan itself takes {certificate.objective}")
    kept: dict[str, Any] = {f.name: getattr(file, f.name) for f in fields(_File) if f.name not in _LAYOUTS}
    if len(file.workers) > 1 or set(file.workers) & set(file.axes):
        raise ValueError(f"workers are {dict(file.workers)}: expected one axis beside {', '.join(file.axes)}")
    strange = [q.axis for q in file.quantized if q.axis not in file.axes or not q.what]
    if strange:
        raise ValueError(f"quantized names axis {strange[0]!r}: expected bits along one of {', '.join(file.axes)}")
    shares = file.shares
    if shares is not None and (
        len(shares.counts) != file.axes.get(shares.axis, 0)
        or shares.microbatches != file.microbatches
        or file.pipeline is not None
    ):
        raise ValueError(
            f"shares are {shares} of axis {shares.axis!r}: expected a number for each of its devices, of "
            f"{file.microbatches} microbatches in the mean, and no stages"
        )
    if set(file.secondary) - set(file.axes):
        raise ValueError(f"secondary names {file.secondary}: expected axes among {', '.join(file.axes)}")
    kept |= {
        "workers": tuple(file.workers.items()),
        "axes": tuple(file.axes.items()),
        "cluster": Cluster.from_toml(file.cluster),
    }
    groups = kept.pop("stage_groups") or ("",) * len(file.stages)
    stages = tuple(Stage(modules, group) for modules, group in zip(file.stages, groups, strict=True))
    kept |= {"stages": stages, "certificate": replace(certificate, claimed=True)}
    _require_stages(file, layouts)
    return Plan(**layouts, **kept)


def _require_stages(file: _File, layouts: Mapping[str, Mapping[str, Layout]]) -> None:
    """Raise if what the file says of stages does not fit together; in a stage nothing reads their axis."""
    pipeline, names = file.pipeline, list(file.axes)
    if pipeline is not None:
        devices = file.axes.get(pipeline.axis, 0)
        if not devices or len(file.stages) % devices or len(file.stages) == 1:
            raise ValueError(
                f"pipeline.axis is {pipeline.axis!r}, and there are {len(file.stages)} stages: expected an axis among "
                f"{', '.join(names)} whose size divides their number, which is 2 or more"
            )
        if pipeline.places and sorted(pipeline.places) != list(range(devices)):
            raise ValueError(f"pipeline.places are {pipeline.places}: expected 0 to {devices - 1} in any order")
    elif len(file.stages) > 1:
        raise ValueError(f"there are {len(file.stages)} stages and no pipeline, which says how they run")
    sizes = list(file.axes.values())
    index = -1 if pipeline is None else names.index(pipeline.axis)
    wrong = [
        f"{table} {name!r} is {placement} along axis {names[i]!r}"
        for table, rows in layouts.items()
        for name, row in rows.items()
        for i, placement in enumerate(row)
        if (i == index and isinstance(placement, Split | Partial))
        or (isinstance(placement, At) and not (i == index and 0 <= placement.index < sizes[i]))
    ]
    wrong += [
        f"choices {name!r} is {row[index]!r} along axis {names[index]!r}"
        for name, row in file.choices.items()
        if index >= 0 and row[index] != str(Replicate())
    ]
    if wrong:
        raise ValueError(f"{wrong[0]}: expected R or a device's @number along the axis of stages, and @ nowhere else")


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _check_numbers(value: Any, path: str) -> None:
    """Raise if a number is infinite, no number, or negative: none in a file is."""
    if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{path.removeprefix('.')} is {value}")
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(inner, f"{path}.{key}")
