"""`capture`: a model and a batch become one `Program`, the joint forward and backward graph of ATen operators.

The model is traced as it is, by calling it: what it does to gradients (autograd functions, hooks) and to its own
attributes happens as in eager PyTorch. Everything runs on fake tensors: no memory is taken for parameters or
activations, whatever device they are on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopar._torch_compat import (
    FakeTensorMode,
    aot_export_joint_with_descriptors,
    compiling,
    dispatch_restored,
    dropout_of_nothing,
    recurrent_dropout,
    resampling_as_operators,
    sizes_of_rows,
    storage_id,
    without_ordered_effects,
    without_trackers,
    without_users_modes,
)
from autopar.capture.decompositions import decompositions
from autopar.capture.describe import describe
from autopar.capture.functions.refused import require_dense, require_plain
from autopar.capture.functions.torch_errors import explained
from autopar.capture.harness import Harness, LossFunction
from autopar.capture.intercepts import extent, refused_view
from autopar.capture.origins import record_origins
from autopar.capture.outside import require_own_seeds
from autopar.capture.selected.questions import RowQuestions
from autopar.capture.selected.rewrite import with_all_rows
from autopar.capture.state.hooks import backward_watched, refuse_hooks_of_all_modules
from autopar.capture.state.known import of_buffers
from autopar.capture.state.record import Record
from autopar.capture.state.slots import VIEW_OF, name_of, state_tensors, tensors_within
from autopar.capture.state.writes import Replay
from autopar.capture.swap import refuse_opaque, swapped
from autopar.errors import CaptureError
from autopar.ir.checkpoint_regions import mark
from autopar.ir.module_outputs import mark_module_outputs
from autopar.ir.program import Program
from autopar.ir.signature import binding, floats
from autopar.ir.signature.outputs import Loss

Batch = tuple[Any, ...] | list[Any] | dict[str, Any]


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    training: bool | None = None,
    compute: torch.dtype | None = None,
) -> Program:
    """Trace one step of ``model`` on ``batch``.

    Args:
        model: real, fake or on the meta device; it is not changed.
        batch: positional (tuple or list) or keyword (dict) arguments; real, fake or meta tensors.
        loss_fn: ``loss_fn(output, batch)`` for a model that does not return its loss.
        loss: which scalar of the output is the loss, see `autopar.ir.signature.outputs`.
        training: with a backward pass; default: gradients are enabled, and a parameter or batch tensor requires one.
        compute: dtype of floating parameters and batch tensors in the graph; default: their own.

    Raises:
        CaptureError: the model cannot be traced, with the user's line and the remedy; or another thread captures one
            for longer than `LONGEST_WAIT` seconds.
        TypeError: the batch does not hold the model's arguments.
        ValueError: ``loss`` and ``loss_fn`` both say what the loss is.
    """
    if loss is not None and loss_fn is not None:
        raise ValueError("loss= picks a scalar of the output and loss_fn= makes one: pass one of them")
    if not any(True for _ in model.parameters()):
        raise CaptureError(f"{type(model).__name__} has no parameters: there is nothing to parallelize{UNLESS_LATER}")
    refuse_hooks_of_all_modules()
    tensors, arguments = binding.flatten(model, batch)
    refuse_opaque(model)
    require_dense(
        {
            **{repr(n): t for n, t in state_tensors(model).items()},
            **{f"tensor {i} of the batch": t for i, t in enumerate(tensors)},
        }
    )
    # As in eager mode: under no_grad a call builds no graph for a backward pass.
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (*model.parameters(), *tensors))
    training = wants_gradient if training is None else training
    attempt = partial(
        _attempt, model, tensors, arguments, loss_fn=loss_fn, loss=loss, training=training, compute=compute
    )
    # The user's modes see what a step computes, as they do in eager mode, and not how it is traced.
    with _alone(), without_users_modes(), without_trackers():
        program: Program = floats.watched(arguments.numbers, partial(_with_fewest_constants, attempt))
    return program


UNLESS_LATER = "; if its first call makes some, call it once before"
"""What a model without parameters may lack."""

LONGEST_WAIT = 1800.0
"""Seconds that a capture waits for the one of another thread."""

_CAPTURING = threading.RLock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time in a process: while it goes on, functions of torch are replaced by others.

    Raises:
        CaptureError: another thread's capture does not end.
    """
    if not _CAPTURING.acquire(timeout=LONGEST_WAIT):
        raise CaptureError(
            f"another thread has been capturing a model for {LONGEST_WAIT:g} s, and one is captured at a time in a "
            "process: capture this model before that thread starts, or in another process"
        )
    try:
        yield
    finally:
        _CAPTURING.release()


