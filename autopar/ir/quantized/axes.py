"""Which messages of a plan are in few bits: gathers of parameters and reductions of gradients along named mesh axes.

That is ZeRO++ (G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023).
A device quantizes its shard of a parameter, and all that gather it, the device itself included, compute with what the
bytes stand for. For a gradient each device sends to every other the quantized terms of the shard that this one holds,
which adds them up in float32. Gradients are those with respect to what was gathered; optimizers see whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autopar.costs.arguments import shown
from autopar.ir.quantized.blocks import BITS, largest_error

WEIGHTS, GRADIENTS = "weights", "gradients"

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of numbers that may be sent in few bits."""

_WHAT = {WEIGHTS: "gathers of parameters", GRADIENTS: "reductions of gradients"}


@dataclass(frozen=True)
class QuantizedAxis:
    """What is sent in few bits along a mesh axis.

    Attributes:
        axis: its name.
        weights: bits of each number of a parameter that is gathered; None: all of them.
        gradients: bits of each number of a gradient that is reduced into shards; None: all of them.
    """

    axis: str
    weights: Literal[8, 4] | None = None
    gradients: Literal[8, 4] | None = None

    def bits(self, what: str) -> int:
        """Of `WEIGHTS` or `GRADIENTS`; 0: whole numbers."""
        return {WEIGHTS: self.weights, GRADIENTS: self.gradients}.get(what) or 0

    @property
    def what(self) -> tuple[str, ...]:
        """What is in few bits."""
        return tuple(what for what in (WEIGHTS, GRADIENTS) if self.bits(what))

    def __str__(self) -> str:
        """What is sent how, and how far off it arrives."""
        parts = (f"{_WHAT[w]} in {self.bits(w)} bits (off by at most {largest_error(self.bits(w))})" for w in self.what)
        return f"along {self.axis}, {' and '.join(parts)}"


def read_quantized(given: Mapping[str, Any]) -> tuple[QuantizedAxis, ...]:
    """What a user asked for: by axis, bits of ``weights`` and ``gradients``.

    Raises:
        ValueError: names the axis, and what is expected.

    >>> read_quantized({"node": {"weights": 8}})
    (QuantizedAxis(axis='node', weights=8, gradients=None),)
    """
    for axis, bits in given.items():
        if not isinstance(bits, Mapping) or not bits or set(bits) - {WEIGHTS, GRADIENTS}:
            raise ValueError(
                f"quantized= has {shown(bits)} for axis {axis!r}: expected bits by what is sent, such as "
                "{'weights': 8, 'gradients': 4}"
            )
        for what, count in bits.items():
            if type(count) is not int or count not in BITS:
                raise ValueError(f"quantized= has {shown(count)} bits for {what} along axis {axis!r}: expected 8 or 4")
    return tuple(QuantizedAxis(axis, **bits) for axis, bits in given.items())
