"""`capture`: a model and a batch become one `Program`, the joint forward and backward graph of ATen operators.

The model is traced as it is, by calling it: what it does to gradients (autograd functions, hooks) and to its own
attributes happens as in eager PyTorch. Everything runs on fake tensors: no memory is taken for parameters or
activations, whatever device they are on.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopar._torch_compat import FakeTensorMode, aot_export_joint_with_descriptors, compiling
from autopar.capture.decompositions import decompositions
from autopar.capture.harness import Harness, LossFunction
from autopar.capture.origins import record_origins
from autopar.capture.state.writes import Record, Replay
from autopar.capture.swap import refuse_scripted, swapped
from autopar.errors import CaptureError
from autopar.ir.checkpoint_regions import mark
from autopar.ir.module_outputs import mark_module_outputs
from autopar.ir.program import GRADIENTS, Input, Output, Program, State
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
        CaptureError: the model cannot be traced, with the user's line and the remedy.
        TypeError: the batch does not hold the model's arguments.
        ValueError: ``loss`` and ``loss_fn`` both say what the loss is.
    """
    if loss is not None and loss_fn is not None:
        raise ValueError("loss= picks a scalar of the output and loss_fn= makes one: pass one of them")
    if not any(True for _ in model.parameters()):
        raise CaptureError(f"{type(model).__name__} has no parameters: there is nothing to parallelize")
    tensors, arguments = binding.flatten(model, batch)
    refuse_scripted(model)
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (*model.parameters(), *tensors))
    training = wants_gradient if training is None else training
    asked = _Asked(model, tensors, arguments, loss_fn, loss, training, compute)
    program: Program = floats.watched(arguments.numbers, asked.captured)
    return program


@dataclass(frozen=True)
class _Asked:
    """What is to be captured."""

    model: nn.Module
    tensors: list[torch.Tensor]
    arguments: binding.Arguments
    loss_fn: LossFunction | None
    loss: Loss
    training: bool
    compute: torch.dtype | None

    def captured(self, recorder: floats.FloatRecorder) -> Program:
        """With as few constants as the model allows."""
        first: CaptureError | None = None
        for promote, track in _ATTEMPTS:
            try:
                return self._attempt(recorder, promote, track)
            except _AgainError as e:
                first = first or e.error
            except CaptureError as e:
                raise first or e from None
        raise AssertionError("the last attempt is final")

    def _attempt(self, recorder: floats.FloatRecorder, promote: bool, track: bool) -> Program:
        model, training = self.model, self.training
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtypes = [self.compute] * self.arguments.tensors + [None] * len(self.arguments.numbers)
        given = zip(self.tensors, dtypes, strict=True)
        fakes = tuple(_fake_tensor(t, mode, dtype).requires_grad_(t.requires_grad) for t, dtype in given)

        def fake(tensor: torch.Tensor, floating: torch.dtype | None) -> torch.Tensor:
            return _fake_tensor(tensor, mode, floating)

        with swapped(model, fake, training, self.compute, promote) as (inputs, references):
            record = Record(model)
            harness = Harness(
                model, self.arguments, self.loss_fn, training, self.loss, recorder, record, track, inputs, references
            )
            try:
                with torch.set_grad_enabled(training), _quiet():
                    joint = _trace(harness, fakes)
                program = _describe(joint, harness, training)
                mark_module_outputs(program)
                program = _check_gradients(program, harness, fakes, mode)
            except CaptureError as e:
                if (promote and inputs) or (track and harness.seen.numbers):
                    raise _AgainError(e) from e
                raise
            finally:
                record.put_back()
        counted = frozenset((w.module, w.path) for w in program.state.writes if isinstance(w.value, Replay))
        state = replace(program.state, counted=counted, constants=not promote)
        return replace(program, state=state, guards=recorder.guards)


_ATTEMPTS = ((True, True), (True, False), (False, False))
"""Whether tensors among the attributes are inputs of the graph, and numbers that are counted are known not to matter.

A model may look at the values of the one or the other, and then they are constants.
"""


