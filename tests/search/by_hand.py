"""Searches of problems that are written down, of no program: graphs hold what a test says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from autopar.costs.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job
from autopar.search.program_search import ProgramSearch
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from tests.explain.tables.stand_ins import hand_made_plan


class SolvedByHand(ProgramSearch):
    """One problem, whatever the restrictions; a subclass says what the graph of a plan holds."""

    built: Formulation

    @classmethod
    def of(cls, built: Formulation, memory: float, seconds: float = 60.0) -> Self:
        nothing: Any = None
        job = Job({}, Cluster.preset("cpu"), memory)
        found = cls(nothing, nothing, nothing, nothing, job, Limits(1e-9, time.monotonic() + seconds))
        object.__setattr__(found, "built", built)
        object.__setattr__(found, "meter", found)
        return found

    @property
    def regions(self) -> bool:
        return False

    @property
    def offload(self) -> bool:
        return False

    def memory_of_state(self, gradients: bool) -> dict[str, float]:
        return {}

    def formulate(self, restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        return self.built

    def plan(self, built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def held(self, plan: Plan) -> Mapping[str, float]:
        raise NotImplementedError
