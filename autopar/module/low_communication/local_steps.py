"""`LocalSteps`: the workers of a mesh axis with the role ``local`` train apart, and exchange every so many steps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.costs.arguments import FLAG, require, whole
from autopar.costs.outer_exchange import RoundCost
from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.choose_round import AUTO, Wanted, chosen, of_an_axis, predicted
from autopar.module.low_communication.compressed.step import first_infinite
from autopar.module.low_communication.exchange import InFlight, fed_back, send, sent_bytes
from autopar.module.low_communication.fragments import require_blocks, split_in_fragments
from autopar.module.low_communication.outer import OuterState, cuts_of, require_exchangeable
from autopar.module.low_communication.settings import Settings
from autopar.module.low_communication.tokens import Tokens, weight_of
from autopar.module.low_communication.worker_exchange import WorkerExchange
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.agreement.points import NOT_FINITE
from autopar.runtime.state.parameters import checksum

logger = logging.getLogger("autopar")


class LocalSteps(WorkerExchange):
    """Local SGD, DiLoCo and streaming DiLoCo, at the end of an optimizer's steps.

    From its first step on, the optimizer of each worker trains this worker's parameters alone. Every ``every`` steps
    the mean of what the workers have moved goes through an outer optimizer, and all begin anew from its result, see
    `autopar.module.low_communication.outer`. Each rank exchanges only its own shards, with the ranks at its place in
    the other workers. All ranks agree on an exchange before it; one that is at another is a `RankError`.

    ::

        search = autopar.Search(roles={"dc": "local"}, inexact=("local",))
        model = autopar.parallelize(model, mesh, search=search)
        optimizer = torch.optim.AdamW(model.parameters())
        local = autopar.LocalSteps(model, optimizer, every=50)
        ...  # the loop as it was
        local.synchronize()

    Attributes:
        settings: what is exchanged, and when; None until ``"auto"`` is decided, in the first step.
        steps: how many the optimizer has made.
        exchanges: how many fragments have been sent.
    """

    role, what = "local", "local steps"
    saved = ("steps", "exchanges", "in_flight")

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        every: int | str,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | str = 1,
        delay: int = 0,
        mix: float | None = None,
        bits: int | None = None,
        synchronous: int = 0,
        weighted: bool = False,
        feedback: bool = False,
        host: bool = True,
    ) -> None:
        """Have the optimizer's steps followed by exchanges; every rank does.

        Args:
            model: what `autopar.parallelize` returned, on a mesh with an axis of the role ``local``.
            optimizer: of all parameters that are trained.
            every: steps of a round, in which everything is exchanged once; ``"auto"``: so many that exchanges hide
                behind training, as the plan's cluster predicts (`autopar.costs.outer_exchange`).
            outer_lr: learning rate of the outer optimizer; 1 without momentum is local SGD.
            outer_momentum: its momentum; 0 for none.
            nesterov: whether the momentum is Nesterov's.
            fragments: parts of the model that are exchanged in turn; with ``every="auto"`` also ``"auto"``.
            delay: what is sent is used so many steps later, and hidden behind these.
            mix: share of a worker's own parameters that stays in an exchange: 0, or 0.5 with a delay.
            bits: 8 or 4, which each number is sent in, with a scale for each block; sums are float32. Not for float64.
            synchronous: steps at the beginning in which workers average their gradients instead: post-local SGD. The
                average is taken when the optimizer's step begins: clipping before it sees one worker's gradients.
            weighted: a worker counts in each mean as much as the tokens that `add_tokens` has been told of since the
                last one, and not as much as any other.
            feedback: what ``bits`` leave out of a difference is added to the next one: a number more for each
                parameter, beside the outer state.
            host: the outer state, two numbers for each parameter, is in host memory, which leaves the budget of the
                devices as it was planned; differences are computed and sent from there.

        Raises:
            ValueError: an argument is wrong, the mesh has no workers, or the optimizer lacks a trained parameter.
        """
        super().__init__(model, optimizer)
        require(host=(host, FLAG))
        mix = (0.5 if delay else 0.0) if mix is None else mix
        outer: dict[str, Any] = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov}
        rest = {"mix": mix, "bits": bits, "synchronous": synchronous, "weighted": weighted, "feedback": feedback}
        self._wanted = Wanted(every, fragments, delay, outer | rest)
        self.settings: Settings | None = None if self._wanted.is_open else self._wanted.settings(every, fragments)
        self.steps, self.exchanges = 0, 0
        self._host, self._tokens = host, Tokens()
        self._outer: OuterState | None = None
        self._compared = False
        self._fragments: list[list[str]] = []
        self._in_flight: dict[int, InFlight] = {}
        self._left: dict[int, torch.Tensor] = {}
        self._group: ProcessGroup = self._workers.group
        require_exchangeable(self._tensors(), bits)
        require_blocks(self._parameters(), fragments)
        self._attach(self._before, self._after)

    @property
    def predicted(self) -> RoundCost:
        """What a round costs, as the plan's cluster predicts; layouts must be decided."""
        if self.settings is None:
            raise AutoparError("every='auto' is decided in the first step; before it there is no prediction")
        return predicted(self.model, self._tensors(), self.settings, of_an_axis(self.model))

    def add_tokens(self, count: int) -> None:
        """Count what this worker has trained on, of which ``weighted=True`` makes its weight.

        Args:
            count: tokens, or samples, of the whole worker in a step; each of its ranks says the same.
        """
        require(count=(count, whole(0)))
        self._tokens.total += count

    def synchronize(self) -> None:
        """Exchange everything now, so that all workers have the same parameters; every rank calls it.

        What is in flight is used first. The outer optimizer makes a step for each fragment, as in a round; nothing of a
        worker's own parameters is mixed in. For the end of training, and for evaluation.
        """
        outer, settings = self._begun(), self.settings
        assert settings is not None
        if self.steps < settings.synchronous:  # they have the same already
            return
        for fragment in sorted(self._in_flight):
            self._use(fragment, settings.mix)
        for fragment in range(len(self._fragments)):
            self._send(fragment, outer, idle=True)
        for fragment in range(len(self._fragments)):
            self._use(fragment, 0.0)

    def _begun(self) -> OuterState:
        """The outer state, made and compared when it is first wanted; every rank comes here at the same time."""
        outer = self._made()
        if not self._compared:
            self._require_same(outer)
        return outer

    def _made(self) -> OuterState:
        """The outer state, which need not be the same on all workers yet."""
        if self._outer is None:
            self._outer = self._new_state()
        return self._outer

    def _new_state(self) -> OuterState:
        self._require_layouts()
        tensors = self._tensors()
        if self.settings is None:
            between, gather = of_an_axis(self.model), self._workers.everyone.gather
            self.settings = chosen(self.model, tensors, self._wanted, between, gather)
            logger.info("local steps: %s", self.settings)
        sizes = {n: p.numel() for n, p in self.model.named_parameters() if n in tensors}
        self._fragments = split_in_fragments(sizes, self.settings.fragments)
        own = self.model._autopar.context.device
        device = torch.device("cpu") if self._host else own
        if self._host and own.type != "cpu":
            self._group = self._host_group()
        cuts = cuts_of(self._parameters()) if self.settings.bits is not None else None
        return OuterState(tensors, self._fragments, device, cuts)

    def _host_group(self) -> ProcessGroup:
        """A group that sends from host memory."""
        return self._workers.everyone.new_group(dist.get_process_group_ranks(self._workers.group), "outer exchanges")

    def _require_same(self, outer: OuterState) -> None:
        """Check that workers begin at the same parameters, in the same layouts.

        Raises:
            RankError: they do not; names the rank.
        """
        layouts = [(name, tuple(t.shape), str(t.dtype)) for name, t in outer.anchor.items()]
        digest = hashlib.sha256(repr((layouts, self._fragments)).encode()).hexdigest()[:16]
        # Shards differ within a worker: each rank is compared with those at its place in the other workers.
        own = ("settings", str(self.settings)), ("the parameters' layouts", digest)
        self._require_same_at_a_place((*own, ("the values agreed on", checksum(outer.anchor))), "the start")
        self._compared = True

    def _before(self, has_closure: bool) -> None:
        """Before an optimizer's step."""
        self._begun()
        assert self.settings is not None
        if self.steps < self.settings.synchronous:
            self._require_gradients(has_closure)
            self._average_gradients()

    def _average_gradients(self) -> None:
        """Replace each gradient by the mean over workers."""
        what = f"synchronous step {self.steps + 1} of {self.model._autopar.name}"
        gradients, notes = self._gradients(what, first_infinite)
        if self._leaves_out(notes):
            return
        with self._workers.everyone.during(what):
            for local in gradients.values():
                mean = local.contiguous()
                dist.all_reduce(mean, group=self._workers.group)
                local.copy_(mean / self._workers.count)
                self.bytes_sent += sent_bytes(mean.numel(), mean.itemsize, self._workers.count, None)

    def _after(self) -> None:
        """After an optimizer's step."""
        outer, settings = self._begun(), self.settings
        assert settings is not None
        self.steps += 1
        apart = self.steps - settings.synchronous
        if apart < 0:
            return
        if apart == 0:  # workers are where synchronous training has brought them all
            self._outer = self._new_state()
            self._require_same(self._outer)
            return
        used, sent = settings.turns(apart)
        if settings.delay and used is not None:
            self._use(used, settings.mix)
        if sent is not None:
            self._send(sent, outer)
            if not settings.delay:
                self._use(sent, settings.mix)

    def _send(self, fragment: int, outer: OuterState, *, idle: bool = False) -> None:
        assert self.settings is not None
        tensors = self._tensors()
        self._require_known(outer.anchor, tensors)
        self.exchanges += 1
        what = f"outer exchange {self.exchanges} of {self.model._autopar.name}"
        infinite = first_infinite({n: tensors[n] for n in self._fragments[fragment]}) or "none"
        details = (
            ("the fragment", str(fragment)), ("local steps", str(self.steps)), ("settings", str(self.settings)),
            (NOT_FINITE, infinite),
        )  # fmt: skip
        self._workers.everyone.meet(what, details)
        if infinite != "none":  # on all ranks the same
            raise RankError(f"{what}: {infinite!r} is not finite: find what made it so, and load a checkpoint")
        weight = self._weight(fragment, what, idle)
        with self._workers.everyone.during(what):
            difference = outer.difference(fragment, tensors)
            if weight != 1:
                difference *= weight
            if self.settings.feedback:
                difference, self._left[fragment] = fed_back(difference, self._left.get(fragment), self.settings.bits)
            self._in_flight[fragment] = send(fragment, difference, self._group, self.settings.bits)
        count, itemsize = difference.numel(), difference.itemsize
        self.bytes_sent += sent_bytes(count, itemsize, self._workers.count, self.settings.bits) if count else 0

    def _weight(self, fragment: int, what: str, idle: bool) -> float:
        """How much this worker counts in the mean of a fragment; collective where that is asked for."""
        assert self.settings is not None
        if not self.settings.weighted:
            return 1.0
        own = self._workers.index, self._tokens.since(fragment)
        self._tokens.sent[fragment] = self._tokens.total
        counted = self._workers.everyone.gather(own, f"the tokens of {what}")
        return weight_of(self._workers.index, counted, idle=idle)

    def _use(self, fragment: int, mix: float) -> None:
        """Take what was sent of a fragment, unless it has been taken already."""
        if fragment not in self._in_flight:
            return
        assert self._outer is not None and self.settings is not None
        tensors = self._tensors()
        self._require_known(self._outer.anchor, tensors)
        with self._workers.everyone.during(f"the mean of fragment {fragment}"):
            mean = self._in_flight.pop(fragment).wait()
        self._outer.apply(fragment, tensors, mean, self.settings, mix)

    def _settings(self) -> Settings | None:
        return self.settings

    def state_dict(self) -> dict[str, Any]:
        """What to save, see `autopar.module.low_communication.saved_state`; every rank calls it."""
        from autopar.module.low_communication.saved_state import saved_state

        return saved_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` has it; every rank calls it, and layouts must be decided."""
        from autopar.module.low_communication.saved_state import load_saved_state

        load_saved_state(self, state)


__all__ = ["AUTO", "LocalSteps"]
