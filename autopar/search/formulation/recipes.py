"""Recipes: well-known kinds of parallelism by name. A recipe gives each mesh axis a role."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from autopar.search.formulation.axis_roles import (
    CONTEXT,
    DATA,
    EXPERT,
    OPTIMIZER,
    SEQUENCE,
    SHARD,
    TENSOR,
    Roles,
    read_roles,
)

RANDOM = "random"

Recipe = Callable[[Sequence[str], Mapping[str, str]], Roles]
"""``recipe(axes, roles)``: names of the axes, outermost first, and the roles that the user gave."""

DATA_NAMES, TENSOR_NAMES = ("data", "dp"), ("tensor", "tp")
EXPERT_NAMES, CONTEXT_NAMES = ("expert", "ep"), ("context", "cp")


def ddp(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """Every axis splits the batch; parameters are replicated, and gradients all-reduced."""
    return (DATA,) * len(axes)


def zero1(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """Every axis splits the batch and optimizer state; parameters are gathered once, gradients all-reduced."""
    return (OPTIMIZER,) * len(axes)


def zero2(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """``zero1``, and gradients are reduce-scattered."""
    return (SHARD,) * len(axes)


def fsdp(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """Every axis splits the batch and parameters, which are re-gathered if memory is short; gradients scattered."""
    return (SHARD,) * len(axes)


def hsdp(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """``ddp`` on the outer axis, ``fsdp`` on the inner one."""
    if len(axes) != 2:
        raise ValueError(f"recipe 'hsdp' takes two axes, the outer to replicate along and the inner to shard along; "
                         f"the mesh has {', '.join(axes) or 'none'}")  # fmt: skip
    return DATA, SHARD


def megatron(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """The tensor axis splits linears, column-parallel then row-parallel; the other axes split the batch."""
    return _megatron("megatron", TENSOR, axes, roles)


def megatron_sequence(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """``megatron``, and between the pairs the tensor axis splits the sequence."""
    return _megatron("megatron-sequence", SEQUENCE, axes, roles)


def expert(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """The expert axis splits the experts of a mixture, and tokens go there and back; the other axes are ``fsdp``'s."""
    return _with_own_axis("expert", EXPERT, EXPERT, EXPERT_NAMES, SHARD, axes, roles)


def context(axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    """The context axis splits the sequence; parameters are ``fsdp``'s on every axis, which split the batch."""
    return _with_own_axis("context", CONTEXT, CONTEXT, CONTEXT_NAMES, SHARD, axes, roles)


def _megatron(name: str, own: str, axes: Sequence[str], roles: Mapping[str, str]) -> Roles:
    return _with_own_axis(name, TENSOR, own, TENSOR_NAMES, DATA, axes, roles)


def _with_own_axis(
    recipe: str, role: str, own: str, names: Sequence[str], rest: str, axes: Sequence[str], roles: Mapping[str, str]
) -> Roles:
    """Roles as given, or else by the axes' names, or else the last axis without a role is the recipe's own.

    Args:
        recipe: its name.
        role: as users give it to the recipe's own axis.
        own: role that this one has then.
        names: of axes that have it.
        rest: role of the axes that are left.
        axes: of the mesh.
        roles: that the user gave.
    """
    given = dict(zip(axes, read_roles(roles, axes), strict=True))
    named = {a: rest if a in DATA_NAMES else own if a in names else None for a in axes}
    found = {a: given[a] or named[a] for a in axes}
    found = {a: own if given_ == role else given_ for a, given_ in found.items()}
    # The last axis joins neighbors, over the fastest link: what the recipe is named for needs it most.
    left = [a for a in axes if found[a] is None]
    if own not in found.values() and left:
        found[left[-1]] = own
    if own not in found.values():
        raise ValueError(f"recipe {recipe!r} has no {role} axis: the roles of {', '.join(axes)} are all others; "
                         f"give one with roles={{{axes[-1]!r}: {role!r}}}")  # fmt: skip
    return tuple(found[a] or rest for a in axes)


RECIPES: dict[str, Recipe] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "megatron": megatron,
    "megatron-sequence": megatron_sequence,
    "context": context,
    "expert": expert,
}

GATHERS_ONCE = ("zero1", "zero2")
"""Recipes that save gathered parameters for the backward pass, whatever the budget."""

TAKES_ROLES = ("megatron", "megatron-sequence", "context", "expert")


def check_recipe(name: str | None, roles: Mapping[str, str]) -> None:
    """Refuse recipes that do not exist, and roles beside a recipe that decides them all.

    Raises:
        ValueError: says what there is.
    """
    if name not in (None, RANDOM, *RECIPES):
        near = difflib.get_close_matches(str(name).lower(), RECIPES, 1)
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)} and {RANDOM}"
                         + (f": did you mean {near[0]!r}?" if near else ""))  # fmt: skip
    if roles and name is not None and name not in TAKES_ROLES:
        raise ValueError(f"recipe {name!r} decides the roles of all axes; leave roles= out, or the recipe")


def roles_of(name: str | None, axes: Mapping[str, int], roles: Mapping[str, str]) -> Roles:
    """The role of each axis under a recipe, or as the user gave it; None: the search decides.

    Raises:
        ValueError: the recipe does not suit the axes, or a role is wrong.
    """
    if name in RECIPES and all(n == 1 for n in axes.values()):
        return (DATA,) * len(axes)  # one device has nothing to lay out
    if name in RECIPES:
        return RECIPES[str(name)](tuple(axes), roles)
    return read_roles(roles, tuple(axes))
