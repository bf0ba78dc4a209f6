"""Parameters that no graph has read: the first that reads them decides their layouts, not the first of all.

An adapter that is switched off in the first call, or a second network of the model, is known to that call by its shape
alone. Its layout there is a guess, which a graph that reads it may be unable to express.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.ir.layout import Layout, TensorType, replicated
from autopar.runtime.dtensor import from_local, full_tensor, plain_type, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.optimizer_layouts import lay_out_states_of
from autopar.runtime.state.parameters import ParameterLayouts, lay_out, slice_replicated
from autopar.runtime.state.stage_tensor import StageTensor
from autopar.specialize import Specialization


class UnreadParameters:
    """Which they are, and where the others are that have been.

    Attributes:
        read: names of parameters that some graph reads.
        moved: types and layouts of those that were laid out anew when a graph first read them.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.moved: dict[str, tuple[TensorType, Layout]] = {}

    def names(self, model: nn.Module, context: MeshContext) -> frozenset[str]:
        """Those whose layouts are free."""
        if context.mesh is None or context.workers is not None:  # workers exchange what they have laid out
            return frozenset()
        named: dict[str, torch.Tensor] = dict(model.named_parameters())
        return frozenset(n for n, p in named.items() if n not in self.read and _may_move(p))

    def read_by(self, found: Specialization, model: nn.Module) -> None:
        """Lay out what a new graph is the first to read as it has it; a collective call where that is another layout.

        Args:
            found: the graph.
            model: on the mesh.
        """
        placeholders = zip(found.program.placeholders, found.program.inputs, strict=True)
        reads = {i.name for n, i in placeholders if i.kind == "parameter" and n.users} - self.read
        free, named = self.names(model, found.context), dict(model.named_parameters())
        layouts: ParameterLayouts = found.step.types.parameters
        moved = {
            n: layouts[n] for n in sorted(reads & free & layouts.keys())
            if tuple(named[n].placements) != to_placements(*layouts[n])  # type: ignore[attr-defined]
        }  # fmt: skip
        self.read |= reads
        for name, known in moved.items():
            _move(named[name], *known, found.context)
        if moved:
            lay_out_states_of([named[n] for n in moved])
        self.moved |= moved


def _may_move(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not isinstance(parameter, StageTensor)


def _move(parameter: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext) -> None:
    """Give a parameter, and its gradient, another layout, in place."""
    gradient, whole = parameter.grad, full_tensor(parameter)
    parameter.grad = None  # its placements would not be the parameter's
    lay_out(parameter, whole, plain_type(whole.shape, whole.dtype), replicated(len(context.axes)), context)
    if gradient is not None:
        everywhere = (Replicate(),) * len(context.axes)
        parameter.grad = from_local(full_tensor(gradient), context, gradient.shape, everywhere)
    slice_replicated(parameter, type_, layout, context)
