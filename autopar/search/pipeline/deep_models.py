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

from autopar.costs.cluster import Link
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan, Scatter, Stage
from autopar.ir.program import Program, RepeatedLayers
from autopar.memory.recompute import uniform
from autopar.passes.pad_dims import pad
from autopar.pipeline.stage_graphs import is_held_by_all
from autopar.search.peak import unverified_in_stages
from autopar.search.pipeline.cuts import forward_order, named_cuts
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.stage_memory import StageMemory
from autopar.search.pipeline.stage_plan import StagePlan, in_parts, measured
from autopar.search.pipeline.stage_times import StageTime
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

ThreeCuts = tuple[StagePlan, StagePlan, StagePlan]
"""The three blocks under one plan: each a stage; the first two one stage; the last two one stage."""

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
        raise InfeasibleError(
            f"{shape.stages} stages of at least a block each, and {repeat.path} has {repeat.blocks} blocks; ask "
            "for fewer stages"
        )


class RepeatedStages:
    """A program that leaves blocks out, cut in three ways under a plan."""

    def __init__(self, program: Program, plan: Plan, shape: PipelineShape, link: Link, split: bool) -> None:
        """Rewrite the blocks.

        Args:
            program: of one microbatch.
            plan: for the devices of a stage, if these had the whole model.
            shape: of the stages, however many they are on a device.
            link: between stages.
            split: whether the backward may be in two parts.
        """
        repeat = program.repeat
        assert repeat is not None
        self.plan, self.padded = plan, pad(program, plan.padding)
        count = layer_classes(self.padded, analyze(self.padded)).count
        # Layers may be treated in several ways: some recompute what others save. Each way is measured by itself.
        parts = [(share, part) for share, part in uniform(plan, count) if share > 0]
        ways = [(share, _rewritten(program, self.padded, replace(_of_three(plan, repeat), recompute=part.recompute)))
                for share, part in parts]  # fmt: skip
        self.whole = [(share, _measured(cuts, link, split)) for share, cuts in ways]
        self.apart: list[tuple[float, ThreeCuts]] = []  # where stages send in parts; empty: that makes no difference
        apart = [(share, [in_parts(p, own, _everywhere(own, shape.axis))[-1] for own, p in cuts])
                 for share, cuts in ways]  # fmt: skip
        if any(own.scatter for _, cuts in apart for own, _ in cuts):
            self.apart = [(share, _measured(cuts, link, split)) for share, cuts in apart]

    def staged(self, shape: PipelineShape, ways: Sequence[Scatter]) -> list[StagePlan]:
        """The stages of the whole model, cut as `stage_plan.staged` does: as it is, and sent in parts.

        Args:
            shape: of the stages, no more than there are blocks; where it names modules, stages begin at these blocks.
            ways: to send in parts.
        """
        found = [_of_whole(self.padded, self.plan, shape, self.whole)]
        if self.apart:
            found += [_of_whole(self.padded, replace(self.plan, scatter=w), shape, self.apart) for w in ways]
        return found


def _everywhere(plan: Plan, axis: str) -> list[Scatter]:
    """To send in parts between all stages."""
    return [Scatter(axis, tuple(range(len(plan.stages) - 1)))]


