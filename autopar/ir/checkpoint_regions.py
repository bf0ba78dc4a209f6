"""Regions of a model that `torch.utils.checkpoint` recomputes in the backward pass, and its policies.

While a model is traced, `checkpoint` runs its function once, and what happens in it carries the number of the region;
torch copies that to the backward pass. So a node of the graph knows its region, and whether a policy saves it, and
`pinned` says what that means for the search.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from autopar._torch_compat import TorchDispatchMode, checkpoint_replaced, selective_policy, traced_graph, without_modes
from autopar.errors import CaptureError
from autopar.ir.graph import is_backward, user_line
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.attention import attention

aten = torch.ops.aten
logger = logging.getLogger("autopar")

PATH = "autopar_regions"
"""Annotation of a traced node: numbers of the regions it is in, outermost first."""

REDRAWN = "autopar_redrawn"
"""Annotation of a traced node in a region that draws other random numbers when it is recomputed."""

RECOMPUTED, SAVED = "made\x20again", "saved"  # as in the names and fingerprints of plans of version 1
"""What the model asks of an operator's results, see `pinned`."""

Policy = Callable[..., Any]

_SAVING = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADING = {CheckpointPolicy.MUST_CPU_OFFLOAD: _SAVING[0], CheckpointPolicy.PREFER_CPU_OFFLOAD: _SAVING[1]}

