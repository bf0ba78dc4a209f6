"""How long does a training step take on this machine?

At world size 1: the emitted module against the eager model. At 2 and 4 Gloo processes: against
`DistributedDataParallel` and `fully_shard`. Same model and batch, forward and backward without the optimizer; the
competitors take turns within each round, and the figures are medians over rounds, on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.turns import Step, stepper, take_turns  # noqa: E402


def main() -> None:
    """Measure each world size and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2,4", help="numbers of processes (default: 1,2,4)")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds (default: 10)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens in the global batch")
    parser.add_argument("--hidden", type=int, default=256, help="width of the Llama-style model of 4 layers")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one world size")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", AUTOPAR_CACHE="0")
    rows: list[dict[str, Any]] = []
    for world in map(int, options.worlds.split(",")):
        rows += measure(world, options)
    print(json.dumps(rows, indent=1) if options.json else table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Medians, spreads and ratios, where more than 1 means slower than autopar's module."""
    lines = [f"{'processes':>9}  {'module':<24} {'median_ms':>10} {'min_ms':>10} {'max_ms':>10} {'ratio':>7}  loss"]
    for r in rows:
        figures = f"{r['median_ms']:10.1f} {r['min_ms']:10.1f} {r['max_ms']:10.1f} {r['ratio']:7.3f}"
        lines.append(f"{r['world']:9d}  {r['module']:<24} {figures}  {r['loss']:.5f}")
    return "\n".join([*lines, "", "ratio: median over the median of autopar's module with as many processes"])


def measure(world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of every competitor with so many processes.

    Raises:
        RuntimeError: a process failed or did not end in time.
    """
    results = mp.get_context("spawn").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = mp.spawn(worker, args=(world, port, vars(options), results), nprocs=world, join=False)
    assert context is not None
    deadline = time.monotonic() + options.limit
    try:
        while not context.join(timeout=0.5):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{world} processes are not done after {options.limit:.0f} s; use fewer --rounds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return list(results.get())


def worker(rank: int, world: int, port: int, options: dict[str, Any], results: Any) -> None:
    """One process: build every competitor, check that losses agree, then take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 256, (options["batch"], 128), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        steps = competitors(world, rank, batch, options["hidden"])
        losses = {name: mean(step(), world) for name, step in steps.items()}
        for step in steps.values():
            step()  # warm
        times = take_turns(steps, options["rounds"], until_all=False)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(rows_of(world, losses, times))


def competitors(world: int, rank: int, batch: dict[str, torch.Tensor], hidden: int) -> dict[str, Step]:
    """A step of each: forward, backward, gradients dropped; returns the loss of what the process computed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from autopar.parallelize import parallelize

    own = {name: value.chunk(world)[rank] for name, value in batch.items()}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("device",))
    models = {"autopar": (parallelize(llama(hidden), mesh, batch), batch)}
    if world == 1:
        models["autopar, no mesh"] = (parallelize(llama(hidden), None, batch), batch)
        models["eager"] = (llama(hidden), batch)
    else:
        models["DistributedDataParallel"] = (DistributedDataParallel(llama(hidden)), own)
        sharded = llama(hidden)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        models["fully_shard"] = (fully_shard(sharded, mesh=mesh), own)
    return {name: stepper(model, data) for name, (model, data) in models.items()}


def rows_of(world: int, losses: dict[str, float], times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Plain data.

    Raises:
        RuntimeError: the losses differ, so that the times would not be of the same work.
    """
    apart = max(losses.values()) - min(losses.values())
    if apart > 1e-4:
        raise RuntimeError(f"the losses differ by {apart:.1e}: {losses}")
    base = statistics.median(times["autopar"])
    return [
        {
            "world": world,
            "module": name,
            "median_ms": 1e3 * statistics.median(seconds),
            "min_ms": 1e3 * min(seconds),
            "max_ms": 1e3 * max(seconds),
            "ratio": statistics.median(seconds) / base,
            "loss": losses[name],
        }
        for name, seconds in times.items()
    ]


def mean(loss: float, world: int) -> float:
    """Over ranks: autopar's loss is global already, the others' are of their own rows, all of one size."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / world


def llama(hidden: int) -> Any:
    """A Llama-style model of 4 layers over bytes, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
