"""What becomes of the keys of DeepSpeed's configuration that decide nothing here.

Only keys that DeepSpeed has are named: of another one in a known table it is said that nobody knows it.
"""

from __future__ import annotations

from autopar.cli.migrate.keys import NO_COUNTERPART, NOT_NEEDED, Reasons

_BUCKETS = NOT_NEEDED, "how large messages are follows from the layouts that are searched"
_MONITORS = NOT_NEEDED, "callbacks of the integrations, and `autopar run`, say how fast steps are"
_ELSEWHERE = NO_COUNTERPART, "it is no part of how a step is distributed; keep the script's own"
_NUMBERS = NO_COUNTERPART, "it changes the numbers of a step; autopar computes what one device would"
_SCALER = NO_COUNTERPART, "losses are scaled by torch.amp.GradScaler, which has no such argument"
_WIDE = NO_COUNTERPART, "parameters, gradients and optimizer state are in float32; a model in bfloat16 has all in it"
_CHECKPOINTS = (
    NOT_NEEDED,
    "checkpoints in the model's code are followed; the pin recompute='search' decides by itself instead",
)
_COPIES = NOT_NEEDED, "how copies to the host are made follows from the plan"
_SPLITS = NOT_NEEDED, "what is split follows from the model's graph"
_SAVED = NOT_NEEDED, "autopar.checkpoint.save and load work on any mesh"
_ON_HOST = NO_COUNTERPART, "the optimizer's step is on the device; the pin offload='search' offloads its state alone"

