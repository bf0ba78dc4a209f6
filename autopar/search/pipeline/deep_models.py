"""`RepeatedStages`: a deep model cut into stages between its alike blocks, of which three are captured.

The three are cut in three ways: each a stage, or two of them one. What the second block of a stage adds is what every
further one adds, to its seconds and to its bytes. So figures of any number of blocks are those of a stage of one block,
and so often the difference between a stage of two and a stage of one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan, Scatter, Stage
from autopar.ir.program import Program, RepeatedLayers
from autopar.memory.recompute import uniform
from autopar.passes import as_planned
from autopar.pipeline.stage_graphs import StageGraphs, is_held_by_all
from autopar.search.emitted.rewritten import chosen, unverified_in_stages
from autopar.search.pipeline.cuts import forward_order, named_cuts
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.stage_devices import StageDevices
from autopar.search.pipeline.stage_memory import StageMemory
from autopar.search.pipeline.stage_plan import StagePlan, in_parts, measured
from autopar.search.pipeline.stage_times import StageTime, times_on, with_links
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

ThreeCuts = tuple[StagePlan, StagePlan, StagePlan]
"""The three blocks under one plan: each a stage; the first two one stage; the last two one stage."""

Blocks = Mapping[Cluster, ThreeCuts]
"""The three blocks on each kind of devices."""

Ways = Mapping[Cluster, Sequence[tuple[float, ThreeCuts]]]
"""For each kind of devices, the ways in which blocks are treated, each with its share of the blocks."""

KEPT = 8
"""So many ways of treatment that were measured last are kept."""

FIRST, MIDDLE, LAST = 0, 1, 2
"""Positions of a stage in the pipeline, and of its block among the three: ends differ from what is between them."""

_T = TypeVar("_T", StageMemory, StageTime)


def require_blocks(program: Program, shape: PipelineShape) -> None:
    """Refuse more stages than blocks, where some are left out.

    Raises:
        InfeasibleError: says so.
    """
    repeat = program.repeat
    if repeat is not None and repeat.blocks < shape.stages:
        alike = f"{repeat.blocks} blocks" + (f" of {repeat.period} modules" if repeat.period > 1 else "")
        alike += f" behind the first {repeat.lead}" if repeat.lead else ""
        raise InfeasibleError(
            f"{shape.stages} stages of at least a block each, and {repeat.path} has {alike}; ask for fewer stages"
        )


class RepeatedStages:
    """A program that leaves blocks out, cut in three ways under a plan."""

    def __init__(self, program: Program, plan: Plan, shape: PipelineShape, devices: StageDevices, split: bool) -> None:
        """Rewrite the blocks.

        Args:
            program: of one microbatch.
            plan: for the devices of a stage, if these had the whole model.
            shape: of the stages, however many they are on a device.
            devices: along the axis of the stages.
            split: whether the backward may be in two parts.
        """
        repeat = program.repeat
        assert repeat is not None
        self.plan, self.padded, self.devices = plan, as_planned(program, plan), devices
        count = layer_classes(self.padded, analyze(self.padded)).count
        # Layers may be treated in several ways: some recompute what others save. Each way is measured by itself.
        own = chosen(_of_three(plan, repeat))
        each = [(share, replace(own, recompute=part.recompute)) for share, part in uniform(plan, count) if share > 0]
        ways = [(share, _cut_blocks(program, self.padded, way, shape, devices, split)) for share, way in each]
        self.whole = {m: [(share, whole[m]) for share, (whole, _) in ways] for m in devices.machines}
        self.apart: Ways = {}  # where stages send in parts; empty: that makes no difference
        if any(apart for _, (_, apart) in ways):
            self.apart = {m: [(share, (apart or whole)[m]) for share, (whole, apart) in ways] for m in devices.machines}

    def staged(self, shape: PipelineShape, ways: Sequence[Scatter], weights: Sequence[float] = ()) -> list[StagePlan]:
        """The stages of the whole model, cut as `stage_plan.staged` does: as it is, and sent in parts.

        Args:
            shape: of the stages, no more than there are blocks; where it names modules, stages begin at these blocks.
            ways: to send in parts.
            weights: by which the seconds of each stage are multiplied where blocks are shared out; default: 1.
        """
        found = [self._of_whole(self.plan, shape, self.whole, weights)]
        if self.apart:
            found += [self._of_whole(replace(self.plan, scatter=w), shape, self.apart, weights) for w in ways]
        return found

    def _of_whole(self, plan: Plan, shape: PipelineShape, by_machine: Ways, weights: Sequence[float]) -> StagePlan:
        own = [by_machine[self.devices.machines[c]] for c in shape.coordinates]
        found = _of_whole(self.padded, plan, shape, own, self.devices, weights)
        return replace(found, times=with_links(found.times, self.devices.links(shape.coordinates)))


def _everywhere(plan: Plan, axis: str) -> list[Scatter]:
    """To send in parts between all stages."""
    return [Scatter(axis, tuple(range(len(plan.stages) - 1)))]


def _cut_blocks(
    program: Program, padded: Program, plan: Plan, shape: PipelineShape, devices: StageDevices, split: bool
) -> tuple[Blocks, Blocks]:
    """The three blocks in one way of treatment, and where stages send in parts, if that makes a difference.

    Plans that are compared often treat some blocks alike; and the best is measured once more, in stages of its own.
    """
    known: list[tuple[Any, tuple[Blocks, Blocks]]] = program.memo.setdefault("blocks in stages", [])
    # A finished plan differs from what was measured in being one of the whole batch.
    key = replace(plan, fingerprint="", microbatches=1), shape.axis, devices, split
    found = next((own for other, own in known if other == key), None)
    if found is None:
        cuts = _rewritten(program, padded, plan)
        apart = [in_parts(local, own, _everywhere(own, shape.axis))[-1] for own, local in cuts]
        differs = any(own.scatter for own, _ in apart)
        found = _measured(cuts, devices, split), _measured(apart, devices, split) if differs else {}
        known.append((key, found))
        del known[:-KEPT]
    return found


def _of_whole(
    padded: Program,
    plan: Plan,
    shape: PipelineShape,
    own: Sequence[Sequence[tuple[float, ThreeCuts]]],
    devices: StageDevices,
    weights: Sequence[float],
) -> StagePlan:
    """The stages of the whole model, from those of three blocks, which are treated in so many ways.

    Args:
        padded: the program with three blocks.
        plan: of the whole model.
        shape: of the stages.
        own: of each stage, the ways in which blocks are treated on its devices, each with the share of the blocks that
            are; the first blocks in the first.
        devices: along the axis of the stages.
        weights: of the seconds of each stage, see `RepeatedStages.staged`.
    """
    ways = own[0]
    repeat = padded.repeat
    assert repeat is not None
    if shape.modules:
        ends = [0, *(repeat.block(m)[0] for m in shape.modules), repeat.blocks]
    else:
        ends = list(itertools.accumulate(_shared_out(own, repeat.blocks, weights), initial=0))
    last = len(ends) - 2
    shares = itertools.accumulate((share for share, _ in ways), initial=0.0)
    borders = [round(share * repeat.blocks) for share in shares]
    memory: list[StageMemory] = []
    times: list[StageTime] = []
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        numbers = [max(0, min(end, stop) - max(begin, start)) for start, stop in itertools.pairwise(borders)]
        position = FIRST if stage == 0 else LAST if stage == last else MIDDLE
        known = [(n, cuts) for n, (_, cuts) in zip(numbers, own[stage], strict=True) if n > 0]
        memory.append(_of_blocks([(n, tuple(cut.memory for cut in cuts)) for n, cuts in known], position))
        times.append(_of_blocks([(n, tuple(cut.times for cut in cuts)) for n, cuts in known], position))
    each = ways[0][1][0]
    plan = replace(plan, stages=_stages(each.plan.stages, ends, repeat))
    holders = _holders(padded, plan, each.holders, ends, repeat)
    homes = {n: None if s is None else (0, 1, last)[s] for n, s in each.homes.items()}
    return StagePlan(plan, memory, times, holders, homes, devices)


def _rewritten(program: Program, padded: Program, plan: Plan) -> list[tuple[Plan, Program]]:
    """The three blocks under plans that cut them as `ThreeCuts` says."""
    assert program.repeat is not None
    order = forward_order(padded, analyze(padded), plan)
    second, third = (program.repeat.modules(number)[0] for number in (1, 2))
    cuts = ([second, third], [third], [second])
    plans = [replace(plan, stages=order.stages(named_cuts(order, modules))) for modules in cuts]
    return list(zip(plans, unverified_in_stages(program, plans), strict=True))


def _measured(cuts: Sequence[tuple[Plan, Program]], devices: StageDevices, split: bool) -> dict[Cluster, ThreeCuts]:
    """The three cuts on each kind of devices; the links between kinds are those of the whole model's stages."""
    first = devices.only(devices.machines[0])
    base = [(measured(own, local, first, [0] * len(own.stages), split), own, local) for own, local in cuts]
    found: dict[Cluster, ThreeCuts] = {}
    for machine in dict.fromkeys(devices.machines):
        on = devices.only(machine)
        each, early, late = (
            cut if on == first else replace(cut, times=_times(own, local, on, split)) for cut, own, local in base
        )
        found[machine] = each, early, late
    return found


