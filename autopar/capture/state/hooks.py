"""Hooks of a model's modules and tensors, while it is traced and afterwards.

A hook that returns something else, or computes in place, is part of the graph. One that records what it sees must see
values: it is undone after the trace, and called after every step with whole tensors. What a hook records of gradients
is nowhere in the forward pass: that is an error.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import TorchDispatchMode, hooks_of_all_modules
from autopar.capture.state.code.objects import is_library
from autopar.capture.state.record import Record
from autopar.capture.state.skeleton import Skeleton, build, holds
from autopar.capture.state.slots import HOOK_TABLES, HOOKS
from autopar.capture.state.values import Path, children
from autopar.errors import AutoparError, CaptureError
from autopar.ir.signature.pytree import Leaf

Observation = Callable[[nn.Module, Any], None]
"""Calls a hook that records, on a model, given the results of a step."""


Place = tuple[str, Path]
"""Of a hook: its module's path, and its own path in the module."""


class Hooks(TorchFunctionMode):
    """Watches the hooks of a model while it is entered."""

    def __init__(self, model: nn.Module, record: Record, counted: dict[Place, list[tuple[str, Path]]]) -> None:
        """Of one call.

        Args:
            model: whose submodules' hooks are watched.
            record: of its state.
            counted: numbers of their own that hooks change, as an earlier call has found them, and this one does.

        Attributes:
            calls: of hooks that record.
            computing: hooks that are part of the graph, each with what of its own state the graph does not depend on.
        """
        super().__init__()
        self._model, self._record = model, record
        self._latest: Record | None = None
        self._registered = 0
        self._on_parameters: list[tuple[str, Any, Any]] = []
        self.calls: list[tuple[str, Path, tuple[Any, ...], bool, bool]] = []
        self.computing: dict[Place, frozenset[Path]] = {}
        self._counted = counted

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, hooks are called through wrappers; a trace's backward pass calls those of gradients later."""
        wrapped: list[tuple[dict[Any, Any], Any, Any, Any]] = []
        for name, module in self._model.named_modules():
            for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                hooks = getattr(module, table)
                for number, hook in list(hooks.items()):
                    at: Path = (("attr", table), ("item", number))
                    make = self._watch_gradients if "backward" in table else self._watch_values
                    # In the table itself: torch looks hooks up there at every call, and order and number stay the same.
                    hooks[number] = make(hook, name, at)
                    wrapped.append((hooks, number, hook, hooks[number]))
        try:
            with self:
                yield
            for name, hook, handle in self._on_parameters:
                if handle.id in (handle.hooks_dict_ref() or ()):
                    raise CaptureError(
                        f"forward registers the hook {_title(hook)} on parameter {name!r} and leaves it there: every "
                        "call would add one; register it once, after parallelize(), on the module that it returns, or "
                        "remove it before forward returns"
                    )
        finally:
            for hooks, number, hook, wrapper in wrapped:
                # A hook may have removed itself, or another have taken its number.
                if hooks.get(number) is wrapper:
                    hooks[number] = hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch what is registered on tensors."""
        given: list[Any] = [*args, *(kwargs or {}).values()]
        if func is torch.Tensor.register_hook:
            self._registered += 1
            register: Any = func
            handle = register(given[0], self._watch_gradients(given[1], "a tensor", ()))
            # Looked for now: the tracer has traced tensors in place of parameters.
            name = next((n for n, p in self._model.named_parameters() if p is given[0]), None)
            if name is not None:
                self._on_parameters.append((name, given[1], handle))
            return handle
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            raise CaptureError(
                f"register_post_accumulate_grad_hook in forward ({_title(given[1])}): gradients have no values while "
                "the model is traced; register it after parallelize(), on a parameter of the module that it returns"
            )
        if func is torch.Tensor.retain_grad:
            raise CaptureError(
                "retain_grad() of a tensor in forward: gradients of intermediate tensors are not kept; return the "
                "tensor and differentiate outside, or register a hook that returns a gradient"
            )
        return func(*args, **(kwargs or {}))

    def _own_state(self) -> Record:
        """The state of the model now."""
        # Walking through a model takes long, and there may be a hook on every module.
        if self._latest is None or self._latest.has_changed():
            self._latest = Record(self._model, self._record.reached, self._record.threads)
        return self._latest

    def _watch_values(self, hook: Callable[..., Any], module: str, at: Path) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            state = Record.of(hook, self._record.threads)
            versions, registered = self._fingerprint(args), self._registered
            own, known = self._own_state(), self._counted.get((module, at))
            state.track(known or ())
            try:
                result = hook(*args, **kwargs)
            except CaptureError:
                raise
            except Exception:  # it looks at values, which there are none of yet
                result, failed = None, True
            else:
                failed = False
            if own.has_changed() and not failed:
                # What it writes to the model's state is done again as every other write of the call is.
                if state.has_changed(outside=own):
                    raise CaptureError(
                        f"the hook {_title(hook)} of {module or 'the model'} writes to the model's state and to what "
                        "is no part of the model, which cannot be done together; keep both in attributes of the model"
                    )
                return result
            own.restore()
            changed, changes, numbers = state.has_changed(), state.not_read(), state.changed_numbers()
            state.restore()
            # In place or not, a hook that computes must be in the graph; only one that does nothing else can be called
            # later.
            silent = result is None and self._fingerprint(args) == versions and self._registered == registered
            if changed or silent or failed:
                self.calls.append((module, at, args[1:], result is None, failed))
            if not silent and not failed:
                # A hook may be called more than once: what one of its calls reads, the graph depends on.
                self.computing[module, at] = self.computing.get((module, at), changes) & changes
                self._counted.setdefault((module, at), numbers)
            return result

        return watching

    def _fingerprint(self, args: tuple[Any, ...]) -> list[Any]:
        """What differs after a hook that computes in place."""
        found: list[Any] = _versions(args)
        for module in self._model.modules():
            tables = (module._parameters, module._buffers)
            found += [(id(t), t._version) for table in tables for t in table.values() if t is not None]
        return found

    def _watch_gradients(self, hook: Callable[..., Any], module: str, at: Path) -> Callable[..., Any]:
        def watching(*args: Any) -> Any:
            state, versions = Record.of(hook, self._record.threads), _versions(args)
            own = self._own_state()
            result = hook(*args)
            changed = state.has_changed() or own.has_changed()
            own.restore()
            state.restore()
            if changed or (result is None and _versions(args) == versions):
                raise CaptureError(
                    f"the backward hook {_title(hook)} of {module or 'the model'} records gradients or returns "
                    "nothing: gradients inside the model have no values while it is traced; return the new gradient "
                    "and do nothing else, or read model.full_gradients() after the backward pass"
                )
            if at:
                self.computing[module, at] = frozenset()
            return result

        return watching


def refuse_hooks_of_all_modules() -> None:
    """Refuse the user's hooks on all modules: modules inside a graph are not called.

    Raises:
        CaptureError: there is one.
    """
    for hook in hooks_of_all_modules():
        # Torch's own, of profilers, see what there is to see.
        if not is_library(getattr(hook, "__module__", None)):
            raise CaptureError(
                f"the hook {_title(hook)} is registered on all modules (torch.nn.modules.module.register_module_...), "
                "and those in a graph are not called; register it on the modules themselves "
                "(module.register_forward_hook), or remove it before the call"
            )


def _title(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(hook, '__qualname__', hook)}{where}"


def _versions(value: Any) -> list[int]:
    """How often each tensor in a hook's arguments has been written to."""
    if isinstance(value, torch.Tensor):
        return [value._version]
    # A module's tensors are compared by `_fingerprint`.
    inner = None if isinstance(value, nn.Module) else children(value)
    return [v for _, part in inner or () for v in _versions(part)]


