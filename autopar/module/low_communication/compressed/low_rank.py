"""PowerSGD: a matrix is exchanged as two thin factors, and what that leaves out is added in the next step.

For a matrix, G of a worker being its gradient as rows x columns, and Q [columns, rank] the same on all workers::

    M = G + e                       e: the worker's error, 0 at the beginning
    P = orthogonal basis of the mean over the workers of M Q         [rows, rank], that of the first worker
    Q = mean over the workers of M^T P                               [columns, rank]
    P Q^T takes the place of the mean gradient;  e = M - P (M^T P)^T

Q is where the next step begins; a column of zeros begins anew. P is sent, not computed by each: another machine's
library may give a column with the other sign, and of dependent columns another basis, so that workers would drift
apart. T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization", 2019, algorithms 1 and 2: e is what the worker's
own M lacks. (Their code subtracts the mean P Q^T, whose errors have the same mean, so that all steps are the same, but
grow with the distance between workers.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from autopar.costs.outer_exchange import is_low_rank, matrix_of
from autopar.module.low_communication.compressed.collectives import REDUCE, TELL, Exchange, Request, joined, parted


class LowRank:
    """Of one worker, or of one rank's shards of it.

    Attributes:
        errors: what has not been sent, of each matrix that is compressed, by name.
        factors: Q of each.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, seed: int) -> None:
        """Begin without errors.

        Args:
            tensors: of the work's dtype, one for each gradient.
            rank: columns of the factors.
            seed: of the first Q; with the name, so that ranks at one place in their workers begin alike.
        """
        self.errors = {n: torch.zeros_like(t) for n, t in tensors.items() if is_low_rank(tuple(t.shape), rank)}
        self.factors: dict[str, torch.Tensor] = {}
        for name, error in self.errors.items():
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            first = torch.randn(matrix_of(tuple(error.shape))[1], rank, generator=generator, dtype=torch.float64)
            self.factors[name] = first.to(error)
        self._first = dict(self.factors)

    def exchange(self, gradients: Mapping[str, torch.Tensor]) -> Exchange[dict[str, torch.Tensor]]:
        """What takes the place of the mean of each gradient."""
        low = {n: _matrix(g + self.errors[n]) for n, g in gradients.items() if n in self.errors}
        sent = {n: m @ self.factors[n] if (m := low.get(n)) is not None else g for n, g in gradients.items()}
        if not sent:
            return {}
        mean = yield Request(REDUCE, joined([*sent.values()]))
        found = parted(mean, {n: t.shape for n, t in sent.items()})
        if not low:
            return found
        bases = {n: torch.linalg.qr(found[n])[0] for n in low}
        told = yield Request(TELL, joined([*bases.values()]))
        bases = parted(told, {n: t.shape for n, t in bases.items()})
        own = {n: m.T @ bases[n] for n, m in low.items()}
        mean = yield Request(REDUCE, joined([*own.values()]))
        for name, factor in parted(mean, {n: t.shape for n, t in own.items()}).items():
            shape = gradients[name].shape
            found[name] = (bases[name] @ factor.T).view(shape)
            self.errors[name] = (low[name] - bases[name] @ own[name].T).view(shape)
            # A column of zeros, of a gradient of zeros, would find nothing ever again.
            self.factors[name] = torch.where((factor == 0).all(0), self._first[name], factor)
        return found


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(matrix_of(tuple(tensor.shape)))


def require_low_rank(parameters: Mapping[str, torch.Tensor], rank: int) -> None:
    """Refuse a rank with which nothing is compressed.

    Raises:
        ValueError: factors of so many columns make no parameter smaller.
    """
    if not any(is_low_rank(tuple(p.shape), rank) for p in parameters.values()):
        raise ValueError(
            f"rank={rank}: factors of so many columns are smaller than no matrix of the model, so that all gradients "
            "would be averaged as they are; take a lower one, or the role 'data' instead"
        )
