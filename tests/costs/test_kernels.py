"""Kernels: bound by arithmetic or by traffic; products by tiles and waves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.cluster import Cluster, Device
from autopar.costs.kernels import UNALIGNED, Work, busy_seconds, kernel_seconds, product, stream

DEVICE = Device("toy", {"float32": 100.0, "bfloat16": 400.0}, memory=1.0, bandwidth=10.0, launch=0.25, efficiency=0.5)
A100 = replace(Cluster.preset("a100-80gb").device, efficiency=1.0, ramp=0.0, launch=1e-9, bandwidth=1e15)
PEAK = A100.peak("float16")
AMOUNTS = st.just(0.0) | st.floats(1, 1e15)  # operations and bytes: nothing, or at least one
SIZES = st.integers(1, 1 << 14)


def plain(flops: float, moved: float) -> Work:
    none = np.zeros(1)
    return Work(np.array([flops]), np.array([moved]), none, none, none, none, np.ones(1), np.ones(1))


def seconds(work: Work, device: Device = A100, dtype: str = "float16") -> float:
    return float(busy_seconds(work, dtype, device)[0])


def test_a_kernel_takes_the_slower_of_arithmetic_and_memory() -> None:
    assert kernel_seconds(plain(100, 10), "float32", DEVICE).tolist() == [2.25]  # 100 / (100 0.5) + launch
    assert kernel_seconds(plain(100, 50), "float32", DEVICE).tolist() == [5.25]  # 50 / 10 + launch
    assert kernel_seconds(plain(100, 1), "bfloat16", DEVICE).tolist() == [0.75]
    half = replace(DEVICE, streaming=0.5)
    assert kernel_seconds(stream([10, 0]), "float32", half).tolist() == [2.25, 0.0]  # nothing to do is free


def test_integers_count_at_the_rate_of_float32_and_unknown_dtypes_are_named() -> None:
    assert kernel_seconds(plain(100, 0), "int64", DEVICE) == kernel_seconds(plain(100, 0), "float32", DEVICE)
    with pytest.raises(ValueError, match="device toy states no peak for float64"):
        kernel_seconds(plain(1, 1), "float64", DEVICE)


def test_float8_has_a_rate_of_its_own_and_kernels_for_multiples_of_16() -> None:
    """On an H100 twice that of bfloat16; other columns and depths are widened to float32, any rows will do."""
    h100 = replace(Cluster.preset("h100").device, bandwidth=1e15)
    half, eighth = (seconds(product(4096, 4096, 4096), h100, t) for t in ("bfloat16", "float8"))
    assert half / eighth == pytest.approx(1979 / 989)
    assert seconds(product(4090, 4096, 4096), h100, "float8") == eighth
    for sizes in ((4096, 4088, 4096), (4096, 4096, 4088)):
        wide = seconds(product(*sizes), h100, "float32")
        assert seconds(product(*sizes), h100, "float8") == pytest.approx(wide)
    with pytest.raises(ValueError, match="states no peak for float8"):
        seconds(product(16, 16, 16), A100, "float8")


@given(flops=AMOUNTS, moved=AMOUNTS, share=st.integers(1, 64))
def test_splitting_work_saves_at_most_its_share(flops: float, moved: float, share: int) -> None:
    whole = float(kernel_seconds(plain(flops, moved), "bfloat16", A100)[0])
    part = float(kernel_seconds(plain(flops / share, moved / share), "bfloat16", A100)[0])
    assert part <= whole * (1 + 1e-12) <= part * share * (1 + 1e-9)


def test_full_waves_of_the_largest_tile_reach_the_peak() -> None:
    """108 tiles of 256 x 128: one wave, nothing wasted."""
    work = product(256 * 108, 128, 4096)
    assert seconds(work) == pytest.approx(2 * 256 * 108 * 128 * 4096 / PEAK)


def test_one_row_more_costs_another_wave() -> None:
    """Whatever the tile, 256 * 108 + 8 rows do not fit one wave of it that is as large as the whole."""
    full, more = seconds(product(256 * 108, 128, 4096)), seconds(product(256 * 108 + 8, 128, 4096))
    assert more > 1.2 * full


def test_a_small_product_uses_few_units() -> None:
    """One tile of 64 x 64 runs on one unit of 108, at the rate of a small tile."""
    assert seconds(product(64, 64, 1 << 16)) == pytest.approx(2 * 64 * 64 * (1 << 16) / (PEAK / 108 * 0.6))


def test_the_ramp_is_as_much_depth() -> None:
    ramped = replace(A100, ramp=128.0)
    assert seconds(product(256 * 108, 128, 4096 - 128), ramped) == pytest.approx(seconds(product(256 * 108, 128, 4096)))


def test_few_rows_or_columns_of_a_core_are_slow() -> None:
    core = Device("core", {"float32": 1e9}, 1.0, 1e30, 1e-30, ramp=16.0)
    times = [float(busy_seconds(product(*sizes), "float32", core)[0]) for sizes in ((16, 1 << 20, 8), (1 << 20, 16, 8))]
    assert times == pytest.approx([2 * 2 * 16 * (1 << 20) * 8 / 1e9] * 2, rel=1e-3)
    deep = float(busy_seconds(product(1 << 20, 1 << 20, 8), "float32", core)[0])
    assert deep == pytest.approx(2 * 8 * (1 << 40) / 1e9, rel=1e-3)


def test_sizes_that_tensor_cores_cannot_load_at_once_are_slow() -> None:
    padded, odd = seconds(product(4096, 50304, 4096)), seconds(product(4096, 50257, 4096))
    assert odd == pytest.approx(padded / UNALIGNED)


@given(rows=SIZES, columns=SIZES, depth=SIZES, batch=st.integers(1, 64))
def test_a_product_takes_no_less_than_the_roofline(rows: int, columns: int, depth: int, batch: int) -> None:
    work = product(rows, columns, depth, batch)
    roofline = float(max(work.flops[0] / PEAK, work.moved[0] / (A100.bandwidth * A100.streaming)))
    assert seconds(work) >= roofline * (1 - 1e-12)


@given(rows=SIZES, columns=SIZES, depth=SIZES, batch=st.integers(1, 64))
def test_rows_and_columns_may_change_places(rows: int, columns: int, depth: int, batch: int) -> None:
    there, back = seconds(product(rows, columns, depth, batch)), seconds(product(columns, rows, depth, batch))
    assert there == pytest.approx(back)


def test_one_unit_is_not_quantized() -> None:
    single = replace(A100, units=1)
    assert seconds(product(100, 100, 1 << 16), single) == pytest.approx(2 * 100 * 100 * (1 << 16) / PEAK)


def test_joined_work() -> None:
    both = Work.join([stream([100.0, 60.0]), product(8, 8, 8)])
    assert both.moved.tolist() == [100.0, 60.0, 2 * 3 * 64]
    assert both.take([2]).rows.tolist() == [8.0]
