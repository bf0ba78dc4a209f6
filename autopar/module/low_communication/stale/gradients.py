"""`StaleGradients`: workers of a mesh axis with the role ``stale`` give gradients to owners, each at its own pace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.costs.arguments import FLAG, require
from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.compressed.step import first_infinite
from autopar.module.low_communication.outer import require_exchangeable
from autopar.module.low_communication.stale.emulate import gradients_of, groups_of, wide
from autopar.module.low_communication.stale.mail import NUMBER, Mail, message, parts
from autopar.module.low_communication.stale.owner import (
    LR,
    Owner,
    Segment,
    cut,
    options_of,
    put,
    require_elementwise,
    taken,
)
from autopar.module.low_communication.stale.saved import load_saved_state, saved_state
from autopar.module.low_communication.stale.settings import Staleness
from autopar.module.low_communication.worker_exchange import WorkerExchange
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.state.parameters import checksum
from autopar.simulate.stale_workers import StaleRate, stale_rate


class StaleGradients(WorkerExchange):
    """Asynchronous SGD with bounded staleness, in place of an optimizer's steps.

    Each worker computes gradients of its part of the batch, sends them to the owners of the parameters, which are
    workers, too, and goes on with the values that come back; it waits for no other worker unless it is more than
    ``staleness`` steps ahead of the slowest. Owners make the optimizer's step with each gradient as it comes, see
    `autopar.module.low_communication.stale.owner`. The optimizer's own step then finds no gradients.

    ::

        search = autopar.Search(roles={"dc": "stale"}, inexact=("stale",))
        model = autopar.parallelize(model, mesh, search=search)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stale = autopar.StaleGradients(model, optimizer, staleness=4, compensation=0.04)
        ...  # the loop as it was
        stale.synchronize()

    Attributes:
        settings: how stale gradients may be.
        steps: how many this worker has made.
    """

    role, what = "stale", "stale gradients"
    saved = ("steps", "version", "clocks", "read", "begun", "counts")

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        staleness: int,
        compensation: float = 0.0,
        owners: int | None = None,
        record: bool = False,
    ) -> None:
        """Have the optimizer's steps made by owners; every rank does.

        Args:
            model: what `autopar.parallelize` returned, on a mesh with an axis of the role ``stale``.
            optimizer: a `torch.optim.SGD`, `Adam` or `AdamW` of all parameters that are trained. Learning rates may
                change, and are those of the worker whose gradient it is; other options may not.
            staleness: steps that a worker may be ahead of the slowest one; further ahead it waits.
            compensation: the factor of ``g * g * (now - then)`` that is added to a gradient, ``then`` being the values
                that it was computed from; it takes a copy of the owned parameters for each worker.
            owners: how many workers, from the first on, own a part; default: all, parts of the same size.
            record: keep the order of arrivals in `arrivals`.

        Raises:
            ValueError: an argument is wrong, there are no owners or one worker, or the optimizer is of another kind or
                lacks a trained parameter.
        """
        super().__init__(model, optimizer)
        require(record=(record, FLAG))
        self.settings, self.steps = Staleness(staleness, compensation, owners), 0
        self._owner_count = self.settings.owners_of(self._workers.count)
        require_elementwise(optimizer)
        require_exchangeable(self._parameters(), None)
        self._record = record
        self._owner: Owner | None = None
        self._mail: Mail | None = None
        self._dtype = wide(self._parameters())
        self._segments: list[list[Segment]] = []
        self._options: list[dict[str, Any]] = []
        self._groups: dict[str, int] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attach(self._before, self._after)

    @property
    def arrivals(self) -> list[tuple[int, int]]:
        """``(worker, version it had read)`` of each gradient that came to this rank's part, where that is recorded."""
        return list(self._made().arrivals)

    @property
    def predicted(self) -> StaleRate:
        """Steps of all workers in a second, as the simulator has it for the plan's cluster, where all take as long.

        Raises:
            AutoparError: the plan has no prediction.
        """
        plan = self.model.plan
        if not plan.predicted.step_seconds:
            raise AutoparError("the plan predicts no step seconds, so that there is no rate either")
        size = sum(t.numel() for t in self._tensors().values()) * self._dtype.itemsize
        link = plan.cluster.link_for(dict(plan.workers) | dict(plan.axes))[0]
        seconds = [[plan.predicted.step_seconds]] * self._workers.count
        return stale_rate(seconds, size, link, staleness=self.settings.staleness, owners=self._owner_count)

    def synchronize(self) -> None:
        """Take the owners' values as they are now, so that all workers have the same; every rank calls it.

        For the end of training, before processes end, and for evaluation. Workers then count as equally far.
        """
        owner = self._begun()
        assert self._mail is not None
        self._require_known(self._groups, self._parameters())
        what = f"synchronize() of {self.what} of {self.model._autopar.name}"
        self.settle(what)
        tensors = self._tensors()
        with self._workers.everyone.during(what), torch.no_grad():
            for number in range(self._owner_count):
                own = self._segments[number]
                flat = owner.flat if number == self._workers.index else taken(tensors, own, self._dtype)
                if flat.numel():
                    dist.broadcast(flat, group=self._mail.group, group_src=number)
                put(tensors, own, flat)
        owner.clocks = [max(owner.clocks)] * len(owner.clocks)
        for worker in range(self._workers.count):
            owner.read_by(worker)
        # Nobody sends a gradient before all have read.
        self._workers.everyone.meet(f"the end of {what}")

    def settle(self, what: str) -> None:
        """Wait until every gradient that any worker has sent has arrived here; every rank calls it.

        Args:
            what: is about to be done.

        Raises:
            RankError: a rank does not come, or a gradient does not.
        """
        if self._mail is None:
            return
        owner, everyone = self._made(), self._workers.everyone
        sent = sum(everyone.gather(self.steps, what))
        with everyone.during(what):
            self._mail.wait_until(lambda: owner.version == sent, self.model._autopar.context.timeout)
        self.bytes_sent = self._mail.sent

    def detach(self) -> None:
        """The optimizer makes its steps itself again; every rank calls it, and takes no more gradients of others."""
        super().detach()
        if self._mail is not None:
            what = f"detach() of {self.what} of {self.model._autopar.name}"
            self.settle(what)
            with self._workers.everyone.during(what):
                self._mail.stop(self.model._autopar.context.timeout)
            self._mail = None

    def _made(self) -> Owner:
        """This rank's part, which need not be that of the other workers yet."""
        if self._owner is None:
            self._require_layouts()
            parameters = self._parameters()
            self._groups = groups_of(parameters, self.optimizer)
            sizes = {n: p.numel() for n, p in parameters.items()}
            self._segments = cut(sizes, self._groups, self._owner_count)
            self._segments += [[] for _ in range(self._workers.count - self._owner_count)]
            self._options = [options_of(group) for group in self.optimizer.param_groups]
            own, tensors = self._segments[self._workers.index], self._tensors()
            self._owner = Owner(
                own, taken(tensors, own, self._dtype), self.optimizer, self.settings, self._workers.count,
                record=self._record,
            )  # fmt: skip
        return self._owner

    def _begun(self) -> Owner:
        """The same, compared and connected when it is first wanted; every rank comes here at the same time."""
        owner = self._made()
        if self._mail is None:
            self.require_same("the start", values=True)
            self.connect()
        return owner

    def require_same(self, what: str, *, values: bool) -> None:
        """Check that workers have the same settings, parameters' sizes and options; every rank calls it.

        Args:
            what: is about to be done.
            values: whether they must have the same values, too.

        Raises:
            RankError: they do not; names the rank.
        """
        self._made()
        layout = hashlib.sha256(repr(self._segments).encode()).hexdigest()[:16]
        own = [
            ("settings", str(self.settings)), ("the optimizer", type(self.optimizer).__name__),
            ("options of the optimizer", repr(self._options)), ("the parameters' sizes", layout),
        ]  # fmt: skip
        own += [("the values at the start", checksum(self._tensors()))] if values else []
        self._require_same_at_a_place(own, what)

    def connect(self) -> None:
        """Take gradients of the others from now on; every rank calls it, once."""
        workers = self._workers
        self._made()
        itemsize = self._dtype.itemsize
        heads = [self._head(worker) for worker in range(workers.count)]
        numbers = [sum(s.size for s in own) for own in self._segments]
        group = workers.everyone.new_group(dist.get_process_group_ranks(workers.group), self.what)
        self._mail = Mail(
            group, workers.index, self._arrived,
            self._reply if workers.index < self._owner_count else None, self._broken_off,
            [NUMBER * head + itemsize * n for head, n in zip(heads, numbers, strict=True)],
            [NUMBER + itemsize * n if i < self._owner_count else 0 for i, n in enumerate(numbers)],
        )  # fmt: skip
        # Connections of Gloo are made when they are first used, by both ends: not by two threads of one.
        with workers.everyone.during(f"connecting for {self.what}"):
            dist.barrier(group=group)
        self._mail.start()

    def _head(self, worker: int) -> int:
        """Numbers before the values of a gradient that goes to a worker."""
        return 1 + len(self._options) + len(self._segments[worker])

    def _arrived(self, sender: int, received: torch.Tensor) -> list[int]:
        # Groups as they were at the start: the script may be changing them, which is an error at its next step alone.
        owner, groups = self._made(), len(self._options)
        head, gradient = parts(received, self._head(self._workers.index), self._dtype)
        lrs, given = head[1 : 1 + groups], [bool(x) for x in head[1 + groups :]]
        return owner.push(sender, gradient, given, lrs)

    def _broken_off(self, why: str) -> None:
        self._workers.everyone.break_off(f"{self.what} of {self.model._autopar.name}, {why}")

    def _reply(self) -> torch.Tensor:
        owner = self._made()
        return message([float(owner.version)], owner.flat)

    def _before(self, has_closure: bool) -> None:
        """In place of an optimizer's step."""
        self._begun()
        self._require_gradients(has_closure)
        self._require_known(self._groups, parameters := self._parameters())
        now = [options_of(group) for group in self.optimizer.param_groups]
        if len(now) != len(self._options) or groups_of(parameters, self.optimizer) != self._groups:
            raise AutoparError(
                f"the optimizer's groups are others than when {self.what} began, and owners have what they were: add "
                "groups before the first step; or make new StaleGradients after synchronize() and detach()"
            )
        if now != self._options:
            changed = next(k for a, b in zip(now, self._options, strict=True) for k in a if a[k] != b.get(k))
            raise AutoparError(
                f"the optimizer's option {changed!r} has changed since {self.what} began, and owners have what it was: "
                "only learning rates may change; make new StaleGradients after synchronize() and detach()"
            )
        gradients, given = gradients_of(parameters)
        if self._leaves_out([first_infinite(gradients)]):
            # It counts as a step all the same: others would wait for this worker.
            gradients = {n: torch.zeros_like(g) for n, g in gradients.items()}
            given = dict.fromkeys(given, False)
        self._exchange(gradients, given)
        for parameter in parameters.values():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _after(self) -> None:
        """After an optimizer's step, which has found no gradient."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    @torch.no_grad()
    def _exchange(self, gradients: dict[str, torch.Tensor], given: Mapping[str, bool]) -> None:
        """Send this worker's gradients to the owners, and take their values."""
        assert self._mail is not None
        tensors = self._tensors()
        self._require_finite(gradients)
        lrs, dtype = [float(group[LR]) for group in self.optimizer.param_groups], self._dtype
        pushes = [
            message([self.steps, *lrs, *(float(given[s.name]) for s in own)], taken(gradients, own, dtype))
            for own in self._segments
        ]
        what = f"step {self.steps + 1} of {self.what} of {self.model._autopar.name}"
        everyone = self._workers.everyone
        with everyone.during(what, locate=self._late):
            found = self._mail.exchange(pushes, self.model._autopar.context.timeout)
        self.bytes_sent = self._mail.sent
        self.steps += 1
        for number, received in found.items():
            put(tensors, self._segments[number], parts(received, 1, dtype)[1])

    def _late(self, error: BaseException) -> str:
        """Whom this worker waits for, for messages."""
        clocks = self._made().clocks
        own = clocks[self._workers.index]
        behind = {w: c for w, c in enumerate(clocks) if own - c > self.settings.staleness}
        ranks = dist.get_process_group_ranks(self._workers.group)
        if not behind:
            late = [i for i in range(self._owner_count) if i != self._workers.index]
            return f", waiting for the parts of rank{'s' * (len(late) > 1)} {', '.join(str(ranks[i]) for i in late)}"
        said = ", ".join(f"rank {ranks[w]}, which has made {c} steps" for w, c in behind.items())
        return f", waiting for {said}, and this one {own} (staleness={self.settings.staleness})"

    def _require_finite(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Refuse a gradient that would make the parameters of all workers infinite.

        Raises:
            RankError: names the parameter and this rank.
        """
        name = first_infinite(gradients)
        if name:
            # Others wait for this worker's gradient.
            self._broken_off(f"whose gradient of {name!r} is not finite")
            raise RankError(
                f"the gradient of {name!r} on rank {dist.get_rank()} is not finite in step {self.steps + 1} of "
                f"{self.what}: owners would take it, and all workers have it; find what made it so, clip before the "
                "step, or load a checkpoint"
            )

    def _settings(self) -> str:
        return f"{self.settings}, workers={self._workers.count}, {type(self.optimizer).__name__}"

    def state_dict(self) -> dict[str, Any]:
        """What to save, see `autopar.module.low_communication.stale.saved`; every rank calls it."""
        return saved_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` has it; every rank calls it, and layouts must be decided."""
        load_saved_state(self, state)
