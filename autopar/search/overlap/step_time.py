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
last unit of the region before beside the last region. In a pipeline each graph of a stage begins, and the last one of
a step ends, in such a way. ``I`` is sent within operators, as in a ring of attention: what of it their own kernels do
not hide is in ``K``, but a link that it takes is taken; the search leaves it out. Of what else hides, the first two
rows have the share for which its link occupies the device (`autopar.costs.device.Link`). Sums of ``m`` microbatches
are reduced during the last of them: ``(K + F + B) (m - 1) / m + G`` is another row on each axis.

The maximum of rows is at least each weighted mean of them: with any weights, the cost of a plan is bounded by one that
is a sum over operators and redistributions (Lagrange), which the solver minimizes. Weights at which the best plan's own
rows are its longest prove it optimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.costs.device import Link
from autopar.ir.program import Program
from autopar.search.overlap.regions import (
    BACKWARD,
    BEFORE,
    BLOCKING,
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


def step_time_of(program: Program, links: Sequence[Link], graphs: int = 1) -> StepTime:
    """How the time of a step of the whole model follows from its regions.

    Args:
        program: canonical program of one microbatch.
        links: of the mesh's axes.
        graphs: see `StepTime`.
    """
    regions, repeat = regions_of(program), program.repeat
    units = regions.units if repeat is None else repeat.extrapolate(regions.units, regions_of(repeat.shorter).units)
    # Other programs are cut anywhere: a stage may begin with less than a block.
    count, occupies = 1 if repeat is None else graphs, tuple(link.occupies for link in links)
    return StepTime(regions, len(links), program.part.count, units, count, occupies)


@dataclass(frozen=True, eq=False)
class StepTime:
    """How the time of a step follows from the seconds in its regions.

    Attributes:
        regions: of a program.
        axes: how many axes the mesh has.
        microbatches: in a step.
        units: blocks of each region, of the whole model.
        graphs: so many graphs of stages the blocks are cut into.
        occupies: of each axis's link, see `autopar.costs.device.Link`; empty: nothing.
    """

    regions: Regions
    axes: int
    microbatches: int = 1
    units: Mapping[str, float] = field(default_factory=dict)
    graphs: int = 1
    occupies: tuple[float, ...] = ()

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

    def _share(self, region: str) -> float:
        """Of what a region gathers or reduces, that of one unit."""
        return 1 / max(self.units.get(region, 1), 1)

    def _exposed(self, region: str) -> float:
        """Of what a region gathers or reduces, that which nothing hides as a stage's graph begins or ends with it."""
        if self.graphs == 1 or region == BEFORE or region.startswith(OUTSIDE):
            return 0.0
        end = FORWARD if region.endswith(FORWARD) else BACKWARD
        blocks = sum(n for r, n in self.units.items() if r.endswith(end) and not r.startswith(OUTSIDE))
        return min((self.graphs - 1) / max(blocks, 1), 1.0)

    def _factors(self, region: str) -> Mapping[str, Floats]:
        axes, each = self.axes, range(self.axes)
        (first, second), (last, before) = self.regions.opening, self.regions.closing
        compute, filled = no_features(axes), no_features(axes)
        compute[[KERNELS, FILLING]] = 1
        filled[KERNELS] = 1
        exposed = self._exposed(region)
        ends = (GATHER, exposed + self._share(region) * (region in (first, self.regions.turning))), (
            GRADIENT, exposed + self._share(region) * (region == last)
        )  # fmt: skip
        # Units that are gathered beside the region before, or reduced beside the one behind.
        moved = {GATHER: self._share(region) * (region == second != first),
                 GRADIENT: self._share(region) * (region == before != last)}  # fmt: skip
        links, final = [], []
        for axis in each:
            compute[feature(BLOCKING, axis, axes)] = filled[feature(BLOCKING, axis, axes)] = 1
            slowed = self.occupies[axis] if self.occupies else 0.0
            compute[feature(WAITED, axis, axes)], filled[feature(WAITED, axis, axes)] = slowed, 1
            for kind, part in (*ends, (CHUNKED, 0.0)):
                shown = min(part, 1.0)
                compute[feature(kind, axis, axes)] = filled[feature(kind, axis, axes)] = shown + (1 - shown) * slowed
            link = no_features(axes)
            link[[feature(kind, axis, axes) for kind in range(_KINDS)]] = 1
            for kind, part in moved.items():
                link[feature(kind, axis, axes)] -= part
            links.append(link)
        early = 1 - 1 / self.microbatches
        for axis in each if self.microbatches > 1 else ():
            row = compute * early
            row[feature(GRADIENT, axis, axes)] = 1 - moved[GRADIENT]
            final.append(row)
        found = {region: [compute, filled, *links, *final]}
        # One value is gathered, or reduced, along one axis after the other.
        if region == first != second:
            self._add_neighbour(found, second, GATHER, no_features(axes), final=False)
        if region == last != before:
            own = compute * early
            own[[feature(GRADIENT, axis, axes) for axis in each]] = 0
            self._add_neighbour(found, before, GRADIENT, own, final=bool(final))
        return {r: np.array(rows) for r, rows in found.items()}

    def _add_neighbour(
        self, found: dict[str, list[Floats]], other: str, kind: int, own: Floats, *, final: bool
    ) -> None:
        """Add what a unit of a neighbour communicates to the rows of links, and a row for all links of that unit.

        Args:
            found: factors of the region's rows, by region.
            other: the neighbour.
            kind: of communication.
            own: what the region has in the row that is added.
            final: whether there are rows of the last microbatch.
        """
        (region, rows), axes, share = next(iter(found.items())), self.axes, self._share(other)
        beside = found.setdefault(other, [no_features(axes) for _ in rows])
        beside += [no_features(axes) for _ in range(len(rows) - len(beside))]
        for axis in range(axes):
            beside[2 + axis][feature(kind, axis, axes)] = share
            if final:
                beside[2 + axes + axis][feature(kind, axis, axes)] = share
        rows.append(own)
        # Its own value takes the last axis first, or last.
        own[feature(kind, axes - 1, axes)] = rows[0][feature(kind, axes - 1, axes)]
        for name, others in found.items():
            if name != region:
                others.append(no_features(axes))
        beside[-1][[feature(kind, axis, axes) for axis in range(axes)]] = share
