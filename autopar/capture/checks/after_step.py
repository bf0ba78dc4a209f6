"""`Check`: what is looked at after a step, given the graph's results; a trace goes on as if all were well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.signature.pytree import Leaf

CHECK_MATRICES = torch.ops.aten._linalg_check_errors.default

Check = Callable[[Any], None]
"""A check that is made after a step, given the graph's results."""


def check_matrices(info: Leaf, function: str, is_matrix: bool, results: Any) -> None:
    """Raise torch's own error if a matrix is singular.

    Args:
        info: the result in which the factorization says of each matrix whether it is.
        function: whose error it is.
        is_matrix: there is one matrix, not a batch.
        results: of the graph.

    Raises:
        torch.linalg.LinAlgError: one is.
    """
    CHECK_MATRICES(results[info.index], function, is_matrix=is_matrix)


def check_count(invalid: Leaf, fail: Callable[[], None], results: Any) -> None:
    """Let a check fail.

    Args:
        invalid: the result that says how many values are not as they should be.
        fail: raises or warns.
        results: of the graph.
    """
    if int(results[invalid.index]):
        fail()


def check_between(valid: Leaf, fail: Callable[[], None], bounds: Sequence[int], results: Any) -> None:
    """Let a check fail where a result that counts, ``valid``, is less than the one bound or more than the other."""
    if not bounds[0] <= int(results[valid.index]) <= bounds[1]:
        fail()


def refusal(said: str) -> Callable[[], None]:
    """What fails where a function of torch was given values that it refuses; torch has the values to show."""

    def fail() -> None:
        raise ValueError(f"{said}; run the model without parallelize() to see them")

    return fail
