"""Save and load a training run: folders that are whole or not there, on any mesh and under any plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autopar.checkpoint.arguments import OF_PARALLEL, PARALLEL
from autopar.checkpoint.gradients import GRADIENT, empty_gradients, take_gradients
from autopar.checkpoint.state_dicts import forget_state, make_state, names_of, take_over, tensors_of
from autopar.costs.arguments import FLAG, PATH, require, whole
from autopar.costs.read_file import read_text
from autopar.errors import AutoparError
from autopar.module.low_communication.optimizer_steps import OptimizerSteps
from autopar.module.low_communication.worker_folders import common_checkpoint, worker_folder
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders, generators
from autopar.runtime.checkpoint.manifest import (
    OPTIMIZER,
    STATEFUL,
    Manifest,
    as_own,
    described,
    put_together,
    taken_apart,
)
from autopar.runtime.checkpoint.tensors import WRITING, group_of, read_into, result_of, start_writing
from autopar.runtime.mesh import MeshContext

MOST_BYTES = 2**30
"""Of a manifest."""

RANDOM_CALLS = "random_calls"
"""Name of the number of the model's calls that drew random numbers, in a manifest."""

ALIKE = "alike"
"""Name of the names of random generators that were in one state on all ranks, in a manifest."""

WORKERS = "workers"
"""Name of the number of workers that train apart, in a manifest."""


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
        same_random_numbers: whether random generators go on as they were: on as many ranks as saved them, or where
            all were in one state on all ranks.
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
            sampler, `torch.amp.GradScaler`. Rank 0's are saved, since they are the same on all. `autopar.LocalSteps`,
            `autopar.CompressedGradients` and their like have tensors, of which every rank writes its part.

    Workers that train apart (role ``local``) have different parameters: each saves into a folder of its own in
    ``folder``, ``worker-0`` and so on.

    Raises:
        AutoparError: ``optimizer`` has a parameter that the model has not, or an earlier save failed.
        ValueError: an argument is wrong, or something cannot be saved without pickle.
        RankError: a rank is gone, or at something else.
    """
    _check(folder, model, optimizer, stateful)
    require(step=(step, whole(0)), keep=(keep, whole(1)), wait=(wait, FLAG))
    return begin_saving(Path(folder), model, optimizer, stateful, {}, step=step, extra=extra, keep=keep, wait=wait)


def begin_saving(
    folder: Path,
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    stateful: Mapping[str, Any],
    gradients: Mapping[str, torch.Tensor],
    *,
    step: int,
    extra: Any = None,
    keep: int,
    wait: bool,
) -> Saving:
    """`save`, with gradients that are still adding up, by parameter; every rank calls it."""
    context, root = model._autopar.context, worker_folder(folder, model)
    earlier = _last.pop(model._autopar, None)
    if earlier is not None:
        earlier.wait()
    tensors, describe = collected(model, optimizer, step, extra, stateful, "checkpoint.save()", gradients)
    random = generators.states()
    alike = generators.alike(random, context)
    manifest = context.together(lambda: describe(list(random), alike), "checkpoint.save()")
    tensors.update({f"random.{context.rank}.{name}": state for name, state in random.items()})

    # Of one name for all workers: by that they find the last which all of them have.
    name = context.everyone.decide(lambda: folders.new_name(step), "the name of a checkpoint")
    context.decide(lambda: folders.begin(root, name), "making the folder of a checkpoint")
    partial = root / f"{name}{folders.PARTIAL}"
    written = start_writing(context, group_of_model(model), tensors, partial, wait=wait)
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
    worker saved, of the last checkpoint that all of them have; more workers than saved begin as copies of these.

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
    # A worker that begins from another's part draws numbers of its own.
    own_part = context.workers is None or found.parent == worker_folder(Path(folder), model)
    same = known.world == math.prod(context.sizes) and own_part
    # In another world those that were alike on all ranks are so again. Older checkpoints do not say which were.
    alike = set(known.values.get(ALIKE, ())) if own_part else set()
    expected, saver = generators.states(), context.rank if same else 0
    again = [n for n in known.generators if n in expected and (same or n in alike)]
    own = {f"random.{saver}.{n}": torch.empty_like(expected[n]) for n in again}

    def read(tensors: dict[str, torch.Tensor]) -> None:
        read_into(context, group_of_model(model), {**tensors, **own}, found)

    take_back(model, optimizer, stateful, known, read, "checkpoint.load()")
    generators.restore({name.split(".", 2)[2]: state for name, state in own.items()})
    return Loaded(found, known.step, known.values["extra"], same or alike >= {*known.generators})


def collected(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Any,
    stateful: Mapping[str, Any],
    what: str,
    gradients: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], Callable[[list[str], list[str]], str]]:
    """What there is to save, but for random generators; every rank calls it.

    Args:
        model: with its parameters and buffers.
        optimizer: of the parameters, or None.
        step: of the run.
        extra: whatever else.
        stateful: other objects, by name.
        what: the call, for messages.
        gradients: that are still adding up, by parameter.

    Returns:
        Tensors by name, and a function that gives the text of the manifest, for names of generators, and of those that
        are in one state on all ranks.
    """
    session = model._autopar
    with session.together(what):
        tensors, plain = taken_apart(tensors_of(model, optimizer), _tied(model))
        outer = _outer_states(stateful)
    for name, found in outer.items():
        tensors |= {f"{STATEFUL}{name}.{key}": tensor for key, tensor in found["tensors"].items()}
    tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()}
    kinds = dict(tensors)

    def describe(random: list[str], alike: list[str]) -> str:
        states = {name: _without_tensors(outer, name, given) for name, given in stateful.items()}
        workers = session.context.workers
        rest = {
            **plain, "stateful": states, "extra": extra, RANDOM_CALLS: session.random_calls,
            WORKERS: 1 if workers is None else workers.count, ALIKE: alike,
        }  # fmt: skip
        return described(kinds, rest, step, math.prod(session.context.sizes), random)

    return tensors, describe


def take_back(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    stateful: Mapping[str, Any],
    known: Manifest,
    read: Callable[[dict[str, torch.Tensor]], None],
    what: str,
) -> None:
    """Bring model, optimizer and other objects into a saved state, but for random generators; every rank calls it.

    Args:
        model: with the same names and shapes.
        optimizer: of the same kind, or None.
        stateful: other objects, by name.
        known: what was saved.
        read: fills tensors by their names.
        what: the call, for messages.

    Raises:
        AutoparError: it is of another model or optimizer. Nothing has changed then.
    """
    session = model._autopar
    with session.together(what):
        made = [] if optimizer is None else make_state(model, optimizer, frozen=True)
        state = tensors_of(model, optimizer)
        begun = _begun(state, known, optimizer)
        tensors, plain = taken_apart(state, _tied(model))
        outer = _outer_states(stateful)
        gradients = empty_gradients(model, known.tensors)
    for name, own_state in outer.items():
        tensors |= {f"{STATEFUL}{name}.{key}": tensor for key, tensor in own_state["tensors"].items()}
    tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()}

    def check() -> None:
        for name in outer:
            stateful[name].require_settings(known.values["stateful"].get(name, {}))
        names = {"model": plain["model"]}
        if optimizer is not None:
            names["optimizer"] = state["optimizer"]["state"]
        known.check(tensors, names, stateful)

    try:
        session.context.together(check, what)
    except BaseException:
        forget_state(optimizer, made)
        raise
    read(tensors)
    with session.together(what):
        if optimizer is not None:
            names = names_of(model, optimizer)
            for parameter in [p for p in optimizer.state if names[p] not in begun]:
                del optimizer.state[parameter]
        take_over(model, optimizer, put_together(state, known.values, _tied(model)))
        take_gradients(model, gradients)
    for name, given in stateful.items():
        saved = known.values["stateful"][name]
        if name in outer:
            given.load_state_dict({**saved, "tensors": outer[name]["tensors"]})
        else:
            given.load_state_dict(as_own(saved, given.state_dict()))
    # Each call draws numbers of its own: those that come go on from there. Older checkpoints have no such entry.
    session.random_calls = known.values.get(RANDOM_CALLS, 0)


def _begun(state: dict[str, Any], known: Manifest, optimizer: torch.optim.Optimizer | None) -> set[str]:
    """Parameters of which the optimizer is to have a state: those that had a gradient before it was saved.

    The others' entries are left out of ``state``. If nothing is left, it was saved before its first step, or is another
    optimizer, which has other options.
    """
    own = state.get("optimizer", {}).get("state", {})
    saved = {n.removeprefix(OPTIMIZER).rpartition(".")[0] for n in known.tensors if n.startswith(OPTIMIZER)}
    saved |= known.values.get("optimizer", {}).keys()
    options = set() if optimizer is None else optimizer.defaults.keys()
    groups = known.values.get("groups", {}).values()
    begins = not saved and all(options <= group.keys() for group in groups)
    found = own.keys() & saved
    for name in own.keys() - found if found or begins else ():
        del own[name]
    return set(own)


def _outer_states(stateful: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States with tensors in shards, which every rank has its own of: those of exchanges among workers, by name."""
    return {name: given.state_dict() for name, given in stateful.items() if isinstance(given, OptimizerSteps)}


