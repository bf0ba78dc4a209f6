"""Functions under `functools.lru_cache` while a model is traced: caches must not hold what a trace makes.

They are called anew, which gives what a cache has as long as they give the same each time. What does not is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.state.code.objects import SIMPLE
from autopar.capture.state.code.owner import Scope
from autopar.errors import CaptureError


@contextlib.contextmanager
def uncached(scopes: Sequence[Scope], parameters: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """While it lasts, cached functions that the model's code names are called, and not their caches.

    Args:
        scopes: names that the code reads.
        parameters: of the model, as they are then.
    """
    kind = functools._lru_cache_wrapper
    found = [(s.owner, n, v) for s in scopes for n, v in s.items() if isinstance(v, kind)]
    try:
        for owner, name, cache in found:
            owner[name] = _called(name, cache, parameters)
        yield
    finally:
        for owner, name, cache in found:
            owner[name] = cache


def _called(name: str, cache: Any, parameters: Callable[[], Iterable[torch.Tensor]]) -> Callable[..., Any]:
    function = cache.__wrapped__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Once(name, parameters):
            result = function(*args, **kwargs)
        # A plain value may be of an earlier state than that of now, as eager mode would get it.
        if _is_plain(result) and all(_is_plain(a) or isinstance(a, nn.Module) for a in (*args, *kwargs.values())):
            missed = cache.cache_info().misses
            cached = cache(*args, **kwargs)
            if cached != result and cache.cache_info().misses != missed:
                _Once(name, parameters).refuse("gives another value each time")
            return cached
        return result

    for asked in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, asked, functools.partial(_refuse_questions, f"{name}.{asked}"))
    return call


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in SIMPLE


def _refuse_questions(name: str) -> Any:
    raise CaptureError(
        f"the model calls {name}() in forward, which a graph cannot do again; do that outside of the model, or keep "
        "what is cached in a dict that is an attribute"
    )


class _Once(TorchFunctionMode):
    """Refuses what a cache would keep of the first call, and a graph computes anew in each."""

    def __init__(self, name: str, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """``name``: of the function."""
        super().__init__()
        self._name = name
        self._trained = {id(p) for p in parameters() if p.requires_grad}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        operator = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        overloads = operator.overloads() if operator is not None else ()
        if any(torch.Tag.nondeterministic_seeded in getattr(operator, o).tags for o in overloads):
            self.refuse("draws numbers")
        given = [*args, *(kwargs or {}).values()]
        given += [x for a in given if isinstance(a, list | tuple) for x in a]  # torch.cat of several
        if any(id(a) in self._trained for a in given):
            self.refuse("computes of a parameter")
        return func(*args, **(kwargs or {}))

    def refuse(self, what: str) -> None:
        """For what it does."""
        raise CaptureError(
            f"{self._name}, which functools.lru_cache keeps the results of, {what}: eager mode keeps what the first "
            "call gives, and a graph would compute it anew in each; do it in __init__ and keep the result in a "
            "buffer, or leave the cache out"
        )
