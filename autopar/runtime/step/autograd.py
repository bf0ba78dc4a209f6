"""`run`: a step as one node of the user's autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch_compat import storage_id
from autopar.capture.state.hooks import seen_by
from autopar.capture.state.writes import names_of_result
from autopar.errors import AutoparError
from autopar.ir.ops.random import current_seed, step_seed
from autopar.ir.program import Program
from autopar.ir.signature.outputs import path_of
from autopar.runtime.agreement.failing_node import failing_node
from autopar.runtime.agreement.points import FAILURES, NO_SYNC, WAITING
from autopar.runtime.dtensor import counting_writes, to_local
from autopar.runtime.step.input_gradients import InputForm, as_passed
from autopar.runtime.step.loss_total import attached
from autopar.runtime.step.no_sync import DeferredReduction
from autopar.runtime.step.step import Step, as_gradient, deliver

Noted = list[tuple[str, torch.Tensor, int]]
"""Tensors that no one may write to for now: what is said of each, and how often it had been written to."""


@dataclass
class Call:
    """One call of the module: goes into the autograd function in one piece, and brings the results out.

    Attributes:
        step: what runs.
        buffers: of the model, by name.
        batch: this rank's part of each batch tensor.
        given: the batch tensors as they were passed.
        deferred: gradients whose reduction is deferred.
        name: such as ``call 3 of Mlp``.
        passed: the form of each batch tensor that requires a gradient, by its number.
        results: of the model.
        apart: results that eager mode has in memory of others.
    """

    step: Step
    buffers: dict[str, torch.Tensor]
    batch: list[torch.Tensor]
    given: Sequence[torch.Tensor]
    deferred: DeferredReduction
    name: str = ""
    passed: Mapping[str, InputForm] = field(default_factory=dict)
    results: list[torch.Tensor] = field(default_factory=list)
    apart: Noted = field(default_factory=list)

    def agree(self, pass_: str) -> None:
        """Wait until every rank is about to run the same pass of the same call.

        Raises:
            RankError: one is not, or does not take part.
        """
        context = self.step.context
        if context.control is not None:
            window = ((NO_SYNC, str(self.deferred.active)), (WAITING, self.deferred.described()))
            context.meet(f"{pass_} of {self.name}", (*window, (FAILURES, context.control.failures())))

    def during(self, pass_: str) -> AbstractContextManager[None]:
        """Replace the error of a collective within by one that names the node, and what happened to other ranks."""
        graphs = self.step.graphs
        return self.step.context.during(f"{pass_} of {self.name}", lambda e: failing_node(e, graphs()))


def run(
    call: Call, parameters: Sequence[torch.Tensor], differentiable: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Run a step; the results of the model, in order, with gradients where the step has a backward pass.

    Those that eager mode has in memory of others are noted in ``call.apart``, see `require_unwritten`.

    Args:
        call: what is run.
        parameters: that go in, in order.
        differentiable: the batch tensors that require a gradient, as they were passed, in the order of ``call.passed``.
    """
    results = _run(call, parameters, differentiable)
    call.apart += _apart(call.step, results)
    return results


