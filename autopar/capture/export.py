"""`capture`: a model and a batch become one `Program`, the joint forward and backward graph of ATen operators.

The model is traced as it is, by calling it: what it does to gradients (autograd functions, hooks) and to its own
attributes happens as in eager PyTorch. Everything runs on fake tensors: no memory is taken for parameters or
activations, whatever device they are on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar import tree
from autopar._torch_compat import FakeTensorMode, aot_export_joint_with_descriptors, compiling
from autopar.capture.attention import Attention
from autopar.capture.hooks import Hooks, Observation, observations
from autopar.capture.origins import Origins, record_origins
from autopar.capture.slots import Path
from autopar.capture.swap import swapped
from autopar.capture.writes import Record, Replay, Write
from autopar.decompose import decompositions
from autopar.errors import CaptureError
from autopar.handed import mark_handed
from autopar.program import Input, Output, Program, State
from autopar.regions import Regions, mark

aten = torch.ops.aten
logger = logging.getLogger("autopar")

Batch = tuple[Any, ...] | list[Any] | dict[str, Any]
LossFunction = Callable[[Any, Any], torch.Tensor]


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    compute: torch.dtype | None = None,
) -> Program:
    """Trace one step of ``model`` on ``batch``.

    Args:
        model: real, fake or on the meta device; it is not changed.
        batch: positional (tuple or list) or keyword (dict) arguments; real, fake or meta tensors.
        loss_fn: ``loss_fn(output, batch)`` for a model that does not return its loss.
        training: with a backward pass; default: gradients are enabled and some parameter requires one.
        compute: dtype of floating parameters and batch tensors in the graph; default: their own.

    Raises:
        CaptureError: the model cannot be traced, with the user's line and the remedy.
    """
    if not any(True for _ in model.parameters()):
        raise CaptureError(f"{type(model).__name__} has no parameters: there is nothing to parallelize")
    wants_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    training = wants_gradient if training is None else training
    first: CaptureError | None = None
    for promote, track in _ATTEMPTS:
        try:
            return _captured(model, batch, loss_fn, training, compute, promote, track)
        except _AgainError as e:
            first = first or e.error
        except CaptureError as e:
            raise first or e from None
    raise AssertionError("the last attempt is final")


_ATTEMPTS = ((True, True), (True, False), (False, False))
"""Whether tensors among the attributes are inputs of the graph, and numbers that are counted are known not to matter.

A model may look at the values of the one or the other, and then they are constants.
"""


class _AgainError(Exception):
    """A capture failed that may succeed with more constants."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def _captured(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    training: bool,
    compute: torch.dtype | None,
    promote: bool,
    track: bool,
) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors, skeleton = tree.flatten(batch, "batch")
    fakes = tuple(_fake_tensor(t, mode, compute) for t in tensors)
    with swapped(model, lambda t, c: _fake_tensor(t, mode, c), training, compute, promote) as inputs:
        record = Record(model)
        harness = Harness(model, skeleton, loss_fn, training, record, track, inputs)
        try:
            with torch.set_grad_enabled(training), _quiet():
                joint = _trace(harness, fakes)
            program = _describe(joint, harness, training)
            mark_handed(program)
            program = _check_gradients(program, harness, fakes, mode)
        except CaptureError as e:
            if (promote and inputs) or (track and harness.seen.numbers):
                raise _AgainError(e) from e
            raise
        finally:
            record.put_back()
    counted = frozenset((w.module, w.path) for w in program.state.writes if isinstance(w.value, Replay))
    return replace(program, state=replace(program.state, counted=counted, constants=not promote))


class Seen:
    """What the harness learns while it is traced; the tracer would restore plain attributes of a module.

    Attributes:
        skeleton: of the output.
        loss: index of the result that is the loss.
        assigned: buffers that get a new tensor, by the index of the result.
        writes: to the model's Python state.
        observed: calls of hooks that record.
        numbers: places of numbers that change.
    """

    def __init__(self) -> None:
        self.skeleton: Any = None
        self.loss: int | None = None
        self.assigned: dict[int, str] = {}
        self.writes: list[Write] = []
        self.observed: list[Observation] = []
        self.numbers: list[tuple[str, Path]] | None = None


