"""Seconds of an operator under each of its candidates."""

from __future__ import annotations

import numpy as np

from autopar.candidates import Candidates, lowered_bytes
from autopar.cost.collectives import collective_seconds
from autopar.cost.kernels import kernel_seconds
from autopar.dims import Operator
from autopar.redistribute import Machine
from autopar.search.variable import Floats
from autopar.work import arithmetic_dtype, operator_work


def operator_seconds(operator: Operator, chosen: Candidates, machine: Machine) -> Floats:
    """Seconds of each candidate of one operator: its kernel on what stays local, and a lowering's collectives."""
    work = operator_work(operator, chosen, machine.sizes)
    seconds = kernel_seconds(work, arithmetic_dtype(operator, machine.device), machine.device)
    return seconds + _lowering_seconds(operator, chosen, machine)


def _lowering_seconds(operator: Operator, chosen: Candidates, machine: Machine) -> Floats:
    """All-reduces of lowerings, on the tensors that the splits along the other axes leave."""
    sizes, total = np.array(machine.sizes), np.zeros(len(chosen.choice))
    letter = [s.factor[0] if s.factor is not None else "" for s in chosen.strategies]
    for lowered in operator.rule.lower:
        uses = np.array([c == lowered for c in letter])[chosen.choice]
        for letters, size in lowered_bytes(operator, lowered) if uses.any() else ():
            split = np.array([c != "" and c in letters for c in letter])
            local = size / np.where(split[chosen.choice], sizes, 1).prod(axis=1)
            for axis, (n, link) in enumerate(zip(machine.sizes, machine.links, strict=True)):
                total += uses[:, axis] * (machine.device.launch + collective_seconds("all_reduce", local, n, link))
    return total
