"""`no_sync`: leave out the reduction of gradients, add up what would have been reduced, and reduce it once.

The collectives whose only purpose is to bring a gradient into its parameter's layout end the backward graph, and are
linear. Cut before them, it is a graph of local sums and a graph that reduces those; sums of the former go into the
latter.
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

from autopar._torch_compat import BoxedCodeGen
from autopar.errors import AutoparError
from autopar.ir.node_info import info


@dataclass(eq=False)
class Waiting:
    """Sums of one step that wait.

    Attributes:
        step: whose second graph reduces them.
        values: what its first graph returned, added up.
        names: of the parameters whose gradients they give.
        passes: how many backward passes have been added.
    """

    step: Any
    values: list[torch.Tensor]
    names: set[str]
    passes: int = 1
    dropped: set[str] = field(default_factory=set)


class DeferredReduction:
    """Gradients that wait for their reduction; `zero_grad` drops them, of a module or an optimizer.

    A window of accumulation is what lies between two calls of `zero_grad`. While gradients wait, ``.grad`` lacks them,
    so an optimizer's step is an error.

    Attributes:
        active: whether `no_sync` is in force.
        types: types and layouts of the parameters for which something has waited.
    """

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Nothing waits.

        Args:
            parameters: name and tensor of each.
        """
        self.active = False
        self.parameters = parameters
        self.types: dict[str, Any] = {}
        self._waiting: list[Waiting] = []

    def add(self, step: Any, values: list[torch.Tensor]) -> None:
        """Add what the first of `split_reductions`'s graphs returned."""
        _see_zero_grad()
        _live.add(self)
        self.types.update(step.types.parameters)
        known = next((w for w in self._waiting if w.step is step and not w.dropped), None)
        if known is None:
            self._waiting.append(Waiting(step, [v.clone() for v in values], set(step.gradient_names)))
            return
        known.passes += 1
        for total, value in zip(known.values, values, strict=True):
            total.add_(value)

    @property
    def any(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def holds(self, step: Any) -> bool:
        """Whether something of a step waits."""
        return any(w.step is step for w in self._waiting)

    def take(self) -> list[Waiting]:
        """Everything that waits, in the order of its first addition; nothing waits afterwards."""
        found, self._waiting = self._waiting, []
        return found

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget what waits for these parameters."""
        if not self._waiting:
            return
        given = {id(p) for p in parameters}
        names = {name for name, p in self.parameters() if id(p) in given}
        for waiting in self._waiting:
            waiting.dropped |= names & waiting.names
        self._waiting = [w for w in self._waiting if w.dropped != w.names]

    def deliver(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add gradients that the backward pass at hand does not return, such as of parameters frozen since."""
        if not gradients:
            return
        with torch.no_grad():
            for name, p in self.parameters():
                if name in gradients:
                    p.grad = gradients[name] if p.grad is None else p.grad + gradients[name]

    def refuse(self, parameters: Iterable[torch.Tensor], what: str) -> None:
        """Gradients of these parameters are about to be used.

        Raises:
            AutoparError: some wait.
        """
        if not self._waiting:
            return
        given = {id(p) for p in parameters}
        named = {name for name, p in self.parameters() if id(p) in given}
        late = sorted(set().union(*(w.names - w.dropped for w in self._waiting)) & named)
        if late:
            raise AutoparError(
                f"{what}: gradients of {len(late)} parameters ({late[0]!r}, ...) still wait for their reduction, since "
                "the last backward pass was within no_sync(). Leave the last backward pass of a window out of it, or "
                "call model.reduce_gradients(), on all ranks, before gradients are clipped or used; zero_grad() "
                "gives the window up"
            )

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within, nothing waits: what is done has nothing to do with gradients."""
        before, self._waiting = self._waiting, []
        try:
            yield
        finally:
            self._waiting = before + self._waiting

    def described(self) -> str:
        """What waits, the same on every rank that has made the same calls."""
        rows = [f"{w.passes} of {len(w.names - w.dropped)}" for w in self._waiting]
        return ", ".join(rows) or "none"


_live: weakref.WeakSet[DeferredReduction] = weakref.WeakSet()
"""Of all modules that have been in `no_sync`."""


@cache
def _see_zero_grad() -> None:
    """From now on, have every ``zero_grad`` drop what waits; torch has hooks for an optimizer's step only."""
    _watch_class(nn.Module)
    for known in _subclasses(Optimizer):
        _watch_class(known)
    register_optimizer_step_pre_hook(_before_step)


def _subclasses(root: type) -> list[type]:
    found = [root]
    for known in found:  # which grows meanwhile
        found += known.__subclasses__()
    return found


def _watch_class(owner: type) -> None:
    original = owner.__dict__.get("zero_grad")
    if not callable(original) or getattr(original, "drops_postponed", False):
        return

    @wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for deferred in list(_live):
            deferred.drop(_parameters_of(self))
        return result

    zero_grad.drops_postponed = True  # type: ignore[attr-defined]
    owner.zero_grad = zero_grad  # type: ignore[attr-defined]


def _parameters_of(owner: Any) -> list[torch.Tensor]:
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for known in type(optimizer).__mro__:
        _watch_class(known)  # one that has been defined since
    for deferred in list(_live):
        deferred.refuse(_parameters_of(optimizer), f"{type(optimizer).__name__}.step()")


def split_reductions(backward: fx.GraphModule, results: int = 0) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``(compute, reduce)``: the first takes what ``backward`` takes, the second what the first returns.

    Args:
        backward: a graph that returns gradients.
        results: how many other results it returns first: ``compute`` returns them first, ``reduce`` does not take
            them.
    """
    late: set[fx.Node] = set()
    for node in backward.graph.nodes:
        collective = info(node).collective
        starts = collective is not None and collective.gradient
        if node.op != "output" and (starts or any(a in late for a in node.all_input_nodes)):
            late.add(node)
    order = {n: i for i, n in enumerate(backward.graph.nodes)}
    late |= _preparations(backward.graph, late)
    outputs: Any = backward.graph.output_node().args[0]
    first, gradients = outputs[:results], outputs[results:]
    used = {a for n in late for a in n.all_input_nodes} | {v for v in gradients if v is not None}
    between = sorted(used - late, key=order.__getitem__)
    compute = _part(backward, [n for n in backward.graph.nodes if n not in late], [*first, *between])
    return compute, _part(backward, [n for n in backward.graph.nodes if n in late], gradients, between)


def _preparations(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """Nodes that feed only late ones and whose value is no tensor to add up, such as a tuple before its getitem."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node in late or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.users and all(u in late or u in found for u in node.users):
            found.add(node)
    return found


def _part(
    backward: fx.GraphModule, nodes: list[fx.Node], outputs: list[Any], between: list[fx.Node] | None = None
) -> fx.GraphModule:
    """The graph of some of the nodes, which takes ``between``, or what the whole takes."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in between or ()}
    for node in nodes:
        if node.op != "output":
            known[node] = graph.node_copy(node, known.__getitem__)
    for node, copied in known.items():
        copied.meta = dict(node.meta)
    graph.output([known[v] if isinstance(v, fx.Node) else None for v in outputs])
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(backward, graph)
