"""Predictions against what is measured: peaks, calibrated figures, operators, and seconds of steps."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from benchmarks.allocated import peak_allocated
from benchmarks.gpu_parts.setting import MODELS, NEEDS_GPU, Row, Setting, parallelized, step

HELD = ("parameters", "optimizer", "buffers", "batch")
"""What is there before a step."""
WORST = 10


def peak(setting: Setting) -> list[Row]:
    """Bytes of a step beside what is held, predicted, allocated, and (on a GPU) reserved, of five models."""
    from autopar.compiler import peak_of, program_of

    rows: list[Row] = []
    for name in MODELS:
        model, batch = setting.example(name)
        program = program_of(copy.deepcopy(model), batch)
        emitted = parallelized(model, batch)
        predicted = sum(size for kind, size in peak_of(program, emitted.plan).items() if kind not in HELD)
        run = _step_of(emitted, batch)
        run()
        emitted.zero_grad()
        figures: dict[str, float] = {"predicted_mib": predicted / 2**20}
        if setting.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setting.device)
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            run()
            allocated = torch.cuda.max_memory_allocated() - before
            figures["reserved_mib"] = (torch.cuda.max_memory_reserved() - reserved) / 2**20
        else:
            allocated = peak_allocated(run)
        figures |= {"allocated_mib": allocated / 2**20, "ratio": allocated / max(predicted, 1.0)}
        rows.append({"check": name, "passed": None, **figures})
    return rows


def _step_of(model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        found = model(**batch)
        getattr(found, "loss", found).backward()

    return run


def calibration(setting: Setting) -> list[Row]:
    """The figures that `autopar calibrate` finds for this device, and how far they are from its kernels."""
    from autopar.costs.calibrate.fit import predicted_seconds
    from autopar.costs.calibrate.kernels import Kernels
    from autopar.costs.calibrate.run import Settings, calibrate

    few = Kernels(((1, 64, 64, 64), (1, 128, 128, 128)), ((1, 2, 32, 16),), (1 << 12, 1 << 16))
    dtypes = ("float32",) if setting.small else ("float32", "bfloat16")
    settings = Settings(dtypes, few if setting.small else None, enough=0.001 if setting.small else 0.05, timeout=300.0)
    base = None if _preset(setting) else "h100"
    found = calibrate(settings, ranks=1, base=base if setting.cuda else "cpu", name="this device")
    assert found is not None
    cluster, samples = found
    seconds = predicted_seconds(samples, cluster.device, cluster.links)
    errors = [abs(math.log(s / sample.seconds)) for s, sample in zip(seconds, samples, strict=True)]
    figures = {f"{dtype}_tflops": rate / 1e12 for dtype, rate in cluster.device.flops.items() if dtype in dtypes}
    return [
        {"check": "fitted", "passed": None, **figures, "gb_per_s": cluster.device.bandwidth / 1e9,
         "launch_us": cluster.device.launch * 1e6},
        {"check": "error of kernels", "passed": None, "median": statistics.median(errors), "largest": max(errors),
         "kernels": len(errors)},
    ]  # fmt: skip


def _preset(setting: Setting) -> bool:
    from autopar.runtime.devices import cluster_of_device

    try:
        cluster_of_device(setting.device)
    except ValueError:  # a GPU of no preset
        return False
    return True


class _Timed(fx.Interpreter):
    """Runs a graph node by node, and keeps the least seconds of each."""

    def __init__(self, module: fx.GraphModule, setting: Setting) -> None:
        super().__init__(module)
        self.setting, self.seconds = setting, dict[str, float]()

    def run_node(self, node: fx.Node) -> Any:
        self.setting.synchronize()
        start = time.perf_counter()
        found = super().run_node(node)
        self.setting.synchronize()
        taken = time.perf_counter() - start
        self.seconds[node.name] = min(self.seconds.get(node.name, math.inf), taken)
        return found


def operators(setting: Setting) -> list[Row]:
    """The ten operators of a Llama whose seconds are furthest from the prediction, and how much they are of a step."""
    from autopar.compiler import program_of, rewrite
    from autopar.simulate.graph_tasks import node_seconds

    model, batch = setting.example("llama")
    emitted = parallelized(model, batch)
    program = program_of(copy.deepcopy(model), batch)
    local = rewrite(program, emitted.plan)
    predicted = node_seconds(local, emitted.plan)
    given = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = list(batch.values())
    inputs = []
    for node, spec in zip(local.graph.graph.find_nodes(op="placeholder"), local.inputs, strict=True):
        value = given.get(spec.name) if spec.kind in ("parameter", "buffer") else None
        if spec.kind == "batch":
            value = tensors[int(spec.name)]
        # The gradient of the loss, and of results that have none.
        fake = node.meta["val"]
        inputs.append(torch.ones(fake.shape, dtype=fake.dtype, device=setting.device) if value is None else value)
    timed = _Timed(local.graph, setting)
    with torch.no_grad():
        for _ in range(3 if setting.small else 10):
            timed.run(*(v.detach().clone() for v in inputs))
    known = {name: (predicted[name], timed.seconds[name]) for name in predicted if name in timed.seconds}
    known = {name: pair for name, pair in known.items() if pair[0] > 0}
    whole = sum(measured for _, measured in known.values())
    # By seconds, not by ratio: a kernel that takes nothing may be off by any factor.
    worst = sorted(known, key=lambda name: -abs(known[name][0] - known[name][1]))[:WORST]
    rows: list[Row] = [
        {"check": name, "passed": None, "predicted_us": known[name][0] * 1e6, "measured_us": known[name][1] * 1e6,
         "share": known[name][1] / whole}
        for name in worst
    ]  # fmt: skip
    every = {"predicted_us": sum(p for p, _ in known.values()) * 1e6, "measured_us": whole * 1e6}
    return [*rows, {"check": "all, one at a time", "passed": None, **every, "operators": len(known)}]


def steps(setting: Setting) -> list[Row]:
    """Seconds of a step of two models: eager, emitted, and (on a GPU) offloaded to the host under a budget."""
    rows: list[Row] = []
    for name in ("encoder", "llama"):
        model, batch = setting.example(name)
        eager = copy.deepcopy(model)
        emitted = parallelized(model, batch)
        rows.append({"check": f"{name}, eager", "passed": None, "ms": _milliseconds(setting, eager, batch)})
        predicted = emitted.plan.predicted.step_seconds * 1e3
        own = _milliseconds(setting, emitted, batch)
        rows.append({"check": f"{name}, emitted", "passed": None, "ms": own, "predicted_ms": predicted})
        rows.append(_offloaded(setting, name, model, batch, emitted.plan))
    return rows


def _offloaded(setting: Setting, name: str, model: Any, batch: Any, plan: Any) -> Row:
    from autopar.errors import InfeasibleError
    from autopar.search.options import Search

    check = f"{name}, offloaded"
    if not setting.cuda:
        return {"check": check, "passed": None, "note": NEEDS_GPU}
    budget = 0.8 * sum(plan.predicted.peak_bytes.values())
    try:
        own = parallelized(model, batch, memory=budget, search=Search(time_limit=20.0, pins={"offload": "search"}))
    except InfeasibleError as error:
        return {"check": check, "passed": None, "note": str(error)[:80]}
    predicted = own.plan.predicted
    return {
        "check": check, "passed": None, "ms": _milliseconds(setting, own, batch),
        "predicted_ms": predicted.step_seconds * 1e3, "host_mib": predicted.host_bytes / 2**20,
    }  # fmt: skip


def _milliseconds(setting: Setting, model: Any, batch: dict[str, torch.Tensor]) -> float:
    """The median of a step's, after two that warm it."""
    times = []
    for i in range(5 if setting.small else 12):
        setting.synchronize()
        start = time.perf_counter()
        step(model, batch)
        setting.synchronize()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
