"""Random modules under random plans on four ranks: every rank sees what eager PyTorch does, or a clear error."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Ranks
from tests.fuzz.case import draw
from tests.fuzz.judge import Outcome
from tests.fuzz.ranks import on_rank
from tests.fuzz.render import source

CHUNK, DEEP = 5, 300
FEW = range(1)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "seeds", [FEW, *(pytest.param(range(s, s + CHUNK), marks=pytest.mark.deep) for s in range(0, DEEP, CHUNK))], ids=str
)
def test_modules_on_ranks(ranks: Ranks, seeds: range) -> None:
    equal = 0
    for case in (draw(seed, "ranks") for seed in seeds):
        outcomes = [Outcome(**found) for found in ranks.run(on_rank, case.as_json())]
        for outcome in outcomes:
            assert not outcome.bad, f"{outcome.kind}: {outcome.text}\n{case.as_json()}:\n{source(case)}"
        assert len({o.kind for o in outcomes}) == 1, outcomes
        equal += outcomes[0].kind == "equal"
    assert equal >= max(1, len(seeds) // 3)
