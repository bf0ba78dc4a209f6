"""Workers in one process, in lock step: what `autopar.LocalSteps` computes on many, without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.module.low_communication.exchange import emulated_mean, fed_back
from autopar.module.low_communication.fragments import split_in_fragments
from autopar.module.low_communication.outer import OuterState, require_exchangeable
from autopar.module.low_communication.settings import Settings
from autopar.module.low_communication.tokens import Tokens, weight_of


def trained_alike(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] | None = None
) -> list[dict[str, nn.Parameter]]:
    """What is trained of each worker's model, by name, which has to be the same.

    Raises:
        ValueError: it is not, there is no model, or not one optimizer of each.
    """
    found = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in models]
    if not found:
        raise ValueError("models= is empty: give one for each worker")
    if optimizers is not None and len(optimizers) != len(models):
        raise ValueError(f"there are {len(models)} models and {len(optimizers)} optimizers: give one for each worker")
    for i, own in enumerate(found):
        if own.keys() != found[0].keys() or any(not torch.equal(own[n], found[0][n]) for n in own):
            raise ValueError(f"worker {i} does not begin at the parameters of worker 0; copy the model")
    for i, (own, optimizer) in enumerate(zip(found, optimizers or (), strict=False)):
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in (n for n, p in own.items() if id(p) not in known):
            raise ValueError(f"optimizer {i} does not have {name!r} of worker {i}: give each the one of its own model")
    return found


class EmulatedWorkers:
    """Models of one process as workers that train apart.

    Attributes:
        settings: what is exchanged, and when.
        steps: how many have been made.
    """

    def __init__(self, models: Sequence[nn.Module], **settings: Any) -> None:
        """Begin at the parameters that the models have, which must be the same.

        Args:
            models: one for each worker.
            settings: as of `Settings`; without ``synchronous`` steps.

        Raises:
            ValueError: a setting is wrong, or the models differ.
        """
        self.settings, self.steps = Settings(**settings), 0
        if self.settings.synchronous:
            raise ValueError("synchronous=: emulated workers see parameters, not gradients; average these yourself")
        self._tensors = [{n: p.detach() for n, p in own.items()} for own in trained_alike(models)]
        first = self._tensors[0]
        require_exchangeable(first, self.settings.bits)
        self._fragments = split_in_fragments({n: t.numel() for n, t in first.items()}, self.settings.fragments)
        self._states = [self._state_of(own) for own in self._tensors]
        self._in_flight: dict[int, torch.Tensor] = {}
        self._left: list[dict[int, torch.Tensor]] = [{} for _ in models]
        self._tokens = [Tokens() for _ in models]

    def step(self, tokens: Sequence[int] | None = None) -> None:
        """After every worker's optimizer has made a step: exchange what has its turn.

        Args:
            tokens: that each worker has trained on in this step; for ``weighted=True``.
        """
        self.steps += 1
        for own, count in zip(self._tokens, tokens or [0] * len(self._tokens), strict=True):
            own.total += count
        used, sent = self.settings.turns(self.steps)
        if self.settings.delay and used is not None:
            self._use(used)
        if sent is not None:
            differences = [s.difference(sent, own) for s, own in zip(self._states, self._tensors, strict=True)]
            if self.settings.weighted:
                counted = [(i, own.since(sent)) for i, own in enumerate(self._tokens)]
                differences = [d * weight_of(i, counted) for i, d in enumerate(differences)]
                for own in self._tokens:
                    own.sent[sent] = own.total
            if self.settings.feedback:
                for i, left in enumerate(self._left):
                    differences[i], left[sent] = fed_back(differences[i], left.get(sent), self.settings.bits)
            self._in_flight[sent] = emulated_mean(differences, self.settings.bits)
            if not self.settings.delay:
                self._use(sent)

    def leave(self, worker: int) -> None:
        """Go on without a worker, as `autopar.ElasticWorkers` do; those behind it have numbers of one less.

        Raises:
            ValueError: it is the last one, or an exchange is in flight.
        """
        self._require_nothing_in_flight()
        if not 0 <= worker < len(self._tensors) or len(self._tensors) == 1:
            raise ValueError(f"worker={worker}: expected one of {len(self._tensors)} workers, of which one has to stay")
        for of_workers in (self._tensors, self._states, self._tokens, self._left):
            del of_workers[worker]

    def join(self, model: nn.Module) -> None:
        """Have a worker more, as the last one: it takes the outer parameters and momentum of the others.

        Raises:
            ValueError: it has other parameters, or an exchange is in flight.
        """
        self._require_nothing_in_flight()
        own, peer = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, self._states[0]
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in peer.anchor.items()}:
            raise ValueError("the model has other trained parameters than those of the workers; copy one of theirs")
        for name, tensor in own.items():
            tensor.copy_(peer.anchor[name])
        state = self._state_of(own)
        for name, tensor in peer.anchor.items():
            state.anchor[name].copy_(tensor)  # of 16 bits in float32
            state.momentum[name].copy_(peer.momentum[name])
        self._tensors.append(own)
        self._states.append(state)
        self._tokens.append(Tokens())
        self._left.append({})

    def _state_of(self, own: dict[str, torch.Tensor]) -> OuterState:
        return OuterState(own, self._fragments, next(iter(own.values())).device)

    def _require_nothing_in_flight(self) -> None:
        if self._in_flight:
            raise ValueError(
                "an exchange is in flight, of the workers that there were: let workers leave and join with delay=0, or "
                "when it has been used"
            )

    def _use(self, fragment: int) -> None:
        mean = self._in_flight.pop(fragment)
        for state, own in zip(self._states, self._tensors, strict=True):
            state.apply(fragment, own, mean, self.settings, self.settings.mix)
