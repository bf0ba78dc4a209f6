"""A ``forward`` that code from outside puts on a parallel module.

Some call the module's own and do something before or after it, which stays outside of the graphs (accelerate's, for
autocast). Others call parts of the model in place of its forward: TRL's computes log-probabilities from hidden states,
in tiles. Such a one is captured, as if it had been put on the model before `parallelize`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autopar.capture.state.record import Record
from autopar.errors import AutoparError
from autopar.ir.signature.pytree import Contents
from autopar.module.whole_outputs import tensors_in
from autopar.runtime.checkpoint import generators

if TYPE_CHECKING:
    from autopar.module.session import Session

NAME = "forward"

_MADE = "_autopar_put"
"""Attribute of the functions that `_method` makes."""


class PutForward:
    """What is known of one.

    Attributes:
        function: the user's.
        bound: whether it is a method of the module, which it takes first.
        captured: what is put on the original, once it is known that this is to be captured.
        outside: kinds of calls that have called the module's own forward, so that they may stay outside.
    """

    def __init__(self, function: Callable[..., Any], bound: bool) -> None:
        self.function, self.bound = function, bound
        self.captured: Callable[..., Any] | None = None
        self.outside: set[Any] = set()


class _PartCalled(BaseException):  # no Exception: the user's own code is not to take it
    """A module inside of the model is called, outside of all graphs."""


def attribute(module: nn.Module, value: Any) -> MethodType:
    """What becomes the module's ``forward`` in the place of the given one: it decides where that runs."""
    bound = isinstance(value, MethodType) and value.__self__ is module
    put = PutForward(value.__func__ if bound else value, bound)
    return MethodType(_method(put, put.function, _call), module)


def is_put(value: Any) -> bool:
    """Whether an attribute is what `attribute` has made, or what that puts on the original."""
    return hasattr(getattr(value, "__func__", None), _MADE)


def _method(put: PutForward, function: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the module and the arguments, with the signature of the user's.

    That is among its cells, and not in ``put`` alone: graphs hold for the state that it refers to.
    """

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (self, *args) if put.bound else args
        return call(put, self, args, kwargs, lambda: function(*given, **kwargs))

    # Of the module's own forward, if the user's was made by ``functools.wraps`` of that: it may take more than that.
    vars(forward).pop("__signature__", None)
    if not put.bound:  # then it has no ``self``, which a method's function begins with
        own, signature = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), inspect.signature(function)
        if "self" not in signature.parameters:
            signature = signature.replace(parameters=[own, *signature.parameters.values()])
            forward.__signature__ = signature  # type: ignore[attr-defined]
    setattr(forward, _MADE, put)
    return forward


def _call(put: PutForward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Run it where it belongs."""
    session: Session = module._autopar
    if session.running:  # called by one that has been put around this, and is captured
        return run()
    if put.captured is None:
        kind = _kind(args, kwargs)
        if kind in put.outside:
            return run()
        called, found = _tried_outside(put, session, (args, kwargs), run)
        if called:
            put.outside.add(kind)
            return found
        put.captured = _method(put, put.function, _captured)
    _install(put.captured, module)
    return session.forward(args, kwargs)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What may decide whether it calls the module's own forward: TRL's asks for ``fused_lm_head``."""

    def of(value: Any) -> Any:
        return value if isinstance(value, bool | str) else type(value)

    return tuple(map(of, args)), tuple((n, of(v)) for n, v in kwargs.items())


def _tried_outside(put: PutForward, session: Session, given: Any, run: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether it calls the module's own forward before any part of the model, and what it returns then.

    If it does not, all is as it was before.

    Raises:
        AutoparError: it has changed what it was given.
    """
    record, states, before = Record(session.original), generators.states(), session.forwards
    contents, versions, found = Contents(given, "arguments"), _versions(given), None
    handle = register_module_forward_pre_hook(lambda part, _: _refuse_part(session, before, part))
    try:
        found = run()
    except _PartCalled:
        pass
    except (AutoparError, RuntimeError):  # of parameters on the mesh beside plain tensors, say
        if session.forwards != before:
            raise
    finally:
        handle.remove()
    if session.forwards != before:
        return True, found
    if contents.changed() or versions != _versions(given):
        raise AutoparError(
            f"{described(put.function)} was put on the parallelized model as its forward, and changes what it is given "
            "before it calls parts of the model: let it change a copy, or put it on the model before parallelize()"
        )
    record.restore()
    generators.restore(states)
    return False, None


def _refuse_part(session: Session, before: int, part: nn.Module) -> None:
    if session.forwards == before and any(part is m for m in session.original.modules()):
        raise _PartCalled


def _versions(value: Any) -> list[int]:
    return [t._version for t in tensors_in(value) if not t.is_inference()]


def _captured(
    put: PutForward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    """Run it in the original's place, in a trace or in eager mode: the module's own forward is the original's then."""
    session: Session = module._autopar
    session.running += 1
    try:
        return run()
    finally:
        session.running -= 1


def _install(captured: Callable[..., Any], module: Any) -> None:
    """Put one on the original, in the place of others that were put there."""
    session: Session = module._autopar
    attributes = vars(session.original)
    now = attributes.get(NAME)
    if getattr(now, "__func__", None) is captured:
        return
    if not is_put(now):
        session.own_forward = now
    attributes[NAME] = MethodType(captured, module)


def remove(session: Session) -> None:
    """Give the original its own forward back."""
    attributes = vars(session.original)
    if is_put(attributes.get(NAME)):
        del attributes[NAME]
        if session.own_forward is not None:
            attributes[NAME] = session.own_forward


def call_own(session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The original's own forward, for one in its place."""
    if session.own_forward is not None:
        return session.own_forward(*args, **kwargs)
    return type(session.original).forward(session.original, *args, **kwargs)


def described(function: Any) -> str:
    """A function, and where it is."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" if code else repr(function)
