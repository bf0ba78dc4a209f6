"""A `ParallelModule` copied, for averages of weights, and written to files, which need plain tensors."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.state.slots import Slots
from autopar.errors import AutoparError
from autopar.runtime.dtensor import full_tensor, on_all_stages
from autopar.runtime.step.no_sync import DeferredReduction

if TYPE_CHECKING:
    from autopar.module.parallel_module import ParallelModule

SAVING = ("save_pretrained", "push_to_hub")
"""Methods of models that write their tensors to files."""

RESIZING = ("resize_token_embeddings", "resize_position_embeddings")
"""Methods of models that put other parameters in place of theirs."""


def deep_copy(module: ParallelModule, memo: dict[int, Any]) -> ParallelModule:
    """A copy with tensors of its own. Plans, graphs and process groups do not change: the two share them."""
    old = module._autopar
    # deepcopy takes what is in its memo for copied already: so these are shared, or replaced.
    for shared in (old.context, old.options, old.init, old.family, old.first, old.latest, old.one):
        memo[id(shared)] = shared
    new = memo[id(module)] = object.__new__(type(module))
    memo[id(old.cache)] = old.cache.copy()
    memo[id(old.deferred)] = DeferredReduction(new.named_parameters)  # no gradient of the copy is deferred
    memo[id(old.meters)] = []  # they count what the original does
    # Both refer to the original's tensors by identity, and are made anew below.
    memo[id(old.offloaded)] = memo[id(old.slots)] = None
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    new._autopar.slots = Slots(new._autopar.original, old.slots.whole)
    new._autopar.slots.compute(old.slots.computing.items())
    new._autopar.family.append(weakref.ref(new._autopar))
    new._autopar.offload_states()
    return new


def shallow_copy(module: ParallelModule) -> ParallelModule:
    """Another object with the same tables, as of any module."""
    new: ParallelModule = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def refuse_pickling() -> None:
    """Refuse pickling: a file with a parallelized model would be of no use to another process.

    Raises:
        AutoparError: always.
    """
    raise AutoparError(
        "a parallelized model cannot be pickled: it holds process groups, graphs and this rank's part of the tensors. "
        "Save torch.save(model.full_state_dict(), path), where every rank calls full_state_dict() and one rank saves, "
        "or autopar.checkpoint.state_dict(model, optimizer) with torch.distributed.checkpoint; then build the model "
        "anew, parallelize() it, and load_full_state_dict() or autopar.checkpoint.load_state_dict()"
    )


def refuse_resizing(name: str) -> None:
    """Refuse a method that resizes parameters.

    Raises:
        AutoparError: always.
    """
    raise AutoparError(
        f"{name}() puts plain parameters in place of those on the mesh: call it before parallelize(), or build "
        "the resized model anew, parallelize() that, and load values with load_full_state_dict()"
    )


def save(module: ParallelModule, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rank 0 writes what one device would; every rank calls it, as a collective call."""
    state = kwargs.get("state_dict")
    if state is not None:
        kwargs["state_dict"] = {k: full_tensor(v) if isinstance(v, DTensor) else v for k, v in state.items()}
    context = module._autopar.context
    writes = context.rank == 0
    # On rank 0: to name the adapters of a model PEFT may ask the hub, which another rank may not reach.
    only = context.decide(lambda: _adapters_to_save(module, name, method, args, kwargs), f"{name}() of rank 0")
    with whole_parameters(module, keep=writes, only=only), _config_kept(module._autopar.original):
        # Together, so that others neither read the file before it is there nor go on if the disk is full.
        return context.together(lambda: method(*args, **kwargs) if writes else None, f"{name}() of rank 0")


def _adapters_to_save(
    module: ParallelModule, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[str] | None:
    """Names of what `save_pretrained` of a PEFT model writes, by PEFT's own choice; None: everything, or not known."""
    library, model = sys.modules.get("peft"), module._autopar.original
    if library is None or name != "save_pretrained" or not isinstance(model, library.PeftModel):
        return None
    given = inspect.signature(method).bind(*args, **kwargs).arguments
    if given.get("path_initial_model_for_weight_conversion") is not None:  # it computes with what it saves
        return None
    if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
        return None  # what it saves it computes by the prompt's encoder: of DTensors on rank 0 alone, others would wait
    stand_ins = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in model.state_dict().items()}
    chosen: list[torch.Tensor] = []
    for adapter in given.get("selected_adapters") or model.peft_config:
        asked = {"adapter_name": adapter, "save_embedding_layers": given.get("save_embedding_layers", "auto")}
        try:
            chosen += library.get_peft_model_state_dict(model, state_dict=dict(stand_ins), **asked).values()
        except RuntimeError:  # it looks at values, as AdaLoRA does where it leaves out ranks
            return None
    names = {id(stand_in): n for n, stand_in in stand_ins.items()}
    if any(id(tensor) not in names for tensor in chosen):  # made of others
        return None
    return frozenset(names[id(tensor)] for tensor in chosen)


@contextmanager
def _config_kept(model: nn.Module) -> Iterator[None]:
    """What a method writes into the model's ``config`` goes into a copy: on one rank alone it would set that apart."""
    config = vars(model).get("config")
    if config is None:
        yield
        return
    vars(model)["config"] = copy.deepcopy(config)
    try:
        yield
    finally:
        vars(model)["config"] = config


@contextmanager
def whole_parameters(
    module: ParallelModule, *, keep: bool, only: frozenset[str] | None = None, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Whole plain parameters in place of DTensors, on ranks that ``keep`` them; a collective call.

    Args:
        module: whose parameters.
        keep: whether this rank needs them.
        only: parameters that are gathered, under any of their names; None: all. The others stay as they are.
        device: of the whole parameters.
    """
    session, whole = module._autopar, {}
    session.require_values()
    types = session.types()
    every = session.original.named_parameters(remove_duplicate=False)
    wanted = None if only is None else {id(parameter) for name, parameter in every if name in only}
    # One parameter at a time, and those to save on the CPU: rank 0 need not have the whole model on its device.
    for name, parameter in module.named_parameters():
        if wanted is not None and id(parameter) not in wanted:
            continue
        known = types.get(name)
        full = full_tensor(on_all_stages(parameter, known[0], known[1], session.context) if known else parameter)
        if keep:
            whole[id(parameter)] = nn.Parameter(full.to(device), parameter.requires_grad)
    tables = [m._parameters for m in module.modules()] if keep else []
    swapped = [(table, name, old) for table in tables for name, old in table.items() if id(old) in whole]
    try:
        for table, name, old in swapped:
            table[name] = whole[id(old)]
        yield
    finally:
        for table, name, old in swapped:
            table[name] = old
