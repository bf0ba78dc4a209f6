"""`Harness`: what is traced, a call of the model from flat tensors to flat tensors, with what it writes to state."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar._torch_compat import storage_id
from autopar.capture.attention import Attention
from autopar.capture.checks.after_step import Check
from autopar.capture.functions.chunk_states import ChunkStates
from autopar.capture.functions.kinds import classes_of_eager, mark_parameter
from autopar.capture.intercepts import Intercepts
from autopar.capture.origins import Origins
from autopar.capture.outside import counting_optimizers_refused, refused
from autopar.capture.selected.questions import RowQuestions
from autopar.capture.state.code.caches import uncached
from autopar.capture.state.hooks import Hooks, Observation, Place, observations
from autopar.capture.state.known import KnownValues, OfBuffers, Reads
from autopar.capture.state.record import Record
from autopar.capture.state.slots import tensor_attributes, where_kept
from autopar.capture.state.values import Path
from autopar.capture.state.writes import Write
from autopar.capture.swap import Reference, put_reference
from autopar.errors import CaptureError
from autopar.ir.checkpoint_regions import Regions
from autopar.ir.signature import binding, floats, pytree
from autopar.ir.signature.outputs import Loss, Results, results_of
from autopar.rules.strides import order_of

LossFunction = Callable[[Any, Any], torch.Tensor]


class Seen:
    """What the harness learns while it is traced; the tracer would restore plain attributes of a module.

    Attributes:
        results: of the call.
        memory: of each result a number of the storage that eager mode has it in.
        orders: of each result its dims in memory, see `autopar.rules.strides.order_of`.
        state_memory: likewise of parameters, buffers and the batch's tensors after the call, by kind and name.
        assigned: buffers that get a new tensor, by the index of the result.
        writes: to the model's Python state.
        observed: calls of hooks that record.
        computing: hooks that are part of the graph, each with what of its own state the graph does not depend on.
        counted_by_hooks: paths of numbers that a hook changes, by the hook's place.
        checks: of values, after the step.
        reads: what it asks about values of buffers.
        stride_read: the user's line that reads strides.
        numbers: paths of numbers that the call changes.
        added_to: state that a checkpointed function adds to.
        seeded: what libraries do to torch's generator.
    """

    def __init__(self) -> None:
        self.results: Results | None = None
        self.memory: list[int] = []
        self.orders: list[tuple[int, ...] | None] = []
        self.state_memory: dict[tuple[str, str], int] = {}
        self.assigned: dict[int, str] = {}
        self.writes: list[Write] = []
        self.observed: list[Observation] = []
        self.computing: dict[Place, frozenset[Path]] = {}
        self.counted_by_hooks: dict[Place, list[tuple[str, Path]]] = {}
        self.checks: tuple[Check, ...] = ()
        self.reads: tuple[Reads, ...] = ()
        self.stride_read = self.added_to = ""
        self.seeded: list[str] = []
        self.numbers: list[tuple[str, Path]] | None = None


class Harness(nn.Module):
    """Calls the model on flat tensors and returns flat tensors.

    Of these only the loss, or what stands for it, carries gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: binding.Arguments,
        loss_fn: LossFunction | None,
        training: bool,
        loss: Loss = None,
        recorder: floats.FloatRecorder | None = None,
        record: Record | None = None,
        tracked: bool = False,
        promoted: Collection[str] = (),
        references: Sequence[Reference] = (),
        of_buffers: OfBuffers | None = None,
        questions: RowQuestions | None = None,
    ) -> None:
        """With a ``record`` of the model's state, each call begins with that, and what it changes is returned, too.

        ``of_buffers`` is what is known of buffers, ``questions`` are those about numbers of rows.
        """
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.loss_fn, self.loss = loss_fn, loss
        self.differentiable = training
        self.recorder = recorder
        self.seen = Seen()
        self.record, self.tracked, self.promoted = record, tracked, promoted
        self.aliases, self.references = aliases_of(model), references
        self.of_buffers = of_buffers or OfBuffers()
        self.questions = questions or RowQuestions()
        # To tell parameters that a lazy module makes in forward.
        self.parameter_names = {name for name, _ in model.named_parameters()}
        named = [*model.named_parameters(), *model.named_buffers()]
        # To tell buffers that forward makes differentiable.
        self.differentiable_buffers = {n for n, b in model.named_buffers(remove_duplicate=False) if b.requires_grad}
        self.plain_parameters = {name for name, p in model.named_parameters() if isinstance(p, nn.Parameter)}
        self.attributes = {name: own for name, t in named if (own := tensor_attributes(t))}
        # Registered as None, or not at all, and set in forward: `named_buffers` does not show these.
        self.copied: dict[int, torch.Tensor] = {}  # what a call keeps, by the index of the result
        self.tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Shared ones under one name always: the tracer would take them for several tensors."""
        return super().named_parameters(prefix, recurse, True)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Shared ones under one name."""
        return super().named_buffers(prefix, recurse, True)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors of the batch, then its floats, to tensors of the output.

        After these come tensors that the call writes to the model's state, and those of buffers that it assigns.
        """
        numbers = floats.values_or_stand_ins(self.recorder, tensors[self.arguments.tensors :])
        if self.record is None:
            return self._results(self._call(self.arguments.fill(tensors, numbers)), tensors, None)
        self._restore()
        self.questions.forget()
        if self.tracked and self.seen.numbers is not None:
            self.record.track(self.seen.numbers)
        self.record.guard_iterators()
        attributes = self._copy_attributes()
        entries = [
            (name, table, dict(table))
            for name, module in self.model.named_modules()
            for table in (module._modules, module._parameters)
        ]
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        named = {f"the batch's tensor {i}": t for i, t in enumerate(tensors)}
        named |= {repr(n): t for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        origins, hooks, intercepts = (
            Origins(self),
            Hooks(self.model, self.record, self.seen.counted_by_hooks),
            Intercepts(
                named, partial(where_kept, self.model), tensors, KnownValues(buffers, self.of_buffers), self.questions
            ),
        )
        with self._traced(origins, hooks, intercepts):
            output, contents = without_python_draws(lambda: self._called(self.arguments.fill(tensors, numbers)))
        if not torch.is_grad_enabled() and self.differentiable:
            raise CaptureError(
                "a call of the model disables gradients, and leaves them so (torch.set_grad_enabled(False)), which its "
                "caller would not see; write with torch.no_grad(): around what needs none"
            )
        if changed := contents.changed():
            raise CaptureError(
                f"the model changes what it is given: {changed} is added, replaced or removed, which the caller's own "
                "would not show; change a copy (dict(batch), list(values)) and return what is made"
            )
        self._require_same_attributes(attributes)
        self._require_same_entries(entries)
        if self.seen.numbers is None:
            # The tracer calls more than once: the first call finds the numbers, and later ones track them.
            self.seen.numbers = self.record.changed_numbers()
        return self._results(
            output, tensors, lambda results: self._add_state(results, buffers, origins.lines, hooks, intercepts)
        )

    def _called(self, given: binding.Passed) -> tuple[Any, pytree.Contents]:
        """The output of the model, and what the containers that it is given held before."""
        contents = pytree.Contents(given.bound, "batch")
        return self._call(given), contents

    def _restore(self) -> None:
        """Bring the model's state to what it was before the tracer's earlier calls."""
        assert self.record is not None
        self.record.restore()
        for table, before in self.tables:
            # Buffers that an earlier call has registered go. Those of before have been set by the tracer already.
            for name in [n for n in table if before.get(n) is None]:
                table.pop(name)
            table.update({n: None for n, b in before.items() if b is None})
        for name, first in self.aliases.items():
            # The tracer sets tied tensors under one name only.
            _put_tensor(self.model, name, _get_tensor(self.model, first))

    def _copy_attributes(self) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """Traced tensors in place of parameters and buffers get the attributes that the user has set on these."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, tensor in tensors:
            vars(tensor).update(self.attributes.get(name, {}))
            if name in self.plain_parameters:
                mark_parameter(tensor)
        return {name: (tensor, dict(vars(tensor))) for name, tensor in tensors}

    @staticmethod
    def _require_same_attributes(given: Mapping[str, tuple[torch.Tensor, dict[str, Any]]]) -> None:
        for name, (tensor, before) in given.items():
            changed = [n for n, v in vars(tensor).items() if n not in before or before[n] is not v]
            if changed and not changed[0].startswith("_"):
                raise CaptureError(
                    f"a call of the model sets the attribute {changed[0]!r} of {name!r}, a parameter or buffer, which "
                    "a graph cannot do again; keep it in an attribute of the module"
                )

    @staticmethod
    def _require_same_entries(entries: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
        """Refuse other submodules and parameters in the place of those of before; submodules may be added."""
        for path, table, before in entries:
            changed = [n for n, value in before.items() if table.get(n) is not value]
            if changed:
                added = {n: module for n, module in table.items() if n not in before}
                table.clear()
                table.update({**before, **added})
                name = f"{path}.{changed[0]}".lstrip(".")
                raise CaptureError(
                    f"a call of the model replaces or deletes {name!r}, which a graph cannot do again; call "
                    "the model once before parallelize() if only its first call does that, else do it outside of the "
                    "model, or choose by a number or a flag that is an attribute"
                )

    @contextlib.contextmanager
    def _traced(self, origins: Origins, hooks: Hooks, intercepts: Intercepts) -> Iterator[None]:
        """While it lasts, the model is called as a trace needs it."""
        assert self.record is not None
        reached = self.record.reached
        parameters = [
            (container, step, original, name)
            for container, step, original, name in self.references
            # A list of weights, say, must hold the very tensors that the tracer traces.
            if put_reference(container, step, _get_tensor(self.model, name))
        ]
        try:
            with (
                uncached(reached.scopes, self.model.parameters),
                refused(reached.globals, self.seen.seeded),
                counting_optimizers_refused(),
                classes_of_eager(reached.globals),
                Regions(self._recomputed).recorded(),
                origins.recorded(),
                intercepts.entered(),
                Attention(partial(where_kept, self.model), self.model.parameters),
                ChunkStates(),
                hooks.watched(),
                self._plain_attributes(),
            ):
                yield
        finally:
            for container, step, original, _ in parameters:
                put_reference(container, step, original)

    @contextlib.contextmanager
    def _recomputed(self) -> Iterator[None]:
        """While it lasts, a function runs that torch would call again: what it adds to state is noted."""
        assert self.record is not None
        own = Record(self.model, self.record.reached, self.record.threads)
        before = {name: (b, b._version) for name, b in self.model.named_buffers()}
        yield
        now = {name: (b, b._version) for name, b in self.model.named_buffers() if name in before}
        written = [name for name, (b, version) in now.items() if b is not before[name][0] or version != before[name][1]]
        self.seen.added_to = self.seen.added_to or (written[0] if written else own.grown())

    @contextlib.contextmanager
    def _plain_attributes(self) -> Iterator[None]:
        """While it lasts, plain tensors that have become buffers are none: a model may ask for its buffers."""
        plain = [(self.model.get_submodule(path), name) for path, _, name in (n.rpartition(".") for n in self.promoted)]
        for module, name in plain:
            vars(module)[name] = module._buffers.pop(name)
        try:
            yield
        finally:
            for module, name in plain:
                if name in vars(module):  # or the model has deleted it
                    module._buffers[name] = vars(module).pop(name)

    def _call(self, given: binding.Passed) -> Any:
        """The model's output, or the loss that the function makes of it."""
        output = self.model(*given.args, **given.kwargs)
        if self.loss_fn is None:
            return output
        loss = self.loss_fn(output, given.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise CaptureError("loss_fn(output, batch) must return a scalar tensor")
        return loss

    def _results(
        self, output: Any, given: Sequence[torch.Tensor], more: Callable[[list[torch.Tensor]], None] | None
    ) -> tuple[torch.Tensor, ...]:
        required = self.model.training
        found = results_of(output, self.loss, training=self.differentiable, required=required, more=more)
        self.seen.results = found
        self._require_sizes(found.tensors)
        if self.record is None:
            return found.tensors
        named: dict[tuple[str, str], torch.Tensor] = {("parameter", n): p for n, p in self.model.named_parameters()}
        # Also one that the call has set to another buffer.
        buffers = self.model.named_buffers(remove_duplicate=False)
        named |= {("buffer", n): b for n, b in buffers if n not in self.aliases}
        named |= {("batch", str(i)): t for i, t in enumerate(given)}
        self.seen.state_memory = {key: storage_id(t) for key, t in named.items()}
        kept = [self.copied.get(i, t) for i, t in enumerate(found.tensors)]
        self.seen.memory, self.seen.orders = [storage_id(t) for t in kept], [order_of(t) for t in kept]
        self.copied.clear()
        # The tracer counts a view of an input as no output of its own, and gives it no gradient: such ones are copied.
        inputs = {id(t) for t in named.values()}
        return tuple(t.clone() if t._is_view() or id(t) in inputs else t for t in found.tensors)

    @staticmethod
    def _require_sizes(results: Sequence[torch.Tensor]) -> None:
        """Refuse results of as many rows as a mask selects."""
        for tensor in results:
            if any(isinstance(n, torch.SymInt) for n in tensor.shape):
                raise CaptureError(
                    "the model returns, or keeps, what a mask selects (x[mask], masked_select, nonzero), of "
                    f"{tensor.ndim} dims: how many rows that are depends on the batch, and every call of a graph has "
                    "results of the same shape; return all rows and the mask, or what is computed of them"
                )

    def _add_state(
        self,
        results: list[torch.Tensor],
        before: Mapping[str, torch.Tensor],
        lines: Mapping[tuple[str, str], str],
        hooks: Hooks,
        intercepts: Intercepts,
    ) -> None:
        """Append the tensors that the call writes to the model's state: of buffers, and of other attributes."""
        assert self.record is not None
        # With the tensor: while it is alive, no other one can have its id.
        known = {id(r): (i, r) for i, r in enumerate(results)}
        trained = {storage_id(p): name for name, p in self.model.named_parameters() if p.requires_grad}

        def leaf(tensor: torch.Tensor) -> pytree.Leaf:
            if id(tensor) not in known:
                known[id(tensor)] = len(results), tensor
                self.copied[len(results)] = tensor
                results.append(tensor.clone())  # it may be one of the inputs
            return pytree.Leaf(known[id(tensor)][0])

        def kept(tensor: torch.Tensor) -> pytree.Leaf:
            return leaf(_in_own_memory(tensor, trained))

        # Hooks first: a number that one of them sees is a constant, and not only counted.
        self.seen.observed, self.seen.computing = observations(hooks, self.record, leaf), hooks.computing
        self.seen.writes = self.record.writes(kept, lines)
        self.seen.checks, self.seen.stride_read = intercepts.checks(leaf), intercepts.stride_read
        self.seen.reads = intercepts.known.reads()
        assigned = {}
        for name, old in before.items():
            if _is_deleted(self.model, name):
                raise CaptureError(
                    f"a call of the model deletes buffer {name!r}, which a graph cannot do again; set it to None, or "
                    "delete it outside of the model"
                )
            new = _get_tensor(self.model, name)
            if new is old:
                continue
            # Another shape or dtype would need another graph at the next call: it is an attribute, and no buffer.
            if new is None or not _alike(new, old) or name in self.promoted:
                path, _, attribute = name.rpartition(".")
                value = None if new is None else kept(new)
                self.seen.writes.append(Write(path, (("attr", attribute),), value))
            else:
                assigned[name] = _in_own_memory(new, trained)
        for name, new in self.model.named_buffers(remove_duplicate=False):
            if name not in before:  # registered as None, or in forward
                path, _, attribute = name.rpartition(".")
                transient = attribute in self.model.get_submodule(path)._non_persistent_buffers_set
                step = ("transient buffer" if transient else "buffer", attribute)
                self.seen.writes.append(Write(path, (step,), kept(new)))
        made = {name for name, _ in self.model.named_parameters()} - self.parameter_names
        if made:
            raise CaptureError(
                f"the model makes parameter {min(made)!r} in forward: call the model once before parallelize()"
            )
        self.seen.assigned = dict(enumerate(assigned, len(results)))
        self.copied |= enumerate(assigned.values(), len(results))
        results += (new.clone() for new in assigned.values())


def _in_own_memory(tensor: torch.Tensor, trained: Mapping[int, str]) -> torch.Tensor:
    """A tensor that a call keeps; ``trained``: names of parameters, by their storages."""
    # One with a history is of this call alone.
    if storage_id(tensor) in trained and not tensor.requires_grad:
        raise CaptureError(
            f"a call of the model sets an attribute to memory of parameter {trained[storage_id(tensor)]!r}, in which "
            "an optimizer's steps would show later; set it to a copy (detach().clone()), or read the parameter itself"
        )
    return tensor


def _alike(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a tensor can replace a buffer in every later call."""
    return new.shape == old.shape and new.dtype == old.dtype and not new.requires_grad


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter or shared buffer, to the first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


def _table(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if attribute in module._parameters else module._buffers), attribute


def _is_deleted(model: nn.Module, name: str) -> bool:
    table, attribute = _table(model, name)
    return attribute not in table


def _get_tensor(model: nn.Module, name: str) -> Any:
    table, attribute = _table(model, name)
    return table[attribute]


def _put_tensor(model: nn.Module, name: str, tensor: Any) -> None:
    table, attribute = _table(model, name)
    table[attribute] = tensor


def without_python_draws(call: Callable[[], Any]) -> Any:
    """The result of a call that must draw no numbers from Python's and numpy's generators.

    Raises:
        CaptureError: it does; names the line.
    """
    # By the generators' states: a list of all functions that draw would never be complete.
    before = random.getstate(), np.random.get_state()
    result = call()
    after = random.getstate(), np.random.get_state()
    if before[0] == after[0] and _same_numpy(before[1], after[1]):
        return result
    random.setstate(before[0])
    np.random.set_state(before[1])
    where = _drawing_line(call)
    random.setstate(before[0])
    np.random.set_state(before[1])
    raise CaptureError(
        f"the model draws from Python's or numpy's random generator{where}: a graph would repeat the first draw for "
        "ever; draw with torch (torch.rand, torch.where), or outside and pass what was drawn as an argument"
    )


def _same_numpy(a: Any, b: Any) -> bool:
    return bool(a[2] == b[2] and np.array_equal(a[1], b[1]))


def _drawing_line(call: Callable[[], Any]) -> str:
    """Where in the user's code a call draws first, found by running it once more.

    Generators' states are read at events of the user's own frames alone: reading them on every line of torch takes
    seconds. A changed state belongs to the line that the event before it announced.
    """
    found: list[str] = []
    libraries = (*(str(File(m.__file__ or "").parent) for m in (random, torch, np)), str(File(__file__).parent))
    skipped = (*libraries, "<frozen", "<string>", "<__array_function__", "<eval_with_key>")
    state = random.getstate(), np.random.get_state()
    running = [""]

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if found or frame.f_code.co_filename.startswith(skipped):
            return None
        if not (random.getstate() == state[0] and _same_numpy(np.random.get_state(), state[1])):
            found.append(running[0])
            return None
        # On return the caller's line goes on; library frames between it and the user's are passed over.
        while event == "return" and frame is not None:
            frame = frame.f_back
            if frame is not None and not frame.f_code.co_filename.startswith(skipped):
                break
        running[0] = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with contextlib.suppress(Exception):  # it ran once: state that it has changed may stop it now
            call()
    finally:
        sys.settrace(before)
    return found[0] if found else ""