_ATTEMPTS = ((True, True), (True, False), (False, False))
"""Whether plain tensors among the attributes are inputs of the graph, and whether numbers that are counted are tracked.

A model may look at the values of the one or the other, and then they are constants.
"""


class _MoreConstantsError(Exception):
    """A capture failed that may succeed with more constants."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def _with_fewest_constants(attempt: Callable[..., Program], recorder: floats.FloatRecorder) -> Program:
    """The program with as few constants as the model allows."""
    first: CaptureError | None = None
    for promote, track in _ATTEMPTS:
        try:
            return attempt(recorder=recorder, promote=promote, track=track)
        except _MoreConstantsError as e:
            # Should all attempts fail, the first error is the user's: later ones come from what was tried instead.
            first = first or e.error
        except CaptureError as e:
            raise first or e from None
    raise AssertionError("the last attempt is final")


def _attempt(
    model: nn.Module,
    tensors: list[torch.Tensor],
    arguments: binding.Arguments,
    *,
    loss_fn: LossFunction | None,
    loss: Loss,
    training: bool,
    compute: torch.dtype | None,
    recorder: floats.FloatRecorder,
    promote: bool,
    track: bool,
) -> Program:
    """Trace the model once.

    Args:
        model: as of `capture`, likewise the others not named here.
        tensors: of the batch, then its floats as tensors.
        arguments: skeleton of the batch.
        loss_fn: makes the loss.
        loss: which scalar is the loss.
        training: with a backward pass.
        compute: dtype of floating parameters and batch tensors.
        recorder: of what the model asks about floats.
        promote: plain tensors among the attributes are inputs of the graph.
        track: numbers that the model only counts on are no constants.

    Raises:
        _MoreConstantsError: it failed, and may not without ``promote`` or ``track``.
    """
    # The model's own constants may be real tensors; torch makes them fake as they are met.
    # What a mask selects has a symbol for its size, until `with_all_rows`; nothing else has.
    questions = RowQuestions()
    sizes = sizes_of_rows(questions.answer)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    dtypes = [compute] * arguments.tensors + [None] * len(arguments.numbers)
    given = zip(tensors, dtypes, strict=True)
    fakes = tuple(_fake_tensor(t, mode, dtype).requires_grad_(t.requires_grad) for t, dtype in given)

    def fake(tensor: torch.Tensor, floating: torch.dtype | None) -> torch.Tensor:
        return _fake_tensor(tensor, mode, floating)

    known = of_buffers(model)
    with swapped(model, fake, training, compute, promote) as (inputs, references):
        record = Record(model)
        harness = Harness(
            model, arguments, loss_fn, training, loss, recorder, record, track, inputs, references, known, questions
        )
        with record.noted():
            try:
                with torch.set_grad_enabled(training), _quiet(), backward_watched(model, record):
                    joint = _trace(harness, fakes)
                program = describe(joint, harness, training)
                require_plain(joint.graph)
                require_own_seeds(harness.seen.seeded, joint.graph)
                mark_module_outputs(program)
                program = _check_gradients(program, harness, fakes, mode)
            except CaptureError as e:
                if not record.threads.mixed and ((promote and inputs) or (track and harness.seen.numbers)):
                    raise _MoreConstantsError(e) from e
                raise
            finally:
                record.restore()
    _require_apart(model, program)
    _require_apart_later(program)
    if harness.seen.added_to:
        raise CaptureError(
            f"a function under torch.utils.checkpoint writes to {harness.seen.added_to!r}, which torch does a second "
            "time when it recomputes the function: write to it before or after the function, or leave the checkpoint "
            "out (the search decides what is recomputed)"
        )
    counted = frozenset((w.module, w.path) for w in program.state.writes if isinstance(w.value, Replay))
    state = replace(program.state, counted=counted, constants=not promote)
    return replace(program, state=state, guards=recorder.guards)


def _require_apart_later(program: Program) -> None:
    """A buffer that a call sets to the memory of one that it writes in place may not be read by the next call."""
    numbers = {name: number for (kind, name), number in program.storages.items() if kind == "buffer"}
    read = {i.name for i, node in zip(program.inputs, program.placeholders, strict=True) if node.users}
    in_place = {o.name for o in program.outputs if o.kind == "buffer"} - program.state.assigned
    for name, other in itertools.product(sorted(program.state.assigned & read), sorted(in_place)):
        if numbers.get(name, -1) == numbers.get(other):
            raise CaptureError(
                f"a call of the model sets {name!r} to memory of {other!r}, to which it writes in place: the next call "
                f"would not see that in {name!r}; set it to a copy ({other}.clone())"
            )


def _require_apart(model: nn.Module, program: Program) -> None:
    """Tensors that a call writes in place must share their memory with no others: a graph keeps each by itself."""
    by_storage: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in {**dict(model.named_parameters()), **state_tensors(model)}.items():
        # Of what is a DTensor no other tensor has a view.
        if not tensor.is_meta and not hasattr(tensor, "placements"):
            by_storage[storage_id(tensor)][name] = tensor
    written = {o.name for o in program.outputs if o.kind in ("buffer", "parameter")}
    # What a call replaces has other memory at the next one.
    replaced = {name_of(w.module, w.path) for w in program.state.writes}
    for name, tensor in tensors_within(model).items() if written else ():
        if storage_id(tensor) in by_storage and not any(name.startswith(r) for r in replaced):
            by_storage[storage_id(tensor)].setdefault(name, tensor)
    read = {i.name for i, node in zip(program.inputs, program.placeholders, strict=True) if node.users}
    for name, tensor in state_tensors(model).items():
        if name in read and (of := vars(tensor).get(VIEW_OF)):
            raise refused_view(repr(name), of)
    for group in by_storage.values():
        for name, other in itertools.product(written & group.keys(), group):
            (first, last), (start, end) = extent(group[name]), extent(group[other])
            if group[name] is not group[other] and first < end and start < last:
                raise CaptureError(
                    f"{name!r} and {other!r} share their memory, and a call of the model writes to {name!r}, which "
                    "would not show in the other; register one of them and take the view in forward"
                )


def _fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, floating: torch.dtype | None = None) -> torch.Tensor:
    dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
    # Meta tensors as if on the CPU: which operator torch picks for attention, say, depends on the device.
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _trace(harness: Harness, fakes: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    try:
        # With oneDNN an LSTM on a CPU is one opaque operator, with cuDNN one on a GPU, which asks for the memory of its
        # weights; without, it is matrix products, the same on every device.
        with (
            dispatch_restored(), contextlib.ExitStack() as stack, torch.backends.mkldnn.flags(enabled=False),
            torch.backends.cudnn.flags(enabled=False), compiling(), recurrent_dropout(), _uncompiled(),
            without_ordered_effects(), resampling_as_operators(), dropout_of_nothing(),
        ):  # fmt: skip
            joint: fx.GraphModule = aot_export_joint_with_descriptors(
                stack, harness, fakes, decompositions=decompositions()
            ).graph_module
        _remove_effects(joint.graph)
        # Torch's annotations become what passes carry along: regions, stacks of modules, lines.
        record_origins(joint.graph)
        mark(joint.graph)
        with_all_rows(joint.graph)
        return joint
    except CaptureError:
        raise
    except Exception as e:
        raise explained(e) from e


def _uncompiled() -> AbstractContextManager[Any]:
    """While it lasts, what the model has under `torch.compile` runs as it was written."""
    # Where nothing is compiled, its compiler has not been imported, which takes long.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _remove_effects(graph: fx.Graph) -> None:
    """Take out what computes nothing: `torch.profiler.record_function`, and the backward pass's checks of matrices.

    Where eager's backward pass raises for a singular matrix, its gradient is infinite or not a number here.
    """
    check = torch.ops.aten._linalg_check_errors.default
    for node in reversed(
        [n for n in graph.nodes if n.target is check or getattr(n.target, "namespace", "") == "profiler"]
    ):
        graph.erase_node(node)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without the traceback that torch logs of an operator that fails: our error says it."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    level = told.level
    told.setLevel(max(level, logging.CRITICAL) if told.getEffectiveLevel() > logging.DEBUG else level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        told.setLevel(level)


def _leaves(results: Sequence[torch.Tensor]) -> set[int]:
    """The ids of the tensors that a backward pass of these results may give gradients to."""
    found: set[int] = set()
    # Kept, since Python makes an object anew for each node that nobody holds, with an id of its own.
    seen = {r.grad_fn for r in results}
    pending = [n for n in seen if n is not None]
    while pending:
        node: Any = pending.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        pending += more
    return found | {id(r) for r in results if r.is_leaf}


def _check_gradients(
    program: Program, harness: Harness, fakes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Program:
    """Parameters without a gradient must have none in the plain model either."""
    if not program.training:
        return program
    # What a backward pass inside the traced one gives a parameter stays with it: also one that gets more in the graph.
    if left := [n for n, p in harness.model.named_parameters() if p.is_leaf and p.grad is not None]:
        raise _lost(left)
    values = dict(zip(program.outputs, program.output_values, strict=True))
    trainable = {n for n, p in harness.model.named_parameters() if p.requires_grad}
    have = {o.name for o, v in values.items() if o.kind == "gradient" and v is not None}
    missing = sorted(trainable - have)
    if not missing:
        return program
    for parameter in harness.parameters():  # a backward pass inside the traced one left its gradients here
        parameter.grad = None
    # Run once more, eagerly on fake tensors: what the plain model gives a gradient, the graph must give one, too.
    live: list[torch.Tensor] = []
    try:
        with mode, _quiet(), compiling(), _uncompiled():
            results = harness(*fakes)
            live = [r for r in results if r.requires_grad]
            if live:
                torch.autograd.backward(live, [torch.ones_like(r) for r in live])
    except CaptureError:
        raise
    except Exception as e:
        # Fake tensors have no backward pass of some functions (Hessians under vmap), which need not be about these.
        wanted = {id(p) for n, p in harness.model.named_parameters() if n in missing}
        if not live or not _leaves(live).isdisjoint(wanted):
            raise explained(e) from e
    lost = [n for n, p in harness.model.named_parameters() if n in missing and p.grad is not None]
    if lost:
        raise _lost(lost)
    return replace(program, unused=tuple(missing))


def _lost(parameters: Sequence[str]) -> CaptureError:
    return CaptureError(
        f"parameter {parameters[0]!r} ({len(parameters)} in all) gets a gradient in the plain model that it does not "
        "get in the captured graph; an autograd function that runs a backward pass of its own does that, as reversible "
        "layers and checkpointing by hand have it: torch.utils.checkpoint is understood; call the blocks by it, and "
        "turn such functions off (reversible=False)"
    )