class Harness(nn.Module):
    """Calls the model on flat tensors and returns flat tensors, the loss made the only differentiable one."""

    def __init__(
        self,
        model: nn.Module,
        skeleton: Any,
        loss_fn: LossFunction | None,
        training: bool,
        record: Record | None = None,
        tracked: bool = False,
        promoted: Collection[str] = (),
    ) -> None:
        """With a ``record`` of the model's state, each call begins with that, and what it changes is returned, too."""
        super().__init__()
        self.model = model
        self.batch_skeleton = skeleton
        self.loss_fn = loss_fn
        self.differentiable = training
        self.seen = Seen()
        self.record, self.tracked, self.promoted = record, tracked, promoted
        self.aliases = _aliases(model)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Shared ones under one name always: the tracer would take them for several tensors."""
        return super().named_parameters(prefix, recurse, True)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Shared ones under one name."""
        return super().named_buffers(prefix, recurse, True)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors of the batch to tensors of the output, of buffers that are assigned, and of the state written."""
        batch = tree.unflatten(self.batch_skeleton, tensors)
        if self.record is None:
            return self._selected(self._results(self._call(batch), batch))
        self.record.put_back()
        for name, first in self.aliases.items():
            _put_tensor(self.model, name, _get_tensor(self.model, first))
        if self.tracked and self.seen.numbers is not None:
            self.record.track(self.seen.numbers)
        before = dict(self.model.named_buffers(remove_duplicate=False))
        origins = Origins(self)
        hooks = Hooks(self.model)
        with Regions().recorded(), origins.recorded(), Attention(), hooks.watched():
            results = self._results(self._call(batch), batch)
        if self.seen.numbers is None:
            self.seen.numbers = self.record.numbers()
        self._add_state(results, before, origins.lines, hooks)
        return self._selected(results)

    def _call(self, batch: Any) -> Any:
        return self.model(**batch) if isinstance(batch, dict) else self.model(*batch)

    def _results(self, output: Any, batch: Any) -> list[torch.Tensor]:
        """Tensors of the output, or the loss that the function makes of it."""
        if self.loss_fn is not None:
            output = self.loss_fn(output, batch)
            if not isinstance(output, torch.Tensor) or output.numel() != 1:
                raise CaptureError("loss_fn(output, batch) must return a scalar tensor")
        results, self.seen.skeleton = tree.flatten(_without_cache(output), "the model's output")
        if not results:
            raise CaptureError("the model returns no tensor")
        return results

    def _selected(self, results: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results, of which scalars alone carry gradients if there are any; the only one is the loss."""
        scalars = [i for i, r in enumerate(results) if r.ndim == 0 and r.is_floating_point() and r.requires_grad]
        self.seen.loss = scalars[0] if len(scalars) == 1 else None
        if self.differentiable and scalars:
            results = [r if i in scalars else r.detach() for i, r in enumerate(results)]
        return tuple(results)

    def _add_state(
        self,
        results: list[torch.Tensor],
        before: Mapping[str, torch.Tensor],
        lines: Mapping[tuple[str, str], str],
        hooks: Hooks,
    ) -> None:
        """Append what the call leaves in the model: new tensors of buffers, and those in other attributes."""
        assert self.record is not None

        known = {id(r): (i, r) for i, r in enumerate(results)}

        def leaf(tensor: torch.Tensor) -> tree.Leaf:
            if id(tensor) not in known:
                known[id(tensor)] = len(results), tensor
                results.append(tensor.clone())  # it may be one of the inputs
            return tree.Leaf(known[id(tensor)][0])

        self.seen.assigned = {}
        self.seen.writes = self.record.writes(leaf, lines)
        self.seen.observed = observations(hooks, self.record, leaf)
        assigned = {}
        for name, old in before.items():
            path, _, attribute = name.rpartition(".")
            new = self.model.get_submodule(path)._buffers.get(attribute)
            if new is old:
                continue
            if new is None or not _alike(new, old) or name in self.promoted:
                value = None if new is None else leaf(new)
                self.seen.writes.append(Write(path, (("attr", attribute),), value))
            else:
                assigned[name] = new.clone()
        self.seen.assigned = dict(enumerate(assigned, len(results)))
        results += assigned.values()


