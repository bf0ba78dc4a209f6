"""Bytes: what an optimizer stores per parameter, and how people write sizes."""

from __future__ import annotations

import re
from fractions import Fraction

from autopar.costs.device import shown

MOST = 2**60
"""Bytes that anybody may ask for."""

_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1}

OPTIMIZERS = tuple(_STATES)
"""Names of optimizers whose state is known."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_UNITS_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}


def optimizer_state_bytes(optimizer: str, numel: int, param_dtype_bytes: int) -> int:
    """Bytes that an optimizer stores for a parameter: its states are tensors of the parameter's shape and dtype.

    Adam's two moments count, its step counter (one number a parameter) does not.

    Args:
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"`` or ``"adagrad"``.
        numel: elements of the parameter, on one device for one device's bytes.
        param_dtype_bytes: bytes of one element.

    Raises:
        ValueError: the optimizer is not known.

    >>> optimizer_state_bytes("adamw", 1000, 4)
    8000
    """
    if optimizer not in _STATES:
        raise ValueError(f"unknown optimizer {optimizer!r}: use one of {', '.join(_STATES)}")
    return _STATES[optimizer] * numel * param_dtype_bytes


def convolution_copies(
    input_bytes: float,
    weight_bytes: float,
    output_bytes: float,
    *,
    kernel: int,
    item: int,
    backward: bool,
    transposed: bool = False,
) -> float:
    """Bytes that oneDNN, the CPU's library, holds while a convolution runs, besides its input and output.

    It copies tensors into an order of its own; products (kernels of one element) need none, and double precision, which
    it has not, is computed from all patches of the input at once. Measured on many shapes
    (``tests/costs/test_memory.py``); a few channels are padded besides, which this leaves out.

    Args:
        input_bytes: of the input.
        weight_bytes: of the weight.
        output_bytes: of the output, or of its gradient.
        kernel: elements of the kernel in space.
        item: bytes of an element.
        backward: whether it is the backward pass, of the input and the weight.
        transposed: whether it is a transposed convolution.

    >>> convolution_copies(100, 20, 50, kernel=9, item=4, backward=False)
    120.0
    """
    if kernel == 1:
        return 0.0
    # float64: oneDNN does not have it, and torch unfolds all patches of the input (im2col).
    if item > 4:
        return float(input_bytes * kernel)
    if backward:
        return float(max(input_bytes + output_bytes, weight_bytes))
    return float(max(input_bytes + weight_bytes, 2 * output_bytes if transposed else output_bytes))


def parse_bytes(size: str | int | float) -> int:
    """A number of bytes from what a person writes; fractions of a byte are cut off.

    Args:
        size: a number of bytes, or text: a number and a unit, from B, KB, MB, GB, TB (powers of 1000) and KiB, MiB,
            GiB, TiB (powers of 1024), in any case.

    Raises:
        ValueError: it is not such a size, or negative.

    >>> parse_bytes("70GiB") == 70 * 2**30
    True
    """
    if isinstance(size, bool) or not isinstance(size, str | int | float):
        raise ValueError(f"a size in bytes must be a number or text such as '70GiB', got {shown(size)}")
    # ASCII: \d alone matches the digits of every script.
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", str(size), re.ASCII)
    if match is None:
        raise ValueError(f"cannot read {shown(size)} as a size in bytes: write a number and a unit, such as '70GiB'")
    number, unit = match.groups()
    if unit.lower() not in _UNITS_BY_LOWER:
        known = ", ".join(name for name in _UNITS if name)
        raise ValueError(f"unknown unit {unit!r} in the size {shown(size)}: use one of {known}")
    # Not as an exact fraction: an exponent of nine digits would take all memory.
    if float(number) > MOST or float(number) * _UNITS_BY_LOWER[unit.lower()] > MOST:
        raise ValueError(f"the size {shown(size)} is more than any device has: at most {MOST} bytes, such as '70GiB'")
    if float(number) == 0:
        return 0
    # Exact: a product of floats may end just below a whole number, and int() cuts off.
    return int(Fraction(number) * _UNITS_BY_LOWER[unit.lower()])


def format_bytes(size: float) -> str:
    """A number of bytes for people, in powers of 1024 and one decimal place.

    >>> format_bytes(80e9), format_bytes(512)
    ('74.5 GiB', '512 B')
    """
    if abs(size) < 1023.5:
        return f"{size:.0f} B"
    value = size / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if abs(value) < 1023.95:  # what rounds to 1024.0 belongs to the next unit
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
