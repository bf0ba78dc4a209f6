"""Roles ``"local"``, ``"compressed"``, ``"stale"``: of an axis of workers, between which nothing is planned.

Such an axis is left out of what is planned: each of its indices is a worker, with all of the other axes to itself and
its part of the batch. With ``local`` it has parameters of its own, which `autopar.LocalSteps` brings together every so
many steps; with ``compressed`` all have the same, since `autopar.CompressedGradients` gives each step the compressed
gradients of all; with ``stale``, `autopar.StaleGradients`, owners of the parameters take gradients as they come. None
is what synchronous training computes: `Search(inexact=("local",))` must ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.costs.arguments import shown
from autopar.ir.program import Program
from autopar.search.formulation.axis_roles import COMPRESSED, LOCAL, STALE, WORKER_ROLES
from autopar.sharding.dims import analyze

Axes = tuple[tuple[str, int], ...]
"""Name and size of each mesh axis, outermost first."""

QUANTIZED = "quantized"
"""Messages in few bits, `Search.quantized`."""

FP8 = "fp8"
"""Linear layers in float8, a choice of ``precision=``."""

FLOAT64 = "float64"
"""Compressed or few-bit messages of parameters in float64: for who compares them with a reference."""

INEXACT = (*WORKER_ROLES, QUANTIZED, FP8, FLOAT64)
"""Choices that change numbers."""

_WHY = {
    LOCAL: "its workers train apart between exchanges",
    COMPRESSED: "its workers exchange compressed gradients",
    STALE: "its workers compute gradients from parameters that others have changed meanwhile",
}


def check_inexact(inexact: tuple[str, ...], roles: Mapping[str, str], quantized: Mapping[str, Any]) -> None:
    """Refuse what changes numbers unless it is asked for, and choices that do not exist.

    Args:
        inexact: what is asked for.
        roles: of axes.
        quantized: bits of messages, by axis.

    Raises:
        ValueError: names the axis or the choice.
    """
    for choice in inexact:
        if choice not in INEXACT:
            raise ValueError(f"inexact= names {shown(choice)}; there are {', '.join(INEXACT)} that change numbers")
    for axis, role in roles.items():
        if role in WORKER_ROLES and role not in inexact:
            raise ValueError(
                f"roles= gives axis {axis!r} the role {role!r}: {_WHY[role]}, which is not equal to synchronous "
                f"training; ask for that with inexact=({role!r},)"
            )
    if quantized and QUANTIZED not in inexact:
        raise ValueError(
            f"quantized= has messages along axis {next(iter(quantized))!r} in few bits, which is not equal to exact "
            f"training; ask for that with inexact=({QUANTIZED!r},)"
        )


def require_no_float64(
    double: Sequence[str], inexact: Sequence[str], roles: Mapping[str, str], quantized: Iterable[str]
) -> None:
    """Refuse to leave out most of what numbers in double precision are kept for.

    Args:
        double: names of the parameters that are stored in float64.
        inexact: what is asked for.
        roles: of axes.
        quantized: axes along which messages are in few bits.

    Raises:
        ValueError: names the axis and a parameter.
    """
    lossy = {axis: f"has the role {role!r}" for axis, role in roles.items() if role == COMPRESSED}
    lossy |= {axis: "has messages in few bits" for axis in quantized}
    if not double or not lossy or FLOAT64 in inexact:
        return
    axis, why = next(iter(lossy.items()))
    given = (*inexact, FLOAT64)
    raise ValueError(
        f"axis {axis!r} {why}, and parameter {double[0]!r} is float64: what is sent of its numbers has not the digits "
        "that they are kept for; train in float32 (model.float()), or, to compare with a reference, ask for that with "
        f"search=Search(inexact={given})"
    )


def exact_roles(roles: Mapping[str, str]) -> dict[str, str]:
    """The roles within a worker."""
    return {axis: role for axis, role in roles.items() if role not in WORKER_ROLES}


def worker_role(roles: Mapping[str, str]) -> str:
    """The role of the workers' axis; where there is no such axis, that of a plan without one."""
    return next((role for role in roles.values() if role in WORKER_ROLES), LOCAL)


def worker_axes(roles: Mapping[str, str], axes: Mapping[str, int]) -> tuple[Axes, dict[str, int]]:
    """The axis of the workers, none or one, and the axes within a worker.

    Raises:
        ValueError: the mesh has no such axis, several axes have the role, or the axis is not the outermost one.
    """
    named = [axis for axis, role in roles.items() if role in WORKER_ROLES]
    for axis in named:
        if axis not in axes:
            raise ValueError(f"roles= names axis {axis!r}; the mesh has {', '.join(axes)}")
    if len(named) > 1:
        raise ValueError(f"roles= gives {len(named)} axes the role {worker_role(roles)!r}; make them one axis")
    if named and named[0] != next(iter(axes)):
        raise ValueError(
            f"axis {named[0]!r} has the role {worker_role(roles)!r} and must be the outermost one of the mesh, which "
            f"is {next(iter(axes))!r}: a worker's devices are neighbors"
        )
    within = {axis: size for axis, size in axes.items() if axis not in named and size > 1}
    if named and within and worker_role(roles) == STALE:
        raise ValueError(
            f"axis {named[0]!r} has the role {STALE!r}, and its workers would have several devices each, {within}: "
            "gradients come in another order to each of them, whose copies of a parameter would no longer be the same; "
            "give all devices to this axis, or take the role 'local' or 'compressed'"
        )
    outer = tuple((axis, axes[axis]) for axis in named)
    return outer, {axis: size for axis, size in axes.items() if axis not in named}


def worker_count(workers: Axes) -> int:
    """How many workers there are; 1 without the role."""
    return math.prod(size for _, size in workers)


def require_rows(program: Program, split: Sequence[int]) -> None:
    """Check that what was split among workers are samples: one dim of the program.

    Args:
        program: of one worker's part of the batch.
        split: numbers of the batch tensors that were split along dim 0.

    Raises:
        ValueError: two of them have nothing to do with each other.
    """
    if not split:
        return
    dims = analyze(program)
    used = {i.name: n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "batch"}
    found: dict[int, str] = {}
    for name in map(str, split):
        if name in used and used[name].users and (dim := dims.types[used[name], 0].dims[0]):
            found.setdefault(id(dim[0]), name)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise ValueError(
            f"batch tensors {first} and {second} have as many rows, and the model does not use these as one dim: which "
            'are samples, to be split among workers? Pass each worker its own part with inputs="local"'
        )
