"""Every registered rule is proven by the oracle on every sample of its operator."""

import pytest
import torch

import autopar.strategies  # noqa: F401
from autopar.oracle import check_rule
from autopar.strategy import registered
from tests.strategies.sample import Sample
from tests.strategies.samples import all_samples
from tests.strategies.stand_ins import STAND_INS

SAMPLES = all_samples()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_rule_has_a_sample():
    sampled = {s.target for s in SAMPLES}
    assert [str(t) for t in registered() if t not in sampled] == []
    assert [str(t) for t in sampled if t not in registered()] == []


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rule(sample: Sample):
    check_rule(sample.target, sample.args, sample.kwargs, run=STAND_INS.get(sample.target))