def _times(plan: Plan, local: Program, devices: StageDevices, split: bool) -> list[StageTime]:
    cutting, stages = StageGraphs(local, len(plan.stages)), len(plan.stages)
    return times_on(cutting, plan, devices, [0] * stages, split, together=plan.overlap)


def _of_three(plan: Plan, repeat: RepeatedLayers) -> Plan:
    """A plan of the whole model for the three blocks that are captured."""

    def own(table: Mapping[str, Any]) -> dict[str, Any]:
        inside = {n: v for n, v in table.items() if repeat.block(n)[0] < 0}
        for name in table:
            number, place = repeat.block(name)
            if number == 0:
                for i, whole in enumerate((0, 1, repeat.blocks - 1)):
                    short = repeat.name(i, place)
                    inside[short] = table.get(repeat.name(whole, place), table.get(short))
        return inside

    return replace(plan, parameters=own(plan.parameters), padding=own(plan.padding))


def _shared_out(own: Sequence[Sequence[tuple[float, ThreeCuts]]], blocks: int, weights: Sequence[float]) -> list[int]:
    """How many blocks each stage has, so that the slowest is as fast as can be."""

    def seconds(cut: StagePlan, stage: int) -> float:
        return cut.times[stage].forward + cut.times[stage].backward

    stages = len(own)
    block = [
        sum(share * (seconds(early, FIRST) - seconds(each, FIRST)) for share, (each, early, _) in ways) for ways in own
    ]
    first, last = seconds(own[0][0][1][0], FIRST), seconds(own[-1][-1][1][0], LAST)
    more = [first - block[0], *[0.0] * (stages - 2), last - block[-1]]  # embeddings and the loss, besides blocks
    found, weights = [1] * stages, weights or [1.0] * stages
    for _ in range(blocks - stages):  # the next block goes where it hurts least; on a draw, to the later stage
        least = min(range(stages), key=lambda s: (weights[s] * (more[s] + (found[s] + 1) * block[s]), -s))
        found[least] += 1
    return found


