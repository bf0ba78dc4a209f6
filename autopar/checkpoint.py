"""Checkpoints: `save` and `load` a training run, on any mesh and under any plan; or state dicts for torch's own.

::

    autopar.checkpoint.save(folder, model, optimizer, step=100, scheduler=scheduler, extra={"epoch": 3})

    found = autopar.checkpoint.load(folder, model, optimizer, scheduler=scheduler)  # after a new parallelize()
    start = found.step + 1

Tensors are safetensors, written and read in parallel by `torch.distributed.checkpoint`; everything else is JSON.
Parameters split inside a fused dim are `_StridedShard`, which that library refuses to save and loads wrongly. A
`ParallelModule`'s own ``state_dict()`` therefore holds plain shards; `state_dict` here does the same for the optimizer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from autopar.costs.arguments import FLAG, PATH, SIZE, Kind, a, optional, require, whole
from autopar.costs.memory import parse_bytes
from autopar.costs.read_file import read_text
from autopar.errors import AutoparError
from autopar.low_communication.worker_exchange import WorkerExchange
from autopar.low_communication.worker_folders import common_checkpoint, worker_folder
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders, generators
from autopar.runtime.checkpoint.manifest import STATEFUL, Manifest, as_own, described, put_together, taken_apart
from autopar.runtime.checkpoint.pretrained_names import file_tensors, numbers
from autopar.runtime.checkpoint.safetensors_files import Source, files_of, write_files
from autopar.runtime.checkpoint.tensors import WRITING, group_of, read_into, result_of, start_writing
from autopar.runtime.checkpoint.whole import gathered_values, write_file
from autopar.runtime.dtensor import full_tensor, in_layout, redistribute
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.parameters import gathered
from autopar.runtime.state.state_dict import savable
from autopar.runtime.state.storage import storage_of

MOST_BYTES = 2**30
"""Of a manifest."""


@dataclass
class Saving:
    """A checkpoint that is being saved.

    Attributes:
        folder: where it will be.
    """

    folder: Path
    _context: MeshContext
    _written: Future[Any]
    _published: Future[Path]
    _finished: bool = field(default=False, init=False)

    def done(self) -> bool:
        """Whether this rank's files, and on rank 0 the whole checkpoint, are on the disk, or failed to get there."""
        return self._written.done() and (self._context.rank != 0 or self._published.done())

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; every rank calls it.

        Raises:
            AutoparError: it could not be written.
            RankError: a rank is gone.
        """
        if not self._finished:
            limit = WRITING.total_seconds()
            self._context.together(lambda: result_of(self._written, limit), "writing a checkpoint")
            self._context.decide(lambda: self._published.result(limit), "publishing a checkpoint")
            self._finished = True
        return self.folder


@dataclass(frozen=True)
class Loaded:
    """What `load` has found.

    Attributes:
        folder: of the checkpoint.
        step: as it was given to `save`.
        extra: likewise.
        same_random_numbers: whether random generators go on as they were: on as many ranks as saved them.
    """

    folder: Path
    step: int
    extra: Any
    same_random_numbers: bool


_last: WeakKeyDictionary[Any, Saving] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def save(
    folder: str | Path,
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int = 2,
    wait: bool = True,
    **stateful: Any,
) -> Saving:
    """Save a training run; every rank calls it.

    The checkpoint is written to a new folder in ``folder`` and renamed when all of it is on the disk: killed at any
    moment, `load` finds the one before or this one.

    Args:
        folder: of all checkpoints of the run, on a file system that all ranks see.
        model: its layouts must be decided: pass ``batch=`` to `autopar.parallelize`, or call it once.
        optimizer: of the model's parameters.
        step: number of the step that was the last.
        extra: anything of numbers, texts, small tensors and containers of them: epoch, position in the data.
        keep: how many checkpoints stay, this one included.
        wait: False: return when everything is copied to the host, and write in the background; one at a time, so the
            next `save` waits for it. The host needs room for one copy.
        stateful: further objects with ``state_dict()`` and ``load_state_dict()``, by name: learning-rate scheduler,
            sampler, `torch.amp.GradScaler`. Rank 0's are saved, since they are the same on all. `autopar.LocalSteps`
            and `autopar.CompressedGradients` have tensors, of which every rank writes its part.

    Workers that train apart (role ``local``) have different parameters: each saves into a folder of its own in
    ``folder``, ``worker-0`` and so on.

    Raises:
        AutoparError: ``optimizer`` has a parameter that the model has not, or an earlier save failed.
        ValueError: an argument is wrong, or something cannot be saved without pickle.
        RankError: a rank is gone, or at something else.
    """
    _check(folder, model, optimizer, stateful)
    require(step=(step, whole(0)), keep=(keep, whole(1)), wait=(wait, FLAG))
    context, root = model._autopar.context, worker_folder(Path(folder), model)
    earlier = _last.pop(model._autopar, None)
    if earlier is not None:
        earlier.wait()
    with model._autopar.together("checkpoint.save()"):
        tensors, plain = taken_apart(_state_dict(model, optimizer), _tied(model))
        outer = _outer_states(stateful)
    for name, found in outer.items():
        tensors |= {f"{STATEFUL}{name}.{key}": tensor for key, tensor in found["tensors"].items()}
    random = generators.states()

    def describe() -> str:
        states = {name: _without_tensors(outer, name, given) for name, given in stateful.items()}
        rest = {**plain, "stateful": states, "extra": extra}
        return described(tensors, rest, step, math.prod(context.sizes), list(random))

    manifest = context.together(describe, "checkpoint.save()")
    tensors.update({f"random.{context.rank}.{name}": state for name, state in random.items()})

    # Of one name for all workers: by that they find the last which all of them have.
    name = context.everyone.decide(lambda: folders.new_name(step), "the name of a checkpoint")
    context.decide(lambda: folders.begin(root, name), "making the folder of a checkpoint")
    partial = root / f"{name}{folders.PARTIAL}"
    written = start_writing(context, _group(model), tensors, partial, wait=wait)
    published: Future[Path] = Future()
    if context.rank == 0:
        # When its part is done, so are those of the others: the library has asked them.
        written.add_done_callback(lambda _: _publish(written, published, root, name, manifest, keep))
    saving = Saving(root / name, context, written, published)
    if wait:
        saving.wait()
    else:
        _last[model._autopar] = saving
    return saving


def load(
    folder: str | Path, model: ParallelModule, optimizer: torch.optim.Optimizer | None = None, **stateful: Any
) -> Loaded:
    """Load the last checkpoint that `save` has finished, or one of them; every rank calls it.

    Mesh, plan and number of ranks may be others than those of `save`. Workers that train apart each load what this
    worker saved, of the last step that all of them have.

    Args:
        folder: what `save` was given, or the folder of one checkpoint in it.
        model: a parallelized model with the same names and shapes.
        optimizer: of the same kind; None leaves what is saved of it.
        stateful: as for `save`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        AutoparError: it is of another model or optimizer; names the first differences. Nothing has changed then.
        ValueError: a file is damaged.
    """
    _check(folder, model, optimizer, stateful)
    context = model._autopar.context
    earlier = _last.pop(model._autopar, None)
    if earlier is not None:
        earlier.wait()
    found, text = context.decide(_reading(Path(folder), model), "finding a checkpoint")
    known = Manifest.of(text, found / folders.MANIFEST)
    with model._autopar.together("checkpoint.load()"):
        state = _state_dict(model, optimizer)
        tensors, _ = taken_apart(state, _tied(model))
        outer = _outer_states(stateful)
    for name, own_state in outer.items():
        tensors |= {f"{STATEFUL}{name}.{key}": tensor for key, tensor in own_state["tensors"].items()}

    def check() -> None:
        for name in outer:
            stateful[name].require_settings(known.values["stateful"].get(name, {}))
        known.check(tensors, optimizer is not None, stateful)

    context.together(check, "checkpoint.load()")
    same = known.world == math.prod(context.sizes)
    own: dict[str, torch.Tensor] = {}
    if same:
        expected = generators.states()
        own = {f"random.{context.rank}.{n}": torch.empty_like(expected[n]) for n in known.generators if n in expected}
    read_into(context, _group(model), {**tensors, **own}, found)
    with model._autopar.together("checkpoint.load()"):
        _load_state_dict(model, optimizer, put_together(state, known.values, _tied(model)))
    for name, given in stateful.items():
        saved = known.values["stateful"][name]
        if name in outer:
            given.load_state_dict({**saved, "tensors": outer[name]["tensors"]})
        else:
            given.load_state_dict(as_own(saved, given.state_dict()))
    generators.restore({name.split(".", 2)[2]: state for name, state in own.items()})
    return Loaded(found, known.step, known.values["extra"], same)


def _outer_states(stateful: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States with tensors in shards, which every rank has its own of: those of exchanges among workers, by name."""
    return {name: given.state_dict() for name, given in stateful.items() if isinstance(given, WorkerExchange)}