@contextlib.contextmanager
def backward_watched(model: nn.Module, record: Record) -> Iterator[None]:
    """While it lasts, backward passes of the user's autograd functions may not change a model's state.

    Args:
        model: whose.
        record: of its state at any time.
    """
    # What autograd calls: replaced at torch itself, for functions that no line of the model's may name.
    kind: Any = torch.autograd.function.BackwardCFunction
    before = kind.apply

    def apply(self: Any, *gradients: Any) -> Any:
        own = Record(model, record.reached, record.threads)
        result = before(self, *gradients)
        if own.has_changed():
            raise CaptureError(
                f"the backward pass of {type(self).__qualname__.removesuffix('Backward')} changes Python state of the "
                "model or of its code, such as a counter or a list: a graph would not do that again; do it in forward, "
                "or in the training loop"
            )
        return result

    kind.apply = apply
    try:
        yield
    finally:
        kind.apply = before


def observations(hooks: Hooks, record: Record, leaf: Callable[[torch.Tensor], Leaf]) -> list[Observation]:
    """The calls to make after every step."""
    found: list[Observation] = []
    for module, path, arguments, silent, failed in hooks.calls:
        skeletons = tuple(record.skeleton(a, leaf, "what a hook sees") for a in arguments)
        # Skeletons now, values later: the traced tensors that the hook saw hold nothing.
        found.append(partial(_call_hook, module, path, skeletons, silent, failed))
    return found