def _of_blocks(known: Sequence[tuple[int, tuple[Sequence[_T], ...]]], position: int) -> _T:
    """Figures of a stage with so many blocks of each way of treatment.

    Args:
        known: of each way, how many blocks, and the figures of the stages of `ThreeCuts`.
        position: of the stage.
    """
    own = -1 if position == LAST else 0  # the model's last block is treated in the last way
    result = known[own][1][0][position]
    for i, (n, (each, early, late)) in enumerate(known):
        times = n - (i == own % len(known))  # one block is in the result already
        # A block in the middle adds what it does at the end: the first stage returns no gradient of its input.
        one, two = (each[FIRST], early[FIRST]) if position == FIRST else (each[LAST], late[1])
        result = _with(result, one, two, times)
    return result


def _with(a: _T, one: _T, two: _T, times: float) -> _T:
    """Figures, and so often what those of two are more than those of one."""

    def add(a: Any, one: Any, two: Any) -> Any:
        if isinstance(a, Mapping):
            return {k: add(a.get(k, 0.0), one.get(k, 0.0), two.get(k, 0.0)) for k in {**a, **two}}
        return max(0.0, a + times * (two - one))

    names = [f.name for f in fields(a)]
    return type(a)(**{name: add(getattr(a, name), getattr(one, name), getattr(two, name)) for name in names})


def _stages(three: tuple[Stage, ...], ends: Sequence[int], repeat: RepeatedLayers) -> tuple[Stage, ...]:
    """Stages of the whole model: those of three blocks name what is before the blocks and after them."""
    before = tuple(m for m in three[0].modules if m not in repeat.modules(0))
    after = tuple(m for m in three[-1].modules if m not in repeat.modules(2))
    found = [tuple(m for i in range(a, b) for m in repeat.modules(i)) for a, b in itertools.pairwise(ends)]
    found[0] = (*before, *found[0])
    found[-1] = (*found[-1], *after)
    return tuple(Stage(modules) for modules in found)


def _holders(
    padded: Program, plan: Plan, three: Mapping[str, int | None], ends: Sequence[int], repeat: RepeatedLayers
) -> dict[str, int | None]:
    """The stage that holds each parameter of the whole model."""
    stages = len(ends) - 1
    found: dict[str, int | None] = {}
    for node, spec in zip(padded.placeholders, padded.inputs, strict=True):
        if spec.kind != "parameter":
            continue
        own = three[spec.name]
        for name in repeat.names(spec.name):
            number, _ = repeat.block(name)
            if own is None or is_held_by_all(node.meta["val"].shape, stages):
                found[name] = None
            else:
                found[name] = bisect_right(ends, number) - 1 if number >= 0 else (0, 1, stages - 1)[own]
    return {name: found[name] for name in plan.parameters}
