"""Every private torch import, in one place. Each name has a contract test in tests/test_torch_compat.py."""

from __future__ import annotations

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
    "get_decompositions",
    "set_group_timeout",
    "tracing",
]
