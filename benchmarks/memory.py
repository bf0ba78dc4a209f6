"""How much memory does a step really take, and do others take less?

Four Gloo processes train a Llama: autopar without a budget and under budgets, `DistributedDataParallel`, `fully_shard`,
and `fully_shard` with every layer checkpointed. Of each: bytes of tensors that are alive at once (see `allocated.py`;
predicted for autopar), growth of resident memory during a step, and time, the modules taking turns. A step is forward
and backward, with gradients left behind and AdamW's state beside them; figures are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.turns import Step, stepper, take_turns  # noqa: E402

WORLD = 4


def main() -> None:
    """Plan in this process, measure in four, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="0.8,0.64,0.5,0.4,0.35", help="shares of what the plan without one takes")
    parser.add_argument("--hidden", type=int, default=256, help="width of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens in the global batch")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--cluster", default="cpu", help="preset or TOML file (default: cpu)")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds for one search (default: 40)")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all measurements")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    # Tensors are mapped one by one and given back when they are dropped, so that resident memory follows them.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        plan_all(Path(folder), options)
        rows = measure(Path(folder), options)
    print(json.dumps(rows, indent=1) if options.json else table(rows))


def plan_all(folder: Path, options: argparse.Namespace) -> None:
    """A plan without a budget, and one for each that something fits."""
    from autopar.compiler import peak_of, program_of, solve
    from autopar.errors import InfeasibleError
    from autopar.search.options import Search
    from benchmarks.memory_models import llama

    axes = {"device": WORLD}
    program = program_of(*llama(options.hidden, options.layers, options.batch))
    free = solve(program, axes, options.cluster)
    ample = sum(peak_of(program, free).values())
    found = {"autopar": solve(program, axes, options.cluster, memory=2 * ample)}
    for share in map(float, filter(None, options.budgets.split(","))):
        try:
            search = Search(time_limit=options.time_limit)
            found[f"autopar in {share:.0%}"] = solve(
                program, axes, options.cluster, memory=share * ample, search=search
            )
        except InfeasibleError as e:
            print(f"{share:.0%}: {e}", file=sys.stderr)
    for i, (name, plan) in enumerate(found.items()):
        plan.save(folder / f"{i}.json")
        (folder / f"{i}.txt").write_text(name)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 measured.

    Raises:
        RuntimeError: the processes did not end in time.
    """
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = mp.spawn(worker, args=(str(folder), port, vars(options)), nprocs=WORLD, join=False)
    assert context is not None
    deadline = time.monotonic() + options.limit
    try:
        while not context.join(timeout=0.5):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {options.limit:.0f} s; use fewer --rounds or a higher --limit")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return list(json.loads((folder / "rows.json").read_text()))


def worker(rank: int, folder: str, port: int, options: dict[str, Any]) -> None:
    """One process: build every module, measure its memory, then take turns for the times.

    Raises:
        RuntimeError: the losses differ, so that the figures would not be of the same work.
    """
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    steps: dict[str, Step] = {}
    rows = []
    for name, make in contenders(Path(folder), rank, options).items():
        model, batch, row = make()
        steps[name] = stepper(model, batch, gradients_stay=True)
        rows.append({"module": name} | row | memory_of(model, steps[name], row.get("hidden_bytes", 0.0)))
    losses = torch.tensor([row["loss"] for row in rows])
    dist.all_reduce(losses)  # autopar's are of the whole batch, the others' of their own rows
    if float(losses.max() - losses.min()) > 1e-3 * WORLD:
        raise RuntimeError(f"the losses differ: {losses / WORLD}")
    times = take_turns(steps, options["rounds"])
    for row in rows:
        row["median_s"] = statistics.median(times[row["module"]])
        row["ratio"] = statistics.median(t / a for t, a in zip(times[row["module"]], times["autopar"], strict=True))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def contenders(folder: Path, rank: int, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """By name a function that makes the module, its batch, and what is known of its memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from autopar.ir.plan import Plan
    from autopar.parallelize import parallelize
    from benchmarks.memory_models import llama

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("device",))

    def example() -> Any:
        model, batch = llama(options["hidden"], options["layers"], options["batch"])
        return model, batch, {name: value.chunk(WORLD)[rank].clone() for name, value in batch.items()}

    def planned(file: Path) -> Any:
        model, batch, _ = example()
        plan = Plan.load(file)
        held = plan.predicted.peak_bytes
        always = sum(held.get(k, 0.0) for k in ("parameters", "optimizer", "buffers", "batch"))
        row = {"predicted": sum(held.values()), "predicted_growth": sum(held.values()) - always}
        return parallelize(model, mesh, batch, plan=plan), batch, row | {"predicted_s": plan.predicted.step_seconds}

    def replicated() -> Any:
        model, _, own = example()
        buckets = sum(p.nbytes for p in model.parameters())  # which Python cannot see; gradients are views of them
        return DistributedDataParallel(model, gradient_as_bucket_view=True), own, {"hidden_bytes": float(buckets)}

    def sharded(again: bool) -> Any:
        model, _, own = example()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), own, {}

    files = sorted(folder.glob("*.json"), key=lambda f: int(f.stem))
    found: dict[str, Callable[[], Any]] = {f.with_suffix(".txt").read_text(): lambda f=f: planned(f) for f in files}
    found["DistributedDataParallel"] = replicated
    found["fully_shard"] = lambda: sharded(False)
    found["fully_shard, checkpoints"] = lambda: sharded(True)
    return found


def memory_of(model: Any, step: Step, hidden_bytes: float, rate: float = 1e-3) -> dict[str, float]:
    """Bytes held before a step, what the step adds at most, and by how much resident memory grows.

    Args:
        model: its optimizer is made here, and makes its state.
        step: forward and backward.
        hidden_bytes: what the module holds all the time and does not show.
        rate: of learning; with 0, what is measured is of the same parameters.
    """
    import torch

    from benchmarks.allocated import peak_allocated

    step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer.step()
    optimizer.zero_grad()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    held = held_bytes([*model.parameters(), *model.buffers(), *state]) + hidden_bytes
    peak = peak_allocated(step)
    optimizer.zero_grad()
    before = resident(reset=True)
    loss = step()
    grown = resident(reset=False) - before
    optimizer.zero_grad()
    return {"loss": loss, "held": held, "peak": held + peak, "grown": peak, "resident_growth": grown}


def held_bytes(tensors: list[Any]) -> float:
    """Bytes of the storages of these tensors on this rank, each once."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return float(sum(storages.values()))


def resident(reset: bool) -> float:
    """Most bytes of resident memory since the last reset; Linux only."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, sizes in MiB; ratios are of the times within a round, and more than 1 is slower than autopar's."""
    head = [
        "module",
        "predicted peak",
        "peak",
        "off by",
        "predicted growth",
        "resident growth",
        "off by",
        "ms",
        "ratio",
    ]
    lines = [f"| {' | '.join(head)} |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for r in rows:
        peak, grown = r["peak"], r["resident_growth"]
        cells = [r["module"], "", f"{peak / 2**20:.1f}", "", "", f"{grown / 2**20:.1f}", ""]
        if "predicted" in r:
            cells[1], cells[3] = f"{r['predicted'] / 2**20:.1f}", f"{r['predicted'] / peak - 1:+.1%}"
            cells[4], cells[6] = f"{r['predicted_growth'] / 2**20:.1f}", f"{r['predicted_growth'] / grown - 1:+.1%}"
        cells += [f"{1e3 * r['median_s']:.0f}", f"{r['ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
