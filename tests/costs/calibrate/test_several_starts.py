"""Planted parameters are found again from rows that they make, whichever rows the fit sees."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.costs.calibrate.several_starts import Expected, Floats, fit_positive, scattered

pytest.importorskip("scipy")

EXPECTED = {
    "rate": Expected(0.9, 0.15, highest=1.0),
    "host": Expected(3e-5, 0.7),
    "bandwidth": Expected(15e9, 0.7),
    "latency": Expected(1e-5, 0.7),
}
PLANTED = {"rate": 0.75, "host": 1.1e-4, "bandwidth": 5e9, "latency": 3e-5}


def seconds(rows: Floats, value: dict[str, float]) -> Floats:
    """A step of a number of kernels, as slow as the slower of device and host, and of collectives."""
    work, kernels, size, messages = rows.T
    device = work / (3e14 * value["rate"])
    return np.maximum(device, kernels * value["host"]) + size / value["bandwidth"] + messages * value["latency"]


def rows_of(count: int, seed: int) -> Floats:
    draw = np.random.default_rng(seed)
    ranges = ((3e11, 3e14), (50, 5000), (1e6, 1e9), (1, 1000))
    return np.exp(np.stack([draw.uniform(*np.log(r), size=count) for r in ranges], axis=1))


def found(rows: Floats, measured: Floats, weights: Floats | None = None) -> dict[str, float]:
    def errors(value: dict[str, float]) -> Floats:
        return np.asarray(np.log(seconds(rows, value) / measured))

    weights = np.ones(len(rows)) if weights is None else weights
    return fit_positive(EXPECTED, errors, weights=weights, robust=(0.1, 0.07, 0.05))


@pytest.mark.parametrize("subset", ["all", "first half", "second half", "a quarter"])
def test_planted_parameters_are_found_again(subset: str) -> None:
    rows = rows_of(120, 0)
    chosen = {
        "all": slice(None),
        "first half": slice(60),
        "second half": slice(60, None),
        "a quarter": slice(0, None, 4),
    }
    own = rows[chosen[subset]]
    assert found(own, seconds(own, PLANTED)) == pytest.approx(PLANTED, rel=0.05)


def test_noise_and_outliers_move_the_fit_little() -> None:
    rows = rows_of(200, 1)
    noise = np.exp(np.random.default_rng(2).normal(0, 0.03, len(rows)))
    measured = seconds(rows, PLANTED) * noise
    measured[::20] *= 3
    assert found(rows, measured) == pytest.approx(PLANTED, rel=0.1)


def test_a_figure_without_a_slope_at_the_start_is_found() -> None:
    """Where the host is expected to be fast no row depends on it: a fit from there alone would leave it."""
    rows = rows_of(120, 3)
    rows[:, 0] = np.maximum(rows[:, 0], 2 * 3e14 * rows[:, 1] * EXPECTED["host"].value)
    measured = seconds(rows, PLANTED)
    here = {name: e.value for name, e in EXPECTED.items()}
    assert np.array_equal(seconds(rows, here), seconds(rows, {**here, "host": here["host"] * 1.1}))
    assert found(rows, measured) == pytest.approx(PLANTED, rel=0.05)


def test_parameters_that_no_row_depends_on_stay_where_they_are_expected() -> None:
    rows = rows_of(60, 4)
    rows[:, 2:] = 0
    value = found(rows, seconds(rows, PLANTED))
    assert {k: value[k] for k in ("bandwidth", "latency")} == pytest.approx(
        {"bandwidth": 15e9, "latency": 1e-5}, rel=1e-3
    )


def test_points_fill_a_box_under_the_bounds() -> None:
    upper = np.array([np.inf, 0.5])
    points = np.array(scattered(2, 40, upper))
    assert not points[0].any()
    assert (points <= upper).all() and (np.abs(points) <= 2).all()
    assert points[:, 0].min() < -1.5 and points[:, 0].max() > 1.5
    assert np.array_equal(points, np.array(scattered(2, 40, upper)))
