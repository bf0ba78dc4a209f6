"""The oracle for strides: a kernel is given the same values with other strides, and must compute the same.

Each tensor argument alone, all at once, and a mixture of all are permuted, transposed, stepped, a window of a longer
tensor, after an odd offset, and expanded, with strides of zero: arguments and gradients alike. Where the rule says that
the kernel asks for strides, it gets them by a copy, as `autopar.passes.kernels.insert_contiguous` does it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import InvalidRuleError
from autopar.rules.oracle.call import RuleCall, map_tensors, outputs_of, wide
from autopar.rules.rule import Rule, required_strides
from autopar.rules.strides import meet, other_strides

MIXTURES = 3
"""Calls in which each argument has strides of a random kind."""


def check_strides(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rule: Rule | None = None,
    run: Callable[..., Any] | None = None,
    expanded: bool = True,
    rtol: float = 1e-9,
) -> list[str]:
    """Run one call with other strides; returns in which ways it was run.

    Args:
        target: an operator overload.
        args: its positional arguments, floating tensors in float64.
        kwargs: its keyword arguments.
        rule: check this rule instead of the registered one.
        run: computes the operator, where it has no kernel itself.
        expanded: also arguments that are the same along a dim, which some operators have no single result for.
        rtol: largest difference, relative to the largest entry of a result (at least 1).

    Raises:
        InvalidRuleError: the kernel needs strides that the rule does not ask for; says which argument.
    """
    call = RuleCall.make(target, args, kwargs, rule, run)
    needs = required_strides(target, call.rule)
    ways = []
    for label, values, tensors in _calls(call, expanded):
        expected = _run(call, values)
        if isinstance(expected, Exception):  # the values are none that the operator takes
            continue
        found = _run(call, [meet(t, need) for t, need in zip(tensors, needs, strict=True)])
        where = f"{target} ({call.rule.equation}), {label}"
        remedy = "say what its kernel needs in Rule(strides=...)"
        if isinstance(found, Exception):
            raise InvalidRuleError(f"{where}: {found}; {remedy}")
        for j, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a is not None and b is not None and call.has_values and not _alike(a, b, rtol):
                raise InvalidRuleError(f"{where}: output {j} depends on the strides of arguments; {remedy}")
        ways.append(label)
    return ways


def _calls(call: RuleCall, expanded: bool) -> Iterator[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """What is run: a label, the tensors row-major, and the same tensors elsewhere in memory."""
    plain = call.inputs
    ways = [dict(other_strides(t)) for t in plain]
    for i, found in enumerate(ways):
        for label, tensor in found.items():
            yield f"argument {i} {label}", plain, [tensor if j == i else t for j, t in enumerate(plain)]
    for label in dict.fromkeys(label for found in ways for label in found):
        yield f"all arguments {label}", plain, [found.get(label, t) for found, t in zip(ways, plain, strict=True)]
    # A fixed seed: a rule that passes today passes tomorrow.
    draw = random.Random(0)
    for k in range(MIXTURES):
        yield f"mixture {k}", plain, [draw.choice([t, *found.values()]) for found, t in zip(ways, plain, strict=True)]
    for i, tensor in enumerate(plain if expanded else ()):
        for label, zero in _expanded(tensor):
            tensors = [zero if j == i else t for j, t in enumerate(plain)]
            # Expanded values are other values: they are compared with their own row-major copy.
            yield f"argument {i} {label}", [t.contiguous() for t in tensors], tensors


def _expanded(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The first of a tensor's elements along one dim, or all, expanded."""
    longer = [d for d, n in enumerate(value.shape) if n > 1] if value.numel() else []
    for d in longer:
        yield f"expanded along {d}", value.narrow(d, 0, 1).expand(value.shape)
    if len(longer) > 1:
        yield "one number, expanded", value.flatten()[0].expand(value.shape)


def _run(call: RuleCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | Exception:
    remaining = iter(tensors)
    args, kwargs = map_tensors(call.arguments, lambda _: next(remaining))
    try:
        return outputs_of(call.rule, call.run(*args, **kwargs))
    except (RuntimeError, ValueError, IndexError) as error:
        return error


def _alike(a: torch.Tensor, b: torch.Tensor, rtol: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    x, y = wide(a), wide(b)
    finite = y[y.isfinite()].abs()
    largest = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    # Another order of memory is another order of summation.
    rtol = max(rtol, 64 * torch.finfo(a.dtype).eps)
    return torch.allclose(x, y, rtol=0.0, atol=rtol * largest, equal_nan=True)
