"""`Compiler`: compiles the regions of local graphs, those that are alike once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch_compat import storage_id
from autopar.ir.ops.random import generator_states, restore_generators
from autopar.runtime.compiled.backend import Backend
from autopar.runtime.compiled.executable import Executables
from autopar.runtime.compiled.regions import Region, regions_of

VARIANTS = 8
"""For how many strides of its inputs a region is compiled; for others its operators run one by one."""

PATIENCE = 2.0
"""Seconds of compilation after which a line says so, and then each time they have doubled."""

logger = logging.getLogger("autopar")


class CompiledRegion:
    """A region that is compiled when it first runs, for the strides that its inputs have then.

    Attributes:
        graph: its operators, a graph from a list of tensors to a tuple of tensors.
        compilations: how often it has been compiled.
    """

    def __init__(self, graph: fx.GraphModule, compiler: Compiler) -> None:
        self.graph, self.compilations = graph, 0
        self.__name__ = "region"  # in generated code
        self._compiler = compiler
        self._latest: tuple[list[Any], Callable[[list[Any]], Any]] | None = None
        self._known: dict[tuple[Any, ...], Callable[[list[Any]], Any]] = {}

    def __call__(self, values: list[torch.Tensor]) -> Any:
        """What the region returns; the list is emptied, so that each tensor is freed after its last use."""
        # Compiled code reads memory by the strides that it was compiled for: they are compared in every call.
        strides = [v.stride() for v in values]
        if self._latest is None or self._latest[0] != strides:
            self._latest = strides, self._for(tuple(strides), values)
        return self._latest[1](values)

    def _for(self, strides: tuple[Any, ...], values: list[torch.Tensor]) -> Callable[[list[Any]], Any]:
        if strides not in self._known:
            if len(self._known) >= VARIANTS:
                logger.warning("a region has been compiled for %d kinds of strides; others are not compiled", VARIANTS)
                return self.graph
            self.compilations += 1
            self._known[strides] = self._compiler.compile(self.graph, values)
        return self._known[strides]


@dataclass
class Compiler(Executables[CompiledRegion]):
    """Compiles local graphs; one for all graphs of a model, whose regions it shares.

    Attributes:
        backend: compiles a region.
        speaks: whether this rank says how long it takes.
        seconds: that compilations have taken.
    """

    backend: Backend
    speaks: bool = True
    seconds: float = 0.0
    _said: float = PATIENCE

    @property
    def compilations(self) -> int:
        """How many there have been."""
        return sum(r.compilations for r in self.regions.values())

    def parts(self, graph: fx.Graph, blocks: Collection[str]) -> list[fx.Node | Region]:
        """Regions by block of the model."""
        return regions_of(graph, blocks)

    def region(self, graph: fx.GraphModule, boxed: int | None) -> CompiledRegion:
        """A region that is compiled when it first runs."""
        return CompiledRegion(graph, self)

    def compile(self, graph: fx.GraphModule, values: list[torch.Tensor]) -> Callable[[list[Any]], Any]:
        """Compile a region for such values; random generators stay as they are, whatever a compiler draws."""
        start, states = time.monotonic(), generator_states()
        try:
            with torch.no_grad():
                return apart(self.backend(graph, [v.detach() for v in values]))
        finally:
            restore_generators(states)
            self.seconds += time.monotonic() - start
            if self.speaks and self.seconds >= self._said:
                self._said = 2 * self.seconds
                logger.warning("compiling: %d regions so far, %.0f s", self.compilations, self.seconds)


def apart(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """What a compiled region returns in memory of its own, as its operators would have made it.

    A compiler drops operators that change nothing, such as a product with ones, and returns an input: a buffer, say,
    that the step writes before the backward pass reads what was saved. Or it returns a tensor twice.

    Args:
        run: a compiled region; what it returns is the memory of the same inputs in every call.
    """
    shared: list[int] | None = None

    def call(values: list[Any]) -> Any:
        nonlocal shared
        # Weak ones: as long as they are there, no other memory has the number of theirs.
        given = [] if shared is not None else [StorageWeakRef(v.untyped_storage()) for v in values]  # type: ignore[no-untyped-call]
        results = run(values)
        if shared is None:
            shared = _seen_before(results, {reference.cdata for reference in given})
        if shared:
            results = [r.clone() if i in shared else r for i, r in enumerate(results)]
        return results

    return call


def _seen_before(tensors: Sequence[torch.Tensor], known: set[int]) -> list[int]:
    """Numbers of the tensors whose memory is known, or that of one before."""
    found = []
    for i, tensor in enumerate(tensors):
        number = storage_id(tensor)
        if number in known:
            found.append(i)
        known.add(number)
    return found
