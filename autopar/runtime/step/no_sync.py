"""`no_sync`: skip the reduction of gradients, accumulate what would have been reduced, and reduce the sum once.

Some collectives have one purpose: to bring a gradient into its parameter's layout. They are linear, and at the end of
the backward graph. Split before them, the graph is two: the first computes unreduced gradients, the second reduces
gradients, or sums of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar._torch_compat import BoxedCodeGen, LazyGraphModule
from autopar.errors import AutoparError
from autopar.ir.node_info import info


@dataclass(eq=False)
class PendingReduction:
    """Unreduced gradients of one step, summed over backward passes.

    Attributes:
        step: whose second graph reduces them.
        sums: of what its first graph returned.
        names: of the parameters whose gradients they give.
        passes: how many backward passes have been added.
        dropped: those of ``names`` whose gradients `zero_grad` has dropped since.
    """

    step: Any
    sums: list[torch.Tensor]
    names: set[str]
    passes: int = 1
    dropped: set[str] = field(default_factory=set)


class DeferredReduction:
    """Gradients whose reduction is deferred; `zero_grad` of a module or an optimizer drops them.

    A window of accumulation is the time between two calls of `zero_grad`. While gradients are deferred, ``.grad`` lacks
    them, so an optimizer's step is an error.

    Attributes:
        active: whether `no_sync` is in force.
        types: types and layouts of the parameters for which something has been deferred.
        is_aside: within `set_aside`.
        passes: how many backward passes there have been, deferred or not.
    """

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Nothing is deferred yet.

        Args:
            parameters: name and tensor of each; called anew each time, since users replace parameters.
        """
        self.active = False
        self.parameters = parameters
        self.types: dict[str, Any] = {}
        self._pending: list[PendingReduction] = []
        self.is_aside = False
        self.passes = 0

    def add(self, step: Any, values: list[torch.Tensor]) -> None:
        """Add what the first of `split_reductions`'s graphs returned."""
        _hook_zero_grad()
        _live.add(self)
        self.types.update(step.types.parameters)
        # Not to an entry of which zero_grad has dropped some gradients: it would drop their new values, too.
        known = next((p for p in self._pending if p.step is step and not p.dropped), None)
        if known is None:
            # Cloned, since later passes are added in place: a value may share memory with another.
            self._pending.append(PendingReduction(step, [v.clone() for v in values], set(step.gradient_names)))
            return
        known.passes += 1
        for total, value in zip(known.sums, values, strict=True):
            total.add_(value)

    @property
    def any(self) -> bool:
        """Whether any gradient is deferred."""
        return bool(self._pending)

    def holds(self, step: Any) -> bool:
        """Whether a gradient of this step is deferred."""
        return any(p.step is step for p in self._pending)

    def pop_all(self) -> list[PendingReduction]:
        """Everything that is deferred, in the order of its first addition; nothing is afterwards."""
        # In this order on every rank: each entry's reduction is a collective.
        pending, self._pending = self._pending, []
        return pending

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the deferred gradients of these parameters."""
        if not self._pending:
            return
        given = {id(p) for p in parameters}
        names = {name for name, p in self.parameters() if id(p) in given}
        for pending in self._pending:
            pending.dropped |= names & pending.names
        self._pending = [p for p in self._pending if p.dropped != p.names]

    def deliver(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add gradients that no autograd function returns, such as of parameters that have been frozen since."""
        if not gradients:
            return
        with torch.no_grad():
            for name, p in self.parameters():
                if name in gradients:
                    p.grad = gradients[name] if p.grad is None else p.grad + gradients[name]

    def refuse(self, parameters: Iterable[torch.Tensor], what: str) -> None:
        """Refuse the use of these parameters' gradients while some are deferred.

        Raises:
            AutoparError: some are.
        """
        if not self._pending:
            return
        given = {id(p) for p in parameters}
        names = {name for name, p in self.parameters() if id(p) in given}
        deferred = sorted(set().union(*(p.names - p.dropped for p in self._pending)) & names)
        if deferred:
            raise AutoparError(
                f"{what}: gradients of {len(deferred)} parameters ({deferred[0]!r}, ...) still wait for their "
                "reduction, since the last backward pass was within no_sync(). Leave the last backward pass of a "
                "window out of it, or call model.reduce_gradients(), on all ranks, before gradients are clipped or "
                "used; zero_grad() "
                "gives the window up"
            )

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within, nothing is deferred: for an optimizer's step that only allocates state."""
        before, self._pending = self._pending, []
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            self._pending = before + self._pending

    def described(self) -> str:
        """What is deferred, in words: the same on every rank that has made the same calls."""
        rows = [f"{p.passes} of {len(p.names - p.dropped)}" for p in self._pending]
        return ", ".join(rows) or "none"


_live: weakref.WeakSet[DeferredReduction] = weakref.WeakSet()
"""Of all modules that have been in `no_sync`."""