class _AgainError(Exception):
    """A capture failed that may succeed with more constants."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


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
    dynamic = "DataDependent" in kind or "DynamicOutputShape" in kind or "data-dependent" in text.lower()
    if dynamic or "Could not guard" in text or "_local_scalar_dense" in text:
        return CaptureError(
            f"control flow that depends on data{line}: one graph must serve every batch; "
            "use torch.where or torch.cond, masked sums in place of tensor[mask], or move the decision out of the model"
        )
    if "DeviceMismatch" in kind and "meta" in text:
        return CaptureError(
            f"a tensor on the meta device that is no parameter, buffer or batch tensor{line}: its values would become "
            "constants of the graph; make it with register_buffer, or on a real device"
        )
    if "Unexpected fake buffer" in text:
        return CaptureError(
            "the model keeps a tensor from one call to the next in a place that is no attribute of a module "
            "(functools.lru_cache, a global dict), where a trace cannot undo that: keep it in an attribute or buffer, "
            "or clear the cache and call the model once before parallelize(), so that the cache has it"
        )
    return CaptureError(f"cannot capture the model{line}: {kind}: {text.splitlines()[0] if text else ''}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _describe(joint: fx.GraphModule, harness: Harness, training: bool) -> Program:
    """Read inputs and outputs off the descriptors that the tracer left; what the model keeps comes first."""
    seen = harness.seen
    for placeholder in [n for n in joint.graph.nodes if n.op == "placeholder" and _is_of_mutation(n.meta["desc"])]:
        _replace_by_zeros(placeholder)
    described = {n: _input(n.meta["desc"]) for n in joint.graph.nodes if n.op == "placeholder"}
    for placeholder in [n for n, i in described.items() if i.name in harness.promoted and not n.users]:
        del described[placeholder]
        joint.graph.erase_node(placeholder)

    def number(result: int) -> int:
        """Of a result, among those that are no buffers."""
        return result - sum(i < result for i in seen.assigned)

    described = {
        n: replace(i, name=str(number(int(i.name)))) if i.kind == "tangent" else i for n, i in described.items()
    }
    inputs = tuple(described.values())
    for placeholder, spec in described.items():
        value = placeholder.meta["val"]
        if spec.kind == "parameter" and value.layout != torch.strided:
            raise CaptureError(f"parameter {spec.name!r} has layout {value.layout}: make it a dense tensor")
    node = joint.graph.output_node()
    values: Any = node.args[0]
    kept: dict[Output, fx.Node | None] = {}
    rest: dict[Output, fx.Node | None] = {}
    for desc, value in zip(node.meta["desc"], values, strict=True):
        if desc is None:  # an input that needs no gradient
            continue
        output = _output(desc)
        if output.kind == "gradient" and _input(desc.grad_of).kind == "buffer":
            if value is not None:
                raise CaptureError(
                    f"{output.name!r} is no parameter, and requires a gradient, which would be lost: make it an "
                    "nn.Parameter, or detach() it where it is kept from an earlier call"
                )
            continue
        if value is not None and not isinstance(value.meta["val"], torch.Tensor):
            raise CaptureError(
                f"the {output.kind} {output.name!r} of the model is a {type(value.meta['val']).__name__}"
            )
        if value is not None and value.meta["val"].layout != torch.strided:
            raise CaptureError(
                f"the {output.kind} {output.name!r} has layout {value.meta['val'].layout}: sparse gradients cannot be "
                "reduced; leave sparse=True out (nn.Embedding, F.embedding), which gives the same values"
            )
        if output.kind == "result" and int(output.name) in seen.assigned:
            output = Output("buffer", seen.assigned[int(output.name)])
            kept.pop(output, None)  # what was written in place before is gone
        elif output.kind == "result":
            output = Output("result", str(number(int(output.name))))
        (kept if output.kind in ("buffer", "parameter") else rest)[output] = value
    rest = dict(sorted(rest.items(), key=lambda item: _ORDER.index(item[0].kind)))
    node.args = ([*kept.values(), *rest.values()],)
    outputs = (*kept, *rest)
    forward = sum(o.kind not in GRADIENTS for o in outputs)
    found = seen.results
    assert found is not None
    assigned = frozenset(seen.assigned.values())
    state = State(
        tuple(seen.writes), assigned, observed=tuple(seen.observed), checks=seen.checks, stride_read=seen.stride_read
    )
    return Program(
        joint, inputs, outputs, forward, found.skeleton,
        None if found.loss is None else number(found.loss), training, (), harness.aliases,
        withheld=frozenset(map(number, found.withheld)), total=found.total, state=state,
    )  # fmt: skip


def _is_of_mutation(desc: Any) -> bool:
    """Whether it is the gradient of what the model writes to a parameter in place, which nobody asks for."""
    return type(desc).__name__ == "TangentAOTInput" and not hasattr(desc.output, "idx")


def _replace_by_zeros(node: fx.Node) -> None:
    value = node.meta["val"]
    with node.graph.inserting_before(next(n for n in node.graph.nodes if n.op != "placeholder")):
        options = {"dtype": value.dtype, "device": value.device}
        zeros = node.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
    zeros.meta = {"val": value, "partitioner_tag": "is_backward"}
    node.replace_all_uses_with(zeros)
    node.graph.erase_node(node)


_ORDER = ("result", "input_gradient", "gradient")
"""Of outputs, behind what the model keeps: `no_sync` splits off the gradients of parameters alone."""


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
        return Output("input_gradient" if source.kind == "batch" else "gradient", source.name)
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
