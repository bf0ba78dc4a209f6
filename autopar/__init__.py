"""autopar: a compiler-pass auto-parallelization tool for PyTorch.

``autopar.parallelize(model, mesh)`` searches over layouts, rewrites the graph, and hands back a distributed module that
computes what one device would; ``autopar.verify`` proves it on an emulated mesh, in one process.
"""

from autopar import _former_paths
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
from autopar.ir.precision import Precision
from autopar.parallelize import parallelize
from autopar.rules.rule import Lowering, Rule, Spec, rule
from autopar.search.options import Search
from autopar.verify.verify import EquivalenceReport, verify

_former_paths.install()

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CaptureError",
    "CertificateError",
    "Cluster",
    "DeadlockError",
    "EquivalenceReport",
    "InfeasibleError",
    "InvalidRuleError",
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
    "VerifyError",
    "parallelize",
    "plan",
    "rule",
    "verify",
]
