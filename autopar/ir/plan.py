"""`Plan`: a layout for every tensor of a model on a mesh, what it is predicted to cost, and how good it is.

A plan is data: readable, versioned JSON keyed by parameter and operator class, with fingerprints of what it is for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autopar.costs.arguments import PATH, require
from autopar.costs.cluster import Cluster
from autopar.costs.mixed.shares import Shares
from autopar.costs.read_file import MIB, read_text
from autopar.errors import PlanError
from autopar.ir.layout import Layout, parse_placement
from autopar.ir.quantized.axes import QuantizedAxis

VERSION = 2
"""Of the format that `Plan.save` writes; `Plan.load` reads version 1, too."""

MOST_BYTES = 256 * MIB
"""Of a plan file; that of a model of a thousand layers has a few."""

TIME_LIMIT, INTERRUPTED = "time limit", "interrupted"
"""Methods of certificates whose search did not end by itself."""

LAGRANGIAN = "Lagrangian"
"""Method of a certificate whose bound prices memory."""

MEMORY_REPAIR = "memory repair"
"""Method of a certificate whose plan was changed after the search, see `autopar.search.budget.repair`."""

Ranges = Mapping[str, tuple[tuple[int, int], ...]]
"""Members of classes, in the model's order, as ranges ``(start, stop)``."""

PER_USE = "per use "
"""Before a consumer layout in a plan's ``recompute``: re-gathered for each operator of the backward pass by itself."""

EVERY = ((0, 2**31),)
"""A range of all members of a class, however many there are."""


@dataclass(frozen=True)
class Certificate:
    """How far from the best a plan can be.

    Attributes:
        objective: predicted seconds of one step, as the search counts them.
        lower_bound: no plan of ``space`` costs less under the same cost model.
        space: the set of plans that the bound speaks of.
        method: what closed the search.
        memory_price: seconds of a step that a byte more a device saves, while the increase is small; 0 where the budget
            does not bind, or where that is not known (`MEMORY_REPAIR`).
        checked: a lower bound on the same plans that was verified apart from the search, from duals and by sums that
            are rounded down; None where that was not asked for, or of a plan that was changed since (`MEMORY_REPAIR`).
        claimed: whether a file says all this, which nobody has verified since.
    """

    objective: float
    lower_bound: float
    space: str
    method: str
    memory_price: float = 0.0
    checked: float | None = None
    claimed: bool = field(default=False, compare=False)

    @property
    def binds(self) -> bool:
        """Whether with more memory there would be faster plans."""
        # A repaired plan was changed for memory, and its price is not known.
        return self.memory_price > 0 or self.method == MEMORY_REPAIR

    @property
    def gap(self) -> float:
        """Relative distance between objective and lower bound."""
        # Never negative by rounding, and never a division by zero.
        return max(0.0, (self.objective - self.lower_bound) / max(self.objective, 1e-300))


@dataclass(frozen=True)
class Predicted:
    """What one step costs on each device.

    Attributes:
        step_seconds: compute, copies to host memory and back, and communication: that which kernels do not hide if the
            plan overlaps, and else all of it.
        compute_seconds: the part that is compute.
        memory_bytes: by category: parameters, gradients, optimizer, buffers.
        peak_bytes: by category, at the peak of the rewritten graph, see `autopar.memory.liveness`; empty where no
            budget was set.
        communication_bytes: bytes that a device sends, by axis.
        collectives: how many, by axis and kind.
        communication_seconds: all collectives, hidden or not.
        room: how much memory the device of ``peak_bytes`` has, as a multiple of the least of the cluster: where devices
            differ, it is the one that has the least left.
        chunked_seconds: how much less ``step_seconds`` is as products run in chunks beside the collectives of their
            rows, see `autopar.passes.collectives.chunk_collectives`.
        host_seconds: copies to host memory and back.
        host_bytes: the most that a device has in host memory.
    """

    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    communication_bytes: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    peak_bytes: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    host_bytes: float = 0.0
    communication_seconds: float = 0.0
    chunked_seconds: float = 0.0
    room: float = 1.0


