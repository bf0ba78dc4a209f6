"""`finished_plan`: what was searched for a part of a program, as a plan of the whole program.

A search sees one microbatch, perhaps padded, and of many repeated layers the few that were captured. Plans stay plans
of that part while they are compared; only the best one is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Program

Shapes = Mapping[str, tuple[int, ...]]
"""Padded shape of each parameter that has one."""

_T = TypeVar("_T")


def finished_plan(plan: Plan, program: Program, part: Program, padding: Shapes, certificate: Certificate) -> Plan:
    """The plan of the whole program.

    Args:
        plan: for ``part``, padded.
        program: of the whole batch; the plan is recognized by its fingerprint.
        part: of one microbatch; the program itself where there is only one.
        padding: padded shapes of parameters under which the plan was searched.
        certificate: of all searches, of which the plan is the best.
    """

    def of_all_layers(table: Mapping[str, _T]) -> Mapping[str, _T]:
        repeat = part.repeat
        return table if repeat is None else {n: value for name, value in table.items() for n in repeat.names(name)}

    return replace(
        plan,
        parameters=of_all_layers(plan.parameters),
        padding=of_all_layers(padding),
        fingerprint=program.fingerprint,
        microbatches=part.microbatches,
        certificate=certificate,
    )


def joint_certificate(
    best: Certificate, found: Sequence[Certificate], pruned: Sequence[float], space: str, method: str = ""
) -> Certificate:
    """The best plan's certificate, with a bound on the plans of several searches.

    Args:
        best: of the best plan.
        found: of the best plan of each search that found one.
        pruned: lower bounds of the searches that ended because the best plan is known.
        space: all plans that were searched.
        method: that closed the searches; default: as for the best plan.
    """
    # The objective is among them: a search that was pruned may prove more than the best plan takes.
    bound = min(*pruned, *(certificate.lower_bound for certificate in found), best.objective)
    verified = [certificate.checked for certificate in found if certificate.checked is not None]
    checked = min(verified) if len(verified) == len(found) else None
    return replace(best, lower_bound=bound, space=space, method=method or best.method, checked=checked)
