"""`AutoparStrategy`: Lightning's trainer with a model that autopar distributes.

::

    from autopar.integrations.lightning_strategy import AutoparStrategy

    trainer = lightning.Trainer(devices=4, strategy=AutoparStrategy())

The strategy parallelizes the module inside the ``LightningModule`` that has the parameters. A loader's ``batch_size``
is that of the whole batch, on any number of devices: every rank loads it, without a distributed sampler.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import checkpoint
from autopar.integrations.whole_batches import (
    gather_outputs_without_loss,
    require_whole_batches,
    take_random_numbers_of_rank_0,
    unwrapped,
    whole,
)
from autopar.module.parallel_module import ParallelModule
from autopar.parallelize import parallelize

try:
    from lightning.fabric.utilities.distributed import _init_dist_connection
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as e:
    raise ImportError(f"lightning cannot be imported: {e}; pip install lightning") from e


class AutoparStrategy(ParallelStrategy):  # type: ignore[misc]
    """Parallelizes the model of a ``LightningModule``, and leaves loaders as they are.

    Checkpoints are those of one device: whole tensors, which rank 0 writes. A run goes on from one on any number of
    devices, and without this strategy.

    Args:
        axes: name and size of each mesh axis, outermost first; default: one axis of all devices.
        module: path of the module to parallelize, which must have all parameters of the ``LightningModule``; default:
            its only child that has parameters.
        backend: of the process group; default: gloo for CPUs and nccl for GPUs.
        options: keyword arguments of `autopar.parallelize`.

    Raises:
        ValueError: parameters are outside of that module, or ``inputs="local"``.
    """

    strategy_name = "autopar"

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        *,
        module: str | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._axes, self._module, self._backend, self._options = axes, module, backend, options
        self.num_nodes = 1
        self._mesh: DeviceMesh | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether loaders get a distributed sampler: never, since every rank loads the whole batch."""
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Of a sampler for the whole batch."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """On this node."""
        return len(self.parallel_devices or ())

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; it is made when processes are connected.

        Raises:
            RuntimeError: they are not yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                "there is no mesh before Trainer.fit() or another of its methods has connected processes"
            )
        return self._mesh

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes."""
        super().setup_environment()
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank
        backend = self._backend or ("gloo" if self.root_device.type == "cpu" else "nccl")
        _init_dist_connection(environment, backend)
        axes = dict(self._axes or {"device": self.world_size})
        self._mesh = init_device_mesh(self.root_device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.lightning_module._device_mesh = self._mesh

    def setup(self, trainer: Any) -> None:
        """Parallelize the model, and then make optimizers."""
        self.accelerator.setup(trainer)
        found = self._parallel()
        if found is None:
            self.precision_plugin.convert_module(self.lightning_module)  # in place
            self.model_to_device()
            found = self._parallelized()
        _sync_no_metrics(self.lightning_module)
        # For loaders that shuffle, where a script has not called seed_everything().
        take_random_numbers_of_rank_0(found._autopar.context)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallel(self) -> ParallelModule | None:
        return next((m for m in self.lightning_module.modules() if isinstance(m, ParallelModule)), None)

    def _parallelized(self) -> ParallelModule:
        outer = self.lightning_module
        path = self._module or _only_child(outer)
        inner = outer.get_submodule(path)
        own = {id(p) for p in inner.parameters()}
        outside = [n for n, p in outer.named_parameters() if id(p) not in own]
        if outside:
            raise ValueError(
                f"parameter {outside[0]!r} of {type(outer).__name__} is outside of the module {path!r}, which is "
                "parallelized: put all layers into one module, and name it in AutoparStrategy(module=...)"
            )
        parallel = parallelize(inner, self.mesh, **self._options)
        require_whole_batches(parallel, "lightning")
        gather_outputs_without_loss(parallel)
        parent, _, name = path.rpartition(".")
        setattr(outer.get_submodule(parent), name, parallel)
        return parallel

    def model_to_device(self) -> None:
        """Before it is parallelized; after that it is on the mesh."""
        if self._parallel() is None:
            self.lightning_module.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The same; its workers get the seeds of rank 0's."""
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", 0) is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
        return dataloader

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The model's own `ParallelModule.no_sync`."""
        found = self._parallel()
        with contextlib.nullcontext() if found is None else found.no_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The whole tensor as it is: each is a sum or mean over the whole batch already."""
        return whole(tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The whole tensor, as on one device."""
        return whole(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or some, decide so."""
        value = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(value)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank on all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole plain tensors; every rank calls it."""
        state: dict[str, Any] = self.lightning_module.state_dict()
        for path, module in self.lightning_module.named_modules():
            if isinstance(module, ParallelModule):
                full = module.full_state_dict()
                state.update({f"{path}.{n}": v for n, v in full.items() if f"{path}.{n}" in state})
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Whole, on rank 0, which writes; every rank calls it."""
        found = self._parallel()
        assert found is not None
        return checkpoint.full_optimizer_state_dict(found, _plain(optimizer))

    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        """From whole tensors, of which each rank keeps its part."""
        found = self._parallel()
        assert found is not None
        for optimizer, state in zip(self.optimizers, checkpoint_["optimizer_states"], strict=True):
            checkpoint.load_full_optimizer_state_dict(found, _plain(optimizer), state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Of rank 0's path, read by every rank: the tuner of batch sizes draws a name on each."""
        checkpoint_path = self.broadcast(checkpoint_path)
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        return found

    def teardown(self) -> None:
        """Leave the model where it is: on its mesh."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _only_child(module: torch.nn.Module) -> str:
    names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(names) != 1:
        raise ValueError(
            f"{type(module).__name__} has parameters in {len(names)} modules ({', '.join(names) or 'none'}), and "
            "one is parallelized: put all layers into one module, and name it in AutoparStrategy(module=...)"
        )
    return names[0]


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    return unwrapped(getattr(optimizer, "_optimizer", optimizer))


def _sync_no_metrics(module: torch.nn.Module) -> None:
    """Let torchmetrics not add up what every rank has seen in whole."""
    children: Any = module.modules()
    for child in children:
        if hasattr(child, "distributed_available_fn"):
            child.distributed_available_fn = _never


def _never() -> bool:
    return False
