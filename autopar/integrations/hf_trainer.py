"""`Trainer`: Hugging Face's, for models that `autopar.parallelize` returned; `WholeBatches` makes one of a subclass.

::

    from autopar.integrations.hf_trainer import Trainer  # instead of transformers'

    model = autopar.parallelize(model, mesh)
    Trainer(model=model, args=args, train_dataset=data).train()

``per_device_train_batch_size`` is the whole batch, on any number of ranks, since the model spans all of them: a run on
four ranks takes the steps, rates and losses of a run on one device with the same arguments.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from autopar import checkpoint
from autopar.integrations.hf_accelerate import Accelerator, refuse_other_distribution
from autopar.integrations.whole_batches import (
    WholeOptimizer,
    attributes,
    parallel_inside,
    take_random_numbers_of_rank_0,
    unwrapped,
    whole,
)
from autopar.ir.signature.outputs import OUTSIDE
from autopar.module.call import put_forward
from autopar.module.parallel_module import ParallelModule

try:
    import transformers
    from accelerate.utils import gather, gather_object
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as e:
    raise ImportError(f"transformers' Trainer cannot be imported: {e}; pip install transformers accelerate") from e


_SHARED = "output_dir must be on a file system that every rank reads: rank 0 writes the files"


class WholeBatches:
    """Comes before a subclass of `transformers.Trainer` in the bases of a class.

    ::

        class Trainer(WholeBatches, MyTrainer): ...

    Checkpoints are those of one device: whole tensors, which rank 0 writes. A run goes on from one on any number of
    ranks, and without autopar.

    Raises:
        TypeError: ``model`` is no parallel module, and none that is in it has all of its parameters.
        ValueError: settings let transformers or accelerate distribute, or load other rows on each rank; or it computes
            its loss within the model's forward, as TRL's DistillationTrainer.
        RankError: ``output_dir`` differs between ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _gather_nothing(type(self))
        given = [m for a in (*args, *kwargs.values()) if (m := parallel_inside(a)) is not None]
        before = [_own_forwards(m) for m in given]
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if hasattr(trainer, "_forward_redirection"):
            raise ValueError(
                f"{_named(type(self))} runs its whole loss, with the teacher's forward in it, in the place of the "
                "model's forward, which is no graph of this model: leave out use_liger_kernel, or in place of "
                "DistillationTrainer use GKDTrainer of trl.experimental.gkd, with its loss outside (lmbda=1.0 trains "
                "on the student's own completions)"
            )
        if trainer.args.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                'train_sampling_strategy="batch_rebalance" gives every rank other rows, and here every rank loads the '
                'whole batch: choose another, such as "group_by_length"'
            )
        if trainer.model is not None:
            context = _require_parallel(trainer.model)._autopar.context
            # TRL's trainer of GRPO seeds every process in its own way, and here all of them draw for the same rows.
            take_random_numbers_of_rank_0(context, host=False)
            # Else one rank would load a best checkpoint that another does not find, of which there is but a warning.
            folder = str(trainer.args.output_dir)
            context.agree(folder, "output_dir", "name one folder on every rank: a time in it is each rank's own")
        for model, forwards in zip(given, before, strict=True):
            if _own_forwards(model) != forwards:
                _compute_loss_outside(model)

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' accelerator, which then leaves parallel modules as they are."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        refuse_other_distribution(trainer.accelerator)
        # Trainers make it from many settings, differently in each version: what is made is adopted.
        trainer.accelerator.__class__ = Accelerator
        gather = functools.partial(trainer.accelerator.gather_for_metrics, use_gather_object=False)
        trainer.gather_function = gather

    def call_model_init(self, trial: Any = None) -> Any:
        """What ``model_init`` returns, which must be a parallel module."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        _require_parallel(model)
        return model

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)  # type: ignore[attr-defined]

    def floating_point_ops(self, inputs: Any) -> float:
        """Those of this rank, of which transformers takes the sum."""
        trainer: Any = self
        every: Any = super().floating_point_ops(inputs)  # type: ignore[misc]
        return float(every) / float(max(1, trainer.args.world_size))

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        # A parallel module is on the device of the mesh.
        if parallel_inside(model) is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        start = getattr(loader, "worker_init_fn", None)
        if isinstance(start, functools.partial) and "rank" in start.keywords:
            # Transformers seeds workers by rank; here workers of all ranks load the same rows.
            init = functools.partial(start.func, *start.args, **{**start.keywords, "rank": 0})
            loader.worker_init_fn = loader.base_dataloader.worker_init_fn = init
        return loader

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        trainer: Any = self
        # PEFT's models and transformers' own have a method that rank 0 alone needs the tensors for.
        if state_dict is None and not _saves_itself(trainer.model):
            state_dict = trainer.accelerator.get_state_dict(trainer.model)
        save = super()._save  # type: ignore[misc]

        def write() -> None:
            # As for models that transformers has distributed: every rank comes here, since tensors are collected.
            collected = attributes(self, is_distributed_loading_by_transformers=True)
            with collected, _folder_of_rank_0(trainer.model, output_dir) as folder:
                save(folder, state_dict)

        # Together, so that others neither read the files before they are there nor go on if the disk is full.
        _require_parallel(trainer.model)._autopar.context.together(write, "Trainer.save_model()")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = self
        save = super()._save_checkpoint  # type: ignore[misc]
        context = _require_parallel(trainer.model)._autopar.context
        context.together(lambda: save(*args, **kwargs), "a checkpoint of Trainer")
        if trainer.args.load_best_model_at_end:
            context.agree(trainer.state.best_model_checkpoint, "the best checkpoint that is there", _SHARED)

    def _load_best_model(self) -> None:
        trainer: Any = self
        found = _weights_in(trainer.state.best_model_checkpoint)
        _require_parallel(trainer.model)._autopar.context.agree(found, "files of the best checkpoint", _SHARED)
        super()._load_best_model()  # type: ignore[misc]

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's: every rank has the numbers of all rows, and looks for them where it alone may write."""
        trainer: Any = self
        with attributes(trainer.accelerator, every_process_writes=True):
            return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._whole_optimizer():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        found = tuple(n for n in (OPTIMIZER_NAME, SCHEDULER_NAME) if (folder / n).is_file())
        _require_parallel(trainer.model)._autopar.context.agree(found, f"optimizer state in {checkpoint}", _SHARED)
        if len(found) < 2:
            return
        # Not transformers', which loads whole tensors to every device.
        state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        WholeOptimizer(_require_parallel(trainer.model), trainer.optimizer).load_state_dict(state)
        trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    @contextlib.contextmanager
    def _whole_optimizer(self) -> Iterator[None]:
        trainer: Any = self
        state = checkpoint.full_optimizer_state_dict(_require_parallel(trainer.model), unwrapped(trainer.optimizer))
        with attributes(self, optimizer=_State(state)):
            yield

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        trainer: Any = self
        own = Path(output_dir) / "rng_state_0.pth"
        if trainer.args.world_size > 1 and trainer.args.process_index == 0:
            shutil.copyfile(own, own.with_name("rng_state.pth"))  # for a run on one device

    def _load_rng_state(self, checkpoint: str | None) -> None:
        trainer: Any = self
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            take_random_numbers_of_rank_0(_require_parallel(trainer.model)._autopar.context)


