"""`Point`: what a rank is about to do, and in what ranks differ that should do the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Details = tuple[tuple[str, str], ...]
"""Name and value of what must be the same on every rank."""

_ALIKE = "every rank must make the same calls in the same order"
SHAPES, STRUCTURE = "the global shape of the batch", "the batch's structure"
LAYOUTS, MODE = "the layouts of the batch", "the mode of the modules"
FROZEN, GRAD, AUTOCAST = "what requires a gradient", "grad mode", "autocast"
MODEL = "the model"
NO_SYNC, WAITING, FAILURES = "no_sync", "what waits since no_sync", "what failed before"
_REMEDIES = {
    SHAPES: "pass tensors of equal shapes on every rank (drop_last=True for a sampler)",
    MODEL: "build the same model on every rank",
    MODE: "call train() or eval() on every rank",
    NO_SYNC: "enter no_sync() on every rank, or on none",
    WAITING: "call backward() and zero_grad() on every rank, or on none",
    FROZEN: "freeze the same parameters on every rank",
    FAILURES: "an error that one rank alone raises leaves it out of step: start again from a checkpoint",
}
"""What to do where ranks differ in something."""


@dataclass(frozen=True)
class Point:
    """What a rank is about to do.

    Attributes:
        what: the call, such as ``forward call 3``.
        details: name and value of what must be the same on every rank.
    """

    what: str
    details: Details = ()

    @cached_property
    def number(self) -> int:
        """A hash, the same in every process."""
        text = repr((self.what, self.details)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def described(key: tuple[Any, ...]) -> Details:
    """What must be the same on every rank of a call, in words.

    Args:
        key: of its specialization: shapes, structure, layouts, modes, grad mode, parameters, batch tensors that
            require a gradient, autocast.
    """
    given, skeleton, layouts, modes, grad, parameters, asked, autocast = key
    shapes = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in given)
    on = sum(training for _, training in modes)
    mode = "train" if on == len(modes) else "eval" if not on else f"{on} of {len(modes)} modules in train"
    trained = [needed for _, needed, *_ in parameters]
    model = [(name, *rest) for name, _, *rest in parameters], [kind.__qualname__ for kind, _ in modes]
    of_batch = f", batch tensors {sorted(asked)}" if asked else ""
    return (
        (SHAPES, shapes),
        (STRUCTURE, skeleton[:1000]),
        (LAYOUTS, str(layouts)),
        (MODEL, _with_digest(f"{len(parameters)} parameters in {len(modes)} modules", model)),
        (MODE, _with_digest(mode, [training for _, training in modes])),
        (FROZEN, _with_digest(f"{sum(trained)} of {len(parameters)} parameters{of_batch}", trained)),
        (GRAD, "on" if grad else "off"),
        (AUTOCAST, str(autocast[1]) if autocast[0] else "off"),
    )


def _with_digest(text: str, value: Any) -> str:
    return f"{text} (#{hashlib.sha256(repr(value).encode()).hexdigest()[:6]})"


def difference(points: Sequence[Point]) -> str:
    """Which ranks differ from most, and in what."""
    calls = [p.what for p in points]
    if len(set(calls)) > 1:
        return (
            f"the ranks are at different calls: {_sorted_out(calls)}; every rank must make the same calls in the same "
            "order: look for a call that depends on the rank, or on data that differ"
        )
    for name, _ in points[0].details:
        values = [dict(p.details).get(name, "nothing") for p in points]
        if len(set(values)) > 1:
            return f"{points[0].what}: {name} differs: {_sorted_out(values)}; {_REMEDIES.get(name, _ALIKE)}"
    return f"{points[0].what}: the ranks describe it differently; use the same version of autopar on every rank"


def _sorted_out(values: Sequence[str]) -> str:
    """``rank 1 has b, ranks 0, 2 have a``: those in the minority first."""
    counts = Counter(values)
    order = sorted(counts, key=lambda v: (counts[v], -values.index(v)))
    rows = []
    for value in order:
        ranks = [str(r) for r, v in enumerate(values) if v == value]
        rows.append(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
        )
    return ", ".join(rows)
