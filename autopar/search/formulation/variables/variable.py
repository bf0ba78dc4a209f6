"""`Variable`: one decision of the search, with the layouts and the activation states to choose from.

Besides its layout, each value of the forward pass has one of these states:

- *not saved*: it is freed after its last reader in the forward pass;
- *saved* for the backward pass, which takes memory;
- *recomputed* in the backward pass: the operator runs once more, its arguments are moved once more, and they must be
  saved or recomputed themselves (Checkmate, https://arxiv.org/abs/1910.02653, states the same choice as an ILP);
- *hoisted, then freed*: computed before the first microbatch, and only to compute what all microbatches share;
- *offloaded* to host memory until the backward pass reads it, which takes the time of two copies.

A consumer layout has the same states, and one more: *moved for the forward pass alone*, and freed after it, since the
backward pass reads the value only as it was made, which must be saved or recomputed. A gathered parameter that is saved
has the traffic of ZeRO-2, one that is re-gathered that of ZeRO-3 (https://arxiv.org/abs/1910.02054).

In a step of microbatches, values that depend on parameters alone are microbatch-invariant (`autopar.memory.hoist`):
where they are saved, they are computed once per step and shared by all microbatches; where they are not saved or
recomputed, each microbatch computes them.
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

NOT_SAVED, SAVED, RECOMPUTED, HOISTED_FREED, FORWARD_ONLY, OFFLOADED = 0, 1, 2, 3, 4, 5
"""States of a value of the forward pass."""

IN_FORWARD, IN_BACKWARD, IN_BOTH, BEFORE_MICROBATCHES, BESIDE_BACKWARD = 0, 1, 2, 3, 4
"""When a label reads its arguments. Labels of programs without a backward pass read them in the forward pass.

`BESIDE_BACKWARD`: in the forward pass, of a value that the backward pass reads, too, as it was made.
"""

READABLE = np.array([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]], dtype=bool)
"""By state, when a value can be read.

