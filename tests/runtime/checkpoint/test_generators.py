"""Random generators go on as they were."""

from __future__ import annotations

import random

import numpy as np
import torch

from autopar.runtime.checkpoint import generators


def draws() -> list[float]:
    drawn = [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.rand())]
    return [*drawn, random.gauss(0, 1), float(np.random.standard_normal())]


def test_all_of_them() -> None:
    random.gauss(0, 1)  # leaves one for the next call
    before = generators.states()
    expected = draws()
    assert draws() != expected
    generators.restore({name: state.clone() for name, state in before.items()})
    assert draws() == expected
