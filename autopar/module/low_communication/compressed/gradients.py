"""`CompressedGradients`: workers of a mesh axis with the role ``compressed`` exchange gradients before each step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from autopar.costs.outer_exchange import ExchangeCost, compressed_collectives, exchange_cost
from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import over_group
from autopar.module.low_communication.compressed.emulate import require_several
from autopar.module.low_communication.compressed.frozen_adam import require_plain_adam
from autopar.module.low_communication.compressed.low_rank import require_low_rank
from autopar.module.low_communication.compressed.saved import load_saved_state, require_layouts, saved_state
from autopar.module.low_communication.compressed.settings import ONEBIT, ZEROONE, Compression
from autopar.module.low_communication.compressed.step import (
    WorkerStep,
    first_infinite,
    require_compressible,
    require_finite,
)
from autopar.module.low_communication.compressed.zero_one import ZeroOne
from autopar.module.low_communication.worker_exchange import WorkerExchange
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.state.parameters import checksum


class CompressedGradients(WorkerExchange):
    """PowerSGD, top-k, 1-bit Adam or 0/1 Adam, at the beginning of an optimizer's steps.

    Each worker computes gradients of its part of the batch. Before the optimizer's step they are exchanged across the
    axis in compressed form, and what comes of that takes their place: the same on all workers, which so keep the same
    parameters. What compression leaves out is added in the next step. Each rank compresses its own shards, with the
    ranks at its place in the other workers: the rank of ``powersgd`` and the share of ``topk`` are of a shard.

    ::

        search = autopar.Search(roles={"dc": "compressed"}, inexact=("compressed",))
        model = autopar.parallelize(model, mesh, search=search)
        optimizer = torch.optim.AdamW(model.parameters())
        compressed = autopar.CompressedGradients(model, optimizer, method="powersgd", rank=4)
        ...  # the loop as it was

    Attributes:
        settings: how gradients are compressed.
    """

    role, what = "compressed", "compressed gradients"
    saved = ("steps", "frozen")

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        method: str,
        rank: int | None = None,
        share: float | None = None,
        freeze: int | None = None,
        start: int = 0,
        seed: int = 0,
        doubling: int | None = None,
        local: int | None = None,
        longest: int | None = None,
    ) -> None:
        """Have gradients exchanged before the optimizer's steps; every rank does.

        Gradients are exchanged as they are when ``optimizer.step()`` begins, once, however often `backward` has added
        to them. Clipping before it sees one worker's gradients; a step pre-hook of the optimizer that is registered
        after this is made sees what takes their place.

        Args:
            model: what `autopar.parallelize` returned, on a mesh with an axis of the role ``compressed``.
            optimizer: of all parameters that are trained; for ``"onebit"`` and ``"zeroone"`` a `torch.optim.Adam` or
                `AdamW`, whose update is made here once variances are frozen, and of ``"zeroone"`` always.
            method: ``"powersgd"``: matrices as two thin factors, see `...compressed.low_rank`;
                ``"topk"``: the largest numbers, see `...compressed.largest`; ``"onebit"``: signs of Adam's momentum,
                see `...compressed.frozen_adam`; ``"zeroone"``: the same, exchanged in some steps only, see
                `...compressed.zero_one`.
            rank: of ``"powersgd"``: columns of the factors. Vectors, and matrices that these do not make smaller, are
                averaged as they are.
            share: of ``"topk"``: the part of each tensor's numbers that is sent, above 0 and at most 1.
            freeze: of ``"onebit"``: steps of plain Adam with averaged gradients, at least 1; of ``"zeroone"``: steps in
                which variances may be updated.
            start: of ``"powersgd"`` and ``"topk"``: steps at the beginning with averaged gradients.
            seed: of the first guess of ``"powersgd"``.
            doubling: of ``"zeroone"``: updates of variances after which the distance between two doubles; default: 16.
            local: of ``"zeroone"``: steps after ``freeze`` after which the distance between exchanges doubles; default:
                there is one in each step.
            longest: of ``"zeroone"``: the longest such distance; default: 16.

        Raises:
            ValueError: an argument is wrong, the mesh has no workers or one, the optimizer lacks a trained parameter
                or, for ``"onebit"`` and ``"zeroone"``, is no `torch.optim.Adam` or `AdamW`.
            AutoparError: a parameter is float16.
        """
        super().__init__(model, optimizer)
        self.settings = Compression(method, rank, share, freeze, start, seed, doubling, local, longest)
        require_several(self._workers.count)
        if method in (ONEBIT, ZEROONE):
            require_plain_adam(optimizer, method)
        require_compressible(self._parameters())
        if rank is not None:
            require_low_rank(self._parameters(), rank)
        self._step: WorkerStep | None = None
        self._compared = self._left_out = False
        self._attach(self._before, self._after)

    @property
    def steps(self) -> int:
        """How many the optimizer has made."""
        return 0 if self._step is None else self._step.steps

    @property
    def error(self) -> float:
        """Of this rank's last exchange: the norm of what was left for the next, as a share of what was to be sent."""
        return 0.0 if self._step is None else self._step.error

    @property
    def predicted(self) -> ExchangeCost:
        """What the next step's exchange costs this rank, on the plan's cluster; layouts must be decided."""
        step, plan, settings = self._made(), self.model.plan, self.settings
        shapes = [tuple(t.shape) for t in self._tensors().values() if t.numel()]
        workers = self._workers.count
        kinds = (
            compressed_collectives(step.exchanges, shapes, step.dtype.itemsize, workers, settings.how_much)
            if step.exchanges is not None
            else []
        )
        return exchange_cost(kinds, workers, plan.cluster.link_for(dict(plan.workers) | dict(plan.axes))[0])

    def synchronize(self) -> None:
        """Exchange what ``"zeroone"`` has not yet, so that all workers have the same parameters; every rank calls it.

        For the end of training, and for evaluation. With other methods they always have the same.
        """
        step = self._begun()
        if not isinstance(step.method, ZeroOne) or step.steps <= step.method.schedule.freeze:
            return
        parameters = self._known()
        what = f"synchronize() of {self.what} of {self.model._autopar.name}"
        self._workers.everyone.meet(what, (("steps", str(step.steps)),))
        with self._workers.everyone.during(what), torch.no_grad():
            exchange = step.method.exchange_moved(parameters, self.optimizer)
            _, sent = over_group(exchange, self._workers.group)
        self.bytes_sent += sent

    def _begun(self) -> WorkerStep:
        """The state, made and compared when it is first wanted; every rank comes here at the same time."""
        step = self._made()
        if not self._compared:
            self.require_same_parameters("the start")
        return step

    def _made(self) -> WorkerStep:
        """The state; parameters need not be the same on all workers yet."""
        if self._step is None:
            self._step = self._new_state()
        return self._step

    def _new_state(self) -> WorkerStep:
        self._require_layouts()
        return WorkerStep(self._tensors(), self.settings, self._workers.index, self._workers.count)

    def require_same_parameters(self, what: str) -> None:
        """Check that workers have the same settings, layouts and parameters; every rank of all workers calls it.

        Raises:
            RankError: they do not; names the rank.
        """
        tensors = self._tensors()
        layouts = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]
        digest = hashlib.sha256(repr(layouts).encode()).hexdigest()[:16]
        values = checksum(self._made().agreed(tensors))
        own = ("settings", str(self.settings)), ("the parameters' layouts", digest), ("parameters", values)
        self._require_same_at_a_place(own, what)
        self._compared = True

    def _known(self) -> dict[str, torch.Tensor]:
        """What is trained.

        Raises:
            AutoparError: something is that was not at first, or is no longer while some of it is to be exchanged.
        """
        step, parameters = self._made(), self._parameters()
        # What is frozen meanwhile has no gradient, which is fine with other methods.
        stay = step.method.anchors if isinstance(step.method, ZeroOne) else parameters
        self._require_known(step.trained & {*stay, *parameters}, parameters)
        return parameters

    def _before(self, has_closure: bool) -> None:
        """Before an optimizer's step."""
        self._require_gradients(has_closure)
        step, parameters = self._begun(), self._known()
        what = f"step {step.steps + 1} of {self.model._autopar.name}"
        gradients, notes = self._gradients(what, first_infinite, (("options of the optimizer", self._options()),))
        self._left_out = self._leaves_out(notes)
        if self._left_out:
            return
        require_finite(notes, what)
        with self._workers.everyone.during(f"{what}: compressed gradients"), torch.no_grad():
            _, sent = over_group(step.before(parameters, gradients, self.optimizer), self._workers.group)
        self.bytes_sent += sent

    def _after(self) -> None:
        """After an optimizer's step."""
        if not self._left_out:
            self._begun().after()

    def _options(self) -> str:
        """Learning rates and the like, which a scheduler may have made different on each worker."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return repr([{k: float(v) if isinstance(v, torch.Tensor) else v for k, v in g.items()} for g in groups])

    def require_settings(self, saved: Mapping[str, Any]) -> None:
        """Refuse what was saved under others, by other workers, or of other shards, before any of it is read.

        Raises:
            AutoparError: names both.
        """
        super().require_settings(saved)
        own, other = self._workers.count, saved.get("workers", self._workers.count)
        if own != other:
            raise AutoparError(
                f"errors of {self.what} are of {other} workers in what is loaded, and there are {own}: what they have "
                "still to add would be lost, or added twice; load on as many, or without these and make new ones"
            )
        require_layouts(self, saved)

    def _settings(self) -> Compression:
        return self.settings

    def state_dict(self) -> dict[str, Any]:
        """What to save, see `autopar.module.low_communication.compressed.saved`; every rank calls it."""
        return saved_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` has it; every rank calls it, and layouts must be decided."""
        load_saved_state(self, state)
