"""Quantized numbers, bit by bit against a reference in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from autopar.costs.outer_exchange import BLOCK, exchange_size
from autopar.ir.quantized.blocks import dequantize, mean_of, quantize
from autopar.ir.quantized.rounded import rounded


def reference(values: np.ndarray, bits: int) -> tuple[bytes, np.ndarray]:
    """Bytes that are sent and numbers that arrive, one block and one number at a time."""
    largest, codes, scales, arrived = 2 ** (bits - 1) - 1, [], [], []
    for start in range(0, len(values), 256):
        block = np.zeros(256, np.float32)
        block[: len(values[start : start + 256])] = values[start : start + 256]
        scale = np.float32(np.abs(block).max()) / np.float32(largest)
        scales.append(scale)
        for x in block:
            code = int(np.clip(np.rint(x / scale), -largest, largest)) if scale > 0 else 0
            codes.append(code)
            arrived.append(np.float32(code) * scale)
    if bits == 8:
        raw = np.array(codes, np.int8).tobytes()
    else:
        raw = bytes((low + 8) | (high + 8) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    return raw + np.array(scales, np.float32).tobytes(), np.array(arrived, np.float32)[: len(values)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 255, 256, 700])
def test_bytes_and_numbers_are_the_references(bits: int, count: int) -> None:
    for seed, scale in enumerate((1.0, 1e-20, 1e30)):
        values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
        payload = quantize(values, bits)
        raw, arrived = reference(values.numpy(), bits)
        assert payload.numpy().tobytes() == raw
        found = dequantize(payload, count, bits)
        assert found.numpy().tobytes() == arrived.tobytes()
        assert torch.equal(rounded(values, bits), found)
        assert payload.numel() * 2 == exchange_size(count, 4, 2, bits)
        # The stated bound, with room for the rounding of float32.
        for start in range(0, count, BLOCK):
            own = values[start : start + BLOCK]
            bound = float(own.abs().max()) / (2 * (2 ** (bits - 1) - 1))
            assert float((found[start : start + BLOCK] - own).abs().max()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_special_numbers(bits: int) -> None:
    assert quantize(torch.zeros(0), bits).numel() == 0
    zeros, tiny = torch.zeros(300), torch.full((5,), 1e-45)
    assert torch.equal(dequantize(quantize(zeros, bits), 300, bits), zeros) and torch.equal(rounded(zeros, bits), zeros)
    assert rounded(torch.zeros(2, 0), bits).shape == (2, 0)
    assert torch.equal(rounded(tiny, bits), dequantize(quantize(tiny, bits), 5, bits))
    assert float(dequantize(quantize(tiny, bits), 5, bits).abs().max()) <= 1e-44
    for bad in (math.nan, math.inf):
        values = torch.ones(600)
        values[300] = bad
        found = dequantize(quantize(values, bits), 600, bits)
        assert found[256:512].isnan().all() and torch.equal(found[:256], values[:256])
        torch.testing.assert_close(rounded(values, bits), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_are_float32_in_the_order_of_workers(bits: int) -> None:
    values = [torch.randn(300, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    arrived = [reference(v.numpy(), bits)[1] for v in values]
    expected = ((arrived[0] + arrived[1]) + arrived[2]) / np.float32(3)
    found = mean_of([quantize(v, bits) for v in values], 300, bits)
    assert found.dtype == torch.float32 and found.numpy().tobytes() == expected.tobytes()
