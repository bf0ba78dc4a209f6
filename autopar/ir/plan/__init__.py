"""`Plan`: a layout for every tensor of a model on a mesh, what it is predicted to cost, and how good it is.

A plan is data: readable, versioned JSON keyed by parameter and operator class, with fingerprints of what it is for, see
`autopar.ir.plan.file`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.costs.arguments import PATH, require
from autopar.costs.cluster import Cluster
from autopar.costs.mixed.shares import Shares
from autopar.ir.layout import Layout
from autopar.ir.quantized.axes import QuantizedAxis

TIME_LIMIT, INTERRUPTED = "time limit", "interrupted"
"""Methods of certificates whose search did not end by itself."""

LAGRANGIAN = "Lagrangian"
"""Method of a certificate whose bound prices memory."""

BY_AXES = "axis by axis"
"""Method of a certificate of many axes, whose bound is a sum over blocks of them."""

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
        step_seconds: compute, copies to host memory and back, communication: that which kernels do not hide if the
            plan overlaps, and else all of it; and ``waiting_seconds``.
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
        waiting_seconds: for which the device waits since the host launches kernels for longer than all else takes.
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
    waiting_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        """Of a step, as if the host launched everything in time."""
        return self.step_seconds - self.waiting_seconds


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
        # Here, as below: what reads and writes files imports this module.
        from autopar.ir.plan.file import to_data

        return to_data(self)

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
        from autopar.ir.plan.file import read_plan_file

        return read_plan_file(path)

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: a key is missing or wrong, or the version is another one.
        """
        from autopar.ir.plan.file import from_data

        return from_data(data)

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