def _run(call: Call, parameters: Sequence[torch.Tensor], differentiable: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    step = call.step
    if not step.trains:
        with call.during("forward"):
            results, _ = step.forward(parameters, call.buffers, call.batch)
        return [step.wrap(i, r) for i, r in enumerate(results)]
    apply: Any = _StepFunction.apply
    made = apply(call, *parameters, *differentiable)
    outputs = dict(zip(step.differentiable, made, strict=True))
    if (total := step.program.total) is not None:
        loss = outputs.pop(step.differentiable[0])
        outputs |= zip(total.parts, attached(loss, call.results, step.program.skeleton, total), strict=True)
    refuse: Any = _Refusal.apply
    # What requires a gradient, so that autograd gives the results below a backward function; and the step's outputs: a
    # gradient of nothing but some parameters or inputs goes by functions that lead there alone.
    leads = (torch.empty(0, requires_grad=True), *made)
    return [
        outputs[i]
        if i in outputs
        else refuse([r], i, step.program, *leads)
        if i in step.program.withheld
        # One that is also the loss, such as loss.detach(), has its history by now.
        else (r.detach() if r.requires_grad else r)
        for i, r in enumerate(call.results)
    ]


class _StepFunction(torch.autograd.Function):
    """The whole model as one node of the user's autograd graph.

    Results come out by way of the call, too: those without gradients must not be outputs of the function, or autograd
    would let them require one.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Any:
        step = call.step
        parameters = tensors[: len(tensors) - len(call.passed)]
        with call.during("forward"):
            locals_, saved = step.forward(parameters, call.buffers, call.batch)
        # A result that is not used has None for its gradient, and not zeros of its size.
        ctx.set_materialize_grads(False)
        ctx.seed = current_seed()
        # Without batch and buffers, but for histories, which the backward pass writes to: what it needs of them is
        # among the saved values, and the rest must not live until then.
        histories = {name: call.buffers[name] for name in step.histories}
        ctx.call = Call(step, histories, [], (), call.deferred, call.name, call.passed, apart=call.apart)
        # save_for_backward takes tensors alone; it lets saved-tensor hooks see them, and finds in-place writes.
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in saved]
        ctx.others = [v for v in saved if not isinstance(v, torch.Tensor)]
        ctx.save_for_backward(*(v for v in saved if isinstance(v, torch.Tensor)))
        ctx.parameters, ctx.differentiable = parameters, tensors[len(parameters) :]
        call.results = [step.wrap(i, r) for i, r in enumerate(locals_)]
        ctx.reread = _reread(call, parameters)
        return tuple(call.results[i] for i in step.differentiable)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        context = ctx.call.step.context
        with torch.no_grad(), context.telling_workers("a backward pass"):
            found = _StepFunction._backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        # With create_graph=True. Gradients without a history would be constants, silently: of a penalty, say. With all
        # that they depend on: a gradient of some of that alone goes by functions that lead there.
        leads = (torch.empty(0, requires_grad=True), *ctx.parameters, *ctx.differentiable, *gradients)
        refuse: Any = _SecondRefusal.apply
        return tuple(None if g is None else refuse([g], *leads) for g in found)

    @staticmethod
    def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        step = call.step
        call.agree("backward")
        _require_unwritten(ctx.reread)
        require_unwritten(call.apart)
        _compare(step, call.name, dict(zip(step.differentiable, gradients, strict=True)))
        saved = _saved_values(ctx)
        incoming = {str(i): g for i, g in zip(step.differentiable, gradients, strict=True)}
        call.deferred.passes += 1
        nothing_deferred = not (call.deferred.active or call.deferred.any)
        with call.during("backward"), step_seed(ctx.seed):  # what is recomputed draws the same numbers
            tangents = [step.tangent(name, incoming[name]) for name in step.cut.tangents]
            of_parameters, of_batch = step.backward(saved, tangents, call.deferred, call.buffers)
        if nothing_deferred and len(incoming) > 1:
            of_parameters = _reached(step, "gradient", of_parameters, incoming)
            of_batch = _reached(step, "input_gradient", of_batch, incoming)
        needed = ctx.needs_input_grad[1 : 1 + len(ctx.parameters)]
        wrapped = [
            as_gradient(of_parameters.pop(name), p, step.types.parameters[name], step.context)
            if is_needed and name in of_parameters
            else None
            for name, p, is_needed in zip(step.parameters, ctx.parameters, needed, strict=True)
        ]
        # Deferred gradients may be of parameters that this call did not take, or that have been frozen since.
        deliver(of_parameters, call.deferred, step.context)
        with call.during("backward"):  # on every rank, asked for or not: it may take a collective
            of_inputs = [
                as_passed(of_batch[name], form, step.types.batch[name], step.context) if name in of_batch else None
                for name, form in call.passed.items()
            ]
        return None, *wrapped, *of_inputs


def _compare(step: Step, name: str, incoming: Mapping[int, torch.Tensor | None]) -> None:
    """Ranks are given the same gradients of what every rank has whole."""
    if step.context.control is None or step.given.compared:
        return
    for i, gradient in incoming.items():
        if gradient is not None and (isinstance(gradient, DTensor) or not gradient.ndim):
            step.given.note(_output(step.program.skeleton, i), gradient)
    step.given.compare(f"backward of {name}", step.context)


def _reread(call: Call, parameters: Sequence[torch.Tensor]) -> Noted:
    """Tensors of the mesh that the backward pass reads again: what messages call them, and how often they were written.

    Of other tensors torch knows that itself. An operator on a DTensor counts there, and not on the local tensor that is
    saved.
    """
    step, found = call.step, Noted()
    named = dict(zip(step.parameters, parameters, strict=True))
    for kind, name in step.cut.reread:
        if kind == "parameter":
            what, tensor = f"parameter {name!r}", named[name]
        elif kind == "batch":
            what, tensor = f"batch tensor {name}", call.given[int(name)]
        else:
            what, tensor = _output(step.program.skeleton, int(name)), call.results[int(name)]
        if isinstance(tensor, DTensor) and not tensor.is_inference():
            # Parameters live on; of others what counts writes, and not their memory, which is freed after its last use.
            found.append((what, tensor if kind == "parameter" else counting_writes(tensor), tensor._version))
    return found


def _require_unwritten(reread: Noted) -> None:
    """As in torch, whose error it is: gradients would be of other values than those that the forward pass had.

    Raises:
        RuntimeError: names the tensor.
    """
    for what, times in _written(reread):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"backward pass reads {what}, which was written to {times} times since the forward pass; write to a copy "
            "of it (.clone()), or after backward()"
        )


def _apart(step: Step, results: Sequence[torch.Tensor]) -> Noted:
    """Results that lie apart from what eager mode has in the same memory: of what, and how often they were written."""
    found = []
    for i, (inputs, others) in step.apart.items():
        own = results[i]
        names = [f"batch tensor {name}" if kind == "batch" else f"{kind} {name!r}" for kind, name in inputs]
        stored = storage_id(to_local(own))
        names += [_result(step.program, j) for j in others if storage_id(to_local(results[j])) != stored]
        if names and not own.is_inference():
            said = f"{_result(step.program, i)}, which in eager mode is memory of {' and '.join(names)}"
            found.append((said, counting_writes(own), own._version))
    return found


def require_unwritten(apart: Noted) -> None:
    """A write to one of such results would show in what it is memory of in eager mode.

    Raises:
        AutoparError: names the result.
    """
    for said, _ in _written(apart):
        raise AutoparError(
            f"the script has written to {said}: here each has memory of its own, where the write does not show; "
            "write to a copy (.clone()), or to each of them"
        )


def _written(noted: Noted) -> Iterator[tuple[str, int]]:
    """Tensors that were written to since they were noted, and how often."""
    return ((what, t._version - version) for what, t, version in noted if t._version != version)


def _saved_values(ctx: Any) -> list[Any]:
    """The saved values in order, of which nothing else holds the tensors: the graph frees each after its last use."""
    tensors, others = list(ctx.saved_tensors), list(ctx.others)
    # Popped off their lists: an iterator would hold all of them until the pass ends.
    saved = [(tensors if is_tensor else others).pop(0) for is_tensor in ctx.is_tensor]
    ctx.maybe_clear_saved_tensors()
    return saved


def _reached(
    step: Step, kind: str, gradients: dict[str, torch.Tensor], incoming: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Gradients of the tensors that some result with an incoming gradient depends on; of others None, not zeros."""
    if all(g is not None for g in incoming.values()):
        return gradients
    # As in torch. An optimizer skips a parameter without a gradient; with zeros it would apply weight decay.
    given = {int(name) for name, gradient in incoming.items() if gradient is not None}
    return {name: g for name, g in gradients.items() if not step.program.reached[kind, name].isdisjoint(given)}


class _SecondRefusal(torch.autograd.Function):
    """A gradient, which raises if someone differentiates it."""

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], *leads: torch.Tensor | None) -> torch.Tensor:
        # In a list, as of `_Refusal`.
        return box[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise AutoparError(
            "a gradient of a gradient of the parallelized model was asked for (create_graph=True), which its graphs do "
            "not compute: take gradients of gradients inside the model, with torch.autograd.grad(..., "
            "create_graph=True) in forward or in loss_fn=lambda output, batch: ..."
        )


class _Refusal(torch.autograd.Function):
    """A result other than the loss or losses: it has no path to the parameters, and raises if one asks for a gradient.

    Merely detaching it would drop the gradient of ``loss + penalty(logits)`` silently.
    """

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], index: int, program: Program, *leads: torch.Tensor) -> torch.Tensor:
        # In a list, where autograd does not look: of an input that is returned as it is, it would return a view.
        ctx.index, ctx.program = index, program
        return box[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        state = ctx.program.state
        names = [f"attribute {n!r}" for n in names_of_result(state.writes, ctx.index)]
        hooks = seen_by(state.observed, ctx.index)
        what = f"what {hooks[0]} sees" if hooks else names[0] if names else _output(ctx.program.skeleton, ctx.index)
        remedy = (
            "let the hook set an attribute of the module to the scalar that it adds to the loss "
            "(module.penalty = output.square().mean()), which carries its gradient"
            if hooks
            else 'pass loss_fn=lambda output, batch: ... to autopar.parallelize, or loss="outside": then all outputs do'
        )
        raise AutoparError(
            f"a gradient was asked through {what} of the parallelized model, which returns its loss: only the loss "
            "carries gradients (the scalar that loss= names, else all scalars that require one). Compute everything "
            f"that is trained on inside the model, or {remedy}"
        )


def _result(program: Program, index: int) -> str:
    names = names_of_result(program.state.writes, index)
    return f"attribute {names[0]!r}" if names else _output(program.skeleton, index)


def _output(skeleton: Any, index: int) -> str:
    path = path_of(skeleton, index)
    return "the output" if path == "" else f"output {index if path is None else path!r}"
