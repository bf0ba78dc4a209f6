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

from collections.abc import Mapping, Sequence

import torch

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
        self, tensors: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]], device: torch.device
    ) -> None:
        """Begin where the parameters are now.

        Args:
            tensors: a worker's parameters, or its shards.
            fragments: names of the parameters of each.
            device: where the state is.
        """
        self.fragments, self._device = fragments, device
        self.anchor = {name: self._copied(t) for name, t in tensors.items()}
        self.momentum = {name: torch.zeros_like(t) for name, t in self.anchor.items()}

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        # Steps of a round are small beside the parameters: 16 bits would lose them.
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return tensor.detach().to(self._device, dtype, copy=True, memory_format=torch.contiguous_format)

    def difference(self, fragment: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """How far this worker has gone since the last exchange: of one dim, of all parameters of a fragment."""
        names = self.fragments[fragment]
        # One dtype for all: the widest is exact for the others.
        wide = any(self.anchor[name].dtype == torch.float64 for name in names)
        parts = [(self.anchor[name] - self._copied(tensors[name])).flatten() for name in names]
        return torch.cat([p.to(torch.float64 if wide else torch.float32) for p in parts])

    def blank(self, fragment: int) -> torch.Tensor:
        """The difference of a worker that has not gone anywhere."""
        sizes = [self.anchor[name] for name in self.fragments[fragment]]
        wide = any(t.dtype == torch.float64 for t in sizes)
        count = sum(t.numel() for t in sizes)
        return torch.zeros(count, dtype=torch.float64 if wide else torch.float32, device=self._device)

    def by_name(self, flat: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of fragments as those of their parameters, of all of these: zeros where there is none."""
        found = {name: torch.zeros_like(t) for name, t in self.anchor.items()}
        for fragment, tensor in flat.items():
            names = self.fragments[fragment]
            parts = torch.split(tensor, [self.anchor[n].numel() for n in names])
            found |= {n: p.view_as(self.anchor[n]) for n, p in zip(names, parts, strict=True)}
        return found

    def by_fragment(self, named: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What `by_name` was given, of all fragments."""
        return {f: torch.cat([named[n].flatten() for n in names]) for f, names in enumerate(self.fragments)}

    def apply(
        self, fragment: int, tensors: Mapping[str, torch.Tensor], mean: torch.Tensor, settings: Settings, mix: float
    ) -> None:
        """Move the anchor by the mean of all workers' differences, and this worker's parameters to it, in place."""
        self.advance(fragment, mean, settings)
        self.pull(fragment, tensors, mix)

    @torch.no_grad()
    def advance(self, fragment: int, mean: torch.Tensor, settings: Settings) -> None:
        """Move the anchor by the mean of all workers' differences."""
        names = self.fragments[fragment]
        parts = torch.split(mean, [self.anchor[n].numel() for n in names])
        for name, part in zip(names, parts, strict=True):
            anchor, momentum = self.anchor[name], self.momentum[name]
            step = part.view_as(anchor).to(anchor.dtype)
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
