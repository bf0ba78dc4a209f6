"""The training run that a recipe describes, on this process and the others of the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import checkpoint
from autopar.integrations.recipe.data import batches, called, function
from autopar.integrations.recipe.schema import Model, Optimizer, Recipe, Schedule
from autopar.module.metrics import Metrics, watch
from autopar.module.parallel_module import ParallelModule
from autopar.parallelize import parallelize
from autopar.runtime.launch.environment import AXES
from autopar.runtime.launch.mesh import mesh
from autopar.search.options import Search


def train(recipe: Recipe) -> ParallelModule:
    """Train a model, from the last checkpoint where there is one; every process of the run calls it.

    Raises:
        ValueError: a field names something that is not there.
        AutoparError: the checkpoint is of another model or optimizer.
    """
    torch.manual_seed(recipe.seed)
    wanted = recipe.mesh
    search = Search(recipe=wanted.recipe, roles=wanted.roles, pins=wanted.pins, inexact=wanted.inexact)
    # The launcher has taken the recipe's axes over, or others that were given to it.
    axes = None if os.environ.get(AXES) else wanted.axes or None
    devices = mesh(axes, device=wanted.device)
    loss = None if recipe.model.loss is None else function(recipe.model.loss, "model.loss")
    kind = wanted.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = parallelize(
        _model(recipe.model).to(kind), devices, _batch(next(batches(recipe.data, recipe.seed, 0))), loss_fn=loss,
        memory=wanted.memory, optimizer=_counted(recipe.optimizer), precision=recipe.model.precision,
        cluster=wanted.cluster, search=search, compile=wanted.compile or None,
    )  # fmt: skip
    optimizer = _optimizer(recipe.optimizer, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(recipe.schedule, recipe.steps))
    first = _found(recipe, model, optimizer, scheduler)
    lines = _Lines(recipe, model, optimizer, first)
    given = batches(recipe.data, recipe.seed, first)
    for step in range(first + 1, recipe.steps + 1):
        batch = {name: _to(kind, value) for name, value in _batch(next(given)).items()}
        lines.loss = _loss(model(**batch))
        lines.loss.backward()  # type: ignore[no-untyped-call]
        if recipe.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        lines.write()
        saved = recipe.checkpoint
        if saved is not None and (step % saved.every == 0 or step == recipe.steps):
            last = step == recipe.steps
            checkpoint.save(saved.folder, model, optimizer, step=step, keep=saved.keep, wait=last, scheduler=scheduler)
    lines.end()
    if recipe.checkpoint is not None and recipe.checkpoint.export is not None:
        checkpoint.export_safetensors(recipe.checkpoint.export, model)
    return model


def _model(wanted: Model) -> nn.Module:
    if wanted.build is not None:
        found = called("model", wanted.build, wanted.arguments)()
        if not isinstance(found, nn.Module):
            raise ValueError(f"model.build: {wanted.build} returned a {type(found).__name__}, no torch.nn.Module")
        return found
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model: nn.Module = load(wanted.pretrained)
    return model.train()


def _batch(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ValueError(f"data.build: a batch is a {type(found).__name__}; it must be a dict of tensors by name")
    return dict(found)


def _to(kind: str, value: Any) -> Any:
    return value.to(kind) if isinstance(value, torch.Tensor) else value


def _loss(output: Any) -> torch.Tensor:
    """The loss of an output: itself, its first element, or what it calls so."""
    if isinstance(output, Mapping):
        output = output["loss"]
    elif isinstance(output, tuple | list):
        output = output[0]
    elif not isinstance(output, torch.Tensor):
        output = output.loss
    found: torch.Tensor = output
    return found


def _counted(wanted: Optimizer) -> str:
    """As `autopar.parallelize` counts its state."""
    return "sgd-momentum" if wanted.name == "sgd" and wanted.momentum else wanted.name


def _optimizer(wanted: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if wanted.name == "sgd":
        return torch.optim.SGD(trained, lr=wanted.lr, momentum=wanted.momentum, weight_decay=wanted.weight_decay)
    kind = torch.optim.AdamW if wanted.name == "adamw" else torch.optim.Adam
    return kind(trained, lr=wanted.lr, betas=wanted.betas, weight_decay=wanted.weight_decay)


def rate(wanted: Schedule, steps: int) -> Callable[[int], float]:
    """Fraction of the learning rate, by the number of steps that have been taken."""

    def at(step: int) -> float:
        if step < wanted.warmup:
            return (step + 1) / (wanted.warmup + 1)
        done = (step - wanted.warmup) / max(1, steps - 1 - wanted.warmup)
        if wanted.name == "constant":
            return 1.0
        shape = 1 - done if wanted.name == "linear" else (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return wanted.least + (1 - wanted.least) * max(shape, 0.0)

    return at


def _found(recipe: Recipe, model: ParallelModule, optimizer: torch.optim.Optimizer, scheduler: Any) -> int:
    """How many steps a checkpoint has; 0 without one."""
    if recipe.checkpoint is None:
        return 0
    try:
        return checkpoint.load(recipe.checkpoint.folder, model, optimizer, scheduler=scheduler).step
    except FileNotFoundError:
        return 0


class _Lines:
    """A line of figures from time to time, which rank 0 prints and adds to a file."""

    def __init__(self, recipe: Recipe, model: ParallelModule, optimizer: torch.optim.Optimizer, first: int) -> None:
        self.loss: torch.Tensor | None = None
        self._recipe, self._optimizer, self._first = recipe.metrics, optimizer, first
        self._figures: Metrics | None = None
        self._writes = model._autopar.context.rank == 0
        self.end = watch(model, self._keep, every=recipe.metrics.every)
        self._step = first

    def _keep(self, found: Metrics) -> None:
        self._figures = found

    def write(self) -> None:
        """After a step: its line, if it has one."""
        self._step += 1
        found, self._figures = self._figures, None
        if found is None or not self._writes or self.loss is None:
            return
        rate = self._optimizer.param_groups[0]["lr"]
        line = {**asdict(found), "step": self._step, "loss": float(self.loss.detach()), "next_lr": float(rate)}
        known = {name: value for name, value in line.items() if value is not None}
        texts = [f"{name} {value:.6g}" for name, value in known.items() if name != "step"]
        print(f"step {self._step}: {', '.join(texts)}", flush=True)
        if self._recipe.file is not None:
            path = Path(self._recipe.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known) + "\n")
