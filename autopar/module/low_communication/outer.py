"""The outer optimizer: what all workers agree on, and how the mean of their steps moves it.

For fragment p, whose parameters are ``x`` on a worker, ``a`` being what the workers last agreed on::

    d = mean over the workers of (a - x)              the pseudo-gradient
    m = momentum * m + d
    a = a - outer_lr * (d + momentum * m)             Nesterov; without it a - outer_lr * m
    x = mix * x + (1 - mix) * a

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, with Nesterov's momentum
as `torch.optim.SGD` has it. With ``outer_lr`` 1 and no momentum ``a`` is the mean of the parameters: local SGD.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.costs.outer_exchange import BLOCK
from autopar.errors import AutoparError
from autopar.module.low_communication.settings import Settings


class OuterState:
    """Of one worker, or of one rank's shards of it.

    Attributes:
        anchor: what the workers last agreed on, by name.
        momentum: of the outer optimizer, by name.
        fragments: names of the parameters of each.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        device: torch.device,
        cuts: Mapping[str, Hashable] | None = None,
    ) -> None:
        """Begin where the parameters are now.

        Args:
            tensors: a worker's parameters, or its shards.
            fragments: names of the parameters of each.
            device: where the state is.
            cuts: how each is cut over a worker's devices, where numbers are sent in blocks: those of a parameter that
                several devices have are in no block with numbers that these have not in common.
        """
        self.fragments, self._device = fragments, device
        self.anchor = {name: self._copied(t) for name, t in tensors.items()}
        self.momentum = {name: torch.zeros_like(t) for name, t in self.anchor.items()}
        self._places = [_places({n: self.anchor[n].numel() for n in names}, cuts or {}) for names in fragments]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        # Steps of a round are small beside the parameters: 16 bits would lose them.
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return tensor.detach().to(self._device, dtype, copy=True, memory_format=torch.contiguous_format)

    def difference(self, fragment: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """How far this worker has gone since the last exchange: of one dim, of all parameters of a fragment."""
        names = self.fragments[fragment]
        return self._flat(fragment, {name: self.anchor[name] - self._copied(tensors[name]) for name in names})

    def blank(self, fragment: int) -> torch.Tensor:
        """The difference of a worker that has not gone anywhere."""
        return self._flat(fragment, {})

    def _flat(self, fragment: int, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        places, length = self._places[fragment]
        # One dtype for all: the widest is exact for the others.
        wide = any(self.anchor[name].dtype == torch.float64 for name in self.fragments[fragment])
        found = torch.zeros(length, dtype=torch.float64 if wide else torch.float32, device=self._device)
        for name, tensor in named.items():
            found[places[name] : places[name] + tensor.numel()] = tensor.flatten()
        return found

    def _parts(self, fragment: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those of its parameters."""
        anchors = {name: self.anchor[name] for name in self.fragments[fragment]}
        places, _ = self._places[fragment]
        return {n: flat[places[n] : places[n] + a.numel()].view_as(a) for n, a in anchors.items()}

    def by_name(self, flat: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of fragments as those of their parameters, of all of these: zeros where there is none."""
        found = {name: torch.zeros_like(t) for name, t in self.anchor.items()}
        for fragment, tensor in flat.items():
            found |= self._parts(fragment, tensor)
        return found

    def by_fragment(self, named: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What `by_name` was given, of all fragments."""
        return {f: self._flat(f, {n: named[n] for n in names}) for f, names in enumerate(self.fragments)}

    def apply(
        self, fragment: int, tensors: Mapping[str, torch.Tensor], mean: torch.Tensor, settings: Settings, mix: float
    ) -> None:
        """Move the anchor by the mean of all workers' differences, and this worker's parameters to it, in place."""
        self.advance(fragment, mean, settings)
        self.pull(fragment, tensors, mix)

    @torch.no_grad()
    def advance(self, fragment: int, mean: torch.Tensor, settings: Settings) -> None:
        """Move the anchor by the mean of all workers' differences."""
        for name, part in self._parts(fragment, mean).items():
            anchor, momentum = self.anchor[name], self.momentum[name]
            step = part.to(anchor.dtype)
            if settings.outer_momentum:
                momentum.mul_(settings.outer_momentum).add_(step)
                step = step.add(momentum, alpha=settings.outer_momentum) if settings.nesterov else momentum
            anchor.sub_(step, alpha=settings.outer_lr)

    @torch.no_grad()
    def pull(self, fragment: int, tensors: Mapping[str, torch.Tensor], mix: float) -> None:
        """Move this worker's parameters to the anchor, in place."""
        for name in self.fragments[fragment]:
            anchor, own = self.anchor[name], tensors[name]
            own.copy_(anchor if not mix else anchor + mix * (self._copied(own) - anchor))


def _places(sizes: Mapping[str, int], cuts: Mapping[str, Hashable]) -> tuple[dict[str, int], int]:
    """Where the numbers of each parameter begin in a flat tensor, and its length."""
    places: dict[str, int] = {}
    length = 0
    for cut in dict.fromkeys(cuts.get(name) for name in sizes):
        for name, size in sizes.items():
            if cuts.get(name) == cut:
                places[name], length = length, length + size
        if len(set(cuts.values())) > 1:  # the next begins a block
            length += -length % BLOCK
    return places, length


def cuts_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    """How each is cut over a worker's devices: along which axes each device has the same of it."""
    return {
        name: tuple(p.is_replicate() for p in parameter.placements) if isinstance(parameter, DTensor) else ()
        for name, parameter in parameters.items()
    }


def require_exchangeable(tensors: Mapping[str, torch.Tensor], bits: int | None) -> None:
    """Refuse parameters that cannot be exchanged as asked.

    Raises:
        ValueError: fewer bits for numbers of double precision.
        AutoparError: a parameter is no real floating tensor.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise AutoparError(
                f"parameter {name!r} is {tensor.dtype}: only real floating parameters are exchanged; freeze it"
            )
        if bits is not None and tensor.dtype == torch.float64:
            raise ValueError(
                f"bits={bits}: parameter {name!r} is float64, and numbers of {bits} bits are added up in float32; "
                "leave bits= out, or train in float32"
            )
