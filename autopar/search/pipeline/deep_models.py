"""`RepeatedStages`: a deep model cut into stages between its alike blocks, of which three are captured.

The three are cut in three ways: each a stage, or two of them one. What the second block of a stage adds is what every
further one adds, to its seconds and to its bytes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

from autopar.costs.cluster import Link
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan, Scatter, Stage
from autopar.ir.program import Program, RepeatedLayers
from autopar.memory.recompute import uniform
from autopar.passes.pad_dims import pad
from autopar.pipeline.stage_graphs import StageGraphs, is_held_by_all
from autopar.search.peak import unverified_in_stages
from autopar.search.pipeline.cuts import line_of, named_cuts
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.stage_memory import StageMemory, held_by
from autopar.search.pipeline.stage_plan import StagePlan, homes_of, in_parts
from autopar.search.pipeline.stage_times import StageTime, taken_by
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

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
        parts = [(share, part) for share, part in uniform(plan, count) if share > 0]
        kinds = [(share, _rewritten(program, self.padded,
                                    replace(_of_three(plan, repeat), recompute=part.recompute)))
                 for share, part in parts]  # fmt: skip
        self.whole = [(share, _ways(cuts, link, split)) for share, cuts in kinds]
        self.apart: list[tuple[float, _Ways]] = []  # where stages send in parts; empty: that makes no difference
        apart = [(share, [in_parts(p, own, _everywhere(own, shape.axis))[-1] for own, p in cuts])
                 for share, cuts in kinds]  # fmt: skip
        if any(own.scatter for _, cuts in apart for own, _ in cuts):
            self.apart = [(share, _ways(cuts, link, split)) for share, cuts in apart]

    def staged(self, shape: PipelineShape, ways: Sequence[Scatter]) -> list[StagePlan]:
        """The stages of the whole model, cut as `stage_plan.staged` does: as it is, and sent in parts.

        Args:
            shape: of the stages, no more than there are blocks.
            ways: to send in parts.
        """
        found = [_of_whole(self.padded, self.plan, shape, self.whole)]
        if self.apart:
            found += [_of_whole(self.padded, replace(self.plan, scatter=w), shape, self.apart) for w in ways]
        return found


def _everywhere(plan: Plan, axis: str) -> list[Scatter]:
    """To send in parts between all stages."""
    return [Scatter(axis, tuple(range(len(plan.stages) - 1)))]


def _of_whole(padded: Program, plan: Plan, shape: PipelineShape, ways: Sequence[tuple[float, _Ways]]) -> StagePlan:
    """The stages of the whole model, from those of three blocks, which are treated in so many ways."""
    repeat = padded.repeat
    assert repeat is not None
    blocks = _shared_out(ways, repeat.blocks, shape.stages)
    ends = list(itertools.accumulate(blocks, initial=0))
    shares = itertools.accumulate((share for share, _ in ways), initial=0.0)
    borders = [round(share * repeat.blocks) for share in shares]  # the first blocks are treated in the first way
    held: list[StageMemory] = []
    taken: list[StageTime] = []
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        numbers = [max(0, min(end, stop) - max(begin, start)) for start, stop in itertools.pairwise(borders)]
        place = 0 if stage == 0 else 2 if stage == len(blocks) - 1 else 1
        held.append(_of_blocks([(n, w.held) for n, (_, w) in zip(numbers, ways, strict=True)], place))
        taken.append(_of_blocks([(n, w.taken) for n, (_, w) in zip(numbers, ways, strict=True)], place))
    first = ways[0][1]
    plan = replace(plan, stages=_stages(first.stages, ends, repeat))
    holders = _holders(padded, plan, first.holders, ends, repeat)
    homes = {n: None if s is None else (0, 1, len(blocks) - 1)[s] for n, s in first.homes.items()}
    return StagePlan(plan, shape, held, taken, holders, homes)


@dataclass(frozen=True)
class _Figures(Generic[_T]):
    """Of stages with one block and with two: at the beginning, in the middle (one only), at the end."""

    one: tuple[_T, _T, _T]
    two: tuple[_T, _T]

    def more(self, place: int) -> tuple[_T, _T]:
        """Figures of a stage, and of one with a block more, whose difference is that of a block.

        A block in the middle adds what it does at the end: the first stage returns no gradient of its input.
        """
        return (self.one[0], self.two[0]) if place == 0 else (self.one[2], self.two[1])


@dataclass(frozen=True)
class _Ways:
    """The three blocks, cut in three ways under one plan."""

    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int | None]
    stages: tuple[Stage, ...]
    held: _Figures[StageMemory]
    taken: _Figures[StageTime]


def _rewritten(program: Program, padded: Program, plan: Plan) -> list[tuple[Plan, Program]]:
    """The three blocks under plans that cut them in three ways."""
    assert program.repeat is not None
    line, path = line_of(padded, analyze(padded), plan), program.repeat.path
    cuts = ([f"{path}.1", f"{path}.2"], [f"{path}.2"], [f"{path}.1"])
    plans = [replace(plan, stages=line.stages(named_cuts(line, modules))) for modules in cuts]
    return list(zip(plans, unverified_in_stages(program, plans), strict=True))


def _ways(cuts: Sequence[tuple[Plan, Program]], link: Link, split: bool) -> _Ways:
    found = []
    for own, local in cuts:
        cutting = StageGraphs(local, len(own.stages))
        found.append((cutting, held_by(cutting, own, split), taken_by(cutting, own, link, split)))
    (cutting, held, taken), (_, held_early, taken_early), (_, held_late, taken_late) = found
    parameters = [i.name for i in cutting.inputs.values() if i.kind == "parameter"]
    return _Ways(
        {name: cutting.holders(name) for name in parameters},
        homes_of(cutting),
        cuts[0][0].stages,
        _Figures((held[0], held[1], held[2]), (held_early[0], held_late[1])),
        _Figures((taken[0], taken[1], taken[2]), (taken_early[0], taken_late[1])),
    )


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


def _shared_out(ways: Sequence[tuple[float, _Ways]], blocks: int, stages: int) -> list[int]:
    """How many blocks each stage has, so that the slowest is as fast as can be."""

    def seconds(taken: StageTime) -> float:
        return taken.forward + taken.backward

    first = ways[0][1].taken
    last = ways[-1][1].taken
    block = sum(share * (seconds(w.taken.two[0]) - seconds(w.taken.one[0])) for share, w in ways)
    more = [seconds(first.one[0]) - block, *[0.0] * (stages - 2), seconds(last.one[2]) - block]
    found = [1] * stages
    for _ in range(blocks - stages):  # the next block goes where it hurts least; on a draw, to the later stage
        least = min(range(stages), key=lambda s: (more[s] + (found[s] + 1) * block, -s))
        found[least] += 1
    return found


def _of_blocks(parts: Sequence[tuple[int, _Figures[_T]]], place: int) -> _T:
    """Figures of a stage with so many blocks of each kind."""
    known = [(n, figures) for n, figures in parts if n > 0]
    own = -1 if place == 2 else 0  # the model's last block is of the last kind
    result = known[own][1].one[place]
    for i, (n, figures) in enumerate(known):
        times = n - (i == own % len(known))
        result = _with(result, *figures.more(place), times)
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
    """Stages of the whole model: those of three blocks name what is in front of the blocks and behind them."""
    before = tuple(m for m in three[0].modules if m != f"{repeat.path}.0")
    behind = tuple(m for m in three[-1].modules if m != f"{repeat.path}.2")
    found = [tuple(f"{repeat.path}.{i}" for i in range(a, b)) for a, b in itertools.pairwise(ends)]
    found[0] = (*before, *found[0])
    found[-1] = (*found[-1], *behind)
    return tuple(Stage(modules) for modules in found)


def _holders(
    padded: Program, plan: Plan, three: Mapping[str, tuple[int, ...]], ends: Sequence[int], repeat: RepeatedLayers
) -> dict[str, int | None]:
    """The stage that holds each parameter of the whole model."""
    stages = len(ends) - 1
    found: dict[str, int | None] = {}
    for node, spec in zip(padded.placeholders, padded.inputs, strict=True):
        if spec.kind != "parameter":
            continue
        own = three[spec.name]
        everywhere = len(own) == 3 or is_held_by_all(node.meta["val"].shape, stages)
        for name in repeat.names(spec.name):
            number = name.removeprefix(f"{repeat.path}.").partition(".")[0]
            inside = name.startswith(f"{repeat.path}.")
            stage = bisect_right(ends, int(number)) - 1 if inside else (0, 1, stages - 1)[own[0]]
            found[name] = None if everywhere else stage
    return {name: found[name] for name in plan.parameters}
