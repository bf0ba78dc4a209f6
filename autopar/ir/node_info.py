"""`NodeInfo` and `GraphInfo`: what passes know of a node and of a graph, as one frozen value each.

Torch keeps its own notes in ``meta`` ("val", "partitioner_tag", "nn_module_stack", ...); ours are one entry beside
them. The values are frozen because copies of a graph share them: ``copy.meta = dict(node.meta)`` is a complete copy.
Change one with `dataclasses.replace`, whose keywords mypy checks::

    set_info(node, replace(info(node), stage=2))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.layout import Layout, TensorType
from autopar.ir.ops.collectives import Collective

_KEY = "autopar"
"""The only entry of ``meta`` that is ours."""


class ModuleOutput(NamedTuple):
    """Of a tensor that a module returns.

    Attributes:
        module: its name.
        call: of the module, where it is called several times.
        number: of the tensor, among all that the call returns.
        shape: in which the module returns it, where the node has the same elements in another one.
    """

    module: str
    call: str
    number: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NodeInfo:
    """What passes know of a node; the default is that nothing is known.

    Capture and canonicalization set the first group, `annotate_layouts` the second from the plan, and the passes named
    set the third.

    Attributes:
        module_path: qualified name of the innermost module; None until `autopar.ir.graph.module_path` is asked for it.
        module_outputs: the module outputs that the node makes, see `autopar.ir.module_outputs`.
        region: number of the outermost checkpointing region that the node is in.
        saved: what a region's policy says of the node's result (a ``CheckpointPolicy``).
        reduce_dtype: in which terms of a gradient are added up, where it is not their own.
        secondary: a parameter's copy that the backward pass reads (`copy_for_backward`).

        types: global type of each output; None for an output that does not exist. Empty for getitem, whose producer
            speaks for it, and for nodes inside a move or a lowered operator.
        layouts: in which each output is made, in the order of ``types``.
        consumer_layouts: by the number of an output, the layout that it is brought to first for all its users.
        forced: numbers of the outputs that all users take in, or from, their consumer layout.
        operator: the `autopar.sharding.dims.Operator`; None for what passes made and for what has been lowered.
        strategy: names of the operator's strategies, one for each mesh axis.
        input_layouts: in which the node takes its tensor arguments; of the output node, those of the program's outputs.
        input_types: of the output node, the global types of the program's outputs.
        hoisted: runs once a step, before the first microbatch.
        hoisted_outputs: numbers of the outputs that are moved to their consumer layout once a step.
        offloaded: the value is in host memory from the forward to the backward pass.
        consumer_layout_offloaded: its form in the consumer layout is.

        program_node: name of the node of the program that `run_passes` was given; None for what passes made.
        recompute_of: name of the forward node that a node of the backward pass recomputes or re-gathers.
        takes_as_made: takes its argument in the layout in which it is made, although a consumer layout is forced:
            moves for the backward pass start from there (`insert_recompute`).
        moved_value: of a node of a move, the name of the value that is moved; empty where it has none
            (`MoveEmitter`).
        collective: what a communication node does, for the census and the memory (`MoveEmitter`, `lower_operators`).
        internal: inside a move or a lowered operator: its tensors have no layout.
        open_size: the tensor has a size that only the data give, and ``val`` a guess (`localize_shapes`); None: nothing
            was noted.
        added: of a product with a bias, what was known of its addition (`add_bias_in_product`).
        stage: number of the pipeline stage that runs the node (`assign_stages`); None without a pipeline.
    """

    module_path: str | None = None
    module_outputs: tuple[ModuleOutput, ...] = ()
    region: int | None = None
    saved: Any = None
    reduce_dtype: torch.dtype | None = None
    secondary: bool = False

    types: tuple[TensorType | None, ...] = ()
    layouts: tuple[Layout | None, ...] = ()
    consumer_layouts: Mapping[int, Layout] = field(default_factory=dict)
    forced: frozenset[int] = frozenset()
    operator: Any = None  # its class is above this package
    strategy: tuple[str, ...] = ()
    input_layouts: tuple[Layout, ...] = ()
    input_types: tuple[TensorType | None, ...] = ()
    hoisted: bool = False
    hoisted_outputs: tuple[int, ...] = ()
    offloaded: bool = False
    consumer_layout_offloaded: bool = False

    program_node: str | None = None
    recompute_of: str | None = None
    takes_as_made: bool = False
    moved_value: str | None = None
    collective: Collective | None = None
    internal: bool = False
    open_size: bool | None = None
    added: NodeInfo | None = None
    stage: int | None = None

    def type(self, output: int = 0) -> TensorType:
        """The global type of an output that exists."""
        found = self.types[output]
        assert found is not None
        return found

    def layout(self, output: int = 0) -> Layout:
        """The layout of an output that exists."""
        found = self.layouts[output]
        assert found is not None
        return found

    def only(self, output: int) -> NodeInfo:
        """The same of a node with the one output alone, that has no consumer layout."""
        return replace(
            self,
            types=(self.types[output],),
            layouts=(self.layouts[output],),
            consumer_layouts={},
            internal=False,
        )

    def without_plan(self) -> NodeInfo:
        """What holds under any plan: what passes know of a mesh axis is of the plan that they followed."""
        return replace(
            self, types=(), layouts=(), consumer_layouts={}, forced=frozenset(), strategy=(), operator=None,
            input_layouts=(), input_types=(), collective=None, internal=False,
        )  # fmt: skip

    def inherit(self, source: NodeInfo) -> NodeInfo:
        """The same inside what ``source`` became: in its region, its stage, and as often in a step."""
        return replace(
            self,
            # Where the source knows nothing, what the node knows itself stays.
            region=self.region if source.region is None else source.region,
            saved=self.saved if source.saved is None else source.saved,
            stage=self.stage if source.stage is None else source.stage,
            hoisted=self.hoisted or source.hoisted,
            internal=True,
        )


@dataclass(frozen=True)
class ChunkedMove:
    """What a step takes less as a product runs in chunks beside the collective of its rows, by the cost model.

    Attributes:
        value: name of the value that is moved.
        axis: along which.
        backward: whether it is moved in the backward pass.
        seconds: in a step.
        dropped: collectives that chunks need no more, such as exchanges that make another dim the first.
        times: that a step makes the move.
    """

    value: str
    axis: str
    backward: bool
    seconds: float
    dropped: tuple[Collective, ...]
    times: int


@dataclass(frozen=True)
class GraphInfo:
    """What passes know of a graph; the default is that nothing is known.

    Attributes:
        invariants: names of what `autopar.ir.check.check` may expect by now: ``layouts``, ``placed``, ``local``.
        axes: sizes of the mesh axes, by name (`annotate_layouts`).
        recompute: the `autopar.memory.recompute.Recompute` that `annotate_layouts` leaves for `insert_recompute`; None
            before the one and after the other.
        offloaded_states: parameters whose optimizer state is in host memory.
        chunked: what chunks of products hide, move by move (`chunk_collectives`).
        storages_known: ``val`` shows which tensors share memory (`insert_contiguous`); whoever changes the graph
            or relies on it unsets it.
    """

    invariants: tuple[str, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    recompute: Any = None  # its class is above this package
    offloaded_states: frozenset[str] = frozenset()
    chunked: tuple[ChunkedMove, ...] = ()
    storages_known: bool = False


# Shared defaults: most nodes of a captured graph have no entry of their own.
_NOTHING, _NOTHING_OF_GRAPH = NodeInfo(), GraphInfo()


def info(node: fx.Node) -> NodeInfo:
    """What passes know of a node."""
    # No entry is written by reading: a node's meta stays what torch made it.
    found: NodeInfo = node.meta.get(_KEY, _NOTHING)
    return found


def set_info(node: fx.Node, value: NodeInfo) -> None:
    """Write what is known of a node."""
    node.meta[_KEY] = value


def graph_info(graph: fx.GraphModule) -> GraphInfo:
    """What passes know of a graph."""
    found: GraphInfo = graph.meta.get(_KEY, _NOTHING_OF_GRAPH)
    return found


def set_graph_info(graph: fx.GraphModule, value: GraphInfo) -> None:
    """Write what is known of a graph."""
    graph.meta[_KEY] = value


def torch_meta(node: fx.Node, *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Torch's own notes of a node, without those named."""
    # Ours is left to the caller, who decides what a copy of the node knows.
    left_out = {_KEY, *but}
    return {k: v for k, v in node.meta.items() if k not in left_out}
