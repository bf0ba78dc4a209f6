import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.memory import convolution_copies, format_bytes, optimizer_state_bytes, parse_bytes
from benchmarks.allocated import peak_allocated

aten = torch.ops.aten

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(10, 10, dtype=dtype))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [s for s in optimizer.state[parameter].values() if isinstance(s, torch.Tensor) and s.numel() > 1]
    assert optimizer_state_bytes(name, 100, dtype.itemsize) == sum(s.nbytes for s in states)


def test_unknown_optimizer_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'lion': use one of adamw, adam, sgd, sgd-momentum, adagrad"):
        optimizer_state_bytes("lion", 1, 4)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("70GiB", 70 * 2**30),
        ("1.5 KiB", 1536),
        ("2TiB", 2**41),
        ("80GB", 80 * 10**9),
        ("3 tb", 3 * 10**12),
        ("1mib", 2**20),
        ("512", 512),
        ("512B", 512),
        ("1e3KB", 10**6),
        (".5KiB", 512),
        (0, 0),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
        ("0.3B", 0),
        ("9007199254740993", 2**53 + 1),  # more digits than a float has
    ],
)
def test_parse_bytes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("70 GIG", "unknown unit 'GIG' in the size '70 GIG': use one of B, KB"),
        ("70G", "unknown unit 'G'"),
        ("lots", "cannot read 'lots'"),
        ("", "cannot read ''"),
        ("-1GiB", "cannot read '-1GiB'"),
        (-5, "cannot read -5"),
        (float("nan"), "cannot read nan"),
        (float("inf"), "cannot read inf"),
        (True, "must be a number or text"),
        (None, "must be a number or text"),
    ],
)
def test_what_is_no_size_is_named(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.9, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (80e9, "74.5 GiB"),
        (2**50, "1024.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
def test_what_is_formatted_reads_back(size: int) -> None:
    text = format_bytes(size)
    step = 0.05 * parse_bytes("1" + text.split()[1])  # half of the last digit shown
    assert abs(parse_bytes(text) - size) <= step + 1
    assert len(text.split()[0]) <= len("1023.9")


def convolution(
    batch: int, channels: int, filters: int, side: int, kernel: int, stride: int = 1, groups: int = 1,
    transposed: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[tuple[float, float], tuple[float, float]]:  # fmt: skip
    """Bytes that torch allocates besides what is made, forward and backward, and what is said of them."""
    shape = (channels, filters // groups) if transposed else (filters, channels // groups)
    x, weight = torch.randn(batch, channels, side, side, dtype=dtype), torch.randn(*shape, kernel, kernel, dtype=dtype)
    how: Any = ([stride] * 2, [kernel // 2] * 2, [1, 1], transposed, [0, 0], groups)
    made: list[Any] = [None]

    def forward() -> None:
        made[0] = aten.convolution(x, weight, None, *how)

    def backward() -> None:
        made[0] = aten.convolution_backward(gradient, x, weight, None, *how, [True, True, False])

    def measured(run: Callable[[], None]) -> float:
        run()  # what is made once
        made[0] = None
        peak = peak_allocated(run)
        results = made[0] if isinstance(made[0], tuple) else made
        return peak - float(sum(t.nbytes for t in results if t is not None))

    ahead = measured(forward)
    gradient = torch.randn_like(made[0])
    found = (ahead, measured(backward))
    said = [
        convolution_copies(
            x.nbytes, weight.nbytes, gradient.nbytes, kernel=kernel**2, item=x.element_size(), backward=late,
            transposed=transposed,
        )
        for late in (False, True)
    ]  # fmt: skip
    return (found[0], said[0]), (found[1], said[1])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(
    "shape",
    [(8, 128, 64, 16, 3), (8, 64, 64, 16, 3), (8, 64, 128, 16, 3, 2), (8, 64, 64, 16, 1), (2, 64, 64, 16, 3),
     (8, 64, 64, 32, 3, 1, 64), (8, 64, 64, 16, 3, 1, 2), (8, 64, 32, 16, 3, 2, 1, True),
     (8, 64, 64, 16, 3, 1, 1, False, torch.float64)],
)  # fmt: skip
def test_convolutions_copy_so_much(shape: tuple[Any, ...]) -> None:
    """On the libraries that were measured; where a machine's has other ways, it holds less."""
    for found, said in convolution(*shape):
        assert found <= 1.05 * said + 2**12
