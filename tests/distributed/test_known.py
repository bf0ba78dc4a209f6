"""Code that looks at values of buffers chooses the same graph on two ranks; against eager."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.parallelize import parallelize
from tests.capture.test_known import Looks, require_equal, train
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices


def on_ranks(rank: int) -> dict[str, Any]:
    return train(parallelize(Looks(), mesh_of(2), cluster=slow_devices(), timeout=WAIT))


@pytest.mark.slow
@pytest.mark.distributed
def test_answers_choose_the_graph(two_ranks: Ranks) -> None:
    expected = train(Looks())
    for found in two_ranks.run(on_ranks):
        require_equal(found, expected)
