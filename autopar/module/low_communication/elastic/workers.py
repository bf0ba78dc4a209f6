"""`ElasticWorkers`: workers that train apart and come and go between rounds, without a restart of the others."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from autopar.costs.arguments import TEXT, number, require, whole
from autopar.costs.outer_exchange import RoundCost
from autopar.errors import AutoparError
from autopar.module.low_communication.choose_round import Wanted, at_a_store, predicted
from autopar.module.low_communication.elastic.given_state import require_plain
from autopar.module.low_communication.elastic.meeting_steps import MeetingSteps
from autopar.module.low_communication.elastic.meetings import PAUSE, Meetings, Waits
from autopar.module.low_communication.elastic.opened_store import is_store, opened
from autopar.module.low_communication.elastic.register import Register, Seat
from autopar.module.low_communication.tokens import Tokens
from autopar.module.parallel_module import ParallelModule


class ElasticWorkers(MeetingSteps):
    """Local SGD, DiLoCo or streaming DiLoCo of workers that leave and join between rounds.

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
        settings: what is exchanged, and when; None until ``"auto"`` is decided, in `join`.
        steps: how many the run has made, as this worker counts them: a newcomer goes on from those of its peer.
        rounds: how many the run has completed: outer steps of the last fragment.
    """

    what = "elastic workers"
    saved = ("steps", "rounds")

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        every: int | str,
        worker: int,
        workers: int,
        store: str | Store,
        run: str = "run",
        least: int = 1,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | str = 1,
        delay: int = 0,
        mix: float | None = None,
        bits: int | None = None,
        weighted: bool = False,
        feedback: bool = False,
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
            every: steps of a round; ``"auto"``: so many that exchanges hide behind training, as the plan's cluster
                predicts; the link is that of ``axis_links["worker"]``, or the outermost.
            worker: the number of this worker, from 0 on. One that comes back may have the number that it had.
            workers: how many begin the run: its first meeting waits for them. More may come later.
            store: ``HOST:PORT`` of a store that all workers reach (``autopar rendezvous HOST:PORT``), or a store of
                torch's.
            run: a name of this run at the store.
            least: with fewer workers no outer step is made; those that are there wait for others.
            outer_lr: learning rate of the outer optimizer; 1 without momentum is local SGD.
            outer_momentum: its momentum; 0 for none.
            nesterov: whether the momentum is Nesterov's.
            fragments: parts of the model that are exchanged in turn, each in a meeting of its own; with
                ``every="auto"`` also ``"auto"``.
            delay: steps for which a meeting is held beside training, at most ``every // fragments``; what has come of
                it is used then.
            mix: share of a worker's own parameters that stays in an exchange: 0, or 0.5 with a delay.
            bits: 8 or 4, which each number is sent in, as of `autopar.LocalSteps`.
            weighted: a worker counts in each mean as much as the tokens that `add_tokens` has been told of since the
                last one.
            feedback: what ``bits`` leave out of a difference is added to the next one; a newcomer has left out nothing
                yet. Each worker then saves, and loads, a folder of its own.
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
        require(
            worker=(worker, whole(0)), workers=(workers, whole(1)), least=(least, whole(1)), run=(run, TEXT),
            store=(store, is_store), grace=(grace, number(0)), timeout=(timeout, number(0, above=True)),
            quorum_timeout=(quorum_timeout, number(0, above=True)), retries=(retries, whole(1)),
            **{name: (given, _stateful) for name, given in stateful.items()},
        )  # fmt: skip
        if least > workers:
            raise ValueError(
                f"least={least}, workers={workers}: the run begins with more than it needs; raise workers="
            )
        mix = (0.5 if delay else 0.0) if mix is None else mix
        rest: dict[str, Any] = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov}
        rest |= {"mix": mix, "bits": bits, "weighted": weighted, "feedback": feedback}
        wanted = Wanted(every, fragments, delay, rest)
        waits = Waits(workers, least, grace, timeout, quorum_timeout, retries)
        super().__init__(model, optimizer, wanted, worker, waits, stateful)
        if self._context.workers is not None:
            raise ValueError(
                f"the mesh has workers of the role {self._context.workers.role!r}, which begin and end "
                "together: leave the role out, and start each worker as a world of its own; or use LocalSteps"
            )
        self._connect(opened(store, timeout), run)

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the workers of the last meeting, of which this worker has used what came."""
        self._joined()
        return tuple(s.number for s in self._members)

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of them: the one to write a checkpoint."""
        return self.members[0] == self.worker

    @property
    def predicted(self) -> RoundCost:
        """What a round costs this rank, as the plan's cluster predicts, with as many workers as there are now.

        Where all come at the same time and none is new. Layouts must be decided, and ``"auto"``.
        """
        if self.settings is None:
            raise AutoparError("every='auto' is decided in join(); before it there is no prediction")
        workers = len(self._members) or self._waits.founders
        return predicted(self.model, self._tensors(), self.settings, at_a_store(self.model, workers, PAUSE))

    def add_tokens(self, count: int) -> None:
        """Count what this worker has trained on, of which ``weighted=True`` makes its weight.

        Args:
            count: tokens, or samples, of the whole worker in a step; each of its ranks says the same.
        """
        require(count=(count, whole(0)))
        self._tokens.total += count

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
        require_plain(self._stateful, self.optimizer)
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
            self._meet(self._all_fragments, idle=True)
            return self._use(0.0)
        except BaseException:
            self._meetings = None
            raise

    def synchronize(self) -> None:
        """Meet now about everything, and begin a round: all workers have to. For the end of training, and evaluation.

        What is under way is used first.
        """
        self._joined()
        self._use(None)
        self._since = 0
        self._meet(self._all_fragments, idle=True)
        self._use(0.0)

    def leave(self) -> None:
        """Have the others go on without this worker, and without waiting for it; steps since the last meeting are lost.

        A meeting that is under way is ended first. The worker may train on alone, or `join` again.
        """
        meetings = self._joined()
        try:
            self._use(None)
        finally:
            if self._context.rank == 0:
                meetings.leave()
            self._links.close()
            self._meetings, self._since, self._tokens = None, 0, Tokens()

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


def _stateful(value: Any) -> str | None:
    fine = all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
    return None if fine else "an object with state_dict() and load_state_dict()"
