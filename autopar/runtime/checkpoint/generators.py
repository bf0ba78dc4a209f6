"""States of this process's random generators, as tensors: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from autopar.ir.ops.random import generator_states, restore_generators


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
