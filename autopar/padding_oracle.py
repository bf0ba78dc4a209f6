"""The oracle for padding: an operator on longer tensors gives, on the elements that were there, what it gave.

What a rule says that the padding must hold is written there; where it may hold anything, not-a-numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import InvalidRuleError
from autopar.oracle import rule_of
from autopar.strategy import Dims, Rule, lengthened, letter_sizes, padding_of, vanishes

EXTRA = 3
"""Elements of padding."""


def check_padding(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rtol: float = 1e-9,
    rule: Rule | None = None,
    run: Callable[..., Any] | None = None,
) -> list[str]:
    """Prove on one call that every letter that can be padded can; returns these letters.

    Args:
        target: an operator overload.
        args: its positional arguments, floating tensors in float64.
        kwargs: its keyword arguments.
        rtol: largest difference, relative to the largest entry of the tensor (at least 1).
        rule: check this rule instead of the registered one.
        run: computes the operator, where it has no kernel itself.

    Raises:
        InvalidRuleError: an output differs, or its padding holds something else than is known of it.
    """
    rule, run = rule or rule_of(target, args, kwargs), run or target
    inputs = [a for a in _leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    expected = _outputs(rule, run(*args, **kwargs))
    shapes = [None if t is None else tuple(t.shape) for t in expected]
    sizes = letter_sizes(rule, [tuple(t.shape) for t in inputs], shapes)
    proven = []
    for letter in rule.letters:
        padding = padding_of(rule, letter)
        tensors = [*rule.inputs, *(dims for dims in rule.outputs if dims is not None)]
        if padding is None or any(letter in dim and len(dim) > 1 for dims in tensors for dim in dims):
            continue
        size = sizes[letter]
        fills = [padding.inputs[i] if i < len(padding.inputs) else None for i in range(len(inputs))]
        # What the padding of the outputs holds, given what that of free arguments holds.
        cases: list[tuple[float, float | None]] = [(math.nan, padding.output)]
        if vanishes(rule, letter):
            cases.append((0.0, 0.0))
        for free, content in cases:
            longer = iter(
                _pad(t, dims, letter, free if fill is None else fill)
                for t, dims, fill in zip(inputs, rule.inputs, fills, strict=True)
            )
            shape = [size + EXTRA if dim == (letter,) else n for dim, n in _first(rule, shapes)]
            made, more = _replace((tuple(args), dict(kwargs)), longer)
            local, named = lengthened(rule, made, more, shape, {letter: (size, size + EXTRA)})
            where = f"{target} ({rule.equation}), {letter} padded with {free:g}"
            try:
                found = _outputs(rule, run(*local, **named))
            except Exception as e:
                raise InvalidRuleError(f"{where}: the run fails: {e}") from e
            for j, (a, b) in enumerate(zip(found, expected, strict=True)):
                if a is not None and b is not None and "empty" not in str(target):
                    _compare(a, b, rule.outputs[j], letter, content, rtol, f"{where}, output {j}")
        proven.append(letter)
    return proven


def _compare(
    found: torch.Tensor, expected: torch.Tensor, dims: Dims | None, letter: str, content: float | None,
    rtol: float, where: str,
) -> None:  # fmt: skip
    own = found
    for d, dim in enumerate(dims or ()):
        if dim == (letter,):
            own = own.narrow(d, 0, expected.shape[d])
            rest = found.narrow(d, expected.shape[d], EXTRA)
            if content is not None and not bool((rest == content).all()):
                raise InvalidRuleError(f"{where}: the padding holds something else than {content:g}")
    if own.shape != expected.shape:
        raise InvalidRuleError(f"{where}: the output is {list(found.shape)}")
    try:
        torch.testing.assert_close(own, expected, rtol=rtol, atol=rtol, equal_nan=True)
    except AssertionError as e:
        raise InvalidRuleError(f"{where}: {str(e).splitlines()[0]}") from e


def _pad(tensor: torch.Tensor, dims: Dims, letter: str, fill: float) -> torch.Tensor:
    """The tensor with more elements along a letter; numbers of places are zero there."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        fill = 1 if tensor.dtype == torch.bool else 0
    for d, dim in enumerate(dims):
        if dim == (letter,):
            shape = [EXTRA if k == d else n for k, n in enumerate(tensor.shape)]
            tensor = torch.cat([tensor, torch.full(shape, fill, dtype=tensor.dtype)], d)
    return tensor


def _first(rule: Rule, shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[tuple[str, ...], int]]:
    """Letters and size of each dim of output 0."""
    if not shapes or shapes[0] is None or rule.outputs[0] is None:
        return []
    return list(zip(rule.outputs[0], shapes[0], strict=True))


def _outputs(rule: Rule, value: Any) -> list[torch.Tensor | None]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    return [v if dims is not None else None for v, dims in zip(values, rule.outputs, strict=False)]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _replace(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The tree with every tensor replaced, in order."""
    if isinstance(tree, dict):
        return {key: _replace(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_replace(value, tensors) for value in tree)
    return next(tensors) if isinstance(tree, torch.Tensor) else tree
