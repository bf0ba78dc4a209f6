"""Predictions against what is measured: peaks, calibrated figures, operators, and seconds of steps."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812

from benchmarks.allocated import peak_allocated
from benchmarks.gpu_parts.setting import MODELS, NEEDS_GPU, Row, Setting, difference, parallelized, step

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


def cross_entropy(setting: Setting) -> list[Row]:
    """Our operator against float64, its least traffic by its time, and torch's own, forward and backward."""
    count, numbers = (16, (100,)) if setting.small else (8192, (32000, 50257, 128256))
    return [_cross_entropy(setting, count, classes, dtype) for classes in numbers for dtype in CROSS_ENTROPY]


CROSS_ENTROPY = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Dtypes of logits, and how far the gradient may be from that of float64."""


def _cross_entropy(setting: Setting, count: int, classes: int, dtype: torch.dtype) -> Row:
    from autopar.ir.ops import cross_entropy as ours

    torch.manual_seed(0)
    logits = torch.randn(count, classes, device=setting.device).to(dtype).requires_grad_()
    target = torch.randint(classes, (count, 1), device=setting.device)
    grad = torch.randn(count, 1, device=setting.device)

    def own() -> tuple[Tensor, Tensor]:
        _, total = ours.cross_entropy(logits.detach(), target, None)
        return total, ours.cross_entropy_backward(grad, logits.detach(), target, total, None, dtype)

    def of_torch() -> None:
        F.cross_entropy(logits.float(), target[:, 0]).backward()
        logits.grad = None

    total, found = own()
    few = slice(256)
    x = logits[few].detach().double().requires_grad_()
    (F.log_softmax(x, -1).gather(-1, target[few]) * grad[few].double()).sum().backward()
    assert x.grad is not None
    exact = {"gradient": x.grad, "sum": x.detach().logsumexp(1, True)}
    error, tolerance = difference({"gradient": found[few], "sum": total[few]}, exact), CROSS_ENTROPY[dtype]
    seconds = _seconds(setting, own)
    return {
        "check": f"{classes} classes, {str(dtype).removeprefix('torch.')}", "passed": error <= tolerance,
        "error": error, "tolerance": tolerance, "us": seconds * 1e6,
        "gb_per_s": 3 * logits.numel() * logits.element_size() / seconds / 1e9,
        "torch_us": _seconds(setting, of_torch) * 1e6,
    }  # fmt: skip


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
    device = cluster.device
    figures = {f"{dtype}_tflops": rate / 1e12 for dtype, rate in device.flops.items() if dtype in dtypes}
    rows: list[Row] = [
        {"check": "fitted", "passed": None, **figures, "gb_per_s": device.bandwidth / 1e9, "fused": device.fused,
         "ramp": device.ramp, "launch_us": device.launch * 1e6, "host_us": device.host * 1e6}
    ]  # fmt: skip
    errors: dict[str, list[float]] = {}
    for predicted, sample in zip(seconds, samples, strict=True):
        errors.setdefault(sample.kind, []).append(abs(math.log(predicted / sample.seconds)))
    rows += [
        {"check": f"error of {kind}", "passed": None, "median": statistics.median(found), "largest": max(found),
         "kernels": len(found)}
        for kind, found in errors.items()
    ]  # fmt: skip
    return rows


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
    """Seconds of a step of two models in bfloat16: eager, emitted, both compiled; on a GPU also replayed, offloaded."""
    rows: list[Row] = []
    for name in ("encoder", "llama"):
        model, batch = setting.example(name, torch.bfloat16)
        emitted = parallelized(model, batch)
        run: dict[str, Callable[[], Any]] = {
            "eager": lambda model=model: copy.deepcopy(model),
            "emitted": lambda emitted=emitted: emitted,
            "torch.compile": lambda model=model: torch.compile(copy.deepcopy(model)),
            "emitted, compiled": lambda model=model, batch=batch: parallelized(model, batch, compile=True),
        }
        for kind, make in run.items():
            row: Row = {"check": f"{name}, {kind}", "passed": None, "ms": _milliseconds(setting, make(), batch)}
            if kind == "emitted":
                row["predicted_ms"] = emitted.plan.predicted.step_seconds * 1e3
            rows.append(row)
        rows.append(_replayed(setting, name, emitted, batch))
        rows.append(_offloaded(setting, name, model, batch, emitted.plan))
    return rows


def _replayed(setting: Setting, name: str, model: Any, batch: dict[str, torch.Tensor]) -> Row:
    """A step that is captured as a CUDA graph once and replayed: its time, and its gradients against those before."""
    check = f"{name}, emitted, CUDA graph"
    if not setting.cuda:
        return {"check": check, "passed": None, "note": NEEDS_GPU}
    _, expected = step(model, batch)
    parameters = dict(model.named_parameters())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks: what is allocated and chosen once is, before the capture
        for _ in range(3):
            step(model, batch)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = model(**batch)
            getattr(found, "loss", found).backward()
    except RuntimeError as error:
        return {"check": check, "passed": None, "note": f"not captured: {str(error).splitlines()[0][:120]}"}
    seconds = _seconds(setting, graph.replay)
    own = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    error = difference(own, expected)
    return {"check": check, "passed": error <= 1e-2, "error": error, "ms": seconds * 1e3}


def _offloaded(setting: Setting, name: str, model: Any, batch: Any, plan: Any) -> Row:
    from autopar.errors import InfeasibleError
    from autopar.search.options import Search

    check = f"{name}, offloaded"
    if not setting.cuda:
        return {"check": check, "passed": None, "note": NEEDS_GPU}
    budget = 0.8 * sum(plan.predicted.peak_bytes.values())
    pins = {"offload": "search", "recompute": "none", "microbatches": 1}  # or others serve
    _, expected = step(copy.deepcopy(model), batch)
    try:
        own = parallelized(model, batch, memory=budget, search=Search(time_limit=20.0, pins=pins))
    except InfeasibleError as error:
        return {"check": check, "passed": None, "note": str(error)[:80]}
    predicted = own.plan.predicted
    error = difference(step(own, batch)[1], expected)
    return {
        "check": check, "passed": error <= 1e-2, "error": error, "ms": _milliseconds(setting, own, batch),
        "predicted_ms": predicted.step_seconds * 1e3, "host_mib": predicted.host_bytes / 2**20,
    }  # fmt: skip


def _milliseconds(setting: Setting, model: Any, batch: dict[str, torch.Tensor]) -> float:
    return 1e3 * _seconds(setting, lambda: step(model, batch))


def _seconds(setting: Setting, run: Callable[[], Any]) -> float:
    """The median of several runs', after two that warm it."""
    times = []
    for _ in range(5 if setting.small else 12):
        setting.synchronize()
        start = time.perf_counter()
        run()
        setting.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
