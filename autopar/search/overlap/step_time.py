"""The seconds of a step whose collectives overlap kernels: for each region, the longest of what must follow in a row.

In a region the device computes ``K + F`` seconds, ``F`` of it for gradients of weights alone, and the link of an axis
works for ``P`` seconds on parameters, ``G`` on gradients, ``W`` on activations of the backward pass and ``B`` on those
of the forward pass, and for ``C`` on such of both that chunks of products hide
(`autopar.passes.collectives.chunk_collectives`). Kernels wait for ``B``. While they wait for ``W``, gradients of
weights are computed. All else hides. So a region takes at least, and with the order of `overlap_collectives` about,

    max(K + F + B, K + B + W, P + G + W + B + C + I on each axis)

What is gathered for the first unit of a step, or re-gathered for the first of its backward pass, hides behind nothing,
and what is gathered for the first unit of the next region, such as the first of all blocks, behind kernels of the
first region alone: it counts there. Likewise gradients of the last unit are reduced behind nothing, and those of the
last unit of the region before beside the last region. Small units are sent together, see `sent_in_buckets`: what is in
the first one's bucket hides behind nothing, too, if a plan sends that one. In a pipeline each graph of a stage begins,
and the last one of a step ends, in such a way. ``I`` is sent within operators, as in a ring of attention: what of it
their own kernels do not hide is in ``K``, but a link that it takes is taken; the search leaves it out. Of what else
hides, the first two rows have the share for which its link occupies the device (`autopar.costs.device.Link`). Sums of
``m`` microbatches are reduced during the last of them: ``(K + F + B) (m - 1) / m + G`` is another row on each axis.

The maximum of rows is at least each weighted mean of them: with any weights, the cost of a plan is bounded by one that
is a sum over operators and redistributions (Lagrange), which the solver minimizes. Weights at which the best plan's own
rows are its longest prove it optimal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.costs.device import Link
from autopar.ir.program import Program
from autopar.passes.collectives.bucket_collectives import bucket_bytes
from autopar.search.overlap.buckets import Sent, Unit, sent_in_buckets
from autopar.search.overlap.regions import (
    BACKWARD,
    BEFORE,
    BLOCKING,
    BLOCKING_KINDS,
    CHUNKED,
    FORWARD,
    GATHER,
    GRADIENT,
    OUTSIDE,
    WAITED,
    Regions,
    regions_of,
)

Floats = NDArray[np.float64]

KERNELS, FILLING = 0, 1
"""Features of a region: seconds of kernels, and of those that compute nothing but gradients of weights."""

_KINDS = 6


def feature(kind: int, axis: int, axes: int) -> int:
    """The feature of a kind of communication, see `regions`, on an axis."""
    return 2 + kind * axes + axis


def no_features(axes: int) -> Floats:
    """Of a region in which nothing happens."""
    return np.zeros(2 + _KINDS * axes)


def step_time_of(program: Program, sizes: Sequence[int], links: Sequence[Link], graphs: int = 1) -> StepTime:
    """How the time of a step of the whole model follows from its regions.

    Args:
        program: canonical program of one microbatch.
        sizes: devices along each of the mesh's axes.
        links: of these axes.
        graphs: see `StepTime`.
    """
    regions, repeat, units = regions_of(program), program.repeat, regions_of(program).units
    if repeat is not None:
        less = regions_of(repeat.shorter).units
        counts = {name: round(repeat.extrapolate(len(own), len(less.get(name, ())))) for name, own in units.items()}
        units = {name: own[:1] * counts[name] if len(own) < counts[name] else own for name, own in units.items()}
    # Other programs are cut anywhere: a stage may begin with less than a block.
    count, occupies = 1 if repeat is None else graphs, tuple(link.occupies for link in links)
    limits = tuple(map(bucket_bytes, sizes, links))
    return StepTime(regions, len(links), program.part.count, units, count, occupies, limits)


@dataclass(frozen=True, eq=False)
class StepTime:
    """How the time of a step follows from the seconds in its regions.

    Attributes:
        regions: of a program.
        axes: how many axes the mesh has.
        microbatches: in a step.
        units: of each region, see `Regions`, of the whole model.
        graphs: so many graphs of stages the blocks are cut into.
        occupies: of each axis's link, see `autopar.costs.device.Link`; empty: nothing.
        limits: bytes of a bucket on each axis; empty: each unit is sent alone.
        begun: kinds of communication, and whether of the backward pass, with one of which the pass is known to begin,
            or of gradients to end, see `sent_in_buckets`.
    """

    regions: Regions
    axes: int
    microbatches: int = 1
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    graphs: int = 1
    occupies: tuple[float, ...] = ()
    limits: tuple[float, ...] = ()
    begun: frozenset[tuple[int, bool]] = frozenset()

    def messages(self, region: str, kind: int) -> Floats:
        """How many messages each move in a region counts as, on each axis: parameters and gradients travel together."""
        sent = [self._sent(kind, axis).messages.get(region, 1.0) for axis in range(self.axes)]
        return np.ones(self.axes) if kind in BLOCKING_KINDS else np.array(sent)

    def rows(self, region: str) -> Mapping[str, Floats]:
        """Seconds of a region's rows are the sum of features with these factors, ``[rows, features]`` by region.

        Most are of the region's own features; the first and the last region have a unit of their neighbour, too.
        """
        if region not in self._rows:
            self._rows[region] = self._factors(region)
        return self._rows[region]

    def seconds_of_rows(self, region: str, features: Mapping[str, Floats]) -> Floats:
        """Seconds of each of a region's rows, from the features of all regions."""
        rows = self.rows(region)
        parts = (factors @ features[r] for r, factors in rows.items() if r in features)
        return np.asarray(sum(parts, np.zeros(len(rows[region]))))

    def affected(self, region: str) -> tuple[str, ...]:
        """The regions with rows that a region's features are in."""
        found = [region]
        for kind in (GATHER, GRADIENT):
            for axis in range(self.axes):
                found += self._sent(kind, axis).beside.get(region, ())
        for end in (self.regions.opening, self.regions.closing):
            found += [end[0]] if region == end[1] != end[0] else []
        return tuple(dict.fromkeys(found))

    def chained(self, region: str) -> bool:
        """Whether what a unit of the next, or the last, region communicates probably takes longer than the kernels."""
        ends = (self.regions.opening, self.regions.closing)
        return region not in self.regions.working and any(region == end[0] != end[1] for end in ends)

    def seconds(self, features: Mapping[str, Floats]) -> float:
        """Seconds of a step, from the features of its regions."""
        regions = dict.fromkeys(r for own in features for r in self.affected(own))
        return float(sum(self.seconds_of_rows(region, features).max() for region in regions))

    _rows: dict[str, Mapping[str, Floats]] = field(default_factory=dict, init=False, repr=False)

    _known: dict[tuple[int, int], Sent] = field(default_factory=dict, init=False, repr=False)

    def _sent(self, kind: int, axis: int) -> Sent:
        """How parameters, in both passes, or gradients are sent along an axis."""
        if (kind, axis) not in self._known:
            limit = self.limits[axis] if self.limits else 0.0
            forward, backward = ({r: own for r, own in self.units.items() if r.endswith(end)}
                                 for end in (FORWARD, BACKWARD))  # fmt: skip
            per_graph = None if self.graphs == 1 else max(self._blocks(FORWARD) // self.graphs, 1)
            together = partial(sent_in_buckets, limit=limit, apart=per_graph)
            first, second = ((kind, late) in self.begun for late in (False, True))
            if kind == GRADIENT:
                found = together(backward, ends=self.regions.closing, late=True, first_is_sent=second)
            else:
                turning = (self.regions.turning,) * 2
                found = together(forward, ends=self.regions.opening, first_is_sent=first)
                found |= together(backward, ends=turning, first_is_sent=second)
            self._known[kind, axis] = found
        return self._known[kind, axis]

    def _blocks(self, end: str) -> int:
        """How many blocks a pass has."""
        return sum(len(own) for r, own in self.units.items() if r.endswith(end) and not r.startswith(OUTSIDE))

    def _exposed(self, region: str, sent: Sent) -> float:
        """Of what a region gathers or reduces, that which nothing hides as a stage's graph begins or ends with it."""
        if self.graphs == 1 or region == BEFORE or region.startswith(OUTSIDE):
            return 0.0
        blocks = self._blocks(FORWARD if region.endswith(FORWARD) else BACKWARD)
        share = sent.most.get(region, 0.0) * len(self.units.get(region, ())) / max(blocks, 1)
        return min((self.graphs - 1) * share, 1.0)

    def _factors(self, region: str) -> Mapping[str, Floats]:
        axes, each, early = self.axes, range(self.axes), 1 - 1 / self.microbatches
        (first, second), (last, before) = self.regions.opening, self.regions.closing
        final = 2 + axes if self.microbatches > 1 else None
        count = 2 + axes * (1 if final is None else 2)
        chains = {other: (kind, count + i) for i, (kind, other) in enumerate(
            [(GATHER, second)] * (region == first != second) + [(GRADIENT, before)] * (region == last != before)
        )}  # fmt: skip
        found = defaultdict[str, Floats](lambda: np.zeros((count + len(chains), len(no_features(axes)))))
        own = found[region]
        own[:2, KERNELS] = own[0, FILLING] = 1
        for axis in each:
            slowed = self.occupies[axis] if self.occupies else 0.0
            own[2 + axis, [feature(kind, axis, axes) for kind in range(_KINDS)]] = 1
            own[:2, feature(BLOCKING, axis, axes)] = own[1, feature(WAITED, axis, axes)] = 1
            own[0, feature(WAITED, axis, axes)] = own[:2, feature(CHUNKED, axis, axes)] = slowed
            for kind in (GATHER, GRADIENT):
                at, sent = feature(kind, axis, axes), self._sent(kind, axis)
                shown = sent.shown.get(region, {})
                part = min(shown.get(region, 0.0) + self._exposed(region, sent), 1.0)
                own[:2, at] = part + (1 - max(part, sum(shown.values()))) * slowed
                own[2 + axis, at] = sent.beside.get(region, {region: 1.0}).get(region, 0.0)
                for other, homes in sent.beside.items():
                    if other != region and region in homes:
                        found[other][:2, at] = sent.shown.get(other, {}).get(region, 0.0)
                        found[other][2 + axis, at] = homes[region]
        if final is not None:
            for factors in found.values():
                factors[final : final + axes] = factors[0] * early
                for axis in each:
                    at = feature(GRADIENT, axis, axes)
                    factors[final + axis, at] = factors[2 + axis, at]
        # One value is gathered, or reduced, along one axis after the other: its own the last axis first, or last.
        for other, (kind, row) in chains.items():
            if kind == GRADIENT:
                own[row] = own[0] * early
                own[row, [feature(kind, axis, axes) for axis in each]] = 0
            at = feature(kind, axes - 1, axes)
            own[row, at] = own[0, at]
            for axis in each:
                at = feature(kind, axis, axes)
                found[other][row, at] = found[other][2 + axis, at]
        return dict(found)
