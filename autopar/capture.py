"""`capture`: a model and a batch become one `Program`, the joint forward and backward graph of ATen operators.

Everything runs on fake tensors: no memory is taken for parameters or activations, whatever device they are on.
"""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar import binding, floats
from autopar._torch_compat import FakeTensorMode, aot_export_joint_with_descriptors
from autopar.attention import simplify_attention
from autopar.decompose import decompositions
from autopar.errors import CaptureError
from autopar.handed import mark_handed
from autopar.outputs import Loss, Results, results_of
from autopar.program import Input, Output, Program
from autopar.regions import Regions, mark

aten = torch.ops.aten

Batch = tuple[Any, ...] | list[Any] | dict[str, Any]
LossFunction = Callable[[Any, Any], torch.Tensor]


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
        loss: which scalar of the output is the loss, see `autopar.outputs`.
        training: with a backward pass; default: gradients are enabled and some parameter requires one.
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
    wants_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    training = wants_gradient if training is None else training
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors, arguments = binding.flatten(model, batch)
    dtypes = [compute] * arguments.tensors + [None] * len(arguments.numbers)
    fakes = tuple(_fake_tensor(t, mode, dtype) for t, dtype in zip(tensors, dtypes, strict=True))

    def make(watch: floats.Watch) -> Program:
        harness = Harness(_fake_module(model, mode, training, compute), arguments, loss_fn, training, loss, watch)
        with torch.set_grad_enabled(training), _quiet():
            joint = _trace(harness, fakes)
        program = _describe(joint, harness, _aliases(model), training)
        mark_handed(program)
        return replace(_check_gradients(program, harness, fakes, mode), guards=watch.guards)

    return floats.watched(arguments.numbers, make)


class _Seen:
    """What the harness learns while it is traced; the tracer would restore plain attributes of a module."""

    results: Results | None = None


class Harness(nn.Module):
    """Calls the model on flat tensors and returns flat tensors, of which not all carry gradients."""

    def __init__(
        self,
        model: nn.Module,
        arguments: binding.Arguments,
        loss_fn: LossFunction | None,
        training: bool,
        loss: Loss = None,
        watch: floats.Watch | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.loss_fn, self.loss = loss_fn, loss
        self.differentiable = training
        self.watch = watch
        self.seen = _Seen()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors of the batch, and behind them its floats, to tensors of the output."""
        numbers = floats.values_or_stand_ins(self.watch, tensors[self.arguments.tensors :])
        given = self.arguments.fill(tensors, numbers)
        output = self.model(*given.args, **given.kwargs)
        if self.loss_fn is not None:
            output = self.loss_fn(output, given.batch)
            if not isinstance(output, torch.Tensor) or output.numel() != 1:
                raise CaptureError("loss_fn(output, batch) must return a scalar tensor")
        required = self.model.training
        self.seen.results = results_of(output, self.loss, training=self.differentiable, required=required)
        return self.seen.results.tensors


def _fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, floating: torch.dtype | None = None) -> torch.Tensor:
    dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _fake_module(model: nn.Module, mode: FakeTensorMode, training: bool, compute: torch.dtype | None) -> nn.Module:
    """A copy of the model on fake tensors; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_fake_tensor(p.detach(), mode, compute), requires_grad=p.requires_grad and training)
    for t in model.buffers():
        memo.setdefault(id(t), _fake_tensor(t.detach(), mode))
    for t in (v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)):
        memo.setdefault(id(t), t.detach().clone())  # becomes a constant of the graph, which needs its values
    try:
        return copy.deepcopy(model, memo)
    except Exception as e:
        raise CaptureError(
            f"cannot copy {type(model).__name__} for tracing: {e}; make copy.deepcopy(model) work"
        ) from e


def _trace(harness: Harness, fakes: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    try:
        # With oneDNN an LSTM on a CPU is one opaque operator; without, it is matrix products, as on every other device.
        regions = Regions()
        with torch.backends.mkldnn.flags(enabled=False), regions.recorded():
            exported = torch.export.export(harness, fakes, strict=False).module(check_guards=False)
        simplify_attention(exported)
        exported = regions.watched(exported)
        with contextlib.ExitStack() as stack, torch.backends.mkldnn.flags(enabled=False):
            joint: fx.GraphModule = aot_export_joint_with_descriptors(
                stack, exported, fakes, decompositions=decompositions(), _record_nn_module_stack=True
            ).graph_module
            mark(joint.graph)
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


def _own_name(target: str, aliases: dict[str, str]) -> str:
    name = target.removeprefix("model.")
    return aliases.get(name, name)


def _describe(joint: fx.GraphModule, harness: Harness, aliases: dict[str, str], training: bool) -> Program:
    """Read inputs and outputs off the descriptors that the tracer left."""
    inputs = _merge_inputs(joint, aliases)
    outputs = _merge_outputs(joint, aliases)
    forward = sum(o.kind != "gradient" for o in outputs)
    seen = harness.seen.results
    assert seen is not None
    found = Program(joint, inputs, outputs, forward, seen.skeleton, seen.loss, training, (), aliases)
    return replace(found, withheld=seen.withheld, total=seen.total)


def _merge_inputs(joint: fx.GraphModule, aliases: dict[str, str]) -> tuple[Input, ...]:
    """One placeholder for each parameter or buffer: the tracer gives a tied one a placeholder for each name."""
    first: dict[Input, fx.Node] = {}
    for node in [n for n in joint.graph.nodes if n.op == "placeholder"]:
        spec = _input(node.meta["desc"], aliases)
        if first.setdefault(spec, node) is not node:
            node.replace_all_uses_with(first[spec])
            joint.graph.erase_node(node)
    return tuple(first)


def _merge_outputs(joint: fx.GraphModule, aliases: dict[str, str]) -> tuple[Output, ...]:
    """One gradient for each parameter: those of its further names are added."""
    node = next(iter(reversed(joint.graph.nodes)))
    merged: dict[Output, fx.Node | None] = {}
    for desc, value in zip(node.meta["desc"], node.args[0], strict=True):
        if desc is None:  # an input that needs no gradient
            continue
        spec = _output(desc, aliases)
        known = merged.get(spec)
        if known is None or value is None:
            merged[spec] = known if value is None else value
            continue
        with joint.graph.inserting_before(node):
            total = joint.graph.call_function(aten.add.Tensor, (known, value))
        total.meta = {"val": known.meta["val"], "partitioner_tag": "is_backward"}
        merged[spec] = total
    node.args = (list(merged.values()),)
    return tuple(merged)


def _input(desc: Any, aliases: dict[str, str]) -> Input:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return Input("parameter", _own_name(desc.target, aliases))
    if kind == "BufferAOTInput":
        return Input("buffer", _own_name(desc.target, aliases))
    if kind == "PlainAOTInput":
        return Input("batch", str(desc.idx))
    if kind == "TangentAOTInput":
        return Input("tangent", str(desc.output.idx))
    raise CaptureError(f"the graph has an input of an unknown kind: {desc}")


def _output(desc: Any, aliases: dict[str, str]) -> Output:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return Output("result", str(desc.idx))
    if kind == "GradAOTOutput":
        source = _input(desc.grad_of, aliases)
        return Output("gradient", source.name if source.kind == "parameter" else f"batch {source.name}")
    if kind == "InputMutationAOTOutput":
        source = _input(desc.mutated_input, aliases)
        if source.kind == "buffer":
            return Output("buffer", source.name)
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