_ATTENTION = tuple(
    getattr(aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""What attention is in eager mode, depending on the device: a policy that saves one of them saves our operator."""


class Regions:
    """The regions of a model that is being traced."""

    def __init__(self, watch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """``watch``: entered for each function that is recomputed."""
        self.watch = watch
        self.count = 0
        self.open: tuple[int, ...] = ()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While it lasts, checkpointed functions run once and are annotated, by whatever name they are called."""
        # By replacing what `checkpoint` calls: whoever imported the function by name calls it, too.
        with checkpoint_replaced(self._reentrant, self._not_reentrant), preserve_node_meta(), _without_hooks():
            yield

    def _reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        # As in torch: the reentrant variant is an autograd function, which does nothing without a differentiable input.
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            with self._region(None, preserve):
                return function(*args)
        if torch.is_grad_enabled():
            logger.warning(
                "no input of a function under checkpoint(use_reentrant=True) requires a gradient: as in torch, its "
                "parameters get none; pass use_reentrant=False"
            )
        with torch.no_grad():
            return function(*args)

    def _not_reentrant(
        self, function: Callable[..., Any], preserve: bool, context_fn: Callable[[], Any], *rest: Any, **kwargs: Any
    ) -> Generator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        # The second context is that of the recomputation, of which a trace sees nothing.
        context, _ = context_fn()
        policy = selective_policy(context)
        with self._region(policy, preserve), contextlib.nullcontext() if policy else context:
            yield

    @contextlib.contextmanager
    def _region(self, policy: Policy | None, preserve: bool) -> Iterator[None]:
        outer = self.open
        self.open = (*outer, self.count)
        self.count += 1
        asking = _Asking(policy) if policy else contextlib.nullcontext()
        try:
            # Regions in this one are annotated, too: what is recomputed in it draws as it does.
            redrawn = {} if preserve else {REDRAWN: True}
            with self.watch(), annotate({PATH: self.open, **redrawn}), asking:
                yield
        finally:
            self.open = outer


def _path(node: fx.Node) -> tuple[int, ...]:
    found: tuple[int, ...] = (node.meta.get("custom") or {}).get(PATH, ())
    return found


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """No hooks on saved tensors, such as `save_on_cpu`: what a graph saves is the plan's to decide."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    before = {name: getattr(hooks, name) for name in ("__enter__", "__exit__")}

    def enter(self: Any) -> None:
        if not isinstance(self, torch.autograd.graph.save_on_cpu) and not _keep_values(self):
            raise CaptureError(
                f"{type(self).__name__} changes what is saved for the backward pass (its unpack function does not give "
                "back what its pack function was given), which a graph cannot do; write a torch.autograd.Function"
            )
        logger.warning("%s is left out: what is saved for the backward pass stays on its device", type(self).__name__)

    def leave(self: Any, *error: Any) -> None:
        """Nothing was entered."""

    hooks.__enter__, hooks.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__, hooks.__exit__ = before["__enter__"], before["__exit__"]  # type: ignore[method-assign]


def _keep_values(hooks: Any) -> bool:
    """Whether the two functions give tensors back as they were: tried on some, since what they do is not known."""
    generator = torch.Generator().manual_seed(0)
    for size in (3, 2**16):  # small tensors are often left alone
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            with without_modes(), torch.no_grad():
                given = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
                try:
                    found = hooks.unpack_hook(hooks.pack_hook(given.clone()))
                except Exception:  # whatever it is, it is not the tensor
                    return False
                alike = isinstance(found, torch.Tensor) and found.dtype == dtype and found.shape == given.shape
                if not alike or not torch.equal(found.cpu(), given):
                    return False
    return True


class _Asking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the nodes of every operator with what policies say of it: it sees what they would see in training."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tracing goes on as if it were not there."""
        return True

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and mark what it left in the graph."""
        kwargs, graph = kwargs or {}, traced_graph()
        # Whatever is in the graph after this node is what the operator left there.
        last = next(iter(reversed(graph.nodes)), None) if graph is not None else None
        out = func(*args, **kwargs)
        if graph is None or func in SAC_IGNORED_OPS:
            return out
        asked = _asked(self.policy, func, out, args, kwargs)
        for node in reversed(graph.nodes) if asked in _SAVING else ():
            if node is last:
                break
            if info(node).saved is not _SAVING[0]:  # what a region in this one must save stays saved
                set_info(node, replace(info(node), saved=asked))
        return out


def _asked(policy: Policy, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
    """What a policy says of an operator; of attention, whether it saves that under any name."""
    answers: list[CheckpointPolicy] = []
    # A policy names the kernel of the machine that it was written on; the plan's may be another.
    for each in (*_ATTENTION, func) if func is attention else (func,):
        said = policy(SelectiveCheckpointContext(is_recompute=False, op_output=out), each, *args, **kwargs)
        if isinstance(said, bool):
            said = CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
        if said in _OFFLOADING:
            logger.warning("%s of %s: it is saved on its device, there is no offload yet", said, each)
            said = _OFFLOADING[said]
        answers.append(said)
    # The strongest of the answers: values are ordered from MUST_SAVE on.
    return CheckpointPolicy(min(answer.value for answer in answers))


def mark(graph: fx.Graph) -> None:
    """Give every node of the joint graph the number of the outermost region it is in, as ``region``.

    Raises:
        CaptureError: a region draws random numbers, and others when it is recomputed.
    """
    for node in graph.nodes:
        redrawn = (node.meta.get("custom") or {}).get(REDRAWN) and not is_backward(node) and info(node).saved is None
        if redrawn and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                "a function under torch.utils.checkpoint(preserve_rng_state=False) draws random numbers "
                f"({node.target}, {user_line(node)}): torch draws others when it recomputes the function, so that "
                "gradients are not of the loss; leave preserve_rng_state=False out"
            )
        # The outermost region: what is inside it is recomputed with it.
        if path := _path(node):
            set_info(node, replace(info(node), region=path[0]))


def pinned(sources: Mapping[fx.Node, Sequence[tuple[fx.Node, int]]]) -> dict[fx.Node, str]:
    """What the model's regions decide for operators of the forward pass.

    `SAVED`: a policy must save the result, so it is not recomputed. `RECOMPUTED`: the result is not saved, as nothing
    but the region's own backward pass reads it. What leaves a region for the backward pass of others, or for another
    region that is recomputed, is saved by torch, too, and is left to the search, as is what a policy prefers to save.

    Args:
        sources: the values that each operator reads, in program order.
    """
    if all(info(node).region is None for node in sources):
        return {}
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, values in sources.items():
        for source, _ in values:
            users[source].append(node)
    readers: dict[fx.Node, set[int | None]] = {}
    for node in reversed(list(sources)):
        found = readers[node] = set()
        for user in users[node]:
            region = info(user).region
            if is_backward(user) or region is not None:
                found.add(region)
            # Who reads a view reads this.
            if not is_backward(user) and _is_view(user):
                found |= readers[user]
    pins: dict[fx.Node, str] = {}
    for node in sources:
        region, saved = info(node).region, info(node).saved
        if region is None or is_backward(node):
            continue
        if saved is CheckpointPolicy.MUST_SAVE:
            pins[node] = SAVED
        # What a policy prefers to save (``saved``) is left to the search.
        elif saved is None and readers[node] <= {region}:
            pins[node] = RECOMPUTED
    return pins


def _is_view(node: fx.Node) -> bool:
    """Whether the result is a view of its argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