def _without_tensors(outer: Mapping[str, dict[str, Any]], name: str, given: Any) -> Any:
    return {k: v for k, v in outer[name].items() if k != "tensors"} if name in outer else given.state_dict()


def _reading(folder: Path, model: ParallelModule) -> Callable[[], tuple[Path, str]]:
    """Reads the manifest of the last checkpoint; among workers that train apart, of the last that all of them have."""
    if model._autopar.context.workers is None:
        return lambda: _read(folder)
    found = common_checkpoint(folder, model)
    return lambda: _read(found)


PARALLEL: Kind = a(ParallelModule, "what parallelize() returned")
OF_PARALLEL: Kind = optional(a(torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters"))


def _check(folder: Any, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> None:
    require(folder=(folder, PATH), model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL))
    require(**{name: (given, _stateful) for name, given in stateful.items()})


def _stateful(given: Any) -> str | None:
    fine = all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict"))
    return None if fine else "an object with state_dict() and load_state_dict()"


def _read(folder: Path) -> tuple[Path, str]:
    found = folders.find(folder)
    try:
        return found, read_text(found / folders.MANIFEST, MOST_BYTES)
    except ValueError as e:
        raise ValueError(f"the checkpoint in {found} is damaged: {e}") from None


def _tied(model: ParallelModule) -> dict[str, str]:
    """Of a parameter's or buffer's further names, the first."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def _group(model: ParallelModule) -> Any:
    session = model._autopar
    if session not in _groups:
        _groups[session] = group_of(session.context)
    return _groups[session]


def _publish(written: Future[Any], published: Future[Path], root: Path, name: str, manifest: str, keep: int) -> None:
    try:
        written.result()
        folder = folders.publish(root, name, manifest)
    except BaseException as e:  # the library's own is no Exception
        published.set_exception(AutoparError(f"{root / name} could not be written: {type(e).__name__}: {e}"))
        return
    # Before anybody knows: the next save makes a folder that looks like what a killed writer has left.
    with contextlib.suppress(OSError):  # what could not be deleted is no loss
        folders.prune(root, keep, name)
    published.set_result(folder)


def export_safetensors(
    folder: str | Path,
    model: ParallelModule,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write the model as files that Hugging Face's ``from_pretrained`` reads; every rank calls it.

    Tensors are whole, under the names of the original model; a model of transformers has the names of its own files, of
    tied tensors one. Each rank writes files of its own, and its host needs room for a few tensors. ``config.json`` and
    the tokenizer are written to the same folder by ``model.config.save_pretrained`` and the tokenizer's.

    Args:
        folder: a new one, on a file system that all ranks see: it is there when it is whole. Workers that train apart
            write one each in it, ``worker-0`` and so on.
        model: on any mesh, under any plan.
        dtype: of floating-point tensors; None: as they are.
        max_shard_size: of a file. One tensor, with what transformers makes of it, is in one file even if it is larger.

    Returns:
        The folder.

    Raises:
        AutoparError: the folder is there already, or could not be written.
        ValueError: an argument is wrong, or a tensor has a dtype that the format has not.
        RankError: a rank is gone, or at something else.
    """
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    require(
        folder=(folder, PATH), model=(model, PARALLEL),
        dtype=(dtype, lambda v: None if v in (None, *floats) else f"None or one of {', '.join(map(str, floats))}"),
        max_shard_size=(max_shard_size, SIZE),
    )  # fmt: skip
    session = model._autopar
    session.require_values()
    tensors, context, types = model._own_tensors(), session.context, session.types()
    groups, conversion = file_tensors(session.original, tensors)

    def made(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        whole = gathered({n: tensors[n] for n in names}, types, context)
        return conversion({n: _as(t, dtype) for n, t in whole.items()})

    def source(names: Sequence[str]) -> Source:
        meta = {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names}
        return Source(conversion({n: _as(t, dtype) for n, t in meta.items()}), lambda: made(names))

    files = files_of([source(names) for names in groups], parse_bytes(max_shard_size))
    with session.together("checkpoint.export_safetensors()"), torch.no_grad():
        return write_files(files, worker_folder(Path(folder), model), context, numbers(tensors.values()))


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to save, or where to load into; every rank calls it.

    Args:
        model: its layouts must be decided: pass ``batch=`` to `autopar.parallelize`, or call it once.
        optimizer: of the model's parameters; its state is made (all zero) if it has none yet.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "groups": {number: {...}}}}``.
    """
    require(model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL))
    with model._autopar.together("checkpoint.state_dict()"):
        return _state_dict(model, optimizer)


def _state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is None:
        return found
    names = _names(model, optimizer)
    # An optimizer's step is an error while gradients are deferred; this one uses none of them.
    with model._autopar.deferred.set_aside():
        _make_state(optimizer)
    # By name, where torch has numbers: another process may have its parameters in another order.
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        known = model._autopar.types().get(names[parameter])
        state[names[parameter]] = {
            k: savable(v, known if v.shape == parameter.shape else None, model._autopar.context)
            if isinstance(v, DTensor)
            else v
            for k, v in values.items()
        }
    groups = {str(i): {k: v for k, v in g.items() if k != "params"} for i, g in enumerate(optimizer.param_groups)}
    found["optimizer"] = {"state": state, "groups": groups}
    return found


def load_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Take over what `torch.distributed.checkpoint.load` has read into the result of `state_dict`; every rank calls it.

    Raises:
        AutoparError: the state is of another model or optimizer.
        ValueError: an argument is wrong.
    """
    require(
        model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL),
        state=(state, a(Mapping, "what state_dict() of this module gives")),
    )  # fmt: skip
    with model._autopar.together("checkpoint.load_state_dict()"):
        _load_state_dict(model, optimizer, state)


def _load_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    names = _names(model, optimizer)
    with model._autopar.deferred.set_aside():
        _make_state(optimizer)
    # The saved state is in plain shards on every stage; this optimizer's is in the layouts of its parameters.
    saved = state["optimizer"]
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        if name not in saved["state"]:
            raise AutoparError(
                f"the optimizer state has nothing for {name!r}; it belongs to another model or optimizer"
            )
        for key, value in saved["state"][name].items():
            if isinstance(value, DTensor):
                assert isinstance(parameter, DTensor)
                own, known = values.get(key), model._autopar.types().get(name)
                target = tuple(own.placements) if isinstance(own, DTensor) else tuple(parameter.placements)
                if known is not None and value.shape == parameter.shape:
                    values[key] = in_layout(value, known[0], known[1], model._autopar.context)
                else:
                    values[key] = redistribute(value, model._autopar.context, target)
            else:
                values[key] = value
    for i, group in enumerate(optimizer.param_groups):
        group.update({k: v for k, v in saved["groups"][str(i)].items() if k in group})


def full_optimizer_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` is on one device, for one plain file; every rank calls it.

    Rank 0 gets the values, on the host, which must have room for all of them; elsewhere ``"state"`` is empty. Where
    that is too much, `save` writes each rank's part.

    Raises:
        AutoparError: ``optimizer`` has a parameter that the model has not.
    """
    session, names = model._autopar, _names(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.state_dict()
    if session.context.mesh is None:
        return found
    whole: dict[Any, dict[str, Any]] = {}
    with session.together("full_optimizer_state_dict()"):
        for number, values in found["state"].items():
            parameter = parameters[number]
            known = session.types().get(names[parameter])
            full = {k: _full(v, known if _shape(v) == parameter.shape else None, session.context)
                    for k, v in values.items()}  # fmt: skip
            if session.context.rank == 0:
                whole[number] = full
    return {**found, "state": whole}


def load_full_optimizer_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take over what ``optimizer.state_dict()`` was on one device; every rank calls it and keeps its part.

    Args:
        model: its layouts need not be decided yet.
        optimizer: with its parameters in the same order.
        state: plain tensors, the same on every rank.

    Raises:
        ValueError: torch's, where parameter groups differ.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    taken = dict(state["state"])
    with model._autopar.context.during("load_full_optimizer_state_dict()", in_step=False):
        # Before torch moves them to the device, which need not have room for whole ones.
        for number, parameter in zip(numbers, parameters, strict=False):  # torch says where their counts differ
            storage = storage_of(parameter)
            if storage is not None and number in taken:
                taken[number] = {
                    k: storage.converted(v) if _shape(v) == parameter.shape and parameter.ndim else v
                    for k, v in taken[number].items()
                }
        optimizer.load_state_dict({**state, "state": taken})


def torch_save(checkpoint: Any, path: str | Path, model: ParallelModule) -> None:
    """`torch.save` of what one device would have, for scripts that write a file of their own; every rank calls it.

    Rank 0 writes, with a whole tensor for each of those on the mesh, for which its host must have room; the file
    replaces an older one when all of it is on the disk. It is loaded as on one device: ``model.load_state_dict`` and
    ``optimizer.load_state_dict`` take whole tensors, before `autopar.parallelize` and after.

    Args:
        checkpoint: anything that `torch.save` takes, with ``model.state_dict()`` and ``optimizer.state_dict()`` in any
            dicts, lists and tuples; of the same structure on every rank.
        path: of the file.
        model: whose parameters, and whose optimizers' state, are in ``checkpoint``.

    Raises:
        ValueError: an argument is wrong.
        OSError: rank 0 cannot write the file; on every rank.
    """
    require(path=(path, PATH), model=(model, PARALLEL))
    context = model._autopar.context
    with model._autopar.together("checkpoint.torch_save()"):
        whole_values = gathered_values(checkpoint, model.parameters(), context)
    context.decide(lambda: write_file(whole_values, Path(path)), "checkpoint.torch_save()")


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _full(value: Any, known: Any, context: MeshContext) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return full_tensor(savable(value, known, context) if isinstance(value, DTensor) else value).cpu().clone()


def _names(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Original name of each of the optimizer's parameters."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise AutoparError(
                    "the optimizer holds a parameter that the model does not have; make it from the parameters of the "
                    "module that parallelize() returned"
                )
    return names


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state by a step that changes nothing: zero gradients, zero learning rate."""
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if optimizer.state or not parameters:
        return
    gradients = [p.grad for p in parameters]
    rates = [g["lr"] for g in optimizer.param_groups]
    with torch.no_grad():
        for p in parameters:
            p.grad = torch.zeros_like(p)
        # Learning rate zero, too: weight decay would change parameters even without gradients.
        for g in optimizer.param_groups:
            g["lr"] = torch.zeros_like(g["lr"]) if isinstance(g["lr"], torch.Tensor) else 0.0
        try:
            optimizer.step()
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for g, rate in zip(optimizer.param_groups, rates, strict=True):
                g["lr"] = rate
        # The step has counted itself, which bias correction would notice.
        for values in optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"].zero_()