def _alike(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a tensor can take a buffer's place in every call to come."""
    return new.shape == old.shape and new.dtype == old.dtype and not new.requires_grad


def _without_cache(output: Any) -> Any:
    """Drop key-value caches: they are for generation, and no gradient flows through them."""
    cache = getattr(output, "past_key_values", None)
    if cache is None or not isinstance(output, dict):
        return output
    logger.info("dropped past_key_values from the output of the parallelized model; set use_cache=False to be explicit")
    return type(output)(**{k: v for k, v in output.items() if k != "past_key_values"})


def _fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, floating: torch.dtype | None = None) -> torch.Tensor:
    dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _trace(harness: Harness, fakes: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    try:
        # With oneDNN an LSTM on a CPU is one opaque operator; without, it is matrix products, as on every other device.
        with contextlib.ExitStack() as stack, torch.backends.mkldnn.flags(enabled=False), compiling():
            joint: fx.GraphModule = aot_export_joint_with_descriptors(
                stack, harness, fakes, decompositions=decompositions()
            ).graph_module
        mark(joint.graph)
        record_origins(joint.graph)
        return joint
    except CaptureError:
        raise
    except Exception as e:
        raise _explain(e) from e


def _explain(error: Exception) -> CaptureError:
    """A tracing failure in the user's terms: their line, the reason, the remedy."""
    text = str(error)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not re.search(r"[/\\]torch[/\\]|[/\\]autopar[/\\]", f.filename)
    ]
    line = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text.lower() or "Could not guard" in text:
        return CaptureError(
            f"control flow that depends on data{line}: one graph must serve every batch; "
            "use torch.where or torch.cond, or move the decision out of the model"
        )
    if "DeviceMismatch" in kind and "meta" in text:
        return CaptureError(
            f"a tensor on the meta device that is no parameter, buffer or batch tensor{line}: its values would become "
            "constants of the graph; make it with register_buffer, or on a real device"
        )
    return CaptureError(f"cannot capture the model{line}: {kind}: {text.splitlines()[0] if text else ''}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _aliases(model: nn.Module) -> dict[str, str]:
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


def _get_tensor(model: nn.Module, name: str) -> Any:
    table, attribute = _table(model, name)
    return table[attribute]


def _put_tensor(model: nn.Module, name: str, tensor: Any) -> None:
    table, attribute = _table(model, name)
    table[attribute] = tensor


def _describe(joint: fx.GraphModule, harness: Harness, training: bool) -> Program:
    """Read inputs and outputs off the descriptors that the tracer left; what the model keeps comes first."""
    seen = harness.seen
    described = {n: _input(n.meta["desc"]) for n in joint.graph.nodes if n.op == "placeholder"}
    for placeholder in [n for n, i in described.items() if i.name in harness.promoted and not n.users]:
        del described[placeholder]
        joint.graph.erase_node(placeholder)
    inputs = tuple(described.values())
    node = joint.graph.output_node()
    values: Any = node.args[0]
    kept: dict[Output, fx.Node | None] = {}
    rest: dict[Output, fx.Node | None] = {}
    for desc, value in zip(node.meta["desc"], values, strict=True):
        if desc is None:  # an input that needs no gradient
            continue
        output = _output(desc)
        if output.kind == "result" and int(output.name) in seen.assigned:
            output = Output("buffer", seen.assigned[int(output.name)])
            kept.pop(output, None)  # what was written in place before is gone
        (kept if output.kind in ("buffer", "parameter") else rest)[output] = value
    node.args = ([*kept.values(), *rest.values()],)
    outputs = (*kept, *rest)
    forward = sum(o.kind != "gradient" for o in outputs)
    loss = seen.loss if training else None
    state = State(tuple(seen.writes), frozenset(seen.assigned.values()), observed=tuple(seen.observed))
    return Program(joint, inputs, outputs, forward, seen.skeleton, loss, training, (), harness.aliases, state=state)


def _input(desc: Any) -> Input:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return Input("parameter", desc.target.removeprefix("model."))
    if kind == "BufferAOTInput":
        return Input("buffer", desc.target.removeprefix("model."))
    if kind == "PlainAOTInput":
        return Input("batch", str(desc.idx))
    if kind == "TangentAOTInput":
        return Input("tangent", str(desc.output.idx))
    raise CaptureError(f"the graph has an input of an unknown kind: {desc}")


def _output(desc: Any) -> Output:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return Output("result", str(desc.idx))
    if kind == "GradAOTOutput":
        source = _input(desc.grad_of)
        return Output("gradient", source.name if source.kind == "parameter" else f"batch {source.name}")
    if kind == "InputMutationAOTOutput":
        source = _input(desc.mutated_input)
        if source.kind in ("buffer", "parameter"):
            return Output(source.kind, source.name)
        raise CaptureError(f"the model writes to its {source.kind} {source.name!r} in place; write to a copy instead")
    raise CaptureError(f"the graph has an output of an unknown kind: {desc}")


def _check_gradients(
    program: Program, harness: Harness, fakes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Program:
    """Parameters without a gradient must have none in the plain model either."""
    if not program.training:
        return program
    values = dict(zip(program.outputs, program.output_values, strict=True))
    trainable = {n for n, p in harness.model.named_parameters() if p.requires_grad}
    have = {o.name for o, v in values.items() if o.kind == "gradient" and v is not None}
    missing = sorted(trainable - have)
    if not missing:
        return program
    for parameter in harness.parameters():  # a backward pass inside the traced one left its gradients here
        parameter.grad = None
    with mode, _quiet():
        results = harness(*fakes)
        live = [r for r in results if r.requires_grad]
        if live:
            torch.autograd.backward(live, [torch.ones_like(r) for r in live])
    lost = [n for n, p in harness.model.named_parameters() if n in missing and p.grad is not None]
    if lost:
        raise CaptureError(
            f"parameter {lost[0]!r} ({len(lost)} in all) gets a gradient in the plain model but not in the captured "
            "graph; an autograd function that runs a backward pass of its own does that: torch.utils.checkpoint is "
            "understood, other checkpointing is not"
        )
    return replace(program, unused=tuple(missing))
