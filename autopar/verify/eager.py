"""The model in eager mode, several calls in a row, in one dtype: the reference for a captured program."""

from __future__ import annotations

import copy
import random
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import TorchDispatchMode
from autopar.capture import Batch, Harness, LossFunction
from autopar.capture.functions.padding.encoder import padded_with_zeros
from autopar.capture.intercepts import branches_taken
from autopar.capture.state.hooks import hooks_undone
from autopar.capture.state.record import Record
from autopar.capture.state.slots import state_tensors, tensor_attributes
from autopar.capture.state.values import children
from autopar.capture.state.writes import written_tensors
from autopar.ir.ops.random import generator_states, same_numbers
from autopar.ir.program import Program
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.verify.float64 import HALF_TO_FLOAT, WITHOUT_KERNEL, cast_dtypes, default_dtype, in_dtype
from autopar.verify.python_state import frozen, is_same, state_of

aten = torch.ops.aten

CALLS = 2
"""How often the model is called: the second call sees what the first has written to buffers and attributes."""

Key = tuple[str, str]
"""Kind and name of an output, as in `autopar.ir.program.Output`."""


@dataclass(frozen=True)
class EagerCall:
    """What one call of the plain model returned and wrote.

    Attributes:
        values: results, gradients, buffers, and parameters that the call wrote to, by kind and name. Of buffers those
            that the call changed.
        written: attributes that the call changed, such as ``encoder.last_loss``, with their new values, frozen.
        drawn: states of the default generators afterwards.
    """

    values: Mapping[Key, torch.Tensor]
    written: Mapping[str, Any]
    drawn: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def results(self) -> int:
        """How many tensors the model returned."""
        return sum(kind == "result" for kind, _ in self.values)


