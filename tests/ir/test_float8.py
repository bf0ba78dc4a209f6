"""Float8 formats, scales and products against torch's casts and against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.ops import float8
from autopar.ir.ops.float8.histories import record

NAMES = list(float8.FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_format_is_rounded_to_itself(name: str) -> None:
    """All 256 bytes as float8 give themselves back, bit by bit; what is no number gives no number."""
    kind = float8.FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    values = codes.view(kind.dtype).float()
    found = float8.quantize(values, torch.ones(1, 1), name)
    finite = values.isfinite()
    assert torch.equal(found[finite], codes[finite])
    assert found.view(kind.dtype).float()[values.isnan()].isnan().all()
    assert float(values[finite].max()) == kind.largest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_are_rounded_as_torch_casts_them(name: str, dtype: torch.dtype) -> None:
    """Between all neighbors, at the middle between them (a tie), at both sides of it, and beyond the largest."""
    kind = float8.FORMATS[name]
    values = torch.arange(256, dtype=torch.uint8).view(kind.dtype).double()
    values = values[values.isfinite()].sort().values.unique()
    middle = (values[1:] + values[:-1]) / 2
    numbers = torch.cat([middle, middle * (1 + 1e-3), middle * (1 - 1e-3)]).reshape(1, -1).to(dtype)
    one = torch.ones(1, 1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(float8.quantize(numbers, one, name), numbers.to(kind.dtype).view(torch.uint8))
    beyond = torch.tensor([[2.0, -2.0, torch.inf, -torch.inf]], dtype=dtype) * kind.largest
    found = float8.quantize(beyond, one, name).view(kind.dtype).float()
    assert found.tolist() == [[kind.largest, -kind.largest] * 2]


@pytest.mark.parametrize("dims", [[0, 1], [0], [1]])
def test_the_scale_makes_the_largest_entry_the_largest_value(dims: list[int]) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    scale = float8.scale(x, dims, "e4m3")
    assert scale.dtype == torch.float32
    values = float8.quantize(x, scale, "e4m3").view(torch.float8_e4m3fn).float()
    assert (values.abs().amax(dims) == 448.0).all()
    # Three bits of mantissa: half of the last one is 2^-4 of the number, above the subnormal ones.
    normal = values.abs() >= 2.0**-6
    assert (((values * scale - x) / x).abs()[normal] <= 2.0**-4).all()


def test_the_largest_scale_of_parts_is_the_scale_of_the_whole() -> None:
    """Bit by bit, in every dtype, so that a maximum over devices gives what one device has."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        parts = torch.stack([float8.scale(part, [0, 1], "e5m2") for part in x.chunk(4)])
        assert torch.equal(parts.amax(0), float8.scale(x, [0, 1], "e5m2"))


def test_a_matrix_without_entries_has_the_scale_of_zeros() -> None:
    """As of a part of the batch without rows."""
    empty = torch.zeros(0, 4)
    for dims, shape in (([0, 1], (1, 1)), ([0], (1, 4)), ([1], (0, 1))):
        scale = float8.scale(empty, dims, "e4m3")
        assert torch.equal(scale, float8.scale(torch.zeros(1, 4), [0, 1], "e4m3").expand(shape))
        assert float8.quantize(empty, scale, "e4m3").shape == (0, 4)
    assert torch.equal(float8.amax(empty), torch.zeros(1, 1))


def test_zeros_have_a_scale_and_what_is_no_number_stays_none() -> None:
    zeros = torch.zeros(2, 4)
    scale = float8.scale(zeros, [0, 1], "e4m3")
    assert float(scale) > 0 and not float8.quantize(zeros, scale, "e4m3").any()
    for wrong in (torch.nan, torch.inf):
        x = torch.ones(2, 4)
        x[0, 0] = wrong
        scale = float8.scale(x, [0, 1], "e4m3")
        assert float(scale) == torch.inf
        values = float8.quantize(x, scale, "e4m3")
        # Also of the part of a device that has finite numbers only, given the scale of all.
        for part in (values, float8.quantize(torch.ones(2, 4), scale, "e4m3")):
            assert float8.product(part, part, scale, scale, "e4m3", "e4m3", torch.float32).isnan().all()


