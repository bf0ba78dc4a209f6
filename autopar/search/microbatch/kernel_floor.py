"""`kernel_floor`: seconds of kernels that no plan on a mesh falls below, in closed form, before anything is searched.

Every operator takes the candidate that is fastest by itself, whatever it costs to bring its arguments there. The
operators are those of the whole batch. In microbatches they are not faster, and of the samples a device can only have a
part of those of one microbatch: that is what the number of microbatches changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.costs.kernels import Work, kernel_seconds
from autopar.ir.graph import dependent_on
from autopar.ir.program import Program
from autopar.rules.remembered import remembered
from autopar.search.padding import MOST_HEADS
from autopar.sharding.candidates import Candidates, candidates
from autopar.sharding.dims import Operator, analyze
from autopar.sharding.factor_kinds import batch_factors, ids, split_factors
from autopar.sharding.layer_classes import layer_classes
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work
from autopar.sharding.redistribute.moves import Machine

Floats = NDArray[np.float64]

_ONCE = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
"""The figures of a `KernelFloor` from those of an operator that runs once a step."""

Splits = frozenset[str]
"""Names of strategies."""


@dataclass(frozen=True)
class KernelFloor:
    """Seconds of a step's kernels where each operator takes its fastest candidate.

    Attributes:
        bound: at the peak of arithmetic or memory, so that no plan takes less.
        typical: as the cost model has it for the sizes that there are.
    """

    bound: float
    typical: float


def kernel_floor(program: Program, machine: Machine, count: int) -> KernelFloor:
    """Seconds of kernels that a step on a mesh takes at least, in a number of microbatches or in a multiple of it.

    Args:
        program: of the whole batch.
        machine: the mesh; what its parameters are padded to is at most `MOST_HEADS` times as long.
        count: of microbatches.
    """
    rows, operators = _operators(program)
    total, runs = np.zeros(2), np.array([[1.0, 0.0, 0.0], [0.0, 1.0, count]])
    for (operator, samples), times in operators.items():
        known = _least(operator, samples, machine)
        fine = [own for parts, own in known.items() if not samples or (rows // count) % parts == 0]
        total += times * (runs if samples else _ONCE) @ np.min(fine, axis=0)
    return KernelFloor(float(total[0]), float(total[1]))


def _operators(program: Program) -> tuple[int, Mapping[tuple[Operator, Splits], float]]:
    """Samples of the batch, and how often the whole model has each operator, with the strategies that split samples."""
    if "operators_on_samples" not in program.memo:
        dims = analyze(program)
        batch, classes = batch_factors(program, dims), layer_classes(program, dims)
        samples, of_batch = ids(batch), _on_batch(program)
        found: dict[tuple[Operator, Splits], float] = {}
        for key, members in classes.members.items():
            node = members[0]
            if node in dims.operators:
                along = split_factors(node, program, dims).items() if node in of_batch else ()
                own = dims.operators[node], frozenset(name for name, factor in along if id(factor) in samples)
                found[own] = found.get(own, 0.0) + classes.count[key]
        program.memo["operators_on_samples"] = min((f.size for f in batch), default=1), found
    known: tuple[int, Mapping[tuple[Operator, Splits], float]] = program.memo["operators_on_samples"]
    return known


def _on_batch(program: Program) -> set[fx.Node]:
    """Nodes that depend on the batch: others run once a step, whatever dims they have."""
    return dependent_on(program.graph.graph, program.inputs_of("batch"))


@remembered(2**14)
def _least(operator: Operator, samples: Splits, machine: Machine) -> Mapping[int, Floats]:
    """The least seconds of an operator by how many parts it cuts the samples into: `[bound, typical, launches]`.

    Launches are apart: each microbatch has its own. What a lowering communicates is in them: of a long sequence only a
    ring may be left.
    """
    chosen = candidates(operator, machine.sizes, padded=MOST_HEADS)
    work, device = operator_work(operator, chosen, machine.sizes, machine.load), machine.device
    dtype, lowered = arithmetic_dtype(operator, device), _lowered(operator, chosen)
    launches = np.where(work.flops + work.moved > 0, work.launches * device.launch, 0.0)
    typical = kernel_seconds(work, dtype, device) - launches
    alone = np.array([_at_peak(work, dtype, machine), typical, launches])
    splits = np.array([s.name in samples for s in chosen.strategies])
    parts = np.where(splits[chosen.choice], np.array(machine.sizes), 1).prod(axis=1)
    found: dict[int, Floats] = {}
    for n in map(int, np.unique(parts)):
        own = np.flatnonzero(parts == n)
        best = alone[:, own[~lowered[own]]].min(axis=1, initial=np.inf)
        # What is emitted is priced in the order of its kernels alone, until these take longer than what is known.
        for i in sorted(own[lowered[own]], key=lambda i: float(alone[0, i])):
            if alone[0, i] >= best[0]:
                break
            best = np.minimum(best, _emitted(operator, chosen.names(int(i)), alone[:, i], machine))
        found[n] = best
    return found


def _at_peak(work: Work, dtype: str, machine: Machine) -> Floats:
    """Seconds of kernels at the peak: neither launches nor small tiles, less than any real device takes."""
    device = machine.device
    rate, streamed = device.peak(dtype) * device.efficiency, device.bandwidth * device.streaming
    return np.maximum(work.flops / rate, work.moved / streamed)


def _lowered(operator: Operator, chosen: Candidates) -> NDArray[np.bool_]:
    """Candidates that split a letter with a lowering into parts that are equal as they are."""
    lower = [s.factor is not None and s.factor[0] in operator.rule.lower for s in chosen.strategies]
    return np.asarray(np.array(lower, dtype=bool)[chosen.choice].any(axis=1), dtype=bool)


def _emitted(operator: Operator, names: tuple[str, ...], alone: Floats, machine: Machine) -> Floats:
    """Seconds of what a lowering emits; what it computes beside what it sends counts where that takes longer."""
    if not _divides(operator, names, machine.sizes):
        return alone  # what is padded is emitted for other sizes
    found = lowered_cost(operator, names, machine)
    if found is None:
        return alone
    sent: Counter[str] = Counter()
    for made, times in found.collectives.items():
        sent[made.axis] += times * machine.seconds(made)  # type: ignore[assignment]
    dtype = arithmetic_dtype(operator, machine.device)
    kernels = found.kernel_seconds(lambda work: _at_peak(work, dtype, machine))
    return np.array([max(kernels, *sent.values(), 0.0), found.seconds(dtype, machine), 0.0])


def _divides(operator: Operator, names: tuple[str, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a candidate's parts are equal without padding."""
    return len(candidates(operator, sizes, [[name] for name in names]).choice) > 0
