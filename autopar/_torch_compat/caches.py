"""What torch keeps of graphs that are gone."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph_module import _loader as _sources


def forget_source_with(graph: torch.fx.GraphModule) -> None:
    """When a graph is gone, the text of its code goes, too, which torch keeps for tracebacks as long as it runs."""
    weakref.finalize(graph, _forget_source, type(graph)).atexit = False


def _forget_source(kind: type[torch.fx.GraphModule]) -> None:
    # Each graph has a class of its own, whose code is compiled when it first runs.
    code = getattr(vars(kind).get("forward"), "__code__", None)
    if code is not None and _sources.eval_cache.pop(code.co_filename, None) is not None:
        linecache.cache.pop(code.co_filename, None)


@contextmanager
def new_fake_results() -> Iterator[list[Any]]:
    """The keys under which torch caches results of operators on fake tensors within, which are there at the end."""
    count = len(FakeTensorMode.cache)
    keys: list[Any] = []
    yield keys
    # In the order in which they came. A list first: the collector may take some out while they are gone through.
    keys += list(FakeTensorMode.cache)[count:]


def forget_fake_results(keys: Iterable[Any]) -> None:
    """Take results out of torch's cache, which keeps all; who asks for them next recomputes them."""
    for key in keys:
        FakeTensorMode.cache.pop(key, None)
