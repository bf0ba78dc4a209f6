"""Signs: a tensor is exchanged as one bit for each number and a scale for each piece, in two stages.

A piece x of n numbers is sent as the signs of x (that of 0 is +) and its scale ``s = sum |x| / n``; what arrives is s
times the signs, which is never further from x than 0 is. Each tensor has as many pieces as there are workers::

    u = x + e                         e: the worker's error, 0 at the beginning
    piece i of C(u) goes to worker i, as signs and scales;                 e = u - C(u)
    worker i:  y = mean over the workers of piece i of C(u) + f            f: this worker's error as a server
    C(y) goes to all workers;                                              f = y - C(y)

Numbers that are to stay as they are (`Signs.still`) have no part in a scale, arrive as 0, and leave no error.

H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021,
algorithm 1; the scale is that of S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from autopar.costs.outer_exchange import piece_of
from autopar.module.low_communication.compressed.collectives import GATHER, SCATTER, Exchange, Request


class Signs:
    """Of one worker, or of one rank's shards of it.

    Attributes:
        errors: what has not been sent, by name.
        served: the errors of this worker's piece as a server, by name; 0 behind its end.
        still: of some tensors, which of their numbers arrive as 0: the same on all workers.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], index: int, workers: int) -> None:
        """Begin without errors.

        Args:
            tensors: of the work's dtype, one for each that is exchanged.
            index: of this worker.
            workers: how many there are.
        """
        self.errors = {n: torch.zeros_like(t) for n, t in tensors.items()}
        self.served = {n: t.new_zeros(piece_of(t.numel(), workers)) for n, t in tensors.items()}
        self.still: dict[str, torch.Tensor] = {}
        self._index, self._workers = index, workers

    def exchange(self, tensors: Mapping[str, torch.Tensor]) -> Exchange[dict[str, torch.Tensor]]:
        """What takes the place of the mean of each."""
        if not tensors:
            return {}
        bits, scales = [], []
        moves = {n: self._moves(n, t) for n, t in tensors.items()}
        for name, tensor in tensors.items():
            rows = torch.where(moves[name], pieces(tensor + self.errors[name], self._workers), 0.0)
            packed, scale, arrives = encoded(rows, moves[name])
            self.errors[name] = whole(rows - arrives, tensor.shape)
            bits.append(packed)
            scales.append(scale)
        received = yield Request(SCATTER, _payload(bits, scales))
        answers, answer_scales = [], []
        for name, arrived in self._decoded(received, tensors):
            own = moves[name][self._index : self._index + 1]
            row = torch.where(own, arrived.sum(0, keepdim=True) / self._workers + self.served[name], 0.0)
            packed, scale, arrives = encoded(row, own)
            self.served[name] = (row - arrives)[0]
            answers.append(packed)
            answer_scales.append(scale)
        received = yield Request(GATHER, _payload(answers, answer_scales)[0])
        found = self._decoded(received, tensors)
        return {n: whole(torch.where(moves[n], rows, 0.0), tensors[n].shape) for n, rows in found}

    def _moves(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Which numbers of each piece are of the tensor, and none of those that stay."""
        still = self.still.get(name)
        return pieces(torch.ones_like(tensor, dtype=torch.bool) if still is None else ~still, self._workers)

    def _decoded(self, received: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Of each tensor the pieces that rows of bytes stand for, [workers, length], by name."""
        lengths = [piece_of(t.numel(), self._workers) for t in tensors.values()]
        dtype = next(iter(tensors.values())).dtype
        *parts, scales = torch.split(received, [*(-(-n // 8) for n in lengths), len(lengths) * dtype.itemsize], 1)
        by_tensor = scales.contiguous().view(-1).clone().view(dtype).view(len(received), -1).unbind(1)
        rows = [decoded(p, s, n) for p, s, n in zip(parts, by_tensor, lengths, strict=True)]
        return list(zip(tensors, rows, strict=True))


def pieces(tensor: torch.Tensor, workers: int) -> torch.Tensor:
    """A row of numbers for each worker, padded with zeros, or False."""
    flat = tensor.reshape(-1)
    length = piece_of(flat.numel(), workers)
    return pad(flat, (0, workers * length - flat.numel())).view(workers, length)


def whole(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What `pieces` has cut."""
    return rows.reshape(-1)[: shape.numel()].view(shape)


def encoded(rows: torch.Tensor, moves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed signs, scales, and the numbers that these stand for.

    Args:
        rows: a piece each, zeros where nothing moves.
        moves: where something does.
    """
    scales = rows.abs().sum(1) / moves.sum(1).clamp(min=1)
    signs = rows >= 0
    arrives = torch.where(moves, torch.where(signs, scales[:, None], -scales[:, None]), 0.0)
    bits = pad(signs.to(torch.uint8), (0, -rows.shape[1] % 8)).view(len(rows), -1, 8)
    return (bits << _SHIFTS.to(rows.device)).sum(2, dtype=torch.uint8), scales, arrives


def decoded(packed: torch.Tensor, scales: torch.Tensor, length: int) -> torch.Tensor:
    """The numbers that packed signs and scales stand for, a row each; what is behind a piece's end is none of it."""
    bits = (packed[:, :, None] >> _SHIFTS.to(packed.device)) & 1
    signs = bits.view(len(packed), -1)[:, :length] == 1
    return torch.where(signs, scales[:, None], -scales[:, None])


_SHIFTS = torch.arange(8, dtype=torch.uint8)


def _payload(bits: list[torch.Tensor], scales: list[torch.Tensor]) -> torch.Tensor:
    """A row of bytes for each row: signs of all tensors, then their scales."""
    return torch.cat([*bits, torch.stack(scales, 1).contiguous().view(torch.uint8)], 1).contiguous()
