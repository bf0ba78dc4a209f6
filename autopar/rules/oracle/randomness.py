"""The oracle for random operators: what each device draws by itself is a part of what one device might have drawn.

Equal numbers cannot be asked for, so every strategy is asked for what makes a mask right: devices that make the same
block make it equal, different blocks differ, the numbers are of the operator's distribution, and the default generator
stays as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import InvalidRuleError
from autopar.ir.ops.random import seeded, step_seed
from autopar.rules.oracle.call import rule_of
from autopar.rules.rule import Rule, letter_sizes

ENOUGH = 64
"""Numbers in a block from which on equal blocks are no accident."""


def check_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, parts: int = 2) -> list[str]:
    """Check every strategy of a random operator's rule, alone and on two axes; returns their names.

    Args:
        target: an operator overload.
        args: its arguments.
        kwargs: its keyword arguments.
        parts: how many devices an axis has.

    Raises:
        InvalidRuleError: a strategy gives wrong numbers.
    """
    rule = rule_of(target, args, kwargs)
    whole = _first(target(*args, **kwargs))
    inputs = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
    sizes = letter_sizes(rule, inputs, [tuple(whole.shape)] + [None] * (len(rule.outputs) - 1))
    free = [c for c in rule.letters if c not in rule.blocked]
    checked = []
    # Replicated, on one axis, and on two.
    for count in (0, 1, 2):
        for chosen in itertools.product(free, repeat=count):
            split = {c: parts ** chosen.count(c) for c in chosen}
            if all(sizes[c] % n == 0 for c, n in split.items()):
                _check(rule, target, args, kwargs, whole, split, f"{target} split along {chosen or 'nothing'}")
                checked.append(" ".join(chosen) or "R")
    return checked


def _first(value: Any) -> torch.Tensor:
    found: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return found


def _check(
    rule: Rule,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: torch.Tensor,
    split: Mapping[str, int],
    where: str,
) -> None:
    dims = rule.outputs[0] or ()
    shape = [n // math.prod(split.get(c, 1) for c in dim) for n, dim in zip(whole.shape, dims, strict=True)]
    local = [shape if i in rule.shapes else a for i, a in enumerate(args)]
    state = torch.get_rng_state()

    def block(seed: int, index: int) -> torch.Tensor:
        with step_seed(seed):
            return _first(seeded(target, 0, index, *local, **kwargs))

    blocks = [block(1, i) for i in range(math.prod(split.values()))]
    if not torch.equal(torch.get_rng_state(), state):
        raise InvalidRuleError(f"{where}: the default generator is disturbed")
    if any(list(b.shape) != shape or b.dtype != whole.dtype for b in blocks):
        raise InvalidRuleError(f"{where}: local output is {blocks[0].shape}, expected {shape}")
    # Replicas draw the same block from the same seed.
    if not all(torch.equal(b, block(1, i)) for i, b in enumerate(blocks)):
        raise InvalidRuleError(f"{where}: two devices make the same block from other numbers")
    others = [*blocks, block(2, 0)]
    # Small blocks of few possible values may well be equal by chance.
    if blocks[0].numel() >= ENOUGH and any(torch.equal(a, b) for a, b in itertools.combinations(others, 2)):
        raise InvalidRuleError(f"{where}: two blocks, or two steps, have the same numbers")
    drawn, expected = torch.stack(blocks).double(), whole.double()
    if whole.numel() < ENOUGH:
        return
    # Of the difference of two means of this many numbers; six of these are no accident.
    deviation = max(float(expected.std()), float(drawn.std())) * math.sqrt(2 / whole.numel())
    if abs(float(drawn.mean() - expected.mean())) > 6 * deviation:
        raise InvalidRuleError(
            f"{where}: the mean is {float(drawn.mean())}, that of one device {float(expected.mean())}"
        )