@pytest.mark.parametrize("rowwise", [False, True])
def test_products_are_those_of_the_values(rowwise: bool) -> None:
    a, b = (torch.randn(n, 32, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (6, 10))
    dims = [1] if rowwise else [0, 1]
    scales = [float8.scale(x, dims, f) for x, f in ((a, "e5m2"), (b, "e4m3"))]
    values = [float8.quantize(x, s, f) for x, s, f in ((a, scales[0], "e5m2"), (b, scales[1], "e4m3"))]
    found = float8.product(*values, *scales, "e5m2", "e4m3", torch.float64)
    left, right = (
        v.view(float8.FORMATS[f].dtype).double() * s for v, s, f in zip(values, scales, ("e5m2", "e4m3"), strict=True)
    )
    torch.testing.assert_close(found, left @ right.T, rtol=0, atol=1e-12)
    assert float((found - a @ b.T).abs().max()) < 0.2 * float((a @ b.T).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_share_a_power_of_two(name: str) -> None:
    """The largest power by which the block's largest entry has the exponent of the format's largest value."""
    kind, exponent = float8.FORMATS[name], {"e4m3": 8, "e5m2": 15}[name]
    largest = torch.tensor([[1.0, 1.75, 1.99, 2.0, 0.0, 3e-5, 2.0**-140, 6e4, torch.inf, torch.nan]])
    x = torch.zeros(1, 10, 32).scatter(-1, torch.full((1, 10, 1), 7), largest.unsqueeze(-1)).flatten(-2)
    found = float8.block_scale(x, name)
    powers = [0, 0, 0, 1, None, -16, -140, 15]
    expected = [0 if p is None else max(-127, p - exponent) + 127 for p in powers] + [255, 255]
    assert found.tolist() == [expected]
    # As torch has them; what is too large for the format becomes its largest value.
    assert torch.equal(found[:, :4].view(torch.float8_e8m0fnu).float().log2(), found[:, :4].float() - 127)
    values = float8.block_quantize(x, found, name).view(kind.dtype).float().unflatten(-1, (-1, 32))[0, :, 7]
    assert values[:4].tolist() == [2.0**exponent, 1.75 * 2**exponent, kind.largest, 2.0**exponent]
    assert float(values[4]) == 0 and values[8:].isnan().all()


def test_products_of_blocks_are_those_of_the_values() -> None:
    a, b = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (6, 10))
    scales = float8.block_scale(a, "e5m2"), float8.block_scale(b, "e4m3")
    values = float8.block_quantize(a, scales[0], "e5m2"), float8.block_quantize(b, scales[1], "e4m3")
    found = float8.block_product(*values, *scales, "e5m2", "e4m3", torch.float64)
    numbers = [
        v.view(float8.FORMATS[f].dtype).double() * (2.0 ** (s.double() - 127)).repeat_interleave(32, -1)
        for v, s, f in zip(values, scales, ("e5m2", "e4m3"), strict=True)
    ]
    torch.testing.assert_close(found, numbers[0] @ numbers[1].T, rtol=0, atol=1e-12)
    assert float((found - a @ b.T).abs().max()) < 0.2 * float((a @ b.T).abs().max())


def test_delayed_scales_are_of_the_largest_entry_of_the_history() -> None:
    history = torch.tensor([[0.0, 7.0, 2.0], [0.0, 0.0, 0.0], [1e-30, 0.0, 0.0]], dtype=torch.float64)
    scales = [float(float8.delayed_scale(history, row, "e4m3")) for row in range(3)]
    assert scales == [7.0 / 448, 1.0, 1e-12 / 448]
    # What the history did not know saturates; what is infinite is no number, whatever it knew.
    x = torch.tensor([[7.0, -70.0, torch.inf, -torch.inf, torch.nan]])
    found = float8.quantize(x, torch.full((1, 1), 7.0 / 448), "e4m3", True).view(torch.float8_e4m3fn).float()
    assert found[0, :2].tolist() == [448.0, -448.0] and found[0, 2:].isnan().all()
    assert float(float8.amax(torch.tensor([[1.0, -3.0]]))) == 3.0 and float(float8.amax(x)) == torch.inf


def test_histories_move_on() -> None:
    """The latest comes first; a row of several tensors gets the largest, one of none or of no number gets zero."""
    buffers = {name: torch.arange(6.0).reshape(3, 2) for name in ("a.w_amax_history", "b_amax_history")}
    noted = {"a.w_amax_history:0:0": 5.0, "a.w_amax_history:0:1": 9.0, "a.w_amax_history:2:0": torch.inf,
             "b_amax_history:1:0": 3.0}  # fmt: skip
    record({name: torch.full((1, 1), value) for name, value in noted.items()}, buffers)
    assert buffers["a.w_amax_history"].tolist() == [[9.0, 0.0], [0.0, 2.0], [0.0, 4.0]]
    assert buffers["b_amax_history"].tolist() == [[0.0, 0.0], [3.0, 2.0], [0.0, 4.0]]
