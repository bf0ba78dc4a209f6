"""`ElasticWorkers`: workers that train apart and come and go between rounds, without a restart of the others."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autopar.costs.arguments import TEXT, number, require, whole
from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.compressed.step import first_infinite
from autopar.module.low_communication.elastic.given_state import Given, give, others_of, received, take
from autopar.module.low_communication.elastic.links import Links
from autopar.module.low_communication.elastic.meetings import Discarded, Meeting, Meetings, Waits
from autopar.module.low_communication.elastic.register import Register, Seat
from autopar.module.low_communication.exchange import sent_bytes
from autopar.module.low_communication.optimizer_steps import OptimizerSteps
from autopar.module.low_communication.outer import OuterState, require_exchangeable
from autopar.module.low_communication.settings import Settings
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.mesh import MeshContext

logger = logging.getLogger("autopar")


class ElasticWorkers(OptimizerSteps):
    """Local SGD or DiLoCo of workers that leave and join between rounds.

    Each worker is a parallel model of its own, on processes of its own. Every ``every`` steps it meets the others, at a
    store that all of them reach, and the mean of what those that have come have moved goes through the outer optimizer.
    Who has not come by then is left out; who comes anew takes the outer parameters and the outer momentum of another.
    If one is lost in a meeting, the others hold it anew, with the same steps: see
    `autopar.module.low_communication.elastic.meetings`.

    ::

        model = autopar.parallelize(model, autopar.mesh(), batch)  # of this worker's processes alone
        optimizer = torch.optim.AdamW(model.parameters())
        local = autopar.ElasticWorkers(
            model, optimizer, every=50, worker=0, workers=4, store="node0:29500", scheduler=scheduler
        )
        if local.join():
            scheduler.step()
        while local.steps < 10_000:
            ...  # a step as always
        local.leave()

    Attributes:
        worker: the number of this one.
        settings: what is exchanged, and when.
        steps: how many the run has made, as this worker counts them: a newcomer goes on from those of its peer.
        rounds: how many outer steps the run has made.
    """

    what = "elastic workers"

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        worker: int,
        workers: int,
        store: str | Store,
        run: str = "run",
        least: int = 1,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        bits: int | None = None,
        weighted: bool = False,
        grace: float = 10.0,
        timeout: float = 60.0,
        quorum_timeout: float = 600.0,
        retries: int = 20,
        **stateful: Any,
    ) -> None:
        """Have the optimizer's steps followed by meetings, once this worker has joined; every rank of it makes one.

        Args:
            model: what `autopar.parallelize` returned, on a mesh of this worker's processes, or on one device. Every
                worker has the same plan.
            optimizer: of all parameters that are trained.
            every: steps of a round.
            worker: the number of this worker, from 0 on. One that comes back may have the number that it had.
            workers: how many begin the run: its first meeting waits for them. More may come later.
            store: ``HOST:PORT`` of a store that all workers reach (``autopar rendezvous HOST:PORT``), or a store of
                torch's.
            run: a name of this run at the store.
            least: with fewer workers no outer step is made; those that are there wait for others.
            outer_lr: learning rate of the outer optimizer; 1 without momentum is local SGD.
            outer_momentum: its momentum; 0 for none.
            nesterov: whether the momentum is Nesterov's.
            bits: 8 or 4, which each number is sent in, as of `autopar.LocalSteps`.
            weighted: a worker counts in each mean as much as the tokens that `add_tokens` has been told of since the
                last one.
            grace: seconds that those who have come to a meeting wait for others who took part in the last one.
            timeout: seconds for an exchange, or for a word of another worker that takes part in a meeting.
            quorum_timeout: seconds to wait for other workers to come: longer than a round takes.
            retries: how many discarded meetings in a row are no error.
            stateful: objects with ``state_dict()`` and ``load_state_dict()`` by name, of which a newcomer takes the
                state of its peer: a learning-rate scheduler, say.

        Raises:
            ValueError: an argument is wrong, the mesh has workers of its own, or the optimizer lacks a trained
                parameter.
            RankError: the store does not answer.
        """
        super().__init__(model, optimizer)
        require(
            worker=(worker, whole(0)), workers=(workers, whole(1)), least=(least, whole(1)), run=(run, TEXT),
            store=(store, _store), grace=(grace, number(0)), timeout=(timeout, number(0, above=True)),
            quorum_timeout=(quorum_timeout, number(0, above=True)), retries=(retries, whole(1)),
            **{name: (given, _stateful) for name, given in stateful.items()},
        )  # fmt: skip
        if least > workers:
            raise ValueError(
                f"least={least}, workers={workers}: the run begins with more than it needs; raise workers="
            )
        if model._autopar.context.workers is not None:
            raise ValueError(
                f"the mesh has workers of the role {model._autopar.context.workers.role!r}, which begin and end "
                "together: leave the role out, and start each worker as a world of its own; or use LocalSteps"
            )
        self._require_free()
        self.settings = Settings(
            every, outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov, bits=bits, weighted=weighted
        )
        self.worker, self.steps, self.rounds = worker, 0, 0
        self._waits = Waits(workers, least, grace, timeout, quorum_timeout, retries)
        self._stateful = stateful
        self._since, self._tokens = 0, 0
        self._outer: OuterState | None = None
        self._meetings: Meetings | None = None
        require_exchangeable(self._tensors(), bits)
        self._store = PrefixStore(f"autopar/{run}", _opened(store, timeout))
        self._links = Links(self._store, self._context.rank, timeout)
        self._attach(self._before, self._after)

    @property
    def _context(self) -> MeshContext:
        context: MeshContext = self.model._autopar.context
        return context

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the workers of the last meeting."""
        return tuple(s.number for s in self._joined().members)

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of them: the one to write a checkpoint."""
        return self.members[0] == self.worker

    def add_tokens(self, count: int) -> None:
        """Count what this worker has trained on, of which ``weighted=True`` makes its weight.

        Args:
            count: tokens, or samples, of the whole worker in a step; each of its ranks says the same.
        """
        require(count=(count, whole(0)))
        self._tokens += count

    def join(self) -> bool:
        """Take part from the next meeting on, and have the state of the others then; every rank of the worker calls it.

        The first meeting makes no outer step: all begin from the parameters of the first worker, or of the first that
        has loaded a checkpoint. In a later one a newcomer waits until those that train come to it. Its inner optimizer
        begins anew, with the options (learning rate) of its peer's. Call it before the first step; and again after
        `leave`.

        Returns:
            Whether this worker is such a newcomer. Its peer has given its state at the end of ``optimizer.step()``: do
            what the loop does behind that, such as ``scheduler.step()``.

        Raises:
            RankError: others do not come in time.
            AutoparError: layouts are not decided, or this worker's model or settings are not those of the others.
        """
        if self._meetings is not None:
            raise AutoparError("this worker has joined already: join() is called once, or again after leave()")
        self._require_layouts()
        register = Register(self._store)
        first = self._context.decide(lambda: (uuid.uuid4().hex[:12], Meetings.first(register)), "joining other workers")
        places = len(self._context.gather(None, "the ranks of a worker"))
        token, start = first
        self._meetings = Meetings(
            register, Seat(self.worker, token), self._context.rank, places, self._waits, self._alive
        )
        self._meetings.start(start)
        self._made()
        try:
            return self._meet(idle=True)
        except BaseException:
            self._meetings = None
            raise

    def synchronize(self) -> None:
        """Meet now, and not at the end of the round: all workers have to. For the end of training, and evaluation."""
        self._joined()
        self._meet(idle=True)

    def leave(self) -> None:
        """Have the others go on without this worker, and without waiting for it; steps since the last meeting are lost.

        The worker may train on alone, or `join` again.
        """
        meetings = self._joined()
        if self._context.rank == 0:
            meetings.leave()
        self._links.close()
        self._meetings, self._since, self._tokens = None, 0, 0

    def detach(self) -> None:
        """The optimizer's steps are no longer followed by meetings; `leave`, if this worker has joined."""
        if self._meetings is not None:
            self.leave()
        super().detach()

    def state_dict(self) -> dict[str, Any]:
        """What to save: counters, and the outer parameters and momentum by name; every rank of the worker calls it."""
        from autopar.module.low_communication.elastic.saved import saved_state

        return saved_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin from there; before `join`, on every worker that begins the run."""
        from autopar.module.low_communication.elastic.saved import load_saved_state

        load_saved_state(self, state)

    def _settings(self) -> Settings:
        return self.settings

    def _joined(self) -> Meetings:
        if self._meetings is None:
            raise AutoparError("this worker has not joined the others: call join() before the first step")
        return self._meetings

    def _made(self) -> OuterState:
        """The outer state; it begins at the parameters that there are."""
        if self._outer is None:
            self._require_layouts()
            tensors = self._tensors()
            self._outer = OuterState(tensors, [list(tensors)], torch.device("cpu"))
        return self._outer

    def _alive(self) -> None:
        with self._context.during("waiting for other workers"):
            pass

    def _before(self, has_closure: bool) -> None:
        self._joined()

    def _after(self) -> None:
        self.steps += 1
        self._since += 1
        if self._since == self.settings.every:
            self._meet()

    def _meet(self, *, idle: bool = False) -> bool:
        """Hold a meeting, and do what has come of it; whether that is an outer step."""
        outer, meetings, tensors = self._made(), self._joined(), self._tensors()
        self._require_known(outer.anchor, tensors)
        if self.settings.weighted and not idle and not self._tokens:
            raise ValueError("weighted=True and no tokens since the last meeting: call add_tokens() in each step")
        self._require_finite({} if meetings.is_newcomer else tensors)
        meeting, (mean, given) = meetings.hold(lambda: self._word(meetings), self._exchange)
        self._links.keep()
        logger.info("worker %s: meeting %s of workers %s", self.worker, meeting.number, list(self.members))
        if given is not None:
            take(self.model, self.optimizer, self._stateful, outer, given)
        giver = meeting.words[_giver(meeting)]
        self.rounds = giver["rounds"] + (mean is not None)
        self.steps = self.steps if given is None else giver["steps"]
        self._since, self._tokens = 0, 0
        if mean is not None:
            outer.apply(0, tensors, mean, self.settings, 0.0)
            return True
        for name, own in tensors.items():  # the run begins
            own.copy_(outer.anchor[name])
        return False

    def _require_finite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have all ranks of this worker come, and refuse a meeting to which it brings what is not finite.

        Raises:
            RankError: it does; the others go on without it.
        """
        what = f"meeting other workers after round {self.rounds}"
        for rank, name in enumerate(self._context.gather(first_infinite(tensors), what)):
            if name:
                raise RankError(
                    f"parameter {name!r} of worker {self.worker} (rank {rank} of it) is not finite: all workers would "
                    "have it; the others go on without this one; find what made it so, and join() anew"
                )

    def _word(self, meetings: Meetings) -> dict[str, Any]:
        """What this rank says to those at its place in the other workers."""
        own = self._tensors()
        all_tensors = own | others_of(self.model, own)
        layouts = [(name, tuple(t.shape), str(t.dtype)) for name, t in all_tensors.items()]
        return {
            "new": meetings.is_newcomer, "steps": self.steps, "rounds": self.rounds,
            "weight": self._tokens if self.settings.weighted else 1,
            "same": {
                "settings": str(self.settings),
                "the names, shapes and layouts of parameters and buffers": hashlib.sha256(
                    repr((self._context.axes, layouts)).encode()
                ).hexdigest()[:12],
                "objects by name": sorted(self._stateful),
                "the optimizer's groups": len(self.optimizer.param_groups),
            },
        }  # fmt: skip

    def _exchange(self, meeting: Meeting) -> tuple[torch.Tensor | None, Given | None]:
        """The mean difference of those that have trained, and what this rank receives; nothing is changed by it."""
        own, giver = self._joined().seat, _giver(meeting)
        _require_same(meeting, own, giver)
        newcomers = [s for s in meeting.members if meeting.words[s]["new"] and s != giver]
        given = None
        try:
            self._links.meet(meeting.number, meeting.members, own)
            if newcomers and own == giver:
                payload = give(self.model, self.optimizer, self._stateful, self._made())
                self._links.give(payload, newcomers)
                self.bytes_sent += payload.numel() * len(newcomers)
            elif own in newcomers:
                given = received(self.model, self._made(), self._links.take(giver))
            return self._mean(meeting, own), given
        except BaseException:
            self._links.close()  # who waits for this rank sees it
            raise

    def _mean(self, meeting: Meeting, own: Seat) -> torch.Tensor | None:
        trained = {s: word["weight"] for s, word in meeting.words.items() if not word["new"]}
        if not trained:
            return None
        total, members = sum(trained.values()), len(meeting.members)
        shares = {s: weight / total if total else 1 / len(trained) for s, weight in trained.items()}
        difference = self._made().difference(0, self._tensors())
        if own not in trained:
            difference.zero_()
        else:
            difference *= members * shares[own]
        count, itemsize, bits = difference.numel(), difference.itemsize, self.settings.bits
        self.bytes_sent += sent_bytes(count, itemsize, members, bits) if count and members > 1 else 0
        return self._links.mean(difference, bits)


