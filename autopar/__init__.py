"""autopar: a compiler-pass auto-parallelization tool for PyTorch.

``autopar.parallelize(model, mesh)`` searches over layouts, rewrites the graph, and hands back a distributed module that
computes what one device would; ``autopar.verify`` proves it on an emulated mesh, in one process.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar import _former_paths

if TYPE_CHECKING:
    from autopar.checkpoint.elastic import elastic
    from autopar.compiler import plan
    from autopar.costs.cluster import Cluster
    from autopar.errors import (
        AutoparError,
        CaptureError,
        CertificateError,
        DeadlockError,
        InfeasibleError,
        InvalidRuleError,
        MissingRuleError,
        PassError,
        PlanError,
        RankError,
        VerifyError,
    )
    from autopar.ir.plan import Plan
    from autopar.ir.precision import Float8, Precision
    from autopar.module.low_communication.compressed.gradients import CompressedGradients
    from autopar.module.low_communication.elastic.workers import ElasticWorkers
    from autopar.module.low_communication.local_steps import LocalSteps
    from autopar.module.low_communication.stale.gradients import StaleGradients
    from autopar.parallelize import parallelize
    from autopar.rules.rule import Lowering, Rule, Spec, rule
    from autopar.runtime.launch.mesh import mesh
    from autopar.search.options import Search
    from autopar.verify.verify import EquivalenceReport, verify

_former_paths.install()

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CaptureError",
    "CertificateError",
    "Cluster",
    "CompressedGradients",
    "DeadlockError",
    "ElasticWorkers",
    "EquivalenceReport",
    "Float8",
    "InfeasibleError",
    "InvalidRuleError",
    "LocalSteps",
    "Lowering",
    "MissingRuleError",
    "PassError",
    "Plan",
    "PlanError",
    "Precision",
    "RankError",
    "Rule",
    "Search",
    "Spec",
    "StaleGradients",
    "VerifyError",
    "elastic",
    "mesh",
    "parallelize",
    "plan",
    "rule",
    "verify",
]

_MODULES = {
    "autopar.checkpoint.elastic": "elastic",
    "autopar.compiler": "plan",
    "autopar.costs.cluster": "Cluster",
    "autopar.errors": "AutoparError CaptureError CertificateError DeadlockError InfeasibleError InvalidRuleError "
    "MissingRuleError PassError PlanError RankError VerifyError",
    "autopar.ir.plan": "Plan",
    "autopar.ir.precision": "Float8 Precision",
    "autopar.module.low_communication.compressed.gradients": "CompressedGradients",
    "autopar.module.low_communication.elastic.workers": "ElasticWorkers",
    "autopar.module.low_communication.local_steps": "LocalSteps",
    "autopar.module.low_communication.stale.gradients": "StaleGradients",
    "autopar.parallelize": "parallelize",
    "autopar.rules.rule": "Lowering Rule Spec rule",
    "autopar.runtime.launch.mesh": "mesh",
    "autopar.search.options": "Search",
    "autopar.verify.verify": "EquivalenceReport verify",
}
_CHECKPOINT = "checkpoint"
"""A module whose functions are called by its name, as `autopar.checkpoint.save`, that need not be imported first."""

_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # On its first use: torch's DTensor alone takes as long to import as torch.
    if name == _CHECKPOINT:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(sys.modules[__name__]).setdefault(name, getattr(import_module(_HOME[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps functions under their names: Python would put the modules there that are called like them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        """By its name, as any module in a function of a script that a library (Ray) sends to other processes."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
