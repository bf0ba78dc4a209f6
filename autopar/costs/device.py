"""One device, and one link between devices: public or measured figures, checked when they are given."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALGORITHMS = ("ring", "tree", "pat")
"""How libraries may run collectives; `autopar.costs.collectives` says what each costs."""

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast")
"""Collectives that have a cost model, in `autopar.costs.collectives`."""

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes of torch whose peak a device may state."""

FLOAT8 = "float8"
"""Products of float8 operands, of either format, accumulated in float32."""

RATES = (*FLOAT_DTYPES, FLOAT8)
"""What a device may state a peak for."""

KIND_NAMES = ("cuda", "rocm", "cpu")
"""Kinds of devices: what a process has on one besides tensors depends on it, see `autopar.costs.budget`."""

MOST_IN_A_NAME = 200

SHOWN = 100
"""Characters of a value in an error."""

_SHARES = ("efficiency", "fused", "streaming")

# Work in other dtypes counts at the rate of one that is stated: integers and booleans run on the float32 units.
_RATED_AS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"} | dict.fromkeys(
    ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"), "float32"
)


@dataclass(frozen=True)
class Device:
    """One device, all of them being alike.

    Attributes:
        name: for people.
        flops: peak floating-point operations per second by dtype name, dense; `FLOAT8` where kernels multiply it.
        memory: bytes.
        bandwidth: of its memory, in bytes per second.
        launch: seconds that every kernel costs however little it does.
        efficiency: share of the peak that large matrix products reach; 1 where ``flops`` was measured.
        units: processors that each work on one tile of a matrix product at a time; 1: sizes are not quantized.
        ramp: depth of a product, in elements, during which a tile could have been computed while it starts and ends; of
            one unit, rows or columns that could have been while a library puts the other operand into its own order.
        streaming: share of ``bandwidth`` that kernels which only move data reach; 1 where it was measured.
        host: seconds that the host needs to launch one kernel: devices that are faster wait for it.
        host_bandwidth: of the way to the host's memory, in bytes per second in one direction, of which copies reach the
            share ``streaming``; 0: nothing can be sent there.
        copies: of what a convolution takes and makes, the share that its library copies into another order of memory,
            see `autopar.costs.memory.convolution_copies`: 1 for oneDNN; 0 counts nothing.
        kind: of `KIND_NAMES`; it decides what the default budget leaves out, and no cost.
        fused: share of what large products reach that fused attention reaches, and a convolution.
        alone: how many times as fast a device is while the others do nothing: processes that share cores take those of
            one that waits. Every other figure is of devices that all work. 1: they share nothing.

    Raises:
        ValueError: a figure is not a positive number, or a dtype or the kind is unknown.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    launch: float
    efficiency: float = 1.0
    units: int = 1
    ramp: float = 0.0
    streaming: float = 1.0
    host: float = 0.0
    host_bandwidth: float = 0.0
    copies: float = 0.0
    kind: str = "cuda"
    fused: float = 1.0
    alone: float = 1.0

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind not in KIND_NAMES:
            raise ValueError(f"kind {shown(self.kind)} is not known{suggest(str(self.kind), KIND_NAMES)}")
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ValueError(
                f"flops must give operations per second by dtype, e.g. float32 = 1e12, got {shown(self.flops)}"
            )
        for dtype in self.flops:
            if dtype not in RATES:
                raise ValueError(f"flops.{dtype} is not a known dtype{suggest(dtype, RATES)}")
        # A plain dict, in one order: a read-only proxy could not be pickled, and ranks exchange clusters.
        flops = {d: _positive(f"flops.{d}", self.flops[d]) for d in RATES if d in self.flops}
        object.__setattr__(self, "flops", flops)
        # Figures from TOML may be integers: as floats, equal devices have equal texts and fingerprints.
        for key in ("memory", "bandwidth", "launch", "alone", *_SHARES):
            object.__setattr__(self, key, _positive(key, getattr(self, key)))
        for key in ("ramp", "host", "host_bandwidth", "copies"):
            object.__setattr__(self, key, _not_negative(key, getattr(self, key)))
        for key in _SHARES:
            if getattr(self, key) > 1:
                raise ValueError(f"{key} is a share of the peak, at most 1, got {getattr(self, key)!r}")
        if self.alone < 1:
            raise ValueError(
                f"alone must be at least 1, how many times as fast a device is while others idle, got {self.alone!r}"
            )
        # A bool is an int to Python: `units = true` in a file would count as 1.
        if isinstance(self.units, bool) or not isinstance(self.units, int) or not 1 <= self.units < 2**31:
            raise ValueError(f"units must be a positive integer, got {shown(self.units)}")

    @property
    def draws_dropout(self) -> bool:
        """Whether kernels of attention draw what dropout keeps by themselves: those of GPUs do."""
        return self.units > 1

    def peak(self, dtype: str) -> float:
        """Operations per second of this dtype; integers count at float32's rate, complex numbers at their parts'.

        Raises:
            ValueError: the device states no rate for it.
        """
        rated = _RATED_AS.get(dtype, dtype)
        if rated not in self.flops:
            known = ", ".join(self.flops)
            raise ValueError(f"device {self.name} states no peak for {dtype} (only {known}); add it to [device.flops]")
        return self.flops[rated]


@dataclass(frozen=True)
class Link:
    """A way from each device to others.

    Attributes:
        name: for people.
        bandwidth: bytes per second that one device sends, while it receives as much.
        latency: seconds per message.
        algorithms: of `ALGORITHMS`, those that the communication library has on this link; the fastest is taken.
        copies: bytes that the library holds besides while it runs, for each byte of what an all-gather makes or a
            reduce-scatter takes: Gloo has a copy of it, NCCL works in place.
        contention: how much groups get in each other's way that share the network cards of a node and have several
            devices in it. Of ``g`` such groups each has its share of the cards over ``g ** contention``, and for each
            other set of such groups elsewhere, as every stage of a pipeline has one, it waits besides for ``contention
            / g`` of the time in which one card would send its bytes. 0: they share without loss. Groups with one
            device a node have a card each.
        wait: seconds for which kernels that need a collective wait besides, until the last of its devices has its turn:
            where processes share cores, milliseconds.
        occupies: share of a collective's seconds for which it takes the device from the kernels beside it: a library on
            a CPU runs on the same cores. They take so much longer; 0: it hides behind them for nothing.
        factors: by collective, how many times as long as its form in `autopar.costs.collectives` it takes: libraries
            have other algorithms, and Gloo's reduce-scatter is an all-reduce. 1 for those that are not named.
        neighbors: how many devices of the group are in each node; what `Cluster.link_for` finds out, not stated.

    Raises:
        ValueError: a figure is not a positive number, or an algorithm or a collective is unknown.
    """

    name: str
    bandwidth: float
    latency: float
    algorithms: tuple[str, ...] = ("ring",)
    copies: float = 0.0
    contention: float = 0.0
    wait: float = 0.0
    occupies: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    neighbors: int = 1

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.algorithms, list | tuple) or not self.algorithms:
            raise ValueError(f"algorithms must be a list of {', '.join(ALGORITHMS)}, got {shown(self.algorithms)}")
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise ValueError(f"algorithms has {name!r}{suggest(str(name), ALGORITHMS)}")
        # In one order, whatever order a file has: links with the same algorithms are equal.
        object.__setattr__(self, "algorithms", tuple(n for n in ALGORITHMS if n in self.algorithms))
        for key in ("bandwidth", "latency"):
            object.__setattr__(self, key, _positive(key, getattr(self, key)))
        for key in ("copies", "contention", "wait", "occupies"):
            object.__setattr__(self, key, _not_negative(key, getattr(self, key)))
        if self.occupies > 1:
            raise ValueError(f"occupies is a share of a collective's seconds, at most 1, got {self.occupies!r}")
        if not isinstance(self.factors, Mapping):
            raise ValueError(f"factors must give a number by collective, got {shown(self.factors)}")
        for kind in self.factors:
            if kind not in KINDS:
                raise ValueError(f"factors has {shown(kind)}{suggest(str(kind), KINDS)}")
        factors = {kind: _positive(f"factors.{kind}", self.factors[kind]) for kind in KINDS if kind in self.factors}
        object.__setattr__(self, "factors", factors)


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {shown(value)}")
    return float(value)


def _not_negative(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{key} must be a number that is not negative, got {shown(value)}")
    return float(value)


def check_name(name: object, what: str = "name") -> None:
    """Refuse names that are no line of text, which TOML files and tables could not show."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > MOST_IN_A_NAME:
        raise ValueError(f"{what} must be a line of text, at most {MOST_IN_A_NAME} characters, got {shown(name)}")


def shown(value: Any) -> str:
    """A value in an error: its text if that is short, else its type."""
    try:
        text = repr(value)
    except Exception:  # whatever a user's class does
        text = ""
    return text if 0 < len(text) <= SHOWN and text.isprintable() else f"<{type(value).__name__}>"


def suggest(word: str, known: tuple[str, ...]) -> str:
    """The end of an error about a word that is not known: the nearest one that is, and all."""
    close = difflib.get_close_matches(word, known, n=1)
    return (f": did you mean {close[0]!r}?" if close else "") + f" (known: {', '.join(known)})"
