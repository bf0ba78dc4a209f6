"""The oracle for padding: an operator on longer tensors gives, on the elements that were there, what it gave.

What a rule says that the padding must hold is written there; where it may hold anything, not-a-numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import InvalidRuleError
from autopar.rules.oracle.call import RuleCall, compare, map_tensors, outputs_of
from autopar.rules.rule import Dims, Padding, Rule, lengthened, padding_of, vanishes

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
        rtol: largest difference of an entry: ``rtol * (1 + |entry|)``.
        rule: check this rule instead of the registered one.
        run: computes the operator, where it has no kernel itself.

    Raises:
        InvalidRuleError: an output differs, or its padding holds something else than is known of it.
    """
    call = _PaddedCall.make(target, args, kwargs, rule, run)
    proven = []
    for letter in call.rule.letters:
        padding = padding_of(call.rule, letter)
        if padding is None or call.is_grouped(letter):
            continue
        # Not-a-numbers spread: an operator that reads free padding shows it everywhere.
        call.check(letter, padding, math.nan, padding.output, rtol)
        if vanishes(call.rule, letter) and letter not in (call.rule.padded or {}):
            # `pad_dims` counts on zeros that stay zeros, and then fills nothing in.
            call.check(letter, padding, 0.0, 0.0, rtol)
        proven.append(letter)
    return proven


class _PaddedCall(RuleCall):
    """A call on longer tensors."""

    def is_grouped(self, letter: str) -> bool:
        """Whether a letter shares a dim of some tensor with others."""
        tensors = [*self.rule.inputs, *(dims for dims in self.rule.outputs if dims is not None)]
        return any(letter in dim and len(dim) > 1 for dims in tensors for dim in dims)

    def check(self, letter: str, padding: Padding, free: float, content: float | None, rtol: float) -> None:
        """Pad, run, compare.

        Args:
            letter: along which tensors get longer.
            padding: what the rule says of it.
            free: what arguments hold there that may hold anything.
            content: what outputs must hold there then; None: anything.
            rtol: as of `check_padding`.
        """
        args, kwargs = self.longer(letter, padding, free)
        where = f"{self.target} ({self.rule.equation}), {letter} padded with {free:g}"
        try:
            value = self.run(*args, **kwargs)
        except Exception as e:  # whatever an operator raises: it does not stand the padding
            raise InvalidRuleError(f"{where}: the run fails: {e}") from e
        found = outputs_of(self.rule, value)
        for j, (a, b, dims) in enumerate(zip(found, self.outputs, self.rule.outputs, strict=True)):
            if a is not None and b is not None and dims is not None and self.has_values:
                own = _unpadded(a, b, dims, letter, content, f"{where}, output {j}")
                compare(own, b, f"{where}, output {j}", rtol=rtol, atol=rtol)

    def longer(self, letter: str, padding: Padding, free: float) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with padding."""
        fills = [*padding.inputs, *[None] * len(self.inputs)]
        longer = iter(
            [
                _pad(t, dims, letter, free if fill is None else fill)
                for t, dims, fill in zip(self.inputs, self.rule.inputs, fills, strict=False)
            ]
        )
        args, kwargs = map_tensors(self.arguments, lambda _: next(longer))
        size = self.sizes[letter]
        # Only output 0 can have its shape among the arguments.
        first, dims = self.outputs[0], self.rule.outputs[0]
        shape = () if first is None or dims is None else zip(first.shape, dims, strict=True)
        wanted = [size + EXTRA if dim == (letter,) else n for n, dim in shape]
        return lengthened(self.rule, args, kwargs, wanted, {letter: (size, size + EXTRA)})


def _unpadded(
    found: torch.Tensor, expected: torch.Tensor, dims: Dims, letter: str, content: float | None, where: str
) -> torch.Tensor:
    """An output without its padding, once it is seen to hold ``content``."""
    padded = [d for d, dim in enumerate(dims) if dim == (letter,)]
    shape = [n + EXTRA if d in padded else n for d, n in enumerate(expected.shape)]
    if list(found.shape) != shape or found.dtype != expected.dtype:
        got = list(found.shape), found.dtype
        raise InvalidRuleError(f"{where}: the output is {got}, expected {(shape, expected.dtype)}")
    own = found
    for d in padded:
        own, rest = own.narrow(d, 0, expected.shape[d]), found.narrow(d, expected.shape[d], EXTRA)
        if content is not None and not bool((rest == content).all()):
            raise InvalidRuleError(f"{where}: the padding holds something else than {content:g}")
    return own


def _pad(tensor: torch.Tensor, dims: Dims, letter: str, fill: float) -> torch.Tensor:
    """The tensor with more elements along a letter; where these may be anything, indices are zero."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        # Integers have no NaN, and an index must name an element that exists.
        fill = fill != 0 if tensor.dtype == torch.bool else int(fill) if math.isfinite(fill) else 0
    for d, dim in enumerate(dims):
        if dim == (letter,):
            shape = [EXTRA if k == d else n for k, n in enumerate(tensor.shape)]
            tensor = torch.cat([tensor, torch.full(shape, fill, dtype=tensor.dtype)], d)
    return tensor
