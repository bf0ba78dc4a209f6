"""What each rank is about to do, and in what ranks differ that should do the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

Details = tuple[tuple[str, str], ...]
"""Name and value of what must be the same on every rank."""

_ALIKE = "every rank must make the same calls in the same order"
SHAPES, STRUCTURE = "the global shape of the batch", "the batch's structure"
LAYOUTS, MODE = "the layouts of the batch", "the mode of the modules"
FROZEN, GRAD, AUTOCAST = "what requires a gradient", "grad mode", "autocast"
MODEL = "the model"
NOT_FINITE = "a parameter that is not finite"
STEPS = "the number of optimizer steps"
NO_SYNC, WAITING, FAILURES = "no_sync", "what waits since no_sync", "what failed before"
# The names above head the rows of a `RankError`; the ones below say what the user does about it.
_REMEDIES = {
    SHAPES: "pass tensors of equal shapes on every rank (drop_last=True for a sampler)",
    STRUCTURE: "pass the same arguments on every rank, and register hooks of the model on every rank, or on none",
    MODEL: "build the same model on every rank",
    MODE: "call train() or eval() on every rank",
    NO_SYNC: "enter no_sync() on every rank, or on none",
    WAITING: "call backward() and zero_grad() on every rank, or on none",
    STEPS: "parameters are of different steps now: call optimizer.step() on every rank, or on none, whatever a rank "
    "finds in its loss or its gradients, and start again from a checkpoint",
    FROZEN: "freeze the same parameters on every rank",
    NOT_FINITE: "all workers would have it: find what made it so, and load a checkpoint",
    FAILURES: "an error that one rank alone raises leaves it out of step: start again from a checkpoint",
}
"""What to do where ranks differ in something."""


def hash_of(what: str, details: Details) -> int:
    """A hash of a call, the same in every process.

    Args:
        what: the call, such as ``forward of call 3 of Mlp``.
        details: name and value of what must be the same on every rank.
    """
    # Not Python's `hash`, which is salted for each process. 7 bytes: the number and its negation must fit an int64.
    text = repr((what, details)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def described(key: tuple[Any, ...]) -> Details:
    """What must be the same on every rank of a call, in words.

    Args:
        key: of its specialization: shapes, structure, layouts, modes, grad mode, parameters, names of shared tensors,
            batch tensors that require a gradient, autocast.
    """
    given, skeleton, layouts, modes, grad, parameters, shared, differentiable, autocast = key
    shapes = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in given)
    on = sum(training for _, training in modes)
    mode = "train" if on == len(modes) else "eval" if not on else f"{on} of {len(modes)} modules in train"
    trainable = [requires_grad for _, requires_grad, *_ in parameters]
    model = [(name, *rest) for name, _, *rest in parameters], [kind.__qualname__ for kind, _ in modes], shared
    of_batch = f", batch tensors {sorted(differentiable)}" if differentiable else ""
    # A model has thousands of names: a message shows the count, and a digest tells whether the names are the same.
    return (
        (SHAPES, shapes),
        (STRUCTURE, skeleton[:1000]),
        (LAYOUTS, str(layouts)),
        (MODEL, _with_digest(f"{len(parameters)} parameters in {len(modes)} modules", model)),
        (MODE, _with_digest(mode, [training for _, training in modes])),
        (FROZEN, _with_digest(f"{sum(trainable)} of {len(parameters)} parameters{of_batch}", trainable)),
        (GRAD, "on" if grad else "off"),
        (AUTOCAST, str(autocast[1]) if autocast[0] else "off"),
    )


def _with_digest(text: str, value: Any) -> str:
    return f"{text} (#{hashlib.sha256(repr(value).encode()).hexdigest()[:6]})"


def difference(calls: Sequence[tuple[str, Details]]) -> str:
    """Which ranks differ from most, and in what; ``calls`` has what each rank is about to do, and its details."""
    names = [what for what, _ in calls]
    if len(set(names)) > 1:
        return (
            f"the ranks are at different calls: {_by_value(names)}; every rank must make the same calls in the same "
            "order: look for a call that depends on the rank, or on data that differ"
        )
    what, details = calls[0]
    # The first difference alone: it often entails those after it, as other shapes do another structure.
    for name, _ in details:
        values = [dict(own).get(name, "nothing") for _, own in calls]
        if len(set(values)) > 1:
            return f"{what}: {name} differs: {_by_value(values)}; {_REMEDIES.get(name, _ALIKE)}"
    return f"{what}: the ranks describe it differently; use the same version of autopar on every rank"


def _by_value(values: Sequence[str]) -> str:
    """``rank 1 has b, ranks 0, 2 have a``: those in the minority first."""
    counts = Counter(values)
    # On a tie rank 0's value comes last, as what the others are held against.
    order = sorted(counts, key=lambda v: (counts[v], -values.index(v)))
    rows = []
    for value in order:
        ranks = [str(r) for r, v in enumerate(values) if v == value]
        rows.append(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
        )
    return ", ".join(rows)
