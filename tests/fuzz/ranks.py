"""Cases on four ranks with Gloo: eager and a random plan's program in every process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from tests.distributed.launch import Ranks, RanksError, mesh_of
from tests.fuzz.case import Case, from_json
from tests.fuzz.judge import Outcome, compared, eager, explained, loaded, plan_of
from tests.fuzz.judge import category as _category

WAIT = 20
"""Seconds that a rank waits for the others."""

SIZES = ((4,), (2, 2))


def on_rank(rank: int, text: str) -> dict[str, Any]:
    """The outcome of a case, in a worker."""
    warnings.simplefilter("ignore")
    import autopar

    case = from_json(text)
    program = loaded(case)
    try:
        expected = eager(program)
    except Exception as e:
        return Outcome("invalid", _category(e), str(e)).as_dict()
    _, _, seed = plan_of(case)
    mesh = mesh_of(*SIZES[seed % 2])
    search = autopar.Search(recipe="random", seed=seed)
    try:
        given = program.build()
        parallel = autopar.parallelize(given, mesh, search=search, deterministic=True, timeout=WAIT)
        found = program.drive(parallel, given)
    except Exception as e:
        return explained(e).as_dict()
    return compared(program, expected, found).as_dict()


class RankPool:
    """Ranks that judge one case after another; a case that ends differently on them costs a new pool."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.ranks: Ranks | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *rest: object) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def run(self, cases: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Outcomes in order."""
        for case in cases:
            yield case, self.judge(case)

    def judge(self, case: Case) -> Outcome:
        """The worst outcome of any rank."""
        if self.ranks is None or not self.ranks.alive:
            self.ranks = Ranks()
        try:
            found = [Outcome(**o) for o in self.ranks.run(on_rank, case.as_json(), timeout=self.timeout)]
        except RanksError as e:
            return Outcome("crash", "ranks hang or die", str(e)[-2000:])
        order = ("crash", "wrong", "unclear", "error", "ill", "invalid", "equal")
        worst = min(found, key=lambda o: order.index(o.kind))
        if len({o.kind for o in found}) > 1:  # whoever failed alone leaves the others' collectives behind
            self.ranks.close()
        return worst
