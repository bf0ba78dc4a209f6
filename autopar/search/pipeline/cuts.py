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
    """The forward pass of a program as a line of positions, between which it can be cut.

    Attributes:
        modules: where a stage may begin: the largest module that begins there, in order.
        spans: first position of each module, and the one after its last.
        forward: seconds of a microbatch's forward, by position.
        backward: seconds of its backward, by position.
        sent: bytes that a device sends, forward, if a stage begins at each position.
    """

    modules: Mapping[int, str]
    spans: Mapping[str, tuple[int, int]]
    forward: Floats
    backward: Floats
    sent: Floats

    def between(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """First position of each stage, and the one after its last."""
        return list(zip((0, *cuts), (*cuts, len(self.forward)), strict=True))

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


def forward_order(program: Program, dims: Dims, plan: Plan) -> ForwardOrder:
    """The forward order of a program, with seconds and bytes under a plan for the devices of a stage."""
    forward_pass = forward_nodes(program)
    position = positions(program, forward_pass)
    length = max(position.values()) + 1
    forward, backward = np.zeros(length + 1), np.zeros(length + 1)
    for node, seconds in node_seconds(program, dims, plan).items():
        if node in position:
            (forward if node in forward_pass else backward)[position[node]] += seconds / program.microbatches
    last = ends(program, forward_pass)
    # What is the same in all microbatches may run before the first of them, where no stage begins.
    own = {module_path(n) for n in forward_pass if n.op == "call_function" and n not in program.microbatch_invariant}
    working = own.union(*(_parents(m) for m in own))
    spans = {m: (a, last[m]) for m, a in starts(program, forward_pass).items() if m in working}
    modules: dict[int, str] = {}
    for module, (begin, _) in sorted(spans.items(), key=lambda s: s[1][0] - s[1][1]):  # the longest first
        if begin:
            modules.setdefault(begin, module)
    sent = _sent(program, dims, plan, forward_pass, position, length)
    return ForwardOrder(dict(sorted(modules.items())), spans, forward[:length], backward[:length], sent)


def _sent(
    program: Program, dims: Dims, plan: Plan, forward: set[fx.Node], position: Mapping[fx.Node, int], length: int
) -> Floats:
    """Bytes that are live in the forward pass before each position: what a stage that begins there is sent."""
    assignment, free = assign(program, dims, plan, layer_classes(program, dims)), free_nodes(program)
    change = np.zeros(length + 1)  # of the bytes from one position to the next
    for node, begin in position.items():
        if node not in forward or node in free or node in program.per_step:
            continue
        end = max((position[u] for u in node.users if u in position and u in forward), default=begin)
        layout = assignment.outputs.get((node, 0))
        size = sum(v.nbytes for v in values_of(node) if v is not None)
        if end > begin:
            change[begin + 1] += size / (split_parts(layout, plan.axis_sizes) if layout else 1)
            change[end + 1] -= size / (split_parts(layout, plan.axis_sizes) if layout else 1)
    return np.cumsum(change)[:length]


def balanced_cuts(orders: Sequence[ForwardOrder], links: Sequence[Link], weights: Sequence[float] = ()) -> list[int]:
    """Cuts that make the slowest stage, with what it sends and receives, as fast as can be.

    A dynamic program over the positions where stages may begin: the slowest of ``n + 1`` stages up to a position is the
    slower of the last one and the slowest of the ``n`` before it. PipeDream (https://arxiv.org/abs/1806.03377, section
    3.1) divides models in this way.

    Args:
        orders: of each stage, with the seconds of its own devices.
        links: between each stage and the next.
        weights: by which the seconds of each stage are multiplied; default: 1.

    Raises:
        InfeasibleError: there are fewer modules than stages.
    """
    order = orders[0]
    require_modules(order, len(orders))
    starts_or_end = np.array([0, *order.modules, len(order.forward)])

    def sent(link: Link) -> Floats:
        send = np.zeros(len(starts_or_end))
        send[1:-1] = 2 * (link.latency + order.sent[starts_or_end[1:-1]] / link.bandwidth)  # and its gradient back
        return send

    def time(stage: int) -> Floats:
        """Of a stage from row to column."""
        own = orders[stage]
        total = np.concatenate([[0.0], np.cumsum(own.forward + own.backward)])[starts_or_end]
        before, after = sent(links[max(stage - 1, 0)]), sent(links[min(stage, len(links) - 1)])
        found: Floats = total[None, :] - total[:, None] + after[None, :] + before[:, None]
        found[np.tril_indices(len(starts_or_end))] = np.inf
        return found * weights[stage] if weights else found

    best, begins = time(0)[0], []  # of the slowest stage up to each position, and where its last stage begins
    for stage in range(1, len(orders)):
        worst = np.maximum(best[:, None], time(stage))
        begins.append(worst.argmin(0))
        best = worst.min(0)
    cuts, at = [], len(starts_or_end) - 1
    for row in reversed(begins):
        at = int(row[at])
        cuts.append(int(starts_or_end[at]))
    return cuts[::-1]


def random_cuts(order: ForwardOrder, stages: int, seed: int) -> list[int]:
    """Any cuts, for tests."""
    require_modules(order, stages)
    starts_of_modules = np.array(list(order.modules))
    chosen = np.random.default_rng(seed).choice(starts_of_modules, stages - 1, replace=False)
    return sorted(int(c) for c in chosen)


def named_cuts(order: ForwardOrder, modules: Sequence[str]) -> list[int]:
    """Cuts where these modules begin.

    Raises:
        ValueError: one does not exist, or they are not in the order of the forward pass.
    """
    unknown = [m for m in modules if m not in order.spans or not order.spans[m][0]]
    if unknown:
        some = ", ".join(list(order.modules.values())[:6])
        raise ValueError(f"pin 'stages': no stage can begin at {unknown[0]!r}; modules that can are {some}, ...")
    cuts = [order.spans[m][0] for m in modules]
    if sorted(set(cuts)) != cuts:
        raise ValueError(f"pin 'stages': {list(modules)} are not in the order in which the model computes them")
    return cuts


def require_modules(order: ForwardOrder, stages: int) -> None:
    """Refuse more stages than modules."""
    if len(order.modules) < stages - 1:
        raise InfeasibleError(
            f"{stages} stages need {stages - 1} modules after the first to begin at, and the model computes "
            f"{len(order.modules)}: ask for fewer stages, or write the model as more modules"
        )


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))] if module else []
