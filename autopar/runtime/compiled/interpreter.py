"""`Interpreter`: runs of local operators between collectives are one call each, into torch's interpreter in C++.

Nothing is compiled: the same kernels run in the same order and free the same tensors, but the way from one to the next
is not Python's. What depends on values (indices out of range, matrices without an inverse) stays in Python, where
errors are those of eager PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import (
    BoxedCodeGen,
    LazyGraphModule,
    OpOverload,
    below_autograd,
    interpreted,
    interpreter_takes,
    interpreting,
    is_boxed,
    said_by_kernel,
)
from autopar.ir.ops import accumulate, attention, cross_entropy
from autopar.ir.ops.attention import CPU_KERNELS, kernel_call
from autopar.runtime.compiled.executable import Executables
from autopar.runtime.compiled.regions import Region, in_order

FEWEST = 3
"""Operators in a row that are worth a call."""

LARGE = 2**10
"""Bytes of an input from which on it is freed within a run: a list takes longer to pass than arguments."""

logger = logging.getLogger("autopar")

_KNOWN = ("aten", "prims", "autopar", "_c10d_functional")

DIRECT = {**accumulate.KERNELS, **attention.KERNELS, **cross_entropy.KERNELS}
"""Operators of this package, and the functions that they are: calling those spares the way through torch."""

_BY_VALUES = tuple("linalg cholesky lu_factor lu_solve inverse triangular multinomial assert bincount histc".split())
"""Parts of names of operators whose errors depend on values."""


class Run(Region):
    """Operators in a row; the interpreter returns views as Python does, so that all of them can be results."""

    @property
    def views(self) -> list[fx.Node]:
        """None is taken outside."""
        return []


@dataclass
class Interpreter(Executables[Callable[[list[Any]], Any]]):
    """Runs local graphs on a device; one for all graphs of a model."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def outer(self, graph: fx.GraphModule, blocks: Collection[str]) -> fx.GraphModule:
        """The graph in which runs are single nodes; of attention, torch's kernel is part of them where it is one."""
        calls = {n: call for n in graph.graph.nodes if (call := kernel_call(n, self.device)) is not None}
        return super().outer(_with_calls(graph, calls) if calls else graph, blocks)

    def parts(self, graph: fx.Graph, blocks: Collection[str]) -> list[fx.Node | Region]:
        """The nodes in their order, runs of operators as one."""
        found: list[fx.Node | Region] = []
        run: list[fx.Node] = []
        for node in (*in_order(graph), None):
            if node is not None and _is_local(node):
                run.append(node)
                continue
            worth = sum(isinstance(n.target, OpOverload) for n in run) >= FEWEST and Run(run).outputs
            found += [Run(run)] if worth else run
            run = []
            if node is not None and node.op not in ("placeholder", "output"):
                found.append(node)
        return found

    def called(self, outer: fx.GraphModule) -> Callable[..., Any]:
        """The graph, below autograd if it has no operators of the user's, which may need that."""
        operators = [n for n in outer.graph.nodes if isinstance(n.target, OpOverload)]
        below = below_autograd if all(n.target.namespace in _KNOWN for n in operators) else contextlib.nullcontext
        for node in operators:
            node.target = DIRECT.get(node.target, node.target)

        def call(*arguments: Any) -> Any:
            # A lazy graph's first forward is a call of a module, which hooks on all modules would see.
            LazyGraphModule.force_recompile(outer)
            with below(), interpreting():
                return outer.forward(*arguments)

        return call

    def boxed(self, part: Region, dying: list[fx.Node]) -> list[fx.Node] | None:
        """Those of some size that nothing uses later."""
        return [a for a in dying if a.meta["val"].nbytes >= LARGE] or None

    def region(self, graph: fx.GraphModule, boxed: int | None) -> Callable[..., Any]:
        """The run as a function."""
        try:
            run = interpreted(graph.graph, boxed or 0)
        except TypeError as e:
            logger.debug("operators run one by one: %s", e)

            def run(*arguments: Any) -> Any:
                values: list[Any] = arguments[0] if boxed else []
                values.extend(arguments[boxed is not None :])
                return graph.forward(values)

        def region(*arguments: Any) -> Any:
            try:
                return run(*arguments)
            except RuntimeError as e:
                # The interpreter's errors are all of one class.
                kind = torch.OutOfMemoryError if "out of memory" in str(e) else RuntimeError
                raise kind(said_by_kernel(e)) from e

        return region


def _with_calls(graph: fx.GraphModule, calls: Mapping[fx.Node, tuple[Any, ...]]) -> fx.GraphModule:
    made = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        known[node] = made.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
        if node in calls:
            known[node].target, *arguments = calls[node]
            known[node].args, known[node].kwargs = fx.map_arg(tuple(arguments), known.__getitem__)
    if is_boxed(graph.graph):
        made.set_codegen(BoxedCodeGen())
    return LazyGraphModule(graph, made)


def _is_local(node: fx.Node) -> bool:
    """Whether the interpreter may run a node: nothing of it is Python's."""
    if node.op != "call_function":
        return False
    value, taken = node.meta.get("val"), [a.meta.get("val") for a in node.all_input_nodes]
    if node.target is operator.getitem:
        return _is_local(node.all_input_nodes[0]) and isinstance(value, torch.Tensor)
    target: Any = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or _fails_by_values(target):
        return False
    # Of several results, each is taken by a getitem, and is a tensor: what none asked for may be None.
    several = isinstance(value, tuple | list) and all(
        u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor) for u in node.users
    )
    tensors = all(isinstance(v, torch.Tensor) for v in (*taken, *(() if several else (value,))))
    draws = torch.Tag.nondeterministic_seeded in target.tags and target not in CPU_KERNELS
    return tensors and not draws and interpreter_takes(node)


def _fails_by_values(target: OpOverload) -> bool:
    """Whether an operator raises for some values of its tensors: indices, singular matrices."""
    names = [a.name for a in target._schema.arguments if "Tensor" in str(a.type)]
    return not {"index", "indices", "target", "offsets"}.isdisjoint(names) or any(
        part in target._schema.name for part in _BY_VALUES
    )
