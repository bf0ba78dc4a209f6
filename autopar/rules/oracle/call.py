"""One call of an operator that a rule is checked on: its arguments, what it gives, and how results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.fx.node import map_aggregate

from autopar.errors import InvalidRuleError, MissingRuleError
from autopar.rules.rule import Rule, Spec, find_rule, letter_sizes

Tensors = list[torch.Tensor | None]
Tree = tuple[tuple[Any, ...], dict[str, Any]]


def rule_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """The rule of one call, from its real arguments.

    Raises:
        MissingRuleError: the operator has none.
    """
    function = find_rule(target)
    if function is None:
        raise MissingRuleError(f"no strategy for {target}; add one in strategies/")
    specs, named = map_tensors((tuple(args), dict(kwargs)), lambda t: Spec(tuple(t.shape), t.dtype))
    return function(*specs, **named)


@dataclass(frozen=True)
class RuleCall:
    """One call of an operator: its arguments, what it gives, and the rule under test."""

    target: Any
    run: Callable[..., Any]
    arguments: Tree
    inputs: list[torch.Tensor]
    outputs: Tensors
    rule: Rule
    sizes: dict[str, int]

    @classmethod
    def make(
        cls,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rule: Rule | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Self:
        """Run the operator, or what computes it, on the whole; the rule is the registered one by default."""
        rule, run = rule or rule_of(target, args, kwargs), run or target
        arguments: Tree = (tuple(args), dict(kwargs))
        inputs: list[torch.Tensor] = []
        map_tensors(arguments, inputs.append)
        outputs = outputs_of(rule, run(*args, **kwargs))
        shapes = [None if t is None else tuple(t.shape) for t in outputs]
        sizes = letter_sizes(rule, [tuple(t.shape) for t in inputs], shapes)
        return cls(target, run, arguments, inputs, outputs, rule, sizes)

    @property
    def has_values(self) -> bool:
        """Whether outputs hold anything; what is not initialized has a shape only."""
        # By the operator's name: torch has no tag for it.
        return "empty" not in str(self.target)


def map_tensors(tree: Tree, function: Callable[[torch.Tensor], Any]) -> Tree:
    """``tree`` with ``function`` of each tensor, in order; lists stay lists."""
    return map_aggregate(tree, lambda a: function(a) if isinstance(a, torch.Tensor) else a)


def outputs_of(rule: Rule, value: Any) -> Tensors:
    """The outputs that the rule speaks about; ``_`` is None whatever the operator gives."""
    # Some operators return a list, most a tuple or one tensor.
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) != len(rule.outputs):
        raise InvalidRuleError(f"{rule.equation}: {len(rule.outputs)} outputs for {len(values)}")
    return [None if dims is None else v for dims, v in zip(rule.outputs, values, strict=True)]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a dtype in which differences can be taken."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def compare(actual: torch.Tensor, expected: torch.Tensor, where: str, *, rtol: float, atol: float) -> None:
    """Refuse an entry that differs by more than ``atol + rtol * |expected|``, or at all if it is no floating number.

    Raises:
        InvalidRuleError: says where, and the largest difference.
    """
    # Counts, indices and booleans are right or wrong.
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        rtol = atol = 0.0
    a, b = wide(actual), wide(expected)
    if not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        # NaN on one side only is the largest difference of all.
        largest = (a - b).abs().nan_to_num(math.inf).max().item()
        raise InvalidRuleError(f"{where}: the largest difference is {largest:.3g}")
