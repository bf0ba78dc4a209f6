"""Every private torch import, in one place. Each name has a contract test in tests/test_torch_compat.py."""

from __future__ import annotations

from typing import Any

from torch._decomp import get_decompositions
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

__all__ = [
    "BoxedCodeGen",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "StridedShard",
    "TensorMeta",
    "TracingContext",
    "aot_export_joint_with_descriptors",
    "default_partition",
    "dtensor_overloads",
    "get_decompositions",
    "operator_database",
    "set_group_timeout",
    "tracing",
]


def operator_database() -> list[Any]:
    """Torch's operators with sample inputs, an `OpInfo` each; importing them takes seconds.

    Raises:
        ValueError: a package that torch's tests need is missing.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as e:
        raise ValueError(f"torch's operator samples need {e.name}: pip install {e.name}") from e
    return list(op_db)


def dtensor_overloads() -> frozenset[str]:
    """Names of the operator overloads for which `torch.distributed.tensor` has a sharding rule."""
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return frozenset(str(op) for table in tables for op in getattr(rules, table, ()))
