"""Robust least squares from several starts: costs have kinks, and a fit from one start stays on its side of them.

A step is the longer of what the device and what the host takes, so a figure of the shorter one has no gradient there:
a fit that starts where the device decides never learns of the host. Parameters are logarithms in units of their widths,
so that finite differences and steps of the fit are of the same size for all of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DIFFERENCE = 0.02
"""Of finite differences, in widths: larger than the kinks of tiles and algorithms, smaller than what a fit finds."""


@dataclass(frozen=True)
class Expected:
    """What is known of a parameter before the fit.

    Attributes:
        value: where it is expected; positive.
        width: how far off it may be, as a ratio's logarithm.
        highest: bound.
    """

    value: float
    width: float
    highest: float = np.inf


def fit_positive(
    expected: Mapping[str, Expected],
    errors: Callable[[dict[str, float]], Floats],
    *,
    weights: Floats,
    robust: Sequence[float],
    prior: float = 1.0,
    screened: int = 24,
    starts: int = 3,
) -> dict[str, float]:
    """Parameters under which the errors are least, by name.

    The loss is Cauchy's of the errors, for which outliers count the less the further they are, and the square of how
    far parameters are from what is expected. Points around what is expected are looked at, the best of them are starts
    of a first fit, and the best of those is refined, each time from the best point on a line along each parameter.

    Args:
        expected: what is known of each parameter.
        errors: of each row, logarithms of predicted over measured seconds, under given parameters.
        weights: as many rows each row counts as.
        robust: errors beyond which a row counts as an outlier, a round of the fit each; the last one decides.
        prior: how much what is expected counts.
        screened: points that are looked at, what is expected among them.
        starts: of the first round.

    Raises:
        ValueError: scipy is missing.
    """
    require_scipy()
    middle = np.log([e.value for e in expected.values()])
    width = np.array([e.width for e in expected.values()])
    upper = (np.log([e.highest for e in expected.values()]) - middle) / width

    def values(z: Floats) -> dict[str, float]:
        return dict(zip(expected, np.exp(middle + width * z).tolist(), strict=True))

    def fitted(z: Floats, outlier: float, evaluations: int) -> Any:
        return fit_within(
            lambda own: np.concatenate([errors(values(own)) / outlier, prior * own]),
            z, np.full(len(z), -np.inf), upper, loss=_cauchy_of(weights), evaluations=evaluations,
        )  # fmt: skip

    def loss(z: Floats, outlier: float) -> float:
        rows = np.log1p((errors(values(z)) / outlier) ** 2)
        return float((weights * rows).sum() + ((prior * z) ** 2).sum())

    first, *others = robust
    points = sorted(scattered(len(width), screened, upper), key=lambda z: loss(z, first))
    # What is expected is a start in any case: far points may look better only for what they share with it.
    begins = [np.zeros(len(width)), *points[:starts]]
    best = min((fitted(z, first, 15).x for z in begins), key=lambda z: loss(z, robust[-1]))
    for outlier in (first, *others):
        across = scanned(best, upper, partial(loss, outlier=outlier))
        best = min((best, fitted(across, outlier, 40).x), key=lambda z: loss(z, robust[-1]))
    return values(best)


def scanned(z: Floats, upper: Floats, loss: Callable[[Floats], float], reach: float = 3.0, step: float = 0.5) -> Floats:
    """The best point on a line along each parameter, one after the other: what lies beyond a kink has no slope here.

    Args:
        z: where to begin.
        upper: bounds.
        loss: to minimize.
        reach: how far the lines go to both sides of zero.
        step: between points.
    """
    for i in range(len(z)):
        line = [np.where(np.arange(len(z)) == i, min(at, upper[i]), z) for at in np.arange(-reach, reach + step, step)]
        z = min([z, *line], key=loss)
    return z


def scattered(dims: int, count: int, upper: Floats, spread: float = 2.0) -> list[Floats]:
    """Points that fill a box around zero evenly, the same each time (Halton's sequence); zero is the first.

    Args:
        dims: of the points.
        count: of the points.
        upper: bounds.
        spread: half of an edge of the box.
    """
    from scipy.stats import qmc

    box = qmc.Halton(dims, scramble=False).random(count)[1:]
    points = [np.zeros(dims), *(spread * (2 * box - 1))]
    return [np.minimum(p, upper - 1e-3) for p in points]


def _cauchy_of(weights: Floats) -> Callable[[Floats], Floats]:
    """Cauchy's loss of as many squared residuals as there are weights, with two derivatives; the rest stay squares."""

    def cauchy(squares: Floats) -> Floats:
        loss = np.stack([np.log1p(squares), 1 / (1 + squares), -1 / (1 + squares) ** 2])
        loss[:, : len(weights)] *= weights
        rest = squares[len(weights) :]
        loss[:, len(weights) :] = rest, np.ones_like(rest), np.zeros_like(rest)
        return loss

    return cauchy


def fit_within(
    residuals: Callable[[Floats], Floats],
    z: Floats,
    lower: Floats,
    upper: Floats,
    *,
    loss: str | Callable[[Floats], Floats],
    scale: float = 1.0,
    evaluations: int | None = None,
    difference: float = DIFFERENCE,
) -> Any:
    """Scipy's least squares from one start, with finite differences of one size for all parameters.

    Args:
        residuals: of a point.
        z: the start.
        lower: bounds.
        upper: bounds.
        loss: of squared residuals.
        scale: of residuals beyond which they are outliers.
        evaluations: at most.
        difference: of the parameters.

    Raises:
        ValueError: scipy is missing.
    """
    require_scipy()
    from scipy.optimize import least_squares

    def slopes(at: Floats) -> Floats:
        # Backward at a bound.
        steps = np.where(at + difference > upper, -difference, difference)
        here, units = residuals(at), np.eye(len(at))
        return np.stack([(residuals(at + s * e) - here) / s for s, e in zip(steps, units, strict=True)], axis=1)

    return least_squares(
        residuals, np.minimum(z, upper - 1e-6), slopes, bounds=(lower, upper), loss=loss, f_scale=scale,
        max_nfev=evaluations,
    )  # fmt: skip


def require_scipy() -> None:
    """Complain before anything is measured, not after it.

    Raises:
        ValueError: scipy is missing.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ValueError("fitting needs scipy: pip install 'autopar[calibrate]'")
