"""Equality with eager: steps in two dtypes, a plan made on a CPU, optimizers, clipping, scaler, checkpoints."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_parts.setting import MODELS, Batch, Row, Setting, compared, difference, parallelized, step

TOLERANCE = 1e-4
"""Of float32, by a tensor's norm."""


def equality(setting: Setting) -> list[Row]:
    """Loss and gradients of five models against eager, in float32 and in bfloat16.

    Kernels round bfloat16 in different places, and so errors are those from eager's float32, at most twice as large as
    eager's own.
    """
    rows: list[Row] = []
    for name in MODELS:
        model, batch = setting.example(name)
        rows.append(compared(f"{name}, float32", model, batch, TOLERANCE))
        _, exact = step(model, batch)
        model, batch = setting.example(name, torch.bfloat16)
        _, eager = step(copy.deepcopy(model), batch)
        _, own = step(parallelized(model, batch), batch)
        error, tolerance = difference(own, exact), 2 * difference(eager, exact) + 1e-3
        rows.append(
            {"check": f"{name}, bfloat16", "passed": error <= tolerance, "error": error, "tolerance": tolerance}
        )
    return rows


def cpu_plan(setting: Setting) -> list[Row]:
    """A plan that was made on a CPU, saved, and read on the device."""
    rows = []
    for name in MODELS:
        there, batch = Setting(torch.device("cpu"), setting.small).example(name)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            parallelized(there, batch).plan.save(file)
            here, moved = setting.example(name)
            rows.append(compared(f"{name}, planned on a CPU", here, moved, TOLERANCE, plan=file))
    return rows


Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def _optimizers(cuda: bool) -> dict[str, Make]:
    found: dict[str, Make] = {
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
        "AdamW, foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        "SGD, momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
        "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    }
    if cuda:
        found["AdamW, capturable"] = lambda p: torch.optim.AdamW(p, 1e-3, capturable=True)
    return found


def train(
    model: nn.Module, batch: Batch, make: Make, *, steps: int = 3, clip: float | None = None, scaler: Any = None
) -> torch.optim.Optimizer:
    """Some steps, as a training loop writes them; returns the optimizer."""
    optimizer = make(model.parameters())
    for i in range(steps):
        torch.manual_seed(i)
        found = model(**batch)
        loss = getattr(found, "loss", found)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return optimizer


def training(setting: Setting) -> list[Row]:
    """Parameters after three steps, by optimizer, with clipping and a scaler, and a checkpoint.

    Errors are those from eager's float64, at most twice as large as those of eager's float32.
    """
    model, batch = setting.example("encoder")
    kinds: dict[str, tuple[Make, dict[str, Any]]] = {n: (m, {}) for n, m in _optimizers(setting.cuda).items()}
    adam = _optimizers(False)["AdamW"]
    kinds["clipped"] = adam, {"clip": 0.01}
    kinds["scaler"] = adam, {"clip": 1.0, "scaler": True}
    rows: list[Row] = []
    for name, (make, options) in kinds.items():
        ends = []
        exact = copy.deepcopy(model).double()
        doubles = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        for own, given in ((exact, doubles), (copy.deepcopy(model), batch), (parallelized(model, batch), batch)):
            # Of its own for each: the scale that one finds is not the other's.
            of_scaler = {"scaler": torch.amp.GradScaler(setting.device.type)} if "scaler" in options else {}
            train(own, given, make, **{**options, **of_scaler})
            ends.append({n: p.detach() for n, p in own.named_parameters()})
        # A gradient that is zero but for rounding, such as a key's bias, moves its parameter by a whole step of some
        # optimizers: both are as far from float64.
        error, tolerance = difference(ends[2], ends[0]), 2 * difference(ends[1], ends[0]) + TOLERANCE
        rows.append({"check": name, "passed": error <= tolerance, "error": error, "tolerance": tolerance})
    return [*rows, _checkpoint(model, batch, adam)]


def _checkpoint(model: nn.Module, batch: Batch, make: Make) -> Row:
    """A state that is saved, loaded into fresh modules, and trained on, against training without a pause."""
    from autopar.checkpoint import load_state_dict, state_dict

    first, fresh = parallelized(model, batch), parallelized(model, batch)
    optimizer, file = train(first, batch, make), io.BytesIO()
    torch.save(state_dict(first, optimizer), file)
    file.seek(0)
    other = make(fresh.parameters())
    load_state_dict(fresh, other, torch.load(file, weights_only=False))
    train(first, batch, lambda _: optimizer, steps=1)
    train(fresh, batch, lambda _: other, steps=1)
    ends = [{n: p.detach() for n, p in own.named_parameters()} for own in (fresh, first)]
    error = difference(*ends)
    return {"check": "checkpoint", "passed": error <= 1e-6, "error": error, "tolerance": 1e-6}
