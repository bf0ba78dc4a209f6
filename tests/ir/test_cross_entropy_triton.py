"""Kernels of a GPU, in triton's interpreter: values of torch's, and what is infinite or nan as there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from autopar.ir.ops import cross_entropy as ours
from autopar.ir.ops import cross_entropy_triton as kernels

kernels.COLUMNS = 8
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    for classes in (5, 8, 12, 33):
        x = (5 * torch.randn(7, 2 * classes, generator=generator, dtype=torch.float64)).to(dtype)[:, :classes]
        target, wide = torch.randint(5, (7, 1), generator=generator), ours.wide_dtype(x)
        if classes == 12:
            x[:, 8:], x[3], x[4, 2], x[5, 1] = -torch.inf, -torch.inf, torch.nan, torch.inf
        given = torch.randn(7, 1, generator=generator, dtype=wide)
        at_target = given.masked_fill(torch.arange(7)[:, None] % 2 == 0, 0.0)
        for is_whole in (True, False):
            total = ours._logsumexp(x.to(wide), is_whole)
            torch.testing.assert_close(kernels.logsumexp(x, wide, is_whole), total, equal_nan=True)
        expected = ours._gradient(x.to(wide), total, given, target, at_target).to(dtype)
        found = kernels.gradient(x, total, given, target, at_target, dtype)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert found.is_contiguous()
assert kernels.logsumexp(x[:0], wide, True).shape == (0, 1)
print("equal")
"""


def test_kernels_compute_what_blocks_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout == "equal\n", run.stderr