def _without_tensors(outer: Mapping[str, dict[str, Any]], name: str, given: Any) -> Any:
    return {k: v for k, v in outer[name].items() if k != "tensors"} if name in outer else given.state_dict()


def _reading(folder: Path, model: ParallelModule) -> Callable[[], tuple[Path, str]]:
    """Reads the manifest of the last checkpoint; among workers that train apart, of the last that all of them have."""
    if model._autopar.context.workers is None:
        return lambda: _read(folder)
    found = common_checkpoint(folder, model, _saved_by)
    return lambda: _read(found)


def _saved_by(folder: Path) -> int | None:
    """How many workers have saved a checkpoint; None: it is an older one, which does not say."""
    count: int | None = Manifest.of(_read(folder)[1], folder / folders.MANIFEST).values.get(WORKERS)
    return count


def _check(folder: Any, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> None:
    require(folder=(folder, PATH), model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL))
    require_stateful(stateful)


def require_stateful(stateful: Mapping[str, Any]) -> None:
    """Refuse objects that have no state.

    Raises:
        ValueError: names the first.
    """
    require(**{name: (given, _stateful) for name, given in stateful.items()})


def _stateful(given: Any) -> str | None:
    fine = all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict"))
    return None if fine else "an object with state_dict() and load_state_dict()"


def _read(folder: Path) -> tuple[Path, str]:
    found = folders.find(folder)
    return found, read_manifest(found)


def read_manifest(found: Path) -> str:
    """The text of a checkpoint's manifest.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return read_text(found / folders.MANIFEST, MOST_BYTES)
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


def group_of_model(model: ParallelModule) -> Any:
    """The process group in which a model's checkpoints are written and read; made once, by all ranks."""
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
