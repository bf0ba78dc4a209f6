"""`Accelerator`: Hugging Face's accelerate, with models that `autopar.parallelize` returned.

::

    from autopar.integrations.hf_accelerate import Accelerator  # instead of accelerate's

    accelerator = Accelerator(cpu=..., gradient_accumulation_steps=4)
    model = autopar.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A loader's ``batch_size`` is that of the whole batch, on any number of ranks: every rank loads it, and autopar slices
out its part. So `num_processes`, by which scripts multiply batch sizes and divide steps, is 1.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.integrations.whole_batches import (
    WholeModel,
    WholeOptimizer,
    WholeState,
    attributes,
    gather_outputs_without_loss,
    parallel_inside,
    require_whole_batches,
    take_random_numbers_of_rank_0,
    whole,
)
from autopar.module.parallel_module import ParallelModule

try:
    import accelerate
except ImportError as e:
    raise ImportError(f"accelerate cannot be imported: {e}; pip install accelerate") from e


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, for parallel modules; arguments are those of `accelerate.Accelerator`.

    Raises:
        ValueError: asks accelerate to distribute, too: deepspeed, fsdp, megatron_lm, parallelism_config,
            ``dispatch_batches=True``.
    """

    every_process_writes = False
    """Whether each process is to write what one would, to where it alone looks for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_other_distribution(self)

    @property
    def num_processes(self) -> int:
        """How many parts of a batch are loaded: 1, since every process loads all of it."""
        return 1

    @property
    def process_index(self) -> int:
        """Which part of a batch this process has: 0 of 1. Which process it is says ``accelerator.state``."""
        return 0

    @property
    def is_main_process(self) -> bool:
        """Rank 0, which writes files."""
        return self.every_process_writes or bool(super().is_main_process)

    @property
    def is_last_process(self) -> bool:
        """The one that is the main process, too."""
        return bool(self.is_main_process)

    @property
    def dispatch_batches(self) -> bool:
        """Never: every rank loads."""
        return False

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """A parallel module as it is, in autocast with ``mixed_precision=``; others as accelerate does.

        Raises:
            ValueError: it takes parts of batches, or is to be compiled by accelerate.
        """
        if (parallel := parallel_inside(model)) is None:
            prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        if self.state.dynamo_plugin.backend != accelerate.utils.DynamoBackend.NO:
            raise ValueError(
                "accelerate (dynamo_backend, torch_compile) cannot compile a parallelized model, whose graphs have "
                "collectives in them: leave it out, and write parallelize(..., compile=True)"
            )
        require_whole_batches(parallel, "accelerate")
        gather_outputs_without_loss(parallel)
        # For evaluation, as accelerate calls it, it does everything but wrap it in DistributedDataParallel.
        found: torch.nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return found

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Stepped once a step: the batch does not grow with the number of ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """The model's own; see `ParallelModule.no_sync`."""
        parallel = parallel_inside(model)
        with super().no_sync(model) if parallel is None else parallel.no_sync():
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce gradients in a backward pass within, though it is in `no_sync`."""
        parallel = parallel_inside(model)
        with super().trigger_sync_in_backward(model) if parallel is None else parallel.no_sync():
            if parallel is not None:
                parallel._autopar.deferred.active = False
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """All inputs: a model spans all processes, which are given the same."""
        yield inputs

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to join where a model is parallelized: all processes have the same batches."""
        if any(parallel_inside(m) is not None for m in joinables):
            yield
            return
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger``; every rank calls it."""
        own = super().check_trigger()
        return bool(super().reduce(torch.tensor(int(own), device=self.device)))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm over all ranks, which is returned as a plain scalar."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather(self, tensor: Any) -> Any:
        """Whole tensors: those of the loader are on every rank already, outputs of the model are collected.

        Nothing is repeated: ``accelerator.gather(loss)`` has one entry. Values that differ from rank to rank, such as
        times, are this rank's; `torch.distributed` gathers those.
        """
        return _with_rows(whole(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, and at most as many rows as the last batch has, where a caller has repeated a loss for each."""
        data, state = self.gather(input_data), self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        try:
            accelerate.utils.recursively_apply(lambda t: t, data, error_on_other_type=True)
        except TypeError:  # objects
            return data[: state.remainder]
        return accelerate.utils.recursively_apply(lambda t: t[: state.remainder], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Whole tensors, as they are: each is a sum or mean over the whole batch already."""
        return whole(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Whole tensors, as they are: ranks have the same."""
        return whole(tensor)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """Whole plain tensors; every rank calls it."""
        if not isinstance(model, ParallelModule):
            state = super().get_state_dict(model, unwrap)
            return state if parallel_inside(model) is None else {name: whole(value) for name, value in state.items()}
        # By its class accelerate knows a model's state, of which it saves tied tensors once.
        return OrderedDict(model.full_state_dict())

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save what one device would; every rank calls it.

        Rank 0 has the whole model and optimizer state in host memory for that. Where it is too large, write
        `autopar.checkpoint.save` instead.

        Raises:
            RankError: the folder differs between ranks, or another rank has failed.
        """
        save = functools.partial(super().save_state, output_dir, safe_serialization, **kwargs)
        with attributes(self, _optimizers=self._whole_optimizers(), _custom_objects=self._whole_objects()):
            for model in self._parallel()[:1]:
                remedy = "name one folder on every rank: a time in it is each rank's own"
                model._autopar.context.agree(str(output_dir), "the folder of save_state()", remedy)
                # So that others neither read files before these are there nor go on if the disk is full.
                return model._autopar.context.together(save, "Accelerator.save_state()")
            return save()

    def save_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Save what one device would, by rank 0; every rank calls it."""
        save = functools.partial(super().save_model, model, *args, **kwargs)
        parallel = parallel_inside(model)
        if parallel is None:
            save()
        else:
            parallel._autopar.context.together(save, "Accelerator.save_model()")

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` has saved, on any number of ranks, this class or accelerate's; every rank calls it."""
        kwargs.setdefault("map_location", "cpu")  # of which each rank takes its part to its device
        models = [WholeModel(m) if isinstance(m, ParallelModule) else m for m in self._models]
        hooks = {key: _with_own_models(hook) for key, hook in self._load_model_state_pre_hook.items()}
        replaced = dict(_models=models, _optimizers=self._whole_optimizers(), _custom_objects=self._whole_objects())
        with attributes(self, **replaced, _load_model_state_pre_hook=hooks):
            super().load_state(input_dir, load_kwargs, **kwargs)
        for model in self._parallel()[:1]:
            # Ranks beyond those that saved have found nothing of their own.
            take_random_numbers_of_rank_0(model._autopar.context)
            self.step = model._autopar.context.decide(lambda: self.step, "the count of accumulated batches")

    def _whole_objects(self) -> list[Any]:
        """What `register_for_checkpointing` was given, with whole states: averages of parameters are on the mesh."""
        return [WholeState(o) for o in self._custom_objects]

    def _parallel(self) -> list[ParallelModule]:
        return [found for m in self._models if (found := parallel_inside(m)) is not None]

    def _whole_optimizers(self) -> list[Any]:
        found: list[Any] = []
        for optimizer in self._optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            owner = [m for m in self._parallel() if own & {id(p) for p in m.parameters()}]
            found.append(WholeOptimizer(owner[0], optimizer) if owner else optimizer)
        return found


def _with_own_models(hook: Callable[[list[Any], str], None]) -> Callable[[list[Any], str], None]:
    """A hook of ``register_load_state_pre_hook``, which loads the script's models and takes these from the list."""

    def called(models: list[Any], folder: str) -> None:
        stand_ins = {id(m.parallel): m for m in models if isinstance(m, WholeModel)}
        own = [m.parallel if isinstance(m, WholeModel) else m for m in models]
        hook(own, folder)
        models[:] = [stand_ins.get(id(m), m) for m in own]

    return called


def refuse_other_distribution(accelerator: Any) -> None:
    """Refuse settings that let accelerate distribute.

    Raises:
        ValueError: there is one.
    """
    # Of accelerate's own class, and what it was given, not what `Accelerator` makes of it.
    configuration, state = accelerator.dataloader_config, accelerator.state
    asked = {
        "deepspeed": getattr(state, "deepspeed_plugin", None),
        "fsdp": getattr(state, "fsdp_plugin", None),
        "megatron_lm": getattr(state, "megatron_lm_plugin", None),
        "parallelism_config": accelerator.parallelism_config,
        "dispatch_batches": configuration.dispatch_batches or None,
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{name} lets accelerate distribute, and autopar.parallelize() does: leave {name} out of accelerate's "
                "settings, or use accelerate's own Accelerator with a model that is not parallelized"
            )


def _with_rows(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value[None] if value.ndim == 0 else value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(_with_rows, value))
    return value