def _giver(meeting: Meeting) -> Seat:
    """Whose state newcomers take: of those that train, or that begin the run, the furthest, and of these the first."""
    words = meeting.words
    train = [s for s in meeting.members if not words[s]["new"]] or meeting.members
    return max(train, key=lambda s: (words[s]["rounds"], words[s]["steps"], -s.number))


def _require_same(meeting: Meeting, own: Seat, giver: Seat) -> None:
    """Refuse this worker where it is not as the others.

    Raises:
        AutoparError: it is not; names what differs.
        Discarded: another one is not.
    """
    expected = meeting.words[giver]["same"]
    for seat in meeting.members:
        for name, value in meeting.words[seat]["same"].items():
            if value == expected[name]:
                continue
            said = f"worker {seat.number} has {value} for {name}, and worker {giver.number} {expected[name]}"
            if seat == own:
                raise AutoparError(f"{said}: make every worker with the same model, plan, optimizer and arguments")
            raise Discarded(said)


def _store(value: Any) -> str | None:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    fine = isinstance(value, Store) or (host and port.isdecimal())
    return None if fine else "HOST:PORT of a store (`autopar rendezvous HOST:PORT`), or a torch.distributed.Store"


def _stateful(value: Any) -> str | None:
    fine = all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
    return None if fine else "an object with state_dict() and load_state_dict()"


def _opened(store: str | Store, seconds: float) -> Store:
    if isinstance(store, Store):
        return store
    host, _, port = store.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
    except RuntimeError as e:
        first = (str(e).splitlines() or [""])[0][:200]
        raise RankError(
            f"no store at {store} within {seconds:g} s ({first}): start `autopar rendezvous {store}` on that machine"
        ) from e