ZERO: Reasons = {
    "zero_optimization.*bucket_size": _BUCKETS,
    "zero_optimization.*max_live_parameters": (NOT_NEEDED, "what is gathered when is searched, within the budget"),
    "zero_optimization.*max_reuse_distance": (NOT_NEEDED, "what is gathered when is searched, within the budget"),
    "zero_optimization.*persistence_threshold": (NOT_NEEDED, "small parameters are split like the others"),
    "zero_optimization.*module_granularity_threshold": (NOT_NEEDED, "parameters are gathered one by one, not modules"),
    "zero_optimization.fast_sharding_for_leaf_module": (NOT_NEEDED, "parameters are gathered one by one, not modules"),
    "zero_optimization.leaf_module.*": (NOT_NEEDED, "parameters are gathered one by one, not modules"),
    "zero_optimization.*use_all_reduce_for_fetch_params": _BUCKETS,
    "zero_optimization.*allgather_sequential": _BUCKETS,
    "zero_optimization.sub_group_size": (NOT_NEEDED, "the optimizer's step is torch's, over all parameters"),
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.contiguous_gradients": (NOT_NEEDED, "the memory budget counts gradients as they are stored"),
    "zero_optimization.overlap_comm": (
        NOT_NEEDED,
        "collectives run beside kernels where that is faster and fits; the pin overlap='none' turns it off",
    ),
    "zero_optimization.round_robin_gradients": (NOT_NEEDED, "nothing is offloaded gradient by gradient"),
    "zero_optimization.*gather_*_weights_on_model_save": (
        NOT_NEEDED,
        "full_state_dict() gathers, autopar.checkpoint does not",
    ),
    "zero_optimization.load_from_fp32_weights": (NOT_NEEDED, "parameters are stored in float32"),
    "zero_optimization.elastic_checkpoint": (NOT_NEEDED, "checkpoints load on any mesh"),
    "zero_optimization.pipeline_loading_checkpoint": (NOT_NEEDED, "checkpoints load on any mesh"),
    "zero_optimization.ignore_unused_parameters": (NOT_NEEDED, "which parameters are used follows from the graph"),
    "zero_optimization.legacy_stage1": (NOT_NEEDED, "stage 1 is recipe 'zero1'"),
    "zero_optimization.memory_efficient_linear": (NOT_NEEDED, "what is saved for the backward pass is searched"),
    "zero_optimization.override_module_apply": (NOT_NEEDED, "modules stay as they are"),
    "zero_optimization.log_trace_cache_warnings": (NOT_NEEDED, "the step is one graph, and nothing is traced later"),
    "zero_optimization.enable_sanity_checks": (NOT_NEEDED, "autopar.verify compares a plan with one device"),
    "zero_optimization.mics_hierarchical_params_gather": (NOT_NEEDED, "costs of links decide how gathers are made"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
    "zero_optimization.cpu_offload_use_pin_memory": _COPIES,
    "zero_optimization.zero_quantized_nontrainable_weights": _NUMBERS,
    "zero_optimization.zeropp_loco_param*": (NO_COUNTERPART, "quantized reductions have no error feedback"),
    "zero_optimization.zenflow*": _NUMBERS,
    "zero_optimization.*super_offload": _ON_HOST,
    "zero_optimization.offload_optimizer.ratio": (NO_COUNTERPART, "the search decides how much is offloaded"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _ON_HOST,
    "zero_optimization.offload_optimizer.nvme_path": (NO_COUNTERPART, "nothing is offloaded to disks"),
}

REASONS: Reasons = {
    **ZERO,
    **{
        f"zero_optimization.offload_optimizer.{name}": _COPIES
        for name in ("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "pipeline")
    },
    "activation_checkpointing.cpu_checkpointing": (
        NO_COUNTERPART,
        "the pin offload='search' lets the search offload what is saved where memory is short",
    ),
    **{
        f"activation_checkpointing.{name}": _CHECKPOINTS
        for name in (
            "partition_activations", "contiguous_memory_optimization", "number_checkpoints",
            "synchronize_checkpoint_boundary", "profile",
        )
    },
    "fp16.auto_cast": (NOT_NEEDED, "floating tensors of the batch are cast"),
    "fp16.*master_weights_and_grads": (NO_COUNTERPART, "parameters, gradients and optimizer state are in float32"),
    "fp16.hysteresis": _SCALER,
    "fp16.consecutive_hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER,
    "fp16.loss_scale": (NO_COUNTERPART, "torch.amp.GradScaler begins with it, and lowers and raises it"),
    "bf16.*master_weights_and_grads": _WIDE,
    "bf16.*optimizer_states": _WIDE,
    "bf16.immediate_grad_update": (NOT_NEEDED, "gradients are added up in float32 as they come"),
    "bf16.check_grad_overflow": (NO_COUNTERPART, "a step is made whatever the gradients are; look at their norm"),
    **{
        f"bf16.{name}": (NOT_NEEDED, "bfloat16 needs no loss scaling, and DeepSpeed does not read this")
        for name in ("auto_cast", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis",
                     "min_loss_scale")
    },
    "amp*": (NO_COUNTERPART, "apex is not followed; ask for precision='fp16' or 'bf16'"),
    "torch_autocast.*": (NO_COUNTERPART, "autocast of the script is captured as it is; or ask for precision='bf16'"),
    "prescale_gradients": (NOT_NEEDED, "gradients are those of the whole batch's mean"),
    "gradient_predivide_factor": (NOT_NEEDED, "gradients are those of the whole batch's mean"),
    "fp32_allreduce": (NOT_NEEDED, "gradients are added in float32 unless a precision is asked for"),
    "sparse_gradients": (NO_COUNTERPART, "sparse gradients are an error: leave sparse=True of embeddings out"),
    "disable_allgather": _BUCKETS,
    "allgather_size": _BUCKETS,
    "zero_allow_untested_optimizer": (NOT_NEEDED, "optimizers that compute element by element all work"),
    "zero_force_ds_cpu_optimizer": (NOT_NEEDED, "the optimizer is torch's"),
    "optimizer.legacy_fusion": (NOT_NEEDED, "the optimizer is torch's"),
    "max_grad_norm": (NO_COUNTERPART, "DeepSpeed does not read it here either: write gradient_clipping"),
    "steps_per_print": _MONITORS,
    "wall_clock_breakdown": (NOT_NEEDED, "`autopar trace` and torch's profiler show the nodes of a step"),
    "timers*": (NOT_NEEDED, "`autopar trace` and torch's profiler show the nodes of a step"),
    "memory_breakdown": (NOT_NEEDED, "a plan says what memory it takes, by category"),
    "dump_state": _MONITORS,
    "monitor_config*": _MONITORS,
    "tensorboard*": _MONITORS,
    "wandb*": _MONITORS,
    "csv_monitor*": _MONITORS,
    "comet*": _MONITORS,
    "flops_profiler*": (NOT_NEEDED, "a plan counts what each module computes"),
    "comms_logger*": (NOT_NEEDED, "a plan counts what each axis sends"),
    "autotuning*": (NOT_NEEDED, "searching is what autopar does"),
    "checkpoint*": _SAVED,
    "nebula*": _SAVED,
    "use_node_local_storage": _SAVED,
    "communication_data_type": (NOT_NEEDED, "gradients are added in float32 unless a precision is asked for"),
    "data_types.grad_accum_dtype": (NOT_NEEDED, "gradients are stored in float32, the parameters' dtype"),
    "aio*": (NO_COUNTERPART, "nothing is offloaded to disks"),
    "elasticity*": (
        NO_COUNTERPART,
        "`autopar run --elastic MIN:MAX` and autopar.elastic keep the batch that the script has, on any world",
    ),
    "scheduler*": (NO_COUNTERPART, "learning rates are set by the script: take a torch.optim.lr_scheduler"),
    "data_efficiency*": _ELSEWHERE,
    "curriculum_learning*": _ELSEWHERE,
    "dataloader_drop_last": _ELSEWHERE,
    "hybrid_engine*": _ELSEWHERE,
    "graph_harvesting": (NO_COUNTERPART, "CUDA graphs are for the caller to capture"),
    "use_data_before_expert*": (NOT_NEEDED, "the mesh says which axis is within which"),
    "progressive_layer_drop*": _NUMBERS,
    "compression_training*": _NUMBERS,
    "quantize_training*": _NUMBERS,
    "sparse_attention*": _NUMBERS,
    "eigenvalue*": _NUMBERS,
    **{
        f"tensor_parallel.{name}": _SPLITS
        for name in ("preset_model", "tp_grain_size", "injection_policy_tuple", "partition_config*", "tp.*grain*")
    },
    "tensor_parallel.tp_overlap_comm": (NOT_NEEDED, "collectives run beside kernels where that is faster and fits"),
    "tensor_parallel.keep_module_on_host": (NO_COUNTERPART, "a model on the meta device takes init=, a file"),
    "tensor_parallel.enabled": (NOT_NEEDED, "autotp_size says it"),
    "pipeline.seed_layers": (NO_COUNTERPART, "initialise the model before it is distributed"),
    "pipeline.activation_checkpoint_interval": (
        NO_COUNTERPART,
        "blocks are not recomputed at an interval; the pin recompute='search' decides tensor by tensor",
    ),
    "pipeline.partition": (NOT_NEEDED, "stages are cut for the shortest step; the pin stages takes names of modules"),
    "pipeline.partition_method": (
        NOT_NEEDED,
        "stages are cut for the shortest step; the pin stages takes names of modules",
    ),
    "pipeline.pipe_partitioned": (NOT_NEEDED, "what stages send in parts is decided for each value"),
    "pipeline.grad_partitioned": (NOT_NEEDED, "what stages send in parts is decided for each value"),
    "pipeline.use_reentrant": _CHECKPOINTS,
    "seq_parallel_communication_data_type": (NOT_NEEDED, "values are sent as they are"),
}  # fmt: skip
