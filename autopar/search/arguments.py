"""What is asked of a plan, refused before any work where it cannot be: arguments, precision, and what is inexact."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.costs.arguments import FUNCTION, LOSS, OPTIMIZER, SIZE, a, optional, require
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.plan import ROUNDED, Plan
from autopar.ir.precision import Precision
from autopar.ir.quantized.axes import WEIGHTS, read_quantized
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.search.formulation.local_axes import FP8, require_no_float64
from autopar.search.formulation.pins import check_names
from autopar.search.options import Search
from autopar.search.recost import IN_FLOAT8, LARGER
from autopar.sharding.dims import Dims

BATCH = a((tuple, list, Mapping, binding.Passed), "a tuple of positional arguments, as (x,), or a dict of named ones")
"""The batch of a function that needs one."""


def check_planning(
    model: nn.Module,
    batch: Batch | None,
    loss_fn: LossFunction | None,
    loss: Loss,
    memory: str | float | None,
    optimizer: str,
    search: Search | None,
) -> None:
    """Refuse arguments that are none, before anything is captured.

    Raises:
        ValueError: names the first, and what is expected.
    """
    require(
        model=(model, a(nn.Module, "a torch.nn.Module")),
        loss_fn=(loss_fn, optional(FUNCTION)),
        loss=(loss, optional(LOSS)),
        memory=(memory, optional(SIZE)),
        optimizer=(optimizer, OPTIMIZER),
        search=(search, optional(a(Search, "an autopar.Search"))),
    )
    if loss is not None and loss_fn is not None:
        raise ValueError("loss= picks a scalar of the output and loss_fn= makes one: pass one of them")
    if search is not None:
        named = (name for name, _ in model.named_parameters(remove_duplicate=False))
        check_names(search.layouts, named, (name for name, _ in model.named_modules(remove_duplicate=False)))
    if batch is not None:
        binding.passed(batch)


def policy_of(
    model: nn.Module, precision: Precision | str | torch.dtype | None, search: Search | None, plan: Plan | None = None
) -> Precision | None:
    """The policy that an argument asks for; float8 layers are for who asks for them twice, as all that is inexact.

    Args:
        model: whose parameters ``exclude`` names.
        precision: the argument.
        search: which says what may be inexact.
        plan: one that is given instead of searching, which says itself that its layers are in float8.

    Raises:
        ValueError: there is no such policy, float8 is not among ``inexact``, or ``exclude`` names no parameter.
        PlanError: the plan computes linear layers in another way.
    """
    policy = Precision.resolve(precision)
    linear = None if policy is None else policy.linear
    how = "" if linear is None else str(linear)
    if plan is not None and plan.float8 != how:
        own = "the dtype of their results"
        raise PlanError(
            f"the plan computes linear layers in {plan.float8 or own}, and precision= asks for {how or own}: pass the "
            "precision that it was planned for, or plan again"
        )
    if linear is None:
        return policy
    if plan is None and FP8 not in (search or Search()).inexact:
        raise ValueError(
            f"precision= computes linear layers in {how}: {ROUNDED}; ask for that with "
            f"search=Search(inexact=({FP8!r},))"
        )
    for pattern in linear.exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters(remove_duplicate=False)):
            raise ValueError(
                f"Float8(exclude=...) names {pattern!r}, which is no parameter of the model; see its names"
            )
    return policy


def check_float64(model: nn.Module, policy: Precision | None, search: Search | None, plan: Plan | None = None) -> None:
    """Refuse compressed and few-bit messages of parameters in float64, unless that too is asked for.

    Args:
        model: whose parameters they are.
        policy: in whose dtype parameters are stored.
        search: which says what may be inexact.
        plan: one that is given instead of searching.

    Raises:
        ValueError: names the axis, a parameter and the remedy.
    """
    search = search or Search()
    roles, quantized = search.roles, [q.axis for q in read_quantized(search.quantized)]
    if plan is not None:
        roles, quantized = {axis: plan.worker_role for axis, _ in plan.workers}, [q.axis for q in plan.quantized]
    stored = [(n, p.dtype if policy is None else policy.master) for n, p in model.named_parameters()]
    require_no_float64([n for n, dtype in stored if dtype == torch.float64], search.inexact, roles, quantized)


def require_load(search: Search, dims: Dims) -> None:
    """Refuse how many tokens each expert got where there are more or fewer experts.

    Raises:
        ValueError: names both numbers.
    """
    other = next((t.experts for t in dims.types.values() if t.experts not in (0, len(search.load))), None)
    if len(search.load) > 1 and other is not None:
        raise ValueError(
            f"imbalance= has the tokens of {len(search.load)} experts, and a mixture of the model has {other}: give a "
            "number for each, or one factor for all mixtures"
        )


def require_sent(
    sent: Collection[tuple[str, str]],
    whole: Callable[[], Mapping[tuple[str, str], str]],
    quantized: Mapping[str, Mapping[str, int]],
) -> None:
    """Refuse a plan that sends none of what was to be in few bits along an axis.

    Args:
        sent: axes, and what is sent in few bits along them.
        whole: gives axes, and what is sent whole along them, with the reason, see `autopar.search.recost`.
        quantized: what is asked for.

    Raises:
        InfeasibleError: names the axis, what it is and the remedy.
    """
    for axis, bits in quantized.items():
        for what in bits:
            if (axis, what) not in sent:
                done = "gathered" if what == WEIGHTS else "reduced into shards"
                raise InfeasibleError(
                    f"quantized= has {what} in {bits[what]} bits along axis {axis!r}, and the plan has none that are "
                    f"{done} along it and smaller so{_INSTEAD[whole().get((axis, what))].format(what)}"
                )


_INSTEAD = {
    None: "; give the axis the role 'shard' (recipe 'fsdp'), or leave it out",
    LARGER: ": blocks of few bits and their scales would be more bytes than what is sent; leave '{}' out for this axis",
    IN_FLOAT8: ": those of linear layers are in float8 when they are sent, as precision= says; leave '{}' out for this "
    "axis, or precision='fp8' out",
}
"""What is to be done, by the reason for which nothing is in few bits; None: nothing of the kind is sent."""


def require_other_gathers(gathered: Collection[str], secondary: Sequence[str]) -> None:
    """Refuse copies for the backward pass that save it no gather.

    Args:
        gathered: axes along which the plan gathers parameters.
        secondary: axes along which the copies are split.

    Raises:
        InfeasibleError: parameters are gathered along these axes alone, or along none.
    """
    if secondary and not set(gathered) - set(secondary):
        raise InfeasibleError(
            f"pin 'secondary' has copies of parameters split along {', '.join(secondary)}, and the plan gathers no "
            "parameter along another axis, which they would save the backward pass: give an outer axis the role "
            "'shard' (recipe 'fsdp'), or leave the pin out"
        )
