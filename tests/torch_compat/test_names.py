"""Every private part of torch that autopar uses has a contract in a file here: when one breaks, it says which."""

from __future__ import annotations

from autopar import _torch_compat as compat


def test_every_name_has_a_contract() -> None:
    tested = {
        "assign_in_parametrizations", "copy_parameters_alone", "handle_operators", "leave_trace", "normal_views",
        "operators_where", "overloads_of", "read_of", "take_shape_in_place", "view_under_inference",
        "written_tensors",
        "BatchNorm", "BoxedCodeGen", "DTensorSpec", "DynamicOutputShapeException",
        "FakeTensor", "FakeTensorMode", "LazyGraphModule", "OpOverload",
        "StridedShard", "TensorMeta",
        "TorchDispatchMode", "TracingContext", "aot_export_joint_with_descriptors", "are_all_true",
        "asks_subclasses", "asserts",
        "associative_scan_as", "attention_kernel",
        "below_autograd",
        "budget_partition",
        "checkpoint_replaced", "compiling", "context_parallel_internals",
        "convert_assigned", "convert_in_place", "default_partition",
        "dispatch_restored", "dropout_of_nothing", "dtensor_overloads",
        "flex_attention_as",
        "forget_fake_results", "forget_source_with", "function_modes",
        "get_decompositions", "hooks_of_all_modules", "inductor", "inductor_lacks", "interpreted",
        "interpreter_takes", "interpreting", "interrupt_gloo", "is_all_true", "is_boxed",
        "is_traced", "is_tracing", "is_transformed", "is_transforming", "local_shape_of",
        "map_tensors",
        "masks_as_they_are", "module_database",
        "new_fake_results", "number_of_groups", "operator_database", "pipeline_runtime",
        "put_around_collectives", "pytree_node", "read_only", "recurrent_dropout", "redistributed",
        "resampling_as_operators",
        "reduce_found_inf_over_every_gradient",
        "refuse_items_of_unreduced", "refuse_to_pickle_parts", "run_beyond_dtensor",
        "said_by_kernel", "sizes_of_rows", "scaled_mm", "selective_policy", "set_group_timeout",
        "spec_in",
        "storage_id", "suggest_memory_format", "take_in_foreach", "tensors_in",
        "torch_schedule", "traced_functions", "traced_graph", "traced_node",
        "traced_root",
        "tracing", "without_modes", "without_ordered_effects", "without_step_hooks", "without_trackers",
        "without_users_modes", "written_by",
    }  # fmt: skip
    assert set(compat.__all__) == tested
