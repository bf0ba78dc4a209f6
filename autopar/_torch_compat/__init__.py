"""Every private torch import, by subject. Each name has a contract test in tests/torch_compat/."""

from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch_compat.caches import forget_fake_results, forget_source_with, new_fake_results
from autopar._torch_compat.changed import (
    associative_scan_as,
    checkpoint_replaced,
    compiling,
    dispatch_restored,
    flex_attention_as,
    masks_as_they_are,
    recurrent_dropout,
    resampling_as_operators,
    selective_policy,
    without_modes,
    without_ordered_effects,
)
from autopar._torch_compat.compilers import budget_partition, default_partition, inductor, inductor_lacks
from autopar._torch_compat.dtensor import (
    asks_subclasses,
    context_parallel_internals,
    convert_assigned,
    dtensor_overloads,
    local_shape_of,
    read_only,
    redistributed,
    reduce_found_inf_over_every_gradient,
    refuse_items_of_unreduced,
    refuse_to_pickle_parts,
    run_beyond_dtensor,
    spec_in,
    take_in_foreach,
)
from autopar._torch_compat.dtensor_handlers import (
    copy_parameters_alone,
    handle_operators,
    leave_trace,
    overloads_of,
    take_shape_in_place,
)
from autopar._torch_compat.interpreter import interpreted, interpreter_takes, interpreting, is_boxed, said_by_kernel
from autopar._torch_compat.operators import (
    attention_kernel,
    below_autograd,
    hooks_of_all_modules,
    is_all_true,
    map_tensors,
    module_database,
    operator_database,
    pytree_node,
    scaled_mm,
    storage_id,
    tensors_in,
    traced_functions,
    written_by,
)
from autopar._torch_compat.pipelining import pipeline_runtime, torch_schedule
from autopar._torch_compat.processes import interrupt_gloo, number_of_groups, put_around_collectives
from autopar._torch_compat.traced import (
    aot_export_joint_with_descriptors,
    function_modes,
    is_traced,
    is_tracing,
    is_transformed,
    is_transforming,
    traced_graph,
    traced_node,
    traced_root,
    without_users_modes,
)

__all__ = [
    "BatchNorm",
    "BoxedCodeGen",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "OpOverload",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "TracingContext",
    "aot_export_joint_with_descriptors",
    "asks_subclasses",
    "associative_scan_as",
    "attention_kernel",
    "below_autograd",
    "budget_partition",
    "checkpoint_replaced",
    "compiling",
    "context_parallel_internals",
    "convert_assigned",
    "copy_parameters_alone",
    "default_partition",
    "dispatch_restored",
    "dtensor_overloads",
    "flex_attention_as",
    "forget_fake_results",
    "forget_source_with",
    "function_modes",
    "get_decompositions",
    "handle_operators",
    "hooks_of_all_modules",
    "inductor",
    "inductor_lacks",
    "interpreted",
    "interpreter_takes",
    "interpreting",
    "interrupt_gloo",
    "is_all_true",
    "is_boxed",
    "is_traced",
    "is_tracing",
    "is_transformed",
    "is_transforming",
    "leave_trace",
    "local_shape_of",
    "map_tensors",
    "masks_as_they_are",
    "module_database",
    "new_fake_results",
    "number_of_groups",
    "operator_database",
    "overloads_of",
    "pipeline_runtime",
    "put_around_collectives",
    "pytree_node",
    "read_only",
    "recurrent_dropout",
    "redistributed",
    "reduce_found_inf_over_every_gradient",
    "refuse_items_of_unreduced",
    "refuse_to_pickle_parts",
    "resampling_as_operators",
    "run_beyond_dtensor",
    "said_by_kernel",
    "scaled_mm",
    "selective_policy",
    "set_group_timeout",
    "spec_in",
    "storage_id",
    "suggest_memory_format",
    "take_in_foreach",
    "take_shape_in_place",
    "tensors_in",
    "torch_schedule",
    "traced_functions",
    "traced_graph",
    "traced_node",
    "traced_root",
    "tracing",
    "without_modes",
    "without_ordered_effects",
    "without_users_modes",
    "written_by",
]
