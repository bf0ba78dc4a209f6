"""Calls of torch that a trace would lose or refuse, done in a way that it records.

* ``parameter.data = value`` writes to the parameter, so that functionalization sees it.
* ``torch.cond`` computes both branches and selects one, with the gradients of the other masked.
* Checks of ``torch.linalg`` for singular matrices, and of arguments of ``torch.distributions`` and losses, become
  results, which are checked after every step.
* A tensor that requires a gradient, but is no parameter of the model, is refused: its gradient would be lost.
* Batch norm with ``momentum=None`` counts with a tensor, not with the number in it.
* Copies of parameters are refused: they would be strangers.
* `nn.Transformer` takes masks as they are, where it would look whether they are causal; its encoder fills with zeros.
* Sequences that recurrent layers would take packed stay padded, under masks.
* `flex_attention` is attention under the mask that its functions make, or its formula.
* `associative_scan` is one operator where it is a linear recurrence.
* Values that are looked at only to raise or to warn are results, too, which are checked after every step.
* Functions of which torch traces another than eager mode runs, or that look at values, are their formulas.
* What is computed of constants and buffers alone may be looked at.
* Results whose strides fake tensors get wrong get those of the kernels.
* Memory, gradients and versions of tensors, which a graph has no part in, may not be read.
* The user's first line that reads strides is noted: the graph is traced with those of a contiguous batch.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import (
    BatchNorm,
    TorchDispatchMode,
    are_all_true,
    asserts,
    is_all_true,
    is_traced,
    is_transformed,
    masks_as_they_are,
    storage_id,
    suggest_memory_format,
    without_modes,
)
from autopar.capture.checks.after_step import CHECK_MATRICES, Check, check_between, check_count, check_matrices, refusal
from autopar.capture.checks.conditions import Conditions, calling_frame
from autopar.capture.checks.statements import is_argument_of
from autopar.capture.functions.drawing import DRAWING, drawn
from autopar.capture.functions.formulas import BY_FORMULA, CHECKED, checked_matrices
from autopar.capture.functions.kinds import is_leaf
from autopar.capture.functions.padding.encoder import padded_with_zeros
from autopar.capture.functions.padding.sequences import padded_sequences
from autopar.capture.origins import user_frame
from autopar.capture.selected.questions import RowQuestions
from autopar.capture.state.known import KnownValues
from autopar.capture.state.on_mesh import is_on_mesh
from autopar.capture.state.slots import VIEW_OF
from autopar.errors import CaptureError
from autopar.ir.ops.sequence.ctc import in_front
from autopar.ir.ops.sequence.flex_attention import by_parts
from autopar.ir.ops.sequence.linear_scan import by_operator
from autopar.ir.signature import pytree
from autopar.ir.signature.pytree import Leaf

_AUTOPAR = str(Path(__file__).parent.parent)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_LERP = torch.ops.aten.lerp_.Tensor

_READS_STRIDES = frozenset(
    {
        torch.Tensor.stride,
        torch.Tensor.is_contiguous,
        torch.Tensor.as_strided,
        torch.Tensor.as_strided_,
        torch.Tensor.dim_order,
        torch.as_strided,
        torch.as_strided_copy,
        torch.as_strided_scatter,
        torch.Tensor.as_strided_scatter,
    }
)
"""Functions whose result depends on a tensor's strides."""

_SELECTS = frozenset({torch.masked_select, torch.Tensor.masked_select, torch.Tensor.__getitem__})
"""Functions that take what a mask selects."""

_TEXTS = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})
"""Functions that make a text of a tensor."""

_MEMORY = "reads the memory of a tensor", "compute with torch, or read it before the call and pass what it says"
_GRADIENT = "reads a tensor's gradient", "read it before the call, and pass it as an argument or keep it in a buffer"
_PLACE = (
    "asks where a tensor lies, or whether it is one as it was made",
    "decide before the call, and keep the decision in an attribute or pass it as an argument",
)
_VERSION = "reads how often a tensor was written to", "count in an attribute or a buffer"

_READS_MORE = {
    "__dlpack__": _MEMORY,
    "data_ptr": _MEMORY,
    "untyped_storage": _MEMORY,
    "storage": _MEMORY,
    ".grad": _GRADIENT,
    "._version": _VERSION,
    ".is_leaf": _PLACE,  # of the batch's alone
    "._base": _PLACE,
    "_is_view": _PLACE,
    "storage_offset": _PLACE,
    "is_pinned": _PLACE,
    "is_inference": _PLACE,
    "is_conj": _PLACE,
    "is_neg": _PLACE,
}
"""Methods and attributes of a tensor of the call, which are not those of the tensor that it stands for: what reads them
does, and what to do instead."""

