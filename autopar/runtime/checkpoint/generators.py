"""States of this process's random generators, as tensors: torch's, Python's and numpy's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch

from autopar.ir.ops.random import generator_states, restore_generators
from autopar.runtime.mesh import MeshContext


def states() -> dict[str, torch.Tensor]:
    """By name."""
    found = {f"torch-{device}": state for device, state in generator_states().items()}
    # In float64, which has all whole numbers of 32 bits: the generators keep a normal number for their next call.
    version, numbers, gauss = random.getstate()
    found["python"] = torch.tensor([version, *numbers, gauss is not None, gauss or 0.0], dtype=torch.float64)
    name, keys, *rest = np.random.get_state()
    if name == "MT19937":
        found["numpy"] = torch.tensor([*map(int, keys), *map(float, rest)], dtype=torch.float64)
    return found


def alike(own: Mapping[str, torch.Tensor], context: MeshContext) -> list[str]:
    """Names of rank 0's generators that are in one state on all ranks, as after ``manual_seed``; every rank calls it.

    They are to be so on all ranks of another world. Of others each rank has its own.
    """
    digests = {name: hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest() for name, state in own.items()}
    every_rank = context.gather(digests, "the states of random generators")
    return [n for n, first in every_rank[0].items() if all(of_rank.get(n) == first for of_rank in every_rank)]


def restore(found: Mapping[str, torch.Tensor]) -> None:
    """Bring this process's generators into these states."""
    restore_generators({n.removeprefix("torch-"): s for n, s in found.items() if n.startswith("torch-")})
    if "python" in found:
        version, *numbers, is_kept, gauss = found["python"].tolist()
        random.setstate((int(version), tuple(map(int, numbers)), gauss if is_kept else None))
    if "numpy" in found:
        *keys, position, is_kept, gauss = found["numpy"].tolist()
        state = ("MT19937", np.array(keys).astype(np.uint32), int(position), int(is_kept), gauss)
        np.random.set_state(state)
