"""`watch`: how fast a training runs, and how much memory it takes, for a callback."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.costs.arguments import FUNCTION, number, require, whole
from autopar.costs.cluster import Cluster
from autopar.costs.device import Device
from autopar.ir.program import Program
from autopar.search.pipeline.space import samples
from autopar.sharding.dims import analyze
from autopar.sharding.factor_kinds import input_types, sequence_factors
from autopar.sharding.operator_cost import arithmetic_dtype
from autopar.specialize import Specialization


@dataclass(frozen=True)
class Metrics:
    """Of the steps since the last call of a callback, by the host's clock.

    Attributes:
        step: steps of the optimizer since the callback was registered.
        seconds: of a step, on average; of the first one, from its call of the module on.
        rows_per_second: of the whole batch.
        tokens_per_second: of the whole batch; None where it has no sequences.
        mfu: model FLOPs utilization: operations of the model, without recomputation, over what the devices could
            compute; None where their peak is not known.
        peak_memory_bytes: the most that this rank's device had allocated; without a GPU, that this process has had.
        predicted_memory_bytes: what the plan takes a device to hold; None where that was not counted.
    """

    step: int
    seconds: float
    rows_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: float | None
    predicted_memory_bytes: float | None


Callback = Callable[[Metrics], None]


def watch(model: nn.Module, callback: Callback, *, every: int = 1, seconds: float = 0.0) -> Callable[[], None]:
    """Call a function after steps of the optimizer; each rank that wants to know calls this by itself.

    A step is counted when an optimizer of the model's parameters takes one after the module has been called in
    training: of several optimizers one counts, and of accumulated gradients all calls.

    Args:
        model: what `autopar.parallelize` returned.
        callback: gets `Metrics` after the first step and then from time to time.
        every: steps from one call of it to the next, at least.
        seconds: from one call of it to the next, at least.

    Returns:
        A function that ends it.

    Raises:
        ValueError: an argument is wrong.
    """
    session = getattr(model, "_autopar", None)
    if session is None:
        raise ValueError(f"model: expected what autopar.parallelize returned, got a {type(model).__name__}")
    require(
        callback=(callback, FUNCTION), every=(every, whole(1)), seconds=(seconds, number(0)),
    )  # fmt: skip
    meter = Meter(session, callback, every, seconds)
    session.meters.append(meter)
    return meter.end


class Meter:
    """Counts what a session computes, and the steps of its optimizers."""

    def __init__(self, session: Any, callback: Callback, every: int, seconds: float) -> None:
        self.callback, self.every, self.least = callback, every, seconds
        self.step, self.since = 0, 0
        self.begun: float | None = None
        self._work = _Work()
        self._latest: Specialization | None = None
        # Weak: torch keeps hooks of all optimizers for ever, and a model must not live as long.
        self._session = weakref.ref(session)
        own = weakref.ref(self)
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(own, optimizer))
        weakref.finalize(session, self._hook.remove)

    def end(self) -> None:
        """Count no more."""
        self._hook.remove()
        session = self._session()
        if session is not None and self in session.meters:
            session.meters.remove(self)

    def calling(self) -> None:
        """The module is about to compute."""
        self.begun = time.perf_counter() if self.begun is None else self.begun

    def called(self, found: Specialization) -> None:
        """The module has computed a batch that it trains on."""
        self._work += work_of(found)
        self._latest = found

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step; it may be another model's."""
        session = self._session()
        if session is None or not self._work.calls or self._latest is None or self.begun is None:
            return
        own = set(map(id, session.original.parameters()))
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        self.step, self.since = self.step + 1, self.since + 1
        self._work.calls = 0
        now = time.perf_counter()
        elapsed = max(now - self.begun, 1e-9)
        if self.step > 1 and (self.since < self.every or elapsed < self.least):
            return
        found = self._metrics(elapsed, self._latest, session)
        self._work, self.since, self.begun = _Work(), 0, now
        self.callback(found)

    def _metrics(self, elapsed: float, found: Specialization, session: Any) -> Metrics:
        work, plan = self._work, found.plan
        predicted = plan.predicted.peak_bytes or plan.predicted.memory_bytes
        ideal = work.ideal_seconds
        return Metrics(
            self.step,
            elapsed / self.since,
            work.rows / elapsed,
            None if work.tokens is None else work.tokens / elapsed,
            None if ideal is None else ideal / math.prod(plan.axis_sizes) / elapsed,
            _peak_memory(session.context.device),
            sum(predicted.values()) if predicted else None,
        )


def _stepped(meter: weakref.ref[Meter], optimizer: torch.optim.Optimizer) -> None:
    found = meter()
    if found is not None:
        found.stepped(optimizer)


@dataclass
class _Work:
    """Of some calls: rows, tokens, and seconds that one device would take at its peak."""

    calls: int = 0
    rows: float = 0.0
    tokens: float | None = 0.0
    ideal_seconds: float | None = 0.0

    def __iadd__(self, other: _Work) -> _Work:
        self.calls += other.calls
        self.rows += other.rows
        self.tokens = None if self.tokens is None or other.tokens is None else self.tokens + other.tokens
        both = (self.ideal_seconds, other.ideal_seconds)
        self.ideal_seconds = None if both[0] is None or both[1] is None else both[0] + both[1]
        return self


def work_of(found: Specialization) -> _Work:
    """What one call of a specialization computes."""
    program, cluster = found.program, found.plan.cluster
    if "work" not in program.memo:
        # Round figures of any machine are no peak of this one, and devices of several kinds have none together.
        known = cluster != Cluster.preset("cpu") and not cluster.groups
        ideal = ideal_seconds(program, cluster.device) if known else None
        program.memo["work"] = _Work(1, float(samples(program)), tokens_of(program), ideal)
    work: _Work = program.memo["work"]
    return work


def tokens_of(program: Program) -> float | None:
    """Positions of all sequences of a batch; None where it has no sequences."""
    dims, rows = analyze(program), samples(program)
    factors = set(map(id, sequence_factors(program, dims)))
    sequences = [
        t.shape[1]
        for t in input_types(program, dims, "batch").values()
        if len(t.dims) > 1 and t.shape[0] == rows and any(id(f) in factors for f in t.dims[1])
    ]
    # Of an encoder and a decoder the longer ones: both are computed for the same rows.
    return float(rows * max(sequences)) if sequences else None


def ideal_seconds(program: Program, device: Device) -> float:
    """Seconds that one device takes for the operations of a captured program, at the peak of each one's dtype."""
    operators = analyze(program).operators.values()
    return sum(op.rule.flops / device.flops[arithmetic_dtype(op, device)] for op in operators if op.rule.flops)


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource  # which Windows lacks

    # In KiB on Linux, and in bytes on macOS.
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