What each microbatch computes is not there before the first one. Nor can a recomputed invariant be read there: to save
it, or to recompute its reader as well, is never worse. There is no row for `OFFLOADED`: it is back when it is read, so
that it is as readable as `SAVED`. Whatever the state of a consumer layout, who takes the value as it was made does not
read the moved one; only `FORWARD_ONLY` makes use of that.
"""


@dataclass(frozen=True)
class Variable:
    """One decision: the candidate of a class of operators, or the layout of a class of tensors.

    Attributes:
        key: of the class; a consumer layout (a value moved once for all its readers) has its own key.
        count: how many nodes share the decision.
        ports: layout number of each label, by port.
        types: type of the tensor at each port.
        choices: an operator's candidates; None for a tensor's layout.
        cost: seconds of each label, all members together.
        memory: bytes of each label, all members together.
        candidate: of each label, its number among ``choices``.
        state: of each label, `NOT_SAVED`, `SAVED`, `RECOMPUTED`, `HOISTED_FREED`, `FORWARD_ONLY` or `OFFLOADED`; None
            for variables without such a choice.
        backward: whether it is an operator of the backward pass, or a consumer layout that only such operators read.
        working: bytes of the arguments and results of one operator under each label; None for tensors.
        invariant: whether all microbatches share it where it is saved.
        alias_only: whether `RECOMPUTED` is allowed only for a consumer layout equal to the layout that the value was
            produced in. Such a consumer layout is no tensor of its own, so the memory counts at the value alone.
        seconds: of an operator without states, the seconds of its kernels under each label, whatever a second costs.
        read_as_made: of a consumer layout, 1 + the number of the layout that its value is made in, where some reader
            may take it so for less than a slice of the moved value; 0 where that is not told. None: nowhere.
        uncounted: bytes of each label that emitted graphs hold besides its memory, approximately. The memory
            constraint leaves them out, since it must hold for all plans. None: nothing.
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
    invariant: bool = False
    alias_only: bool = False
    uncounted: Floats | None = None
    seconds: Floats | None = None
    read_as_made: Ints | None = None

    @property
    def made(self) -> Ints:
        """Of each label, ``read_as_made``."""
        return np.zeros(len(self.cost), dtype=np.int64) if self.read_as_made is None else self.read_as_made

    @property
    def readable(self) -> Ints:
        """The row of `READABLE` of each label."""
        if self.state is None:
            return np.full(len(self.cost), SAVED)
        as_saved = (self.state == OFFLOADED) | ((self.state == RECOMPUTED) & ~np.bool_(self.invariant))
        return np.where(as_saved, SAVED, self.state)

    @property
    def reads(self) -> Ints:
        """The column of `READABLE` of each label: when it reads its arguments."""
        if self.backward or self.state is None:
            only = IN_BACKWARD if self.backward else BEFORE_MICROBATCHES if self.invariant else IN_FORWARD
            return np.full(len(self.cost), only)
        hoisted = (self.state == SAVED) | (self.state == HOISTED_FREED)
        first = np.where(hoisted, BEFORE_MICROBATCHES, IN_FORWARD) if self.invariant else IN_FORWARD
        first = np.where(self.state == FORWARD_ONLY, BESIDE_BACKWARD, first)
        return np.where(self.state == RECOMPUTED, IN_BOTH, first)

    @property
    def in_recompute(self) -> NDArray[np.bool_]:
        """Whether a plan's ``recompute`` names the variable, label by label."""
        if self.state is None:
            return np.zeros(len(self.cost), dtype=bool)
        # Plans save invariants by default: one that is not saved is computed in each microbatch, which is named, too.
        named: NDArray[np.bool_] = self.invariant & (self.state == NOT_SAVED)
        if not self.alias_only:
            named |= self.state == RECOMPUTED
            # Named as well where the value that the backward pass reads may be recomputed.
            named |= (self.state == FORWARD_ONLY) & (self.state == RECOMPUTED).any()
        return named

    @property
    def in_offload(self) -> NDArray[np.bool_]:
        """Whether a plan's ``offload`` names the variable, label by label."""
        return np.zeros(len(self.cost), dtype=bool) if self.state is None else self.state == OFFLOADED

    def layout(self, label: int, tables: Tables) -> Layout:
        """The layout of a tensor under a label."""
        return tables.of(self.types["in", 0]).layouts[int(self.ports["in", 0][label])]

    def reading_as_made(self, labels: Ints, made: Ints, forward_only: NDArray[np.bool_]) -> Variable:
        """The variable of a consumer layout with some of its labels, once or more, and for these ``read_as_made``.

        Args:
            labels: some of its labels.
            made: ``read_as_made`` of each.
            forward_only: which of them hold nothing beyond the forward pass: their state becomes `FORWARD_ONLY`.
        """
        return replace(
            self,
            ports={port: numbers[labels] for port, numbers in self.ports.items()},
            cost=self.cost[labels],
            memory=np.where(forward_only, 0.0, self.memory[labels]),
            candidate=self.candidate[labels],
            state=None if self.state is None else np.where(forward_only, FORWARD_ONLY, self.state[labels]),
            read_as_made=made,
        )

    def in_states(
        self,
        states: Sequence[int],
        runs: int,
        saved: Floats,
        copies: Floats | None = None,
        prices: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> Variable:
        """The variable with each of its labels once per state.

        Args:
            states: to choose from.
            runs: how often a label that is not saved runs in the forward pass, as a multiple of its cost.
            saved: additional bytes of each label where it is saved.
            copies: additional seconds of each label where it is offloaded; None: it cannot be.
            prices: of a second where a label first runs, is recomputed, or runs once a step.
        """
        # Offloaded last: among equally good labels the solvers prefer the first.
        states = states if copies is None else (*states, OFFLOADED)
        n, times = len(self.cost), len(states)
        state = np.repeat(np.array(states, dtype=np.int64), n)
        # By state: a saved invariant runs once per step, and what is recomputed runs twice.
        first, second, once = prices[0] * runs, prices[1] * runs, prices[2]
        repeats = np.array([first, once if self.invariant else first, first + second, once, first, first])[state]
        copy_seconds = 0.0 if copies is None else np.where(state == OFFLOADED, prices[0] * np.tile(copies, times), 0.0)
        return replace(
            self,
            ports={port: np.tile(numbers, times) for port, numbers in self.ports.items()},
            cost=np.tile(self.cost, times) * repeats + copy_seconds,
            memory=np.tile(self.memory, times) + np.where(state == SAVED, np.tile(saved, times), 0.0),
            candidate=np.tile(self.candidate, times),
            state=state,
            working=None if self.working is None else np.tile(self.working, times),
            seconds=None,
        )
