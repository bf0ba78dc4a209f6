"""Top-k: of each tensor the numbers that are largest by magnitude are exchanged, the others are added in the next step.

    M = G + e                                     e: the worker's error, 0 at the beginning
    C(M) = the ceil(share * numbers) largest of M by magnitude, else 0
    the mean over the workers of C(M) takes the place of the mean gradient;  e = M - C(M)

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", 2018. Values and indices are all-gathered, and
added up in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.costs.outer_exchange import INDEX, largest_of
from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import GATHER, Exchange, Request


class Largest:
    """Of one worker, or of one rank's shards of it.

    Attributes:
        errors: what has not been sent, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], share: float) -> None:
        """Begin without errors.

        Args:
            tensors: of the work's dtype, one for each gradient.
            share: of the numbers that are sent.

        Raises:
            AutoparError: a tensor has more numbers than an index can count.
        """
        for name, tensor in tensors.items():
            if tensor.numel() >= 2**31:
                raise AutoparError(
                    f"the shard of {name!r} has {tensor.numel()} numbers, and indices are 32 bits: split it"
                )
        self.errors = {n: torch.zeros_like(t) for n, t in tensors.items()}
        self._share = share

    def exchange(self, gradients: Mapping[str, torch.Tensor]) -> Exchange[dict[str, torch.Tensor]]:
        """What takes the place of the mean of each gradient."""
        if not gradients:
            return {}
        values, indices = [], []
        for name, gradient in gradients.items():
            whole = (gradient + self.errors[name]).reshape(-1)
            chosen = whole.abs().topk(largest_of(whole.numel(), self._share), sorted=False).indices
            values.append(whole[chosen])
            indices.append(chosen.to(torch.int32))
            self.errors[name] = whole.index_fill(0, chosen, 0).view(gradient.shape)
        payload = torch.cat([torch.cat(values).view(torch.uint8), torch.cat(indices).view(torch.uint8)])
        gathered = yield Request(GATHER, payload)
        count = sum(v.numel() for v in values)
        found = {n: g.new_zeros(g.numel()) for n, g in gradients.items()}
        for row in gathered:
            sent, places = row.tensor_split([row.numel() - INDEX * count])
            # Copies: bytes of a view need not begin where a number may.
            sent, places = sent.clone().view(values[0].dtype), places.clone().view(torch.int32)
            parts = zip(sent.split([v.numel() for v in values]), places.split([v.numel() for v in values]), strict=True)
            for total, (part, place) in zip(found.values(), parts, strict=True):
                total.index_add_(0, place, part)
        return {n: (found[n] / len(gathered)).view(g.shape) for n, g in gradients.items()}
