"""`Variable`: one decision of the search, and in which states what it decides on may be.

What the forward pass makes is, besides its layout, in one of four states: it is *passing*, and gone
when its forward users have it; *kept* for the backward pass, which takes memory; made *again* there, which takes the
operator's time once more, moves its arguments once more, and needs these to be kept or made again themselves; or *away*
until then, in the memory of the host, which takes the time of two copies. All but the last hold for a relay, too: a
gathered parameter that is kept makes the traffic of ZeRO-2, one that is moved again ZeRO-3's.

In a step of microbatches, what comes from parameters alone is *kept* for all of them, and made once
(`autopar.memory.hoist`). What is passing or made again is made in each of them, and what only serves to make what is
kept is *early*: made once, and gone before the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import Layout, TensorType
from autopar.sharding.candidates import Candidates
from autopar.sharding.redistribute import Tables

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Port = tuple[str, int]
"""``("in", 1)``: second tensor argument; ``("out", 0)``: first output."""


@dataclass(frozen=True)
class Variable:
    """One decision: the candidate of a class of operators, or the layout of a class of tensors.

    Attributes:
        key: of the class; a relay (where a value used more than once is moved for all its users) has its own.
        count: how many nodes share the decision.
        ports: layout number of each label, by port.
        types: type of the tensor at each port.
        choices: an operator's candidates; None for a tensor's layout.
        cost: seconds of each label, all members together.
        memory: bytes of each label, all members together.
        candidate: of each label, its number among ``choices``.
        state: of each label, `PASSING`, `KEPT`, `AGAIN`, `EARLY` or `AWAY`; None for what has no such choice.
        backward: whether it is an operator of the backward pass, or a relay for such alone.
        working: bytes of what one operator takes and makes under each label; None for tensors.
        steady: whether all microbatches share it where it is kept.
        unmoved: whether ``AGAIN`` stands for a relay that lies as it was made: what it takes counts there alone.
        unseen: bytes of each label that graphs hold besides its memory, about, which a row leaves out so as to hold for
            all plans; None: nothing.
    """

    key: str
    count: int
    ports: Mapping[Port, Ints]
    types: Mapping[Port, TensorType]
    choices: Candidates | None
    cost: Floats
    memory: Floats
    candidate: Ints
    state: Ints | None = None
    backward: bool = False
    working: Floats | None = None
    steady: bool = False
    unmoved: bool = False
    unseen: Floats | None = None

    @property
    def available(self) -> Ints:
        """Of each label, the row of `TAKEN` that says in which passes others can take the value."""
        if self.state is None:
            return np.full(len(self.cost), KEPT)
        there = (self.state == AWAY) | ((self.state == AGAIN) & ~np.bool_(self.steady))
        return np.where(there, KEPT, self.state)

    @property
    def passes(self) -> Ints:
        """Of each label, in which passes it takes its arguments: `ONCE`, `LATE`, `TWICE` or `BEFORE`."""
        if self.backward or self.state is None:
            return np.full(len(self.cost), LATE if self.backward else BEFORE if self.steady else ONCE)
        first = np.where((self.state == KEPT) | (self.state == EARLY), BEFORE, ONCE) if self.steady else ONCE
        return np.where(self.state == AGAIN, TWICE, first)

    @property
    def marked(self) -> NDArray[np.bool_]:
        """Of each label, whether a plan's ``recompute`` names it."""
        if self.state is None:
            return np.zeros(len(self.cost), dtype=bool)
        named: NDArray[np.bool_] = self.steady & (self.state == PASSING)
        if not self.unmoved:
            named |= self.state == AGAIN
        return named

    @property
    def away(self) -> NDArray[np.bool_]:
        """Of each label, whether a plan's ``offload`` names it."""
        return np.zeros(len(self.cost), dtype=bool) if self.state is None else self.state == AWAY

    def layout(self, label: int, tables: Tables) -> Layout:
        """Of a tensor under a label."""
        return tables.of(self.types["in", 0]).layouts[int(self.ports["in", 0][label])]

    def in_states(self, states: Sequence[int], runs: int, kept: Floats, copied: Floats | None = None) -> Variable:
        """The variable with a label for each of its own in each state.

        Args:
            states: to choose from.
            runs: how often what is not kept is made in the forward pass for each time that its cost counts.
            kept: bytes more of each label where it is kept.
            copied: seconds more of each label where it is away; None: it cannot be.
        """
        states = states if copied is None else (*states, AWAY)
        n, times = len(self.cost), len(states)
        state = np.repeat(np.array(states, dtype=np.int64), n)
        made = np.array([runs, 1 if self.steady else runs, 2 * runs, 1, runs])[state]
        copies = 0.0 if copied is None else np.where(state == AWAY, np.tile(copied, times), 0.0)
        return replace(
            self,
            ports={port: np.tile(numbers, times) for port, numbers in self.ports.items()},
            cost=np.tile(self.cost, times) * made + copies,
            memory=np.tile(self.memory, times) + np.where(state == KEPT, np.tile(kept, times), 0.0),
            candidate=np.tile(self.candidate, times),
            state=state,
            working=None if self.working is None else np.tile(self.working, times),
        )


PASSING, KEPT, AGAIN, EARLY, AWAY = 0, 1, 2, 3, 4
"""States of what the forward pass makes."""

ONCE, LATE, TWICE, BEFORE = 0, 1, 2, 3
"""Passes in which a label takes its arguments: forward (or no matter), backward, both, before the first microbatch."""

TAKEN = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1]], dtype=bool)
"""By state, in which passes a value is there. One that each microbatch makes is not there before; nor is it made once
more: to keep it, or to make what it serves for again, costs less or takes no more. What is away is back when it is
taken, as what is kept is there."""
