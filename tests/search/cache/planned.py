"""A small model, planned."""

from __future__ import annotations

from typing import Any

from autopar.compiler import solve
from autopar.costs.cluster import Cluster
from autopar.ir.plan import Plan
from tests import models as zoo

AXES = {"a": 2, "b": 2}
CLUSTER = Cluster.preset("cpu")


def planned(**options: Any) -> Plan:
    program, _, _ = zoo.captured("mlp")
    return solve(program, AXES, "cpu", **options)