def _of_whole(padded: Program, plan: Plan, shape: PipelineShape, ways: Sequence[tuple[float, ThreeCuts]]) -> StagePlan:
    """The stages of the whole model, from those of three blocks, which are treated in so many ways.

    Args:
        padded: the program with three blocks.
        plan: of the whole model.
        shape: of the stages.
        ways: in which blocks are treated, each with the share of the blocks that are; the first blocks in the first.
    """
    repeat = padded.repeat
    assert repeat is not None
    if shape.modules:
        ends = [0, *(int(m.removeprefix(f"{repeat.path}.")) for m in shape.modules), repeat.blocks]
    else:
        ends = list(itertools.accumulate(_shared_out(ways, repeat.blocks, shape.stages), initial=0))
    last = len(ends) - 2
    shares = itertools.accumulate((share for share, _ in ways), initial=0.0)
    borders = [round(share * repeat.blocks) for share in shares]
    memory: list[StageMemory] = []
    times: list[StageTime] = []
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        numbers = [max(0, min(end, stop) - max(begin, start)) for start, stop in itertools.pairwise(borders)]
        position = FIRST if stage == 0 else LAST if stage == last else MIDDLE
        known = [(n, cuts) for n, (_, cuts) in zip(numbers, ways, strict=True) if n > 0]
        memory.append(_of_blocks([(n, tuple(cut.memory for cut in cuts)) for n, cuts in known], position))
        times.append(_of_blocks([(n, tuple(cut.times for cut in cuts)) for n, cuts in known], position))
    each = ways[0][1][0]
    plan = replace(plan, stages=_stages(each.plan.stages, ends, repeat))
    holders = _holders(padded, plan, each.holders, ends, repeat)
    homes = {n: None if s is None else (0, 1, last)[s] for n, s in each.homes.items()}
    return StagePlan(plan, memory, times, holders, homes)


def _rewritten(program: Program, padded: Program, plan: Plan) -> list[tuple[Plan, Program]]:
    """The three blocks under plans that cut them as `ThreeCuts` says."""
    assert program.repeat is not None
    order, path = forward_order(padded, analyze(padded), plan), program.repeat.path
    cuts = ([f"{path}.1", f"{path}.2"], [f"{path}.2"], [f"{path}.1"])
    plans = [replace(plan, stages=order.stages(named_cuts(order, modules))) for modules in cuts]
    return list(zip(plans, unverified_in_stages(program, plans), strict=True))


def _measured(cuts: Sequence[tuple[Plan, Program]], link: Link, split: bool) -> ThreeCuts:
    each, early, late = (measured(own, local, link, split) for own, local in cuts)
    return each, early, late


def _of_three(plan: Plan, repeat: RepeatedLayers) -> Plan:
    """A plan of the whole model for the three blocks that are captured."""

    def own(table: Mapping[str, Any]) -> dict[str, Any]:
        inside = {n: v for n, v in table.items() if not n.startswith(f"{repeat.path}.")}
        for name in table:
            number, _, rest = name.removeprefix(f"{repeat.path}.").partition(".")
            if name not in inside and number == "0":
                for i, whole in enumerate((0, 1, repeat.blocks - 1)):
                    short = f"{repeat.path}.{i}.{rest}"
                    inside[short] = table.get(f"{repeat.path}.{whole}.{rest}", table.get(short))
        return inside

    return replace(plan, parameters=own(plan.parameters), padding=own(plan.padding))


def _shared_out(ways: Sequence[tuple[float, ThreeCuts]], blocks: int, stages: int) -> list[int]:
    """How many blocks each stage has, so that the slowest is as fast as can be."""

    def seconds(cut: StagePlan, stage: int) -> float:
        return cut.times[stage].forward + cut.times[stage].backward

    block = sum(share * (seconds(early, FIRST) - seconds(each, FIRST)) for share, (each, early, _) in ways)
    first, last = seconds(ways[0][1][0], FIRST), seconds(ways[-1][1][0], LAST)
    more = [first - block, *[0.0] * (stages - 2), last - block]  # embeddings and the loss, besides blocks
    found = [1] * stages
    for _ in range(blocks - stages):  # the next block goes where it hurts least; on a draw, to the later stage
        least = min(range(stages), key=lambda s: (more[s] + (found[s] + 1) * block, -s))
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
    before = tuple(m for m in three[0].modules if m != f"{repeat.path}.0")
    after = tuple(m for m in three[-1].modules if m != f"{repeat.path}.2")
    found = [tuple(f"{repeat.path}.{i}" for i in range(a, b)) for a, b in itertools.pairwise(ends)]
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
            number = name.removeprefix(f"{repeat.path}.").partition(".")[0]
            inside = name.startswith(f"{repeat.path}.")
            if own is None or is_held_by_all(node.meta["val"].shape, stages):
                found[name] = None
            else:
                found[name] = bisect_right(ends, int(number)) - 1 if inside else (0, 1, stages - 1)[own]
    return {name: found[name] for name in plan.parameters}
