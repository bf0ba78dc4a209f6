"""`ReplicaGroups`: the steps of one group among others that may be lost, and come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autopar.costs.arguments import require, whole
from autopar.errors import AutoparError, RankError
from autopar.integrations.replicas.cards import Card
from autopar.integrations.replicas.gradients import average
from autopar.integrations.replicas.manager import Exchange, Manager
from autopar.integrations.replicas.state import beginning, go_back, own_state, take_state
from autopar.module.parallel_module import ParallelModule

logger = logging.getLogger("autopar")

Connect = Callable[[Callable[[dict[str, Any]], None], Callable[[], dict[str, Any]], Callable[[], Card]], Any]
"""From functions that take a peer's state, give this rank's, and tell the group's card, to manager and exchange."""

OPEN, AVERAGED, COMMITTED, STEPPED, CLOSED = "open", "averaged", "committed", "stepped", "closed"
"""Where the body of the loop is: at its forward pass, and so on; closed between steps, and after a discarded one."""


class ReplicaGroups:
    """The steps of a group whose gradients are averaged with those of others.

    Attributes:
        group: its number.
        count: how many groups the global batch is divided over.
        healed: how often this group has taken a peer's state.
        discarded: how many steps have been done anew.
        bytes_sent: of the flat gradients of this rank.
    """

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Any],
        card: Card,
        count: int,
        connect: Connect,
        seconds: Mapping[str, float],
    ) -> None:
        """Of `autopar.integrations.torchft.replica_groups`, which see; every rank of the group makes one."""
        second = next((n for n, given in stateful.items() if isinstance(given, torch.optim.Optimizer)), None)
        if second is not None:
            raise ValueError(
                f"{second}= is a further optimizer, whose steps no vote decides on: put all parameters into groups of "
                "one, passed as optimizer="
            )
        self.group, self.count = card.group, count
        self.healed, self.discarded, self.bytes_sent = 0, 0, 0
        self._model, self._optimizer, self._stateful, self._card = model, optimizer, dict(stateful), card
        self._seconds, self._stage = seconds, CLOSED
        self._begun: dict[str, Any] = {}
        self._received: dict[str, Any] | None = None
        with self._waits("connecting", "the lighthouse", seconds["timeout"]):
            manager, exchange = connect(self._receive, self._give, lambda: card.at(self.step))
        self._manager: Manager = manager
        self._exchange: Exchange = exchange
        self._hooks = [
            optimizer.register_step_pre_hook(lambda _, *given: self._before_optimizer(*given)),
            optimizer.register_step_post_hook(lambda *_: self._after_optimizer()),
        ]

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._manager.current_step()

    @property
    def participants(self) -> int:
        """How many groups take part in this step."""
        return self._manager.num_participants()

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the groups that take part."""
        return self._exchange.members

    @property
    def leads(self) -> bool:
        """Whether this group is the first of them: the one to write a checkpoint."""
        return self.members[:1] == (self.group,)

    def rows(self, total: int) -> slice:
        """Which rows of a global batch this group passes; with ``inputs="local"`` of `autopar.parallelize`, this rank.

        Raises:
            ValueError: so many rows cannot be divided evenly.
        """
        require(total=(total, whole(1)))
        is_local = self._model._autopar.options.inputs == "local"
        within = self._model.data_world_size if is_local else 1
        parts = self.count * within
        if total % parts:
            raise ValueError(
                f"total={total}: so many rows cannot be divided evenly over the {parts} parts of the batch in "
                f"{self.count} groups, and a mean of means of unequal parts is not theirs; give a multiple of {parts}"
            )
        first = self.group * within + (self._model.data_rank if is_local else 0)
        return slice(first * (total // parts), (first + 1) * (total // parts))

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``; the loop's body does each of them.

        Before each the groups meet, and a newcomer takes the state of a peer. A step that was discarded comes again.

        Raises:
            AutoparError: the body has left something out, or this group is none of the others' kind.
            RankError: a rank of the group is gone, or the other groups cannot be met.
        """
        require(total=(total, whole(0)))
        while self.step < total:
            self._meet()
            if self.step >= total:  # a newcomer that comes when the others are done
                break
            self._stage, self._begun = OPEN, beginning(self._model, self._stateful)
            yield self.step
            if self._stage in (OPEN, AVERAGED):
                missing = "average_gradients()" if self._stage == OPEN else "commit()"
                raise AutoparError(
                    f"the body of steps() has ended without {missing}: each step is backward(), average_gradients(), "
                    "and `if commit(): optimizer.step()`"
                )
            self._stage = CLOSED

    def average_gradients(self) -> None:
        """Replace gradients by their mean over the groups that take part; clip after it. Every rank of all calls it.

        What goes wrong has the step discarded: `commit` tells.

        Raises:
            AutoparError: there is no step in which this is to be done, or gradients wait in ``no_sync()``.
        """
        self._require(OPEN, "average_gradients()")
        self._model._autopar.deferred.refuse(self._model.parameters(), "average_gradients()")
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        with self._waits("averaging gradients", self._others(), self._seconds["timeout"]):
            self.bytes_sent += average(parameters, lambda flat: self._manager.allreduce(flat).wait)
        if self._manager.errored() is not None:
            self._exchange.abort()  # or others wait for this rank until their time is over
        self._stage = AVERAGED

    def commit(self) -> bool:
        """Whether all ranks of this group have the mean gradients, and the optimizer's step is to be made.

        If not, the step is discarded: buffers, states of random generators and of the objects by name are those of its
        beginning, gradients are gone, and `steps` gives its number again.

        Raises:
            RankError: a rank of the group does not answer, or too many steps in a row were discarded.
        """
        self._require(AVERAGED, "commit()")
        if self._vote():
            self._stage = COMMITTED
            return True
        go_back(self._model, self._stateful, self._begun)
        for parameter in self._model.parameters():
            parameter.grad = None
        self._stage = CLOSED
        return False

    def close(self) -> None:
        """Leave the other groups, which go on without this one."""
        for hook in self._hooks:
            hook.remove()
        self._manager.shutdown()

    def state_dict(self) -> dict[str, int]:
        """For `autopar.checkpoint.save`: numbers of committed steps, and of the shares in them."""
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; before the first step."""
        self._manager.load_state_dict(dict(state))

    def _meet(self) -> None:
        """Meet the others, and take a peer's state if this group is behind: all ranks of the group, or none."""
        while True:
            before = dict(self._manager.state_dict())
            with self._waits("meeting", f"the lighthouse, {self._others()}", self._seconds["quorum"]):
                self._manager.start_quorum()
            error = self._manager.errored()
            wrong = self._wrong_at_meeting(error)
            received, self._received = self._received, None
            if not wrong:
                if received is not None:
                    take_state(self._model, self._optimizer, self._stateful, received)
                    self.healed += 1
                return
            # A state that some ranks alone have got is taken by none: the group stays what it was.
            self._manager.report_error(error or RankError(wrong))
            self._exchange.abort()
            if self._vote():
                raise AssertionError("a meeting that failed was committed")
            self._manager.load_state_dict(before)

    def _wrong_at_meeting(self, error: Any) -> str:
        """What has gone wrong on any rank of the group; empty: nothing has. All of them call it, and get the same."""
        own = (self._exchange.refused, _shown(error), (self.step, self._received is not None))
        ranks = self._model._autopar.context.gather(own, "the meeting of replica groups")
        refused = next((reason for reason, *_ in ranks if reason), "")
        if refused:
            raise AutoparError(refused)
        failed = [f"rank {rank}: {shown}" for rank, (_, shown, _) in enumerate(ranks) if shown]
        states = [state for *_, state in ranks]
        if not failed and any(state != states[0] for state in states):
            failed = [f"steps of the ranks, and whether they have a peer's state: {states}"]
        return "; ".join(failed)

    def _vote(self) -> bool:
        error = self._manager.errored()
        with self._waits(f"deciding on step {self.step}", "the other ranks of the group", self._seconds["timeout"]):
            decided = self._manager.should_commit()
        if not decided:
            self.discarded += 1
            why = _shown(error) or f"of another rank of the group, or {self.participants} groups are too few"
            logger.warning(
                "group %s: step %s is discarded, after an exchange with %s: %s",
                self.group, self.step, self._others(), why,
            )  # fmt: skip
            self._exchange.abort()
        return decided

    def _receive(self, state: dict[str, Any]) -> None:
        self._received = state

    def _give(self) -> dict[str, Any]:
        return own_state(self._model, self._optimizer, self._stateful)

    def _others(self) -> str:
        others = [str(n) for n in self._exchange.members if n != self.group] if hasattr(self, "_exchange") else []
        return f"groups {', '.join(others)}" if others else "the other groups"

    @contextmanager
    def _waits(self, what: str, whom: str, limit: float) -> Iterator[None]:
        begun, rank = time.monotonic(), self._model._autopar.context.rank
        try:
            yield
        except AutoparError:
            raise
        except Exception as e:
            raise RankError(
                f"group {self.group}, rank {rank} of it: {what} failed after {time.monotonic() - begun:.1f} s (of "
                f"{limit:g} s) of waiting for {whom}: {_shown(e)}"
            ) from e

    def _require(self, stage: str, what: str) -> None:
        if self._stage != stage:
            raise AutoparError(
                f"{what} where the step is {self._stage}: within steps(), each step is backward(), "
                "average_gradients(), and `if commit(): optimizer.step()`"
            )

    def _before_optimizer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._model._autopar.deferred.is_aside:
            return
        self._require(COMMITTED, "optimizer.step()")
        if any(callable(given) for given in (*args, *kwargs.values()) if given is not self._optimizer):
            raise AutoparError(
                "replica groups: optimizer.step(closure) computes gradients within the step, and they are averaged "
                "before it: call backward() first, and step() without a closure"
            )

    def _after_optimizer(self) -> None:
        if not self._model._autopar.deferred.is_aside:
            self._stage = STEPPED


def _shown(error: Any) -> str:
    """The first line of an error; empty: there is none."""
    if error is None:
        return ""
    error = getattr(error, "original_exception", error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