@cache
def _hook_zero_grad() -> None:
    """From now on, have every ``zero_grad`` drop deferred gradients; torch has hooks for an optimizer's step only."""
    _wrap_zero_grad(nn.Module)
    # Each class that overrides zero_grad, since an override need not call the base class's.
    for known in _subclasses(Optimizer):
        _wrap_zero_grad(known)
    register_optimizer_step_pre_hook(_before_step)


def _subclasses(root: type) -> list[type]:
    found = [root]
    for known in found:  # which grows meanwhile
        found += known.__subclasses__()
    return found


def _wrap_zero_grad(owner: type) -> None:
    original = owner.__dict__.get("zero_grad")  # its own: an inherited one is wrapped where it is defined
    if not callable(original) or getattr(original, "drops_deferred", False):
        return

    @wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # One around another may do nothing, as accelerate's does within a window; the other drops when it is called.
        if isinstance(self, Optimizer) and any(isinstance(v, Optimizer) for v in vars(self).values()):
            return result
        for deferred in list(_live):
            deferred.drop(_parameters_of(self))
        return result

    zero_grad.drops_deferred = True  # type: ignore[attr-defined]
    owner.zero_grad = zero_grad  # type: ignore[attr-defined]


def _parameters_of(owner: Any) -> list[torch.Tensor]:
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    for known in type(optimizer).__mro__:
        _wrap_zero_grad(known)  # a class that has been defined since

    def refuse() -> None:
        for deferred in list(_live):
            deferred.refuse(_parameters_of(optimizer), f"{type(optimizer).__name__}.step()")

    given = dict(zip(("self", "closure"), args, strict=False)) | (kwargs or {})
    closure = given.pop("closure", None)
    if closure is None:
        refuse()
        return None

    @wraps(closure)
    def checked() -> Any:
        # The last backward pass of the window may be the closure's.
        loss = closure()
        refuse()
        return loss

    return (args[0], *args[2:]), {**(kwargs or {}), "closure": checked}


def split_reductions(backward: fx.GraphModule, results: int = 0) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``(compute, reduce)``: the first takes what ``backward`` takes, the second what the first returns.

    Before: ``g = mm(x, dy); w = reduce_scatter(g); return w``. After: ``g = mm(x, dy); return g``, and
    ``w = reduce_scatter(g); return w``.

    Args:
        backward: a graph that returns gradients.
        results: how many other results it returns first: ``compute`` returns them first, ``reduce`` does not take
            them.
    """
    # The first reductions of gradients, and all that depends on them.
    reducing: set[fx.Node] = set()
    for node in backward.graph.nodes:
        collective = info(node).collective
        starts = collective is not None and collective.gradient
        if node.op != "output" and (starts or any(a in reducing for a in node.all_input_nodes)):
            reducing.add(node)
    order = {n: i for i, n in enumerate(backward.graph.nodes)}
    reducing |= _preparations(backward.graph, reducing)
    outputs: Any = backward.graph.output_node().args[0]
    first, gradients = outputs[:results], outputs[results:]
    # A bucket may hold gradients of the batch beside those of parameters, which are then reduced in each pass.
    reducing -= _needed(v for v in first if v is not None)
    used = {a for n in reducing for a in n.all_input_nodes} | {v for v in gradients if v is not None}
    boundary = sorted(used - reducing, key=order.__getitem__)
    compute = _subgraph(backward, [n for n in backward.graph.nodes if n not in reducing], [*first, *boundary])
    return compute, _subgraph(backward, [n for n in backward.graph.nodes if n in reducing], gradients, boundary)


def _needed(values: Iterable[fx.Node]) -> set[fx.Node]:
    """Values, and all that they are computed from."""
    found: set[fx.Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _preparations(graph: fx.Graph, reducing: set[fx.Node]) -> set[fx.Node]:
    """Nodes that feed only reducing ones and whose value is no tensor, such as a tuple before its getitem, or of bytes.

    They must not be at the boundary, whose values are added up: bytes stand for numbers in few bits.
    """
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        value = node.meta.get("val")
        numbers = isinstance(value, torch.Tensor) and value.dtype != torch.uint8
        if node.op != "call_function" or node in reducing or numbers:
            continue
        if node.users and all(u in reducing or u in found for u in node.users):
            found.add(node)
    return found


def _subgraph(
    backward: fx.GraphModule, nodes: list[fx.Node], outputs: list[Any], inputs: list[fx.Node] | None = None
) -> fx.GraphModule:
    """The graph of some of the nodes, which takes ``inputs``; None: the placeholders are among the nodes."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in inputs or ()}
    for node in nodes:
        if node.op != "output":
            known[node] = graph.node_copy(node, known.__getitem__)
    for node, copied in known.items():
        copied.meta = dict(node.meta)
    graph.output([known[v] if isinstance(v, fx.Node) else None for v in outputs])
    # Boxed: the graph takes one list and empties it, so that each argument can be freed after its last use.
    graph.set_codegen(BoxedCodeGen())
    return LazyGraphModule(backward, graph)