def _call_hook(
    name: str, path: Path, arguments: tuple[Skeleton, ...], silent: bool, failed: bool, model: nn.Module, results: Any
) -> None:
    """Call a recording hook with values.

    Args:
        name: path of the hook's module.
        path: of the hook in the module.
        arguments: skeletons of what it is called with besides the module.
        silent: it returned None while it was traced.
        failed: it could not run then, so that nobody knows what it writes to.
        model: the live one.
        results: for the leaves.
    """
    module = model.get_submodule(name)
    (_, table), (_, number) = path
    hook = getattr(module, table).get(number)
    if hook is None:
        return  # it has been removed in the meantime
    # With gradients, as in eager mode: what a hook keeps may become part of a loss, which must not lose them silently.
    given = [build(model, a, results) for a in arguments]
    written = _Written(module, table) if failed else None
    with written or contextlib.nullcontext():
        returned = hook(module, *given)
    if written is not None and (what := written.too_late(model, name, given)):
        raise AutoparError(
            f"the hook {_title(hook)} of {name or 'the model'} looks at values and writes to {what}, which the rest of "
            "the call would have to see, and no graph can: compute with tensors alone, or write in the training loop"
        )
    if returned is not None and silent and not _is_what_it_saw(returned, given, table):
        raise AutoparError(
            f"the hook {_title(hook)} of {name or 'the model'} returns something that depends on the "
            "values it sees, which no graph can: return None, or compute with tensors alone"
        )


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a hook that is called after the step writes to while it is entered."""

    def __init__(self, module: nn.Module, table: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._is_before, self._attributes = module, table == "_forward_pre_hooks", _attributes(module)
        self._memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note where an operator writes, and go on."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._memory |= _memory(args[i] if i < len(args) else (kwargs or {}).get(argument.name))
        return func(*args, **(kwargs or {}))

    def too_late(self, model: nn.Module, name: str, given: list[Any]) -> str:
        """What eager mode would read in the same call; empty: nothing."""
        if self._memory & _memory(given):
            return "what it is called with"
        if self._is_before:
            read = _names(getattr(type(self._module).forward, "__code__", None))
            now, before = _attributes(self._module), self._attributes
            if changed := sorted(n for n, v in now.items() if n in read and v is not before.get(n)):
                return f"{'.'.join(filter(None, (name, changed[0])))!r}"
        # After a module's forward its own tensors may be written, as observers do: they are read by the next call.
        own = () if self._is_before else (*self._module.parameters(), *self._module.buffers())
        after = {id(t) for t in own}
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) not in after and self._memory & _memory(tensor):
                return f"{path!r}"
        return ""


def _memory(value: Any) -> set[int]:
    """Where the tensors in a value are."""
    if isinstance(value, torch.Tensor):
        tensor = value.to_local() if isinstance(value, DTensor) else value
        return {tensor.untyped_storage().data_ptr()} - {0}
    inner = None if isinstance(value, nn.Module) else children(value)
    return {m for _, part in inner or () for m in _memory(part)}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def _names(code: types.CodeType | None) -> set[str]:
    """The attributes that a function reads or writes, and those in it."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _is_what_it_saw(returned: Any, given: list[Any], table: str) -> bool:
    """Whether a hook returns what torch would go on with anyway.

    Args:
        returned: by the hook.
        given: its arguments after the module; of a forward hook the output is the last.
        table: of hooks, in which it is.
    """
    if table == "_forward_hooks":
        return returned is given[-1]
    args = given[0]
    if len(given) > 1 and isinstance(returned, tuple) and len(returned) == 2:  # with_kwargs=True
        return returned[0] is args and returned[1] is given[1]
    return returned is args or (len(args) == 1 and returned is args[0])


def seen_by(calls: Sequence[Observation], index: int) -> list[str]:
    """The modules whose recording hooks see a result of the graph."""
    # `partial`s of `_call_hook`: the module's path, the hook's, and what the hook is called with.
    found = [call.args for call in calls if isinstance(call, partial)]
    return [f"the hook of {a[0] or 'the model'}" for a in found if any(holds(v, index) for v in a[2])]


def replay(model: nn.Module, calls: Sequence[Observation], results: Any) -> None:
    """Call recording hooks with the values of a step."""
    for call in calls:
        call(model, results)


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """While it lasts, a module has no hooks of its own; those of the modules in it stay."""
    tables = [getattr(module, name) for name in HOOK_TABLES]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


@contextlib.contextmanager
def hooks_undone(model: nn.Module) -> Iterator[None]:
    """Afterwards, what the hooks of a model refer to, such as lists that they record in, is as it was."""
    hooks = [h for module in model.modules() for name in HOOKS for h in getattr(module, name).values()]
    records = [Record.of(hook) for hook in hooks]
    try:
        yield
    finally:
        for record in records:
            record.restore()