class _InDtype(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every floating cast, creation and constant is in one dtype, as `autopar.verify.float64` has them in graphs.

    Models contain casts to float32, whose rounding would be larger than the errors that are looked for.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(cast_dtypes(args, self.dtype)), cast_dtypes(kwargs or {}, self.dtype)
        if func is aten._efficientzerotensor.default:  # torch would call operators on it without end, under a mode
            func = aten.zeros.default
        if func in HALF_TO_FLOAT:
            args[HALF_TO_FLOAT[func]] = False
        for i, (value, argument) in enumerate(zip(args, func._schema.arguments, strict=False)):
            # What is written to, or viewed, must stay the same tensor.
            if argument.alias_info is None:
                args[i] = self._converted(value)
        if self.dtype is torch.float64 and func in WITHOUT_KERNEL:
            return WITHOUT_KERNEL[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _converted(self, value: Any) -> Any:
        """A tensor that no parameter, buffer, attribute or batch holds, such as a global constant, in the dtype."""
        if isinstance(value, list | tuple):
            return type(value)(self._converted(v) for v in value) if any(map(_floats, value)) else value
        return in_dtype(value, self.dtype) if _floats(value) else value


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _OwnEpsilon(TorchFunctionMode):
    """``RMSNorm`` without an epsilon takes that of the model's own dtype, as in graphs, whatever it is computed in."""

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()
        self.epsilon = torch.finfo(own).eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.rms_norm, nn.functional.rms_norm) and args[3:] == (None,):
            args = (*args[:3], self.epsilon)
        elif func in (torch.rms_norm, nn.functional.rms_norm) and len(args) < 4 and kwargs.get("eps") is None:
            kwargs["eps"] = self.epsilon
        return func(*args, **kwargs)


@contextmanager
def _everything_in(dtype: torch.dtype | None, own: torch.dtype) -> Iterator[None]:
    """Within, all is computed in ``dtype``; None: in the dtypes that the model asks for, ``own`` by default."""
    if dtype is None:
        yield
        return
    # Under modes torch packs no sequences, as eager mode does.
    with default_dtype(dtype), padded_with_zeros(), _InDtype(dtype), _OwnEpsilon(own):
        yield


@contextmanager
def _same_python_numbers() -> Iterator[None]:
    """Python's and numpy's generators start from the same state each time; afterwards they are as before."""
    # Models draw layers to drop, or augmentations, with these; captured once, the numbers are constants of the graph.
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def eager_calls(
    model: nn.Module,
    batch: Batch,
    program: Program,
    tangents: Mapping[str, torch.Tensor],
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    dtype: torch.dtype | None = torch.float64,
    compute: torch.dtype | None = None,
    calls: int = CALLS,
) -> list[EagerCall]:
    """Call a copy of a model several times in a row, each time with a backward pass if the program has one.

    Args:
        model: stays as it is.
        batch: the same for all calls.
        program: as captured: whether it trains, and which result is the loss.
        tangents: of the results, by index; a result that has none gets ones.
        loss_fn: for a model that does not return its loss.
        loss: which scalar of the output is the loss.
        dtype: of all floating numbers; None: the model's own.
        compute: dtype of parameters and batch tensors instead of their own, where ``dtype`` is None.
        calls: how many. Each starts from the same state of the generators of random numbers.
    """
    tensors, arguments = binding.flatten(model, batch)
    own = copied(model, dtype or compute, buffers=dtype is not None)
    harness = Harness(own, arguments, loss_fn, program.training, loss)
    results, record = [], Record(model)
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    plain = compute or (floating[0] if floating else torch.get_default_dtype())
    with _everything_in(dtype, plain), torch.set_grad_enabled(program.training), _same_python_numbers():
        for _ in range(calls):
            # New tensors for each call: a model may write to its inputs, and gradients must not add up.
            inputs = [
                _leaf(in_dtype(t.detach(), dtype or (compute if i < arguments.tensors else None)).clone(), t)
                for i, t in enumerate(tensors)
            ]
            with same_numbers(0), hooks_undone(own), branches_taken():
                results.append(_call(harness, inputs, tangents, program))
    record.restore()  # calls change globals, of which there are no copies
    return results


def _leaf(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(like.requires_grad and like.is_leaf)


def _call(
    harness: Harness, inputs: Sequence[torch.Tensor], tangents: Mapping[str, torch.Tensor], program: Program
) -> EagerCall:
    model = harness.model
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.grad = None
    tensors_before = _tensor_state(model, harness.aliases)
    values_before = {k: t.detach().clone() for k, t in tensors_before.items()}
    python_before = state_of(model)
    results = harness(*inputs)
    numbers = list(range(len(results)))
    # A loss that a function computes is the last result; in the graph, tensors written to attributes come before it.
    if program.total is not None:
        assert program.loss is not None
        numbers[-1] = program.loss
    numbered = list(zip(numbers, results, strict=True))
    _backward(model, numbered, tangents, program)
    values = {("result", str(i)): r.detach().clone() for i, r in numbered}
    values.update({("gradient", n): p.grad.clone() for n, p in parameters.items() if p.grad is not None})
    values.update({("input_gradient", str(i)): t.grad for i, t in enumerate(inputs) if t.grad is not None})
    registered = {("buffer", n) for n, _ in model.named_buffers(remove_duplicate=False)}
    for key, tensor in _tensor_state(model, harness.aliases).items():
        if key[0] == "buffer" and key not in registered and tensors_before.get(key) is not tensor:
            continue  # an attribute that gets a new tensor: it is among what is written
        if key not in values_before or not is_same(frozen(values_before[key]), frozen(tensor)):
            values[key] = tensor.detach().clone()
    python_after = state_of(model)
    written = {n: v for n, v in python_after.items() if n not in python_before or not is_same(python_before[n], v)}
    return EagerCall(values, written, generator_states())


def _backward(
    model: nn.Module,
    results: Sequence[tuple[int, torch.Tensor]],
    tangents: Mapping[str, torch.Tensor],
    program: Program,
) -> None:
    """The backward pass of a call, with the tangents that the graph gets; nothing if the program does not train."""
    differentiable = [(i, r) for i, r in results if r.requires_grad]
    # A tensor that the model leaves in an attribute, such as an auxiliary loss, is a result of the graph.
    attributes = written_tensors(model, program.state.writes)
    differentiable += [
        (i, t) for i, t in attributes.items() if i >= len(results) and str(i) in tangents and t.requires_grad
    ]
    if program.training and differentiable:
        incoming = [
            torch.ones_like(r) if str(i) not in tangents else tangents[str(i)].to(r.dtype) for i, r in differentiable
        ]
        torch.autograd.backward([r for _, r in differentiable], incoming)


def _tensor_state(model: nn.Module, aliases: Mapping[str, str]) -> dict[Key, torch.Tensor]:
    """Parameters, buffers and other tensors that modules hold; ``aliases``: further names of one, to the first."""
    state: dict[Key, torch.Tensor] = {("parameter", n): p for n, p in model.named_parameters()}
    found = state_tensors(model)
    # A graph has a buffer of a shared module once, until the names stand for two.
    state.update({("buffer", n): b for n, b in found.items() if n not in aliases or found.get(aliases[n]) is not b})
    return state


LOCKS = (type(threading.Lock()), type(threading.RLock()))


def copied(model: nn.Module, dtype: torch.dtype | None, *, buffers: bool = True) -> nn.Module:
    """A copy of a model in another dtype: parameters, and buffers and other tensors if they are to follow.

    Tied parameters stay tied, and hooks on parameters stay. Python copies no functions: hooks and methods that refer to
    a module in a closure or a default argument are made anew, or the copy would compute with the original.

    Raises:
        ValueError: Python cannot copy an attribute.
    """
    # deepcopy takes what is in its memo for copied: so tensors change their dtype, and functions their closures.
    memo: dict[int, Any] = {}
    for p in model.parameters():
        new = nn.Parameter(in_dtype(p.detach(), dtype).clone(), requires_grad=p.requires_grad)
        for hook in (p._backward_hooks or {}).values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
        vars(new).update(tensor_attributes(p))
        memo[id(p)] = new
    for t in [*model.buffers(), *_tensors([vars(m) for m in model.modules()])]:
        if id(t) not in memo:
            memo[id(t)] = in_dtype(t.detach(), dtype if buffers else None).clone()
    modules = set(model.modules())
    functions = {id(f): (f, _blank(f)) for m in modules for f in _functions(vars(m), modules)}
    memo.update({key: new for key, (_, new) in functions.items()})
    for lock in (v for m in modules for v in vars(m).values() if isinstance(v, LOCKS)):
        memo[id(lock)] = lock  # nothing in it would differ in a copy
    known = dict(memo)
    try:
        new_model = copy.deepcopy(model, memo)
    except Exception as e:
        raise ValueError(
            f"verification runs on copies of the model, and copy.deepcopy cannot copy {_uncopyable(model, known)} "
            f"({type(e).__name__}: {e}); set it to None for the time, or give its class __deepcopy__"
        ) from e
    # Filled when all modules are in the memo: what closures refer to is then the copies.
    for old, blank in functions.values():
        filled = {name: v for (kind, name), v in children(old) or () if kind == "cell"}
        for name, cell in zip(blank.__code__.co_freevars, blank.__closure__ or (), strict=True):
            if name in filled:
                cell.cell_contents = copy.deepcopy(filled[name], memo)
        blank.__defaults__ = copy.deepcopy(old.__defaults__, memo)
        blank.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)
    _refer_to_copies(modules, memo)
    return new_model


def _refer_to_copies(modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> None:
    """Weak references among the attributes: Python copies them as they are, to the original."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, weakref.ref) and id(value()) in memo:
                vars(memo[id(module)])[name] = weakref.ref(memo[id(value())])


def _uncopyable(model: nn.Module, memo: dict[int, Any]) -> str:
    """The attribute that cannot be copied, for people."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                # Submodules come later, and have attributes of their own.
                if name != "_modules":
                    return f"the {type(value).__name__} in {name!r} of {path or 'the root'} ({type(module).__name__})"
    return f"the {type(model).__name__}"


def _functions(value: Any, modules: set[nn.Module], depth: int = 4) -> Iterator[types.FunctionType]:
    """Functions in attributes and hooks that refer to one of the modules; what else holds them is not looked into."""
    if isinstance(value, types.FunctionType):
        inside = [v for _, v in children(value) or ()]
        if any(_refers(v, modules, depth) for v in inside):
            yield value
        value = inside
    if isinstance(value, dict | list | tuple) and depth:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _functions(inner, modules, depth - 1)


def _refers(value: Any, modules: set[nn.Module], depth: int) -> bool:
    if isinstance(value, nn.Module):
        return value in modules
    if isinstance(value, types.MethodType):
        return _refers(value.__self__, modules, depth)
    if isinstance(value, dict | list | tuple) and depth:
        return any(_refers(v, modules, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, types.FunctionType) and depth:
        return any(_refers(v, modules, depth - 1) for _, v in children(value) or ())
    return False


def _blank(function: types.FunctionType) -> types.FunctionType:
    """The same code with closure and default arguments of its own, which are filled when all else is copied."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    new.__dict__.update(function.__dict__)
    return new


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in attributes, and in lists, tuples and dicts among them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and depth:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, depth - 1)