def _weights_in(folder: str) -> tuple[str, ...]:
    """Names of files of weights that this rank finds."""
    return tuple(sorted(p.name for p in Path(folder).glob("*") if p.name.startswith(("model", "pytorch_", "adapter_"))))


def _named(trainer: type) -> str:
    """The library's class that `WholeBatches` was put before."""
    return next((c.__name__ for c in trainer.__mro__ if c.__module__.partition(".")[0] == "trl"), trainer.__name__)


def _require_parallel(model: Any) -> ParallelModule:
    found = parallel_inside(model)
    if found is None:
        raise TypeError(
            f"model must be what autopar.parallelize() returned, or have all of its parameters in one such module, got "
            f"a {type(model).__name__}; for a model on one device take transformers' own Trainer"
        )
    return found


def _gather_nothing(trainer: type) -> None:
    """Let accelerate's functions that a trainer's module has imported leave values as they are: ranks have all rows.

    TRL gathers rewards by them, of which there would be several copies.
    """
    functions = {gather: whole, gather_object: lambda value: value}
    modules = {c.__module__ for c in trainer.__mro__} - {__name__}
    for module in (sys.modules[n] for n in modules if n.partition(".")[0] not in ("accelerate", "transformers")):
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in functions:
                setattr(module, name, functions[value])


def _own_forwards(model: ParallelModule) -> set[int]:
    """Modules of which the model's class does not say what they compute."""
    return {id(m) for m in (model, *model.modules()) if put_forward.NAME in vars(m)}


def _compute_loss_outside(model: ParallelModule) -> None:
    """A trainer that puts a forward of its own on the model, as TRL's do, computes the loss of what that returns."""
    session = model._autopar
    if session.options.loss is None and session.options.loss_fn is None:
        session.options = replace(session.options, loss=OUTSIDE)


def _saves_itself(model: Any) -> bool:
    peft: Any = sys.modules.get("peft")  # a model of its has imported it
    if not isinstance(model, ParallelModule):
        return hasattr(model, "save_pretrained")
    return isinstance(model, transformers.PreTrainedModel) or (peft is not None and isinstance(model, peft.PeftModel))


@contextlib.contextmanager
def _folder_of_rank_0(model: Any, folder: str | None) -> Iterator[str | None]:
    """Where a rank saves: a module around a parallel one writes on every rank, of which rank 0's files are kept."""
    context = _require_parallel(model)._autopar.context
    if isinstance(model, ParallelModule) or context.rank == 0:
        yield folder
        return
    with tempfile.TemporaryDirectory() as other:
        yield other


class Trainer(WholeBatches, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` for parallel modules; see `WholeBatches`."""


class Seq2SeqTrainer(WholeBatches, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer` for parallel modules; see `WholeBatches`.

    With ``predict_with_generate`` every rank has the whole model of an encoder and a decoder on its device while it
    generates.
    """


class _State:
    """What has a state to save."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """As it was given."""
        return self._state