_READS_VALUES = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
        torch.Tensor.__bool__,
    }
)
"""Of a tensor that is no part of the trace, which the graph is for: its values are looked at as they are."""

_ALL_TRUE = {
    is_all_true: ("a distribution of torch.distributions", "values that its constraints refuse"),
    are_all_true: ("a check (torch._check_tensor_all)", "a condition that does not hold"),
}
"""Questions that are asked to raise if the answer is no, and what is said then."""

_BY_FORMAT = frozenset({functional.batch_norm, torch.batch_norm, torch.roll, torch.Tensor.roll})
"""Functions whose CPU kernels give the memory format that their argument suggests; fake tensors say otherwise.

Strides decide in which order `torch.empty_like` and dropout draw. Found by comparing torch's operator database on
permuted arguments; what else differs there are elementwise operators on arguments with different strides.
"""

_IN_PLACE = re.compile(r"(?!requires_grad_)[a-z]\w*[a-z0-9]_")
"""Names of functions that write to their first argument."""

_ITEMS = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
"""Operators that write to their first argument."""

_WITHOUT_GRADIENT = frozenset("detach size dim numel is_floating_point __len__ zeros_like ones_like empty_like".split())
"""Names of functions through which no gradient flows."""

_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes of a tensor through which it does."""

_ROW_MAJOR = frozenset({functional.unfold})
"""Functions whose CPU kernels give a row-major result whatever their argument; fake tensors say otherwise."""


class Intercepts(TorchFunctionMode):
    """Changes calls of torch while it is entered."""

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
        batch: Sequence[torch.Tensor],
        known: KnownValues,
        rows: RowQuestions,
    ) -> None:
        """Of one call.

        Args:
            named: the tensors that go into it, the model's and the batch's.
            name_of: where the model keeps another one; empty: nowhere.
            batch: the tensors of the batch.
            known: values of what is computed of no batch and no parameter.
            rows: what is asked about how many rows masks select.
        """
        super().__init__()
        self._name_of = name_of
        self._batch = {id(t): t for t in batch}
        self._lasting = {id(t): t for t in (*named.values(), *batch)}
        self._memory: Memory = {}
        self.known, self.rows = known, rows
        for name, t in named.items():
            self._memory.setdefault(storage_id(t), []).append((*extent(t), name, t))
        self.checked: list[tuple[torch.Tensor, str, bool]] = []
        self.conditions = Conditions()
        self.required: list[tuple[torch.Tensor, Callable[[], None], int, int]] = []
        self.stride_read = ""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While it lasts, calls are changed."""
        cond, batch_norm, length = torch.cond, BatchNorm.forward, builtins.len
        # Replaced at torch itself: its own version would trace the branches as graphs within the graph.
        torch.cond = _cond
        builtins.len = self.rows.length
        BatchNorm.forward = lambda module, x: _batch_norm(batch_norm, module, x)  # type: ignore[method-assign,assignment]
        try:
            with (
                checked_matrices(),
                masks_as_they_are(),
                padded_with_zeros(),
                padded_sequences(self._refuse, self._require),
                by_parts(),
                by_operator(),
                _Checks(self.checked, self.known, self.rows),
                self,
            ):
                yield
        finally:
            torch.cond, builtins.len = cond, length
            BatchNorm.forward = batch_norm  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write ``.data`` through, refuse foreign tensors."""
        if kwargs and kwargs.get("generator", func) is None:
            # torch has an overload of its own for it, which draws the same.
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if kwargs and "out" in kwargs:
            self.conditions.forget()
        # The name first: this runs at every call of torch, and names compare faster than descriptors.
        if func.__name__ == "__set__" and func == _SET_DATA:
            self.conditions.forget()
            return _set_data(args[0], args[1], self._memory)
        # That of a tensor that the call makes ends with it, as where forward has an optimizer of its own.
        lasts = func.__name__ == "__set__" and func == _SET_GRAD and id(args[0]) in self._lasting
        if lasts and is_traced(args[0]) and (line := _own_line()):
            if args[1] is None and self._has_no_gradient(args[0]):
                return None
            raise CaptureError(
                f"the model sets a tensor's gradient (.grad) at {line}, which no graph has; {_GRADIENT[1]}"
            )
        if not self.stride_read and func in _READS_STRIDES:
            self.stride_read = _own_line()
        if func in _TEXTS and is_transformed(args[0]) and (func is torch.Tensor.__repr__ or args[0].ndim):
            # Torch's own text of a tensor within `torch.func` asks what a trace does not have, and ends the process.
            return f"tensor(..., size={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if (name := _name(func)) in _READS_MORE:
            of_batch = id(args[0]) in self._batch and args[0].requires_grad  # it may be computed by the caller
            if name == ".is_leaf" and is_traced(args[0]) and not of_batch:
                return is_leaf(args[0])
            if name == ".grad" and is_traced(args[0]) and self._has_no_gradient(args[0]):
                return func(*args)  # what forward has set, if anything
            _refuse_reading(name, args[0])
        if func in _READS_VALUES:
            return self._looked_at(func, args) if is_traced(args[0]) else _values(func, args, kwargs or {})
        if func in _SELECTS and len(args) == 2 and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return _selected(func, args)
        if func is asserts and isinstance(args[0], torch.Tensor) and is_traced(args[0]):
            return self.conditions.require(*args)
        if func in _ALL_TRUE and is_traced(args[0]):
            self._refuse(args[0].logical_not(), *_ALL_TRUE[func])
            return True if func is is_all_true else torch.ones((), dtype=torch.bool)
        if func is torch.Tensor.__deepcopy__:
            _refuse_copy(args[0])
        if args and (_IN_PLACE.fullmatch(func.__name__) or func.__name__ in _ITEMS):
            _refuse_constant(args[0])
            self.conditions.forget()
        # Without gradients none can be lost.
        refuse_foreign_tensors(args, torch.is_grad_enabled() and not _drops_gradient(func), self._name_of)
        if func in BY_FORMULA:
            return BY_FORMULA[func](*args, **(kwargs or {}))
        if func in CHECKED:
            return CHECKED[func](self._refuse, *args, **(kwargs or {}))
        if func in DRAWING:
            return drawn(func, args, kwargs or {})
        self.rows.require_some(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.conditions.remember(func, args, kwargs or {}, result)
        if func in _ROW_MAJOR:
            return result.contiguous()
        return _in_suggested_format(args[0], result) if func in _BY_FORMAT else result

    def _looked_at(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What code is told of a traced tensor's value: as it is where it is known, else so that a check passes."""
        try:
            return func(*args)
        except Exception:
            answer = self.conditions.answer(args[0])
            if answer is NotImplemented:
                raise
            return answer

    def _has_no_gradient(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._batch and self.known.has_no_gradient(tensor)

    def _refuse(self, invalid: torch.Tensor, function: str, values: str) -> None:
        """After a step, raise where any of ``invalid`` is true."""
        # A sum over samples, which can be made in microbatches; whether there are any cannot.
        line = "{}:{}".format(*user_frame())
        self.conditions.found.append((invalid.sum(), refusal(f"{function} was given {values}, at {line}")))

    def _require(self, condition: torch.Tensor, function: str, values: str) -> None:
        """After a step, raise where none of ``condition`` is true."""
        line = "{}:{}".format(*user_frame())
        self.required.append((condition.sum(), refusal(f"{function} was given {values}; at {line}"), 1, sys.maxsize))

    def checks(self, leaf: Callable[[torch.Tensor], Leaf]) -> tuple[Check, ...]:
        """What is to be checked after a step."""
        self.conditions.close()
        matrices = [functools.partial(check_matrices, leaf(info), name, single) for info, name, single in self.checked]
        invalid = [functools.partial(check_count, leaf(n), fail) for n, fail in self.conditions.found]
        required = [
            functools.partial(check_between, leaf(n), fail, bounds)
            for n, fail, *bounds in (*self.required, *self.rows.checks())
        ]
        return (*matrices, *invalid, *required)


def _name(func: Any) -> str:
    """Of a method of tensors, or with a dot of an attribute that is asked for."""
    return f".{func.__self__.__name__}" if func.__name__ == "__get__" else str(func.__name__)


def _refuse_reading(name: str, tensor: Any) -> None:
    # Whose line first: torch asks for memory, too, of tensors that can be asked for nothing else.
    if (line := _own_line()) and isinstance(tensor, torch.Tensor) and is_traced(tensor):
        what, instead = _READS_MORE[name]
        raise CaptureError(f"the model {what} ({name}) at {line}, which no graph has; {instead}")


def _selected(func: Any, args: Any) -> Any:
    """What a mask selects; of a batch, for `ctc_loss` alone, as that takes it."""
    made = func(*args)
    symbolic = isinstance(made, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in made.shape)
    return in_front(*args) if symbolic and is_argument_of(calling_frame(), "ctc_loss") else made


def _values(func: Any, args: Any, kwargs: Any) -> Any:
    """Of a tensor that has some: of an array that shares its memory, to read them alone."""
    with without_modes():
        found = func(*args, **kwargs)
    if isinstance(found, np.ndarray):
        found.flags.writeable = False  # no version counts what is written there
    return found


def _in_suggested_format(argument: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result with the kernel's strides: a copy in the trace, which canonicalization removes again."""
    return result.contiguous(memory_format=suggest_memory_format(argument))


def _batch_norm(forward: Callable[..., torch.Tensor], module: BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Batch norm; its average over all batches so far (``momentum=None``) reads the number of batches otherwise."""
    counted, means, variances = module.num_batches_tracked, module.running_mean, module.running_var
    averages = module.momentum is None and module.training and module.track_running_stats
    if not averages or counted is None or means is None or variances is None:
        return forward(module, x)
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        counted.add_(1)
        share = counted.to(means.dtype).reciprocal()
        variance, mean = torch.var_mean(x.to(means.dtype), [d for d in range(x.dim()) if d != 1], correction=1)
        means.mul_(1 - share).add_(share * mean)
        variances.mul_(1 - share).add_(share * variance)
    return functional.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)


def _refuse_copy(tensor: torch.Tensor) -> None:
    if is_traced(tensor) and not tensor.is_leaf:
        file, line = user_frame()
        raise CaptureError(
            f"the model copies a parameter or another tensor that has a gradient (copy.deepcopy), of shape "
            f"{list(tensor.shape)}, at {file}:{line}: the copy is no parameter of the model; use detach().clone(), or "
            "torch.func.functional_call with other weights, or make the copy once before parallelize()"
        )


def _own_line() -> str:
    """The user's line that calls torch right now; empty where torch calls itself, which picks kernels by strides."""
    file, line = user_frame()
    frame = sys._getframe(1)
    # Through autopar's own frames to whoever called torch: the user, or torch itself.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_AUTOPAR):
        frame = frame.f_back
    return f"{file}:{line}" if (frame.f_code.co_filename, frame.f_lineno) == (file, line) else ""


class _Checks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[tuple[torch.Tensor, str, bool]], known: KnownValues, rows: RowQuestions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.known, self.rows = found, known, rows

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tracing goes on as if it were not there."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CHECK_MATRICES:
            # Removed from the graph: on fake tensors there is nothing to check.
            self.found.append((args[0], args[1], bool((kwargs or {}).get("is_matrix"))))
            return None
        if func is _LERP:
            # Under jvp the kernel that checks shapes in functionalization fails, as in `torch.quantile`.
            return args[0].copy_(torch.ops.aten.lerp.Tensor(*args))
        args = self.rows.same(func, args)
        made = self.known.run(func, args, kwargs or {})
        self.rows.note(func, args, kwargs or {}, made)
        return made


Memory = dict[int, list[tuple[int, int, str, torch.Tensor]]]
"""By storages, which bytes of them are whose; with a tensor, since a storage that is freed gives its id away."""


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of a storage that a tensor lies in."""
    begin = int(tensor.storage_offset())
    steps = [(int(n) - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return begin * tensor.itemsize, (begin + sum(steps) + 1) * tensor.itemsize if tensor.numel() else 0


def _set_data(tensor: torch.Tensor, value: torch.Tensor, memory: Memory) -> None:
    """Write to a tensor what its ``.data`` is set to."""
    if not is_traced(tensor):
        _SET_DATA(tensor, value)
        return
    (first, last), (file, line) = extent(value), user_frame()
    name = next((name for *_, name, _ in memory.get(storage_id(tensor), ())), "a tensor")
    same = storage_id(tensor) == storage_id(value) and tensor.stride() == value.stride()
    others = [other for start, end, other, _ in memory.get(storage_id(value), ()) if first < end and start < last]
    if others and not same:
        raise CaptureError(
            f".data of {name} is set to memory of {others[0]} in forward, at {file}:{line}: both would share it "
            "from then on, which a graph cannot do; copy it (tensor.data = value.clone())"
        )
    memory.setdefault(storage_id(value), []).append((first, last, name, value))
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        raise CaptureError(
            f".data of a tensor of shape {list(tensor.shape)} and {tensor.dtype} is set to one of {list(value.shape)} "
            f"and {value.dtype} in forward, at {file}:{line}: shapes and dtypes must stay as they are; do that outside "
            "of the model, before parallelize()"
        )
    with torch.no_grad():
        # Detached on both sides: `.data` has no part in autograd.
        tensor.detach().copy_(value.detach())


def _refuse_constant(value: Any) -> None:
    """Refuse to write to a tensor of the user's that is no input of the trace."""
    if isinstance(value, torch.Tensor) and not is_traced(value):
        file, line = user_frame()
        raise CaptureError(
            f"the model writes in place to a tensor of shape {list(value.shape)} at {file}:{line} that is kept in a "
            "list, a dict, an object, a closure or a global: a graph would lose that; make it a buffer "
            "(register_buffer) or an attribute of a module"
        )


def refuse_foreign_tensors(args: Sequence[Any], gradients: bool, name_of: Callable[[torch.Tensor], str]) -> None:
    """Refuse tensors among a call's arguments that lie on a mesh, or whose gradients or later values would be lost.

    Args:
        args: of a function of torch.
        gradients: whether these flow through it.
        name_of: where the model keeps a tensor; empty where it does not.
    """
    for value in args:
        if isinstance(value, list | tuple):
            refuse_foreign_tensors(value, gradients, name_of)
        elif not isinstance(value, torch.Tensor) or is_traced(value):
            continue
        elif is_on_mesh(value):
            file, line = user_frame()
            raise CaptureError(
                f"{name_of(value) or 'a tensor'}, of shape {list(value.shape)}, at {file}:{line}: it lies on the mesh, "
                "each rank has a part of it, and the model has it from a closure, a global or another model; keep "
                "tensor.full_tensor() there, taken on all ranks, or pass the tensor as an argument"
            )
        elif gradients and value.requires_grad:
            file, line = user_frame()
            name = name_of(value)
            remedy = (
                "register it (nn.Parameter as an attribute, the module as a submodule, nn.ModuleList in place of a "
                "list), pass it as an argument, or detach() it"
                if value.is_leaf
                else "it was computed before this call, and a graph is of one call; detach() it where it is kept or "
                "read, pass it as an argument, or compute it in this call"
            )
            raise CaptureError(
                f"{f'{name!r}, ' if name else ''}a tensor of shape {list(value.shape)} that requires a gradient and is "
                f"no parameter of the model, at {file}:{line}: its gradient would be lost; {remedy}"
            )
        elif of := vars(value).get(VIEW_OF):
            raise refused_view(name_of(value) or "a tensor that the model keeps", of)


def _drops_gradient(func: Any) -> bool:
    name = func.__name__
    return name in _WITHOUT_GRADIENT or (name == "__get__" and getattr(func.__self__, "__name__", "T") not in _VIEWS)


def refused_view(name: str, parameter: str) -> CaptureError:
    """The error for a tensor that was a view of a parameter."""
    return CaptureError(
        f"{name} is a view of parameter {parameter!r}, in which an optimizer's steps would not show on a mesh; take "
        "the view in forward (weight.detach()), or register a copy (clone())"
    )


class _Masked(torch.autograd.Function):
    """A tensor whose gradient is 0 where the other branch was selected, even if what comes back is NaN."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(selected)
        return tensor.view_as(tensor)  # a new tensor: autograd takes an input that is returned for unchanged

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (selected,) = ctx.saved_tensors
        # `where`, not a product: 0 * NaN is NaN, as from the square root of a number that only this branch avoids.
        return torch.where(selected, gradient, torch.zeros_like(gradient)), None


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """``torch.cond`` without control flow."""
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    condition = pred.reshape(())
    tensors, skeleton = pytree.flatten(tuple(operands), "the operands of torch.cond")
    branches = []
    for function, selected in ((true_fn, condition), (false_fn, ~condition)):
        masked = [_mask(tensor, selected) for tensor in tensors]
        output = function(*pytree.unflatten(skeleton, masked))
        branches.append(pytree.flatten(output, "what a branch of torch.cond returns"))
    (ones, kind), (others, _) = branches
    return pytree.unflatten(kind, [torch.where(condition, a, b) for a, b in zip(ones, others, strict=True)])


@contextlib.contextmanager
def branches_taken() -> Iterator[None]:
    """While it lasts, ``torch.cond`` runs one branch, as it does without a compiler, under any mode."""
    cond = torch.cond
    torch.cond = lambda pred, true_fn, false_fn, operands=(): (true_fn if bool(pred) else false_fn)(*operands)
    try:
        yield
    finally:
        torch.cond = cond


def _mask(tensor: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    masked: torch.Tensor = _Masked.apply(tensor, selected) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return masked