@dataclass(frozen=True)
class ModuleRow:
    """One line of the plan's table: all instances of a repeated module together."""

    path: str
    instances: int
    layouts: Mapping[str, str]
    seconds: float
    communication_bytes: Mapping[str, float]
    memory_bytes: float


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: modules that run on the same devices. A plan without a pipeline has one.

    Attributes:
        modules: the first begins it.
        group: of the cluster's devices that it is on; empty where all are of one kind.
    """

    modules: tuple[str, ...]
    group: str = ""


_WHOLE = (Stage(("",)),)

WORKER = {
    "local": "of one worker of several that train apart between exchanges: not equal to synchronous training",
    "compressed": "of one worker of several that exchange compressed gradients in each step, of which "
    "CompressedGradients.error is the relative error: not equal to synchronous training",
    "stale": "of one worker of several whose gradients are of parameters that others have changed meanwhile, at most "
    "StaleGradients' staleness= steps ahead of the slowest: not equal to synchronous training",
}
"""What a certificate says of a plan with workers, by the role of their axis."""

ROUNDED = "operands are rounded to 4 or 3 significant bits, not equal to training without it"
"""What plan and certificate say of float8 layers."""


@dataclass(frozen=True)
class Pipeline:
    """How the stages of a plan run.

    Attributes:
        axis: the mesh axis of the stages.
        schedule: in which order each device works on its microbatches: a name, see `autopar.pipeline.schedules`, or the
            text of a table, see `autopar.pipeline.custom_schedule`.
        places: the coordinate along the axis of the device that comes first in the schedule, of the second, and so on;
            empty: in the order of the axis.
    """

    axis: str
    schedule: str
    places: tuple[int, ...] = ()

    @property
    def order(self) -> str:
        """The schedule in a few words."""
        return "a custom schedule" if "\n" in self.schedule else self.schedule


@dataclass(frozen=True)
class Scatter:
    """Between which stages each device sends only a shard, see `passes/pipeline/scatter_sends.py`.

    Attributes:
        axis: of the stages; its link decides whether shards are faster.
        behind: the stages whose next stage is on other devices.
    """

    axis: str
    behind: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A layout for every tensor.

    Attributes:
        axes: name and size of each mesh axis, outermost first.
        cluster: what it was planned for; redistribution takes the paths that are cheapest there.
        parameters: layout of each parameter (and of its gradient and optimizer state).
        batch: layout of each batch tensor, by position.
        results: layout of each output tensor, by position.
        choices: strategy of each operator class on each axis.
        consumer_layouts: layout in which the users of a value take it, where it is made in another one.
        forced_consumer_layouts: those of ``consumer_layouts`` that hold for every user, even one that could take the
            value as it was made: pinned layouts of module outputs.
        optimizer: whose state the memory counts.
        fingerprint: of the captured graph.
        torch: version of torch that captured it.
        recompute: what the backward pass recomputes instead of having it saved: operator classes, and consumer
            layouts (``consumer CLASS OUTPUT``), which are re-gathered, once for each user where they are not to be held
            between two (``per use consumer CLASS OUTPUT``, besides). For each the ranges ``(start, stop)`` of members,
            in the model's order. What comes from parameters alone and is not here is hoisted out of the microbatches.
        offload: what is in host memory: results of operator classes, and consumer layouts, from the forward to the
            backward pass; and the optimizer state of parameter classes (``parameter NAME``) except during the
            optimizer's step. In the form of ``recompute``.
        microbatches: how many microbatches a step runs, see `autopar.search.microbatch.rewrite`. Layouts of batch and
            results are those of one microbatch; values computed from the whole batch before are numbered after the
            batch tensors.
        shares: along which axis devices run other numbers of microbatches, as they are of other speeds; None: all run
            the same.
        stages: in the order of the forward pass.
        pipeline: how the stages run; None where there is only one. In a pipeline each parameter is on the devices of
            one stage, see `autopar.ir.layout.At`, and everything else has the same layout in all stages.
        scatter: after which stages shards are sent; None: whole tensors are.
        padding: padded shape of each parameter with dims that do not divide, see `autopar.passes.pad_dims`.
        overlap: whether collectives are joined and put where kernels hide them, see
            `autopar.passes.collectives.overlap_collectives`: what is in flight takes memory. Products may then be cut
            into chunks beside the collectives of their rows, see `autopar.passes.collectives.chunk_collectives`.
        fused: whether costs are those of kernels that a compiler fuses, see `autopar.rules.shapes.fused_kernels`.
        workers: name and size of the mesh axis of workers (role ``local`` or ``compressed``), outside of ``axes``: each
            has all of ``axes`` to itself, and the plan is one worker's, for its part of the batch. Empty: none do.
        worker_role: of this axis: workers train apart, or exchange compressed or stale gradients.
        quantized: along which axes gathers of parameters and reductions of gradients are in few bits: those that are
            smaller then.
        secondary: axes along which copies of parameters that the backward pass gathers stay split, where there are such
            copies, see `autopar.passes.copy_for_backward`; empty: it reads the parameters themselves.
        expert_load: of experts, which time and memory are predicted with, see `autopar.ir.layout.imbalance_of`.
        float8: how linear layers compute in float8, an `autopar.Float8` as text; empty: they do not.
    """

    axes: tuple[tuple[str, int], ...]
    cluster: Cluster
    parameters: Mapping[str, Layout]
    batch: Mapping[str, Layout]
    results: Mapping[str, Layout]
    choices: Mapping[str, tuple[str, ...]]
    consumer_layouts: Mapping[str, Layout]
    optimizer: str
    fingerprint: str
    torch: str
    certificate: Certificate
    predicted: Predicted = field(default_factory=Predicted)
    modules: tuple[ModuleRow, ...] = ()
    stages: tuple[Stage, ...] = _WHOLE
    padding: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    recompute: Ranges = field(default_factory=dict)
    offload: Ranges = field(default_factory=dict)
    microbatches: int = 1
    shares: Shares | None = None
    pipeline: Pipeline | None = None
    scatter: Scatter | None = None
    forced_consumer_layouts: tuple[str, ...] = ()
    overlap: bool = False
    fused: bool = False
    workers: tuple[tuple[str, int], ...] = ()
    worker_role: str = "local"
    quantized: tuple[QuantizedAxis, ...] = ()
    secondary: tuple[str, ...] = ()
    expert_load: tuple[float, ...] = ()
    float8: str = ""

    def of_messages(self) -> Plan:
        """The plan whose certificate says what is sent in few bits, if something is."""
        if not self.quantized:
            return self
        note = f"{'; '.join(map(str, self.quantized))}: not equal to exact training"
        return replace(self, certificate=replace(self.certificate, space=f"{self.certificate.space}; {note}"))

    def of_workers(self, workers: tuple[tuple[str, int], ...], role: str) -> Plan:
        """The plan as that of each of some workers, whose axis has this role; the certificate says what that means."""
        if not workers:
            return self
        note = f"{WORKER[role]}, {' x '.join(f'{axis}={n}' for axis, n in workers)}"
        certificate = replace(self.certificate, space=f"{self.certificate.space}; {note}")
        return replace(self, workers=workers, worker_role=role, certificate=certificate)

    def in_float8(self, how: str) -> Plan:
        """The plan as one whose linear layers compute in float8; the certificate says so."""
        if not how:
            return self
        certificate = replace(self.certificate, space=f"{self.certificate.space}; linear layers in {how}: {ROUNDED}")
        return replace(self, float8=how, certificate=certificate)

    @property
    def inner(self) -> Plan:
        """The plan of the devices of any one stage, for the whole model."""
        if self.pipeline is None:
            return self
        axis = self.axis_names.index(self.pipeline.axis)

        def drop(rows: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
            # Along the axis of the stages a tensor is on one coordinate, or on all; strategies there replicate.
            return {name: row[:axis] + row[axis + 1 :] for name, row in rows.items()}

        return replace(
            self,
            axes=self.axes[:axis] + self.axes[axis + 1 :],
            parameters=drop(self.parameters),
            batch=drop(self.batch),
            results=drop(self.results),
            consumer_layouts=drop(self.consumer_layouts),
            choices=drop(self.choices),
            pipeline=None,
        )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return tuple(n for n, _ in self.axes)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(n for _, n in self.axes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `save` writes it."""
        data: dict[str, Any] = {"autopar_plan": VERSION, "torch": self.torch, "fingerprint": self.fingerprint}
        data["axes"] = dict(self.axes)
        data["optimizer"] = self.optimizer
        # The whole cluster, not its name: presets change, and the plan's redistributions depend on its links.
        data["cluster"] = self.cluster.to_toml()
        for name in _LAYOUTS:
            data[name] = {k: [str(p) for p in v] for k, v in getattr(self, name).items()}
        data["choices"] = {k: list(v) for k, v in self.choices.items()}
        data["microbatches"] = self.microbatches
        data["shares"] = None if self.shares is None else asdict(self.shares)
        certificate = {**asdict(self.certificate), "gap": self.certificate.gap}
        data["certificate"] = {name: value for name, value in certificate.items() if name != "claimed"}
        data["predicted"] = asdict(self.predicted)
        data["modules"] = [asdict(m) for m in self.modules]
        data["stages"] = [list(s.modules) for s in self.stages]
        if any(s.group for s in self.stages):
            data["stage_groups"] = [s.group for s in self.stages]
        data["pipeline"] = None if self.pipeline is None else asdict(self.pipeline)
        data["overlap"] = self.overlap
        data["fused"] = self.fused
        data["scatter"] = None if self.scatter is None else asdict(self.scatter)
        data["workers"], data["worker_role"] = dict(self.workers), self.worker_role
        data["quantized"] = [asdict(q) for q in self.quantized]
        data["secondary"] = list(self.secondary)
        data["expert_load"] = list(self.expert_load)
        data["float8"] = self.float8
        data["forced_consumer_layouts"] = list(self.forced_consumer_layouts)
        data["padding"] = {name: list(shape) for name, shape in self.padding.items()}
        for name in ("recompute", "offload"):
            data[name] = {key: [list(r) for r in ranges] for key, ranges in getattr(self, name).items()}
        return data

    def save(self, path: str | Path) -> None:
        """Write readable JSON.

        Raises:
            ValueError: ``path`` is no path.
            OSError: the file cannot be written.
        """
        require(path=(path, PATH))
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` wrote.

        Raises:
            PlanError: the file is missing, no regular file, corrupt or of another version; names the file and the
                reason.
            ValueError: ``path`` is no path.
        """
        require(path=(path, PATH))
        try:
            text = read_text(path, MOST_BYTES)
        except OSError as e:
            raise PlanError(f"cannot read plan file {path}: {e.strerror}") from e
        except ValueError as e:
            raise PlanError(f"plan file {e}") from e
        try:
            return Plan.from_dict(json.loads(text))
        except RecursionError as e:
            raise PlanError(f"plan file {path} is corrupt: nested too deep; save it again with Plan.save") from e
        except ValueError as e:
            raise PlanError(f"plan file {path} is corrupt: {e}; save it again with Plan.save") from e
        except PlanError as e:
            raise PlanError(f"plan file {path}: {e}") from e

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: a key is missing or wrong, or the version is another one.
        """
        if not isinstance(data, dict) or "autopar_plan" not in data:
            raise PlanError("this is no plan of autopar; save one with Plan.save or `autopar plan --save`")
        if data["autopar_plan"] not in (1, VERSION):
            raise PlanError(
                f"version {data['autopar_plan']} of the format, this autopar reads 1 to {VERSION}; plan again"
            )
        try:
            return _parse(_of_version_1(data) if data["autopar_plan"] == 1 else data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError) as e:
            raise PlanError(f"corrupt: {type(e).__name__}: {e}; save it again with Plan.save") from e

    def check(
        self,
        model: Any,
        batch: Any,
        *,
        loss_fn: Any = None,
        loss: Any = None,
        memory: str | float | None = None,
        precision: Any = None,
        search: Any = None,
        deterministic: bool = False,
        progress: Any = None,
    ) -> Plan:
        """Derive objective and lower bound anew, for a model, and verify the bound apart from the search.

        What the plan says of its costs is compared with what its layouts cost, and nothing of it is used. The bound
        comes from a new search, as with ``Search(check=True)``, which takes as long as planning and checking.

        Args:
            model: a `torch.nn.Module`, as it was planned; it may be on the meta device.
            batch: as it was planned.
            loss_fn: as it was planned.
            loss: as it was planned.
            memory: budget per device that it was planned for, such as ``"70GiB"``; default: as for `autopar.plan`.
            precision: as it was planned.
            search: the `Search` that it was planned with, which says of what plans the bound is. Default: no pins; of a
                plan with stages, its stages, microbatches and schedule.
            deterministic: as it was planned.
            progress: called with ``(phase, incumbent, bound)``.

        Returns:
            The plan, its prediction counted here, whose certificate is verified: ``checked`` is the bound in seconds,
            None where the search was cut short, and ``claimed`` is False.

        Raises:
            PlanError: the plan is for another graph, does not cost what it says, is above the budget, or its bounds are
                refuted by a faster plan; names what differs.
            CertificateError: the new search refutes itself.
        """
        # By name: planning is built on top of plans.
        checked: Plan = import_module("autopar.explain.check_plan").check_plan(
            self, model, batch, loss_fn=loss_fn, loss=loss, memory=memory, precision=precision, search=search,
            deterministic=deterministic, progress=progress,
        )  # fmt: skip
        return checked

    def summary(self) -> str:
        """A table for people."""
        # Here: the table imports this module.
        from autopar.ir.plan_table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        """The same as `summary`."""
        return self.summary()


_LAYOUTS = ("parameters", "batch", "results", "consumer_layouts")


_METHODS = {
    "fold": "elimination",
    "messages": "dual ascent",
    "prices": LAGRANGIAN,
}
"""What closed a search, in version 1 and now."""

_SAME = ("ilp", "multiplier", "axis by axis", TIME_LIMIT, INTERRUPTED, "random", "")
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
    stages: tuple[tuple[str, ...], ...]
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
    if file.pipeline is not None and file.pipeline.places:
        devices = file.axes.get(file.pipeline.axis, 0)
        if sorted(file.pipeline.places) != list(range(devices)):
            raise ValueError(f"pipeline.places are {file.pipeline.places}: expected 0 to {devices - 1} in any order")
    return Plan(**layouts, **kept)


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _check_numbers(value: Any, path: str) -> None:
    """Raise if a number is infinite, no number, or negative: none in a file is."""
    if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{path.removeprefix('.')} is {value}")
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(inner, f"{path}.{key}")
