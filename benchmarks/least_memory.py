"""How little memory can a model do with? A lower bound, apart from the search and from any layout.

Everything is split over all devices, but for what the operator that runs takes and makes: of its candidates the one
counts that takes the least, such as with a gathered weight. While an operator of the backward pass runs there are the
parameters with their state; what the backward pass has made and takes later; results that the caller gets; and what the
operator takes and makes, with what its library copies. Of what the forward pass made there is what must be, see
`autopar.search.budget.live_ranges`, whichever of it is kept. It leaves out what moves take, and what is held while the
forward pass runs or values are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar.ir.graph import is_backward, tensor_arguments, values_of
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.memory.liveness import copied_by_convolution
from autopar.search.budget.live_ranges import LiveRanges, minimize_peak
from autopar.search.emitted.peak import state_bytes
from autopar.search.formulation.memory_model import block_boundary_activations
from autopar.sharding.candidates import candidates, combine, split_parts
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import layer_classes

Storage = Any


def least(program: Program, axes: Mapping[str, int], *, away: bool = False, copies: float = 0.0) -> float:
    """Bytes a device that no plan does without.

    Args:
        program: of the whole batch, without blocks left out.
        axes: of the mesh.
        away: whether optimizer state may lie on the host, and what is kept until an operator takes it.
        copies: of the device, see `autopar.costs.cluster.Device`.
    """
    ranges = lives_of(program, tuple(axes.values()), away=away, copies=copies)
    bound = max(ranges.base) if away else minimize_peak(ranges)[0]
    state = sum(state_bytes(program, "sgd" if away else "adamw", gradients=False).values())
    step = sum(state_bytes(program, "adamw").values())  # which takes all of it, wherever it lay before
    return max(state + bound, step) / math.prod(axes.values())


def lives_of(program: Program, sizes: Sequence[int] = (), *, away: bool = False, copies: float = 0.0) -> LiveRanges:
    """What all devices together hold of a program, at least."""
    dims = analyze(program)
    found = LiveRanges()
    inputs = {s for node in program.placeholders for s in storages(node)}
    outputs = zip(program.outputs, program.output_values, strict=True)
    results = {
        s for o, v in outputs if v is not None and o.kind in ("result", "gradient") for s in storages(v)
    } - inputs
    keeps = block_boundary_activations(program, layer_classes(program, dims))
    working = _Working(program, dims, tuple(sizes), away, copies)
    taken, more = [], []
    for node in program.sources:
        own = {s for n in node.all_input_nodes for s in storages(n)} - inputs
        made = storages(node) - inputs - own
        if not is_backward(node):
            for s in made:
                found.size[s], found.sources[s] = float(s.nbytes()), own
                found.fixed.update({s} if node in keeps else ())
            continue
        t = len(taken)
        taken.append(own | made)
        more.append(working.more(node))
        for s in own & found.size.keys():
            found.first.setdefault(s, t)
            found.last[s] = t
    given = results & found.size.keys()
    early = sum(s.nbytes() for s in given)  # results of the forward pass, which are there all the time
    there: dict[Storage, tuple[int, float]] = {}
    for t, own in enumerate(taken):
        for s in own - found.size.keys():
            there[s] = there.get(s, (t, 0))[0], math.inf if s in results else t
    for t in range(len(taken)):
        now = sum(s.nbytes() for s, (a, b) in there.items() if a <= t <= b)
        found.base.append(float(early + now + more[t]))
    for s in given:
        del found.size[s]
    for t, own in enumerate(taken if away else ()):
        found.base[t] += sum(found.size[s] for s in own & found.size.keys())
    return found


class _Working:
    """What an operator takes and makes besides equal parts of all of it."""

    def __init__(self, program: Program, dims: Dims, sizes: tuple[int, ...], away: bool, copies: float) -> None:
        self.dims, self.sizes, self.away, self.copies = dims, sizes, away, copies
        self.devices = math.prod(sizes)
        inputs = zip(program.placeholders, program.inputs, strict=True)
        self.kind = {s: i.kind for n, i in inputs for s in storages(n)}

    def more(self, node: fx.Node) -> float:
        """Bytes of all devices together, of the candidate that takes the least."""
        operator = self.dims.operators[node]
        if operator.rule.view:
            return 0.0
        values = [*map(_one, tensor_arguments(node)), *values_of(node)]
        every = candidates(operator, self.sizes)
        return min(self._of(node, values, *combine(operator, every.names(i))) for i in range(len(every.choice)))

    def _of(self, node: fx.Node, values: Sequence[Any], into: Sequence[Layout], made: Sequence[Layout]) -> float:
        most: dict[Storage, float] = {}
        for value, layout in zip(values, (*into, *made), strict=True):
            storage = None if value is None else value.untyped_storage()
            if (
                storage is not None and value.nbytes == storage.nbytes()
            ):  # or what is local of it may be less than of the value
                most[storage] = max(most.get(storage, 0.0), self._beyond(storage, layout))
        return sum(most.values()) + self.copies * self._copied(node, into)

    def _beyond(self, storage: Storage, layout: Layout) -> float:
        """What a layout has beyond equal parts; of a parameter that is not as split as it can be, all of it.

        Such a parameter lies beside its part, or has all of its optimizer state with it.
        """
        copies = self.devices / split_parts(layout, self.sizes)
        kind = self.kind.get(storage)
        if kind is None or (kind == "parameter" and self.away):
            return float((copies - 1) * storage.nbytes())
        return float(copies * storage.nbytes()) if kind == "parameter" and copies > 1 else 0.0

    def _copied(self, node: fx.Node, into: Sequence[Layout]) -> float:
        """What the CPU's library copies, of all devices together."""
        if not self.copies or not copied_by_convolution(node):
            return 0.0
        given, taken, weight = into[:3]  # those of the backward pass
        parts = [split_parts(layout, self.sizes) for layout in (taken, weight, given)]
        return self.devices * copied_by_convolution(node, parts)


def _one(node: fx.Node) -> Any:
    """What an argument is."""
    (value,) = values_of(node)
    return value


def storages(node: fx.Node) -> set[Storage]:
    """Of what a node makes, or what its results are views of."""
    return {value.untyped_storage() for value in values_of(node) if value is not None}
