"""Copies, averages of weights, files, and tensors that are put in the place of others, on one device.

tests/distributed/test_changes.py does the same on ranks.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from tests.reports.changes import CHANGES, PLAIN, Pair, batch, noise, outcome


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.deep) for n in PLAIN), *sorted({*CHANGES} - {*PLAIN})]
)
def test_what_is_done_to_a_model_is_what_eager_does(name: str) -> None:
    assert outcome(name, None, {}, 1) < 1e-12


@pytest.mark.deep
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_before_the_first_call_is_what_eager_does(name: str) -> None:
    assert outcome(name, None, {}, 0) < 1e-12


def test_a_copy_shares_what_does_not_change() -> None:
    pair = Pair(None, {}, 1)
    copied = copy.deepcopy(pair.parallel)
    assert copied.plan is pair.parallel.plan
    assert copied.fc.weight is copied.table.weight
    assert copied.fc.weight.data_ptr() != pair.parallel.fc.weight.data_ptr()
    assert copied._autopar.original.fc is copied.fc
    assert copy.copy(pair.parallel).fc is pair.parallel.fc


def test_pickling_says_how_to_save() -> None:
    model = Pair(None, {}, 0).parallel
    for save in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(nn.Sequential(model))):
        with pytest.raises(AutoparError, match=r"cannot be pickled.*full_state_dict.*parallelize"):
            save()


def test_modules_and_parameters_may_be_replaced_and_resized_on_one_device() -> None:
    pair = Pair(None, {}, 1)
    for model in pair.both:
        model.fc.weight = nn.Parameter(noise(12, 8))
        torch.manual_seed(1)
        model.encoder = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)).double()
        model.fc.register_parameter("bias", None)
    pair.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in pair.both]
    pair.train(1)
    for model in pair.both:
        model.encoder[1] = nn.Tanh()
    pair.train(2)
    assert pair.apart() < 1e-12


@pytest.mark.some(1)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_another_dtype(dtype: torch.dtype, error: float) -> None:
    pair = Pair(None, {}, 1)
    values = {k: v.to(dtype) for k, v in batch(1).items()}
    losses = [m.to(dtype)(**values) for m in pair.both]
    for loss in losses:
        loss.backward()
    assert losses[0].dtype is dtype
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(pair.parallel.fc.weight.grad, pair.plain.fc.weight.grad, rtol=0, atol=error)
