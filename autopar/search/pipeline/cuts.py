"""Where a pipeline is cut: stages that take as long as each other, and send little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.costs.cluster import Link
from autopar.errors import InfeasibleError
from autopar.ir.graph import module_path, values_of
from autopar.ir.plan import Plan, Stage
from autopar.ir.program import Program
from autopar.pipeline.forward_order import ends, forward_nodes, positions, starts
from autopar.pipeline.stage_graphs import free_nodes
from autopar.search.predict import node_seconds
from autopar.sharding.assignment import assign
from autopar.sharding.candidates import split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import layer_classes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ForwardOrder:
    """The forward pass of a program as a line that can be cut.

    Attributes:
        modules: where a stage may begin: the largest module that begins there, in order.
        spans: first position of each module, and the one behind its last.
        ahead: seconds of a microbatch's forward, by position.
        back: seconds of its backward, by position.
        sent: bytes that a device sends, forward, if a stage begins at each position.
    """

    modules: Mapping[int, str]
    spans: Mapping[str, tuple[int, int]]
    ahead: Floats
    back: Floats
    sent: Floats

    def between(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """First position of each stage, and the one behind its last."""
        return list(zip((0, *cuts), (*cuts, len(self.ahead)), strict=True))

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        """The stages that begin at the model's first operator and at these positions."""
        return tuple(Stage(self._modules(begin, end)) for begin, end in self.between(cuts))

    def _modules(self, begin: int, end: int) -> tuple[str, ...]:
        """The largest modules that lie within a stage; the first begins it."""
        within = [m for m, (a, b) in self.spans.items() if begin <= a and b <= end]
        known = set(within)
        found = [m for m in within if not any(p in known for p in _parents(m))]
        leading = next((m for m in found if self.spans[m][0] == begin), None)
        if leading is None:  # a module that the stage has the beginning of
            leading = max((m for m, (a, _) in self.spans.items() if a == begin), key=len)
        return (leading, *(m for m in found if m != leading))


def line_of(program: Program, dims: Dims, plan: Plan) -> ForwardOrder:
    """The line of a program under a plan for the devices of a stage."""
    forward = forward_nodes(program)
    place = positions(program, forward)
    length = max(place.values()) + 1
    ahead, back = np.zeros(length + 1), np.zeros(length + 1)
    for node, seconds in node_seconds(program, dims, plan).items():
        if node in place:
            (ahead if node in forward else back)[place[node]] += seconds / program.microbatches
    last = ends(program, forward)
    # What is the same in all microbatches may run before the first of them, where no stage begins.
    own = {module_path(n) for n in forward if n.op == "call_function" and n not in program.microbatch_invariant}
    working = own.union(*(_parents(m) for m in own))
    spans = {m: (a, last[m]) for m, a in starts(program, forward).items() if m in working}
    modules: dict[int, str] = {}
    for module, (begin, _) in sorted(spans.items(), key=lambda s: s[1][0] - s[1][1]):
        if begin:
            modules.setdefault(begin, module)
    sent = _sent(program, dims, plan, forward, place, length)
    return ForwardOrder(dict(sorted(modules.items())), spans, ahead[:length], back[:length], sent)


def _sent(
    program: Program, dims: Dims, plan: Plan, forward: set[fx.Node], place: Mapping[fx.Node, int], length: int
) -> Floats:
    assignment, free = assign(program, dims, plan, layer_classes(program, dims)), free_nodes(program)
    change = np.zeros(length + 1)
    for node, begin in place.items():
        if node not in forward or node in free or node in program.per_step:
            continue
        end = max((place[u] for u in node.users if u in place and u in forward), default=begin)
        layout = assignment.outputs.get((node, 0))
        size = sum(v.nbytes for v in values_of(node) if v is not None)
        if end > begin:
            change[begin + 1] += size / (split_parts(layout, plan.axis_sizes) if layout else 1)
            change[end + 1] -= size / (split_parts(layout, plan.axis_sizes) if layout else 1)
    return np.cumsum(change)[:length]


def balanced_cuts(line: ForwardOrder, stages: int, link: Link) -> list[int]:
    """Cuts that make the slowest stage, with what it sends and receives, as fast as can be.

    Raises:
        InfeasibleError: there are fewer modules than stages.
    """
    require_modules(line, stages)
    places = np.array([0, *line.modules, len(line.ahead)])
    total = np.concatenate([[0.0], np.cumsum(line.ahead + line.back)])[places]
    hop = np.zeros(len(places))
    hop[1:-1] = 2 * (link.latency + line.sent[places[1:-1]] / link.bandwidth)
    time = total[None, :] - total[:, None] + hop[None, :] + hop[:, None]
    time[np.tril_indices(len(places))] = np.inf
    best, back = time[0], []
    for _ in range(stages - 1):
        worst = np.maximum(best[:, None], time)
        back.append(worst.argmin(0))
        best = worst.min(0)
    cuts, at = [], len(places) - 1
    for row in reversed(back):
        at = int(row[at])
        cuts.append(int(places[at]))
    return cuts[::-1]


def random_cuts(line: ForwardOrder, stages: int, seed: int) -> list[int]:
    """Any cuts, for tests."""
    require_modules(line, stages)
    places = np.array(list(line.modules))
    chosen = np.random.default_rng(seed).choice(places, stages - 1, replace=False)
    return sorted(int(c) for c in chosen)


def named_cuts(line: ForwardOrder, modules: Sequence[str]) -> list[int]:
    """Cuts where these modules begin.

    Raises:
        ValueError: one does not exist, or they are not in the order of the forward pass.
    """
    unknown = [m for m in modules if m not in line.spans or not line.spans[m][0]]
    if unknown:
        some = ", ".join(list(line.modules.values())[:6])
        raise ValueError(f"pin 'stages': no stage can begin at {unknown[0]!r}; modules that can are {some}, ...")
    cuts = [line.spans[m][0] for m in modules]
    if sorted(set(cuts)) != cuts:
        raise ValueError(f"pin 'stages': {list(modules)} are not in the order in which the model computes them")
    return cuts


def require_modules(line: ForwardOrder, stages: int) -> None:
    """Refuse more stages than modules."""
    if len(line.modules) < stages - 1:
        raise InfeasibleError(
            f"{stages} stages need {stages - 1} modules to begin at behind the first, and the model computes "
            f"{len(line.modules)}: ask for fewer stages, or write the model as more modules"
        )


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))] if module else []
