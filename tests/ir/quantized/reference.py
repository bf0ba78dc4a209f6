"""Sharded training whose messages are in few bits, written down in numpy and plain PyTorch: no autopar.

Every device has its rows of the batch. Weights are what the quantized shards of all devices stand for, gradients the
sums of what the quantized terms of all devices stand for, shard by shard; the optimizer updates whole numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

Array = np.ndarray
BLOCK = 256


def sent(numbers: Array, bits: int) -> Array:
    """What numbers arrive as, in float32: blocks of 256 with a scale each."""
    flat = numbers.astype(np.float32).ravel()
    blocks = np.zeros((-(-flat.size // BLOCK), BLOCK), np.float32)
    blocks.ravel()[: flat.size] = flat
    largest = np.float32(2 ** (bits - 1) - 1)
    scales = np.abs(blocks).max(1, keepdims=True) / largest
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scales > 0, np.rint(blocks / scales), 0).clip(-largest, largest).astype(np.float32)
    return (codes * scales).ravel()[: flat.size].reshape(numbers.shape)


def is_smaller(count: int, itemsize: int, bits: int) -> bool:
    """Whether so many numbers take fewer bytes as codes of whole blocks and scales."""
    return -(-count // BLOCK) * (BLOCK * bits // 8 + 4) < count * itemsize


class Sharded:
    """A model in float64 on some devices.

    Args:
        model: the whole one.
        optimizer: of its parameters.
        dims: along which each parameter is cut; None: it is not.
        parts: devices along the axis whose messages are in few bits.
        inner: devices along another axis inside of it, whose messages are whole.
        weights: bits of gathers, 0 for whole numbers, and `gradients` of reductions.
        gradients: see there.
        itemsize: bytes of a number as it would be sent whole.
        inner_dims: along which each parameter is cut within its block along the first axis; None: it is not.
        inner_gradients: bits of reductions along that axis.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        dims: Mapping[str, int | None],
        parts: int,
        inner: int = 1,
        weights: int = 0,
        gradients: int = 0,
        itemsize: int = 8,
        inner_dims: Mapping[str, int | None] | None = None,
        inner_gradients: int = 0,
    ) -> None:
        self.inner_dims, self.inner_gradients = inner_dims or {}, inner_gradients
        self.model, self.dims, self.parts, self.inner = model, dims, parts, inner
        self.optimizer, self.itemsize = optimizer(model), itemsize
        self.weights, self.gradients = weights, gradients
        self.reached: set[str] = set()

    def gathered(self) -> nn.Module:
        """The model that all devices compute with."""
        found = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                dim = self.dims[name]
                if dim is None:
                    continue
                # What is gathered along the other axis comes first: it is inside of this one's blocks.
                shards = np.split(parameter.numpy(), self.parts, dim)
                if self.weights and is_smaller(shards[0].size, self.itemsize, self.weights):
                    shards = [sent(s, self.weights).astype(np.float64) for s in shards]
                    self.reached.add("weights")
                parameter.copy_(torch.from_numpy(np.concatenate(shards, dim)))
        return found

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]], loss: Callable[..., torch.Tensor]) -> float:
        """A step on the rows of each device, outer axis first; the mean loss."""
        model = self.gathered()
        terms: list[dict[str, Array]] = []
        total = 0.0
        for batch in batches:
            model.zero_grad()
            own = loss(model, batch) / len(batches)
            own.backward()
            total += float(own.detach())
            terms.append({n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None})
        for name, parameter in self.model.named_parameters():
            if name in terms[0]:
                parameter.grad = torch.from_numpy(self._reduced(name, [t[name] for t in terms]))
        self.optimizer.step()
        return total

    def _reduced(self, name: str, terms: list[Array]) -> Array:
        dim = self.dims[name]
        if dim is None:
            return np.sum(terms, 0)
        inside = self.inner_dims.get(name)
        if inside is None:
            # Along the axis of few bits first, for each place along the other one.
            return np.sum([self._scattered(terms[i :: self.inner], dim) for i in range(self.inner)], 0)
        # Within the node first: what is sent between nodes is one device's part of each node's sum.
        nodes = [self._within(terms[at : at + self.inner], dim, inside) for at in range(0, len(terms), self.inner)]
        parts = [[np.split(part, self.inner, inside) for part in np.split(g, self.parts, dim)] for g in nodes]
        found = [
            np.concatenate([self._added([own[i][j] for own in parts]) for j in range(self.inner)], inside)
            for i in range(self.parts)
        ]
        return np.concatenate(found, dim)

    def _within(self, terms: list[Array], dim: int, inside: int) -> Array:
        """The sum over a node; what a device sends another is its part of the block of each node, as one message."""
        if not self.inner_gradients:
            return np.sum(terms, 0)
        assert dim == inside

        def message(term: Array, place: int) -> Array:
            blocks = np.split(term, self.parts, dim)
            return np.concatenate([np.split(block, self.inner, dim)[place] for block in blocks], dim)

        sums = [
            np.split(self._added([message(t, place) for t in terms], self.inner_gradients), self.parts, dim)
            for place in range(self.inner)
        ]
        return np.concatenate([np.concatenate([own[i] for own in sums], dim) for i in range(self.parts)], dim)

    def _scattered(self, terms: list[Array], dim: int) -> Array:
        shards = [np.split(t, self.parts, dim) for t in terms]
        return np.concatenate([self._added([own[owner] for own in shards]) for owner in range(self.parts)], dim)

    def _added(self, terms: list[Array], bits: int | None = None) -> Array:
        """What the owner of a shard makes of all terms of it."""
        bits = self.gradients if bits is None else bits
        if not (bits and is_smaller(terms[0].size, self.itemsize, bits)):
            return np.sum(terms, 0)
        self.reached.add("gradients")
        total = np.zeros_like(terms[0], dtype=np.float32)
        for own in terms:
            total = total + sent(own, bits)
        return total.astype(np.float64)
