"""The seconds of a step whose collectives overlap kernels: for each region, the longest of what must follow in a row.

In a region the device computes ``K + F`` seconds, ``F`` of it for gradients of weights alone, and the link of an axis
works for ``P`` seconds on parameters, ``G`` on gradients, ``W`` on activations of the backward pass and ``B`` on those
of the forward pass. Kernels wait for ``B``. While they wait for ``W``, gradients of weights are computed. ``P`` and
``G`` hide. So a region takes at least, and with the order of `overlap_collectives` about,

    max(K + F + B, K + B + W, P + G + W + B + I on each axis)

where ``I`` is sent within operators, as in a ring of attention: what of it their own kernels do not hide is in ``K``,
but a link that it takes is taken. ``B`` is all that is sent, whatever chunks hide of it
(`autopar.passes.collectives.chunk_collectives`), and where what is gathered before the first kernel, and reduced behind
the last, hides behind nothing. Sums of ``m`` microbatches are reduced during the last of them:
``(K + F + B) (m - 1) / m + G`` is another row on each axis.

The maximum of rows is at least each weighted mean of them: with any weights, the cost of a plan is bounded by one that
is a sum over operators and redistributions (Lagrange), which the solver minimizes. Weights at which the best plan's own
rows are its longest prove it optimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.search.overlap.regions import BLOCKING, GATHER, GRADIENT, WAITED, Regions

Floats = NDArray[np.float64]

KERNELS, FILLING = 0, 1
"""Features of a region: seconds of kernels, and of those that compute nothing but gradients of weights."""

_KINDS = 5


def feature(kind: int, axis: int, axes: int) -> int:
    """The feature of a kind of communication, see `regions`, on an axis."""
    return 2 + kind * axes + axis


def no_features(axes: int) -> Floats:
    """Of a region in which nothing happens."""
    return np.zeros(2 + _KINDS * axes)


@dataclass(frozen=True, eq=False)
class StepTime:
    """How the time of a step follows from the seconds in its regions.

    Attributes:
        regions: of a program.
        axes: how many axes the mesh has.
        microbatches: in a step.
        units: blocks of each region, of the whole model.
    """

    regions: Regions
    axes: int
    microbatches: int = 1
    units: Mapping[str, float] = field(default_factory=dict)

    def rows(self, region: str) -> Floats:
        """``[rows, features]``: seconds of each of a region's rows are the sum of its features with these factors."""
        axes, share = self.axes, 1 / max(self.units.get(region, 1), 1)
        compute, filled = no_features(axes), no_features(axes)
        compute[[KERNELS, FILLING]] = 1
        filled[KERNELS] = 1
        links = []
        for axis in range(axes):
            compute[feature(BLOCKING, axis, axes)] = filled[feature(BLOCKING, axis, axes)] = 1
            filled[feature(WAITED, axis, axes)] = 1
            link = no_features(axes)
            link[[feature(kind, axis, axes) for kind in range(_KINDS)]] = 1
            links.append(link)
            exposed = share * (region == self.regions.opening), share * (region == self.regions.closing)
            for kind, part in zip((GATHER, GRADIENT), exposed, strict=True):
                for row in (compute, filled):
                    row[feature(kind, axis, axes)] = part
        last = []
        if self.microbatches > 1:
            for axis in range(axes):
                row = compute * (1 - 1 / self.microbatches)
                row[feature(GRADIENT, axis, axes)] = 1
                last.append(row)
        return np.array([compute, filled, *links, *last])

    def seconds(self, features: Mapping[str, Floats]) -> float:
        """Seconds of a step, from the features of its regions."""
        return float(sum((self.rows(region) @ own).max() for region, own in features.items()))
