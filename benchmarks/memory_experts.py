"""Does a mixture of experts take the memory that is predicted, where tokens travel to their experts?

Four Gloo processes train a small Mixtral whose experts are split, and measure what is alive at once during a step (see
`allocated.py`), with AdamW's state. Which tokens an expert gets depends on the data: each process has its own peak.
Imbalance is that of the fullest process's rows over the mean, counted at the router of each layer, the largest of all.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WORLD = 4

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "experts over 4": ({"expert": 4}, {"roles": {"expert": "expert"}}),
    "experts over 4, imbalance told": ({"expert": 4}, {"roles": {"expert": "expert"}, "imbalance": None}),
    "experts over 2, sharded over 2": ({"data": 2, "expert": 2}, {"roles": {"data": "shard", "expert": "expert"}}),
    "as the search likes": ({"device": 4}, {}),
}
"""Axes, and what is asked of the search; an imbalance of None is the measured one."""


def main() -> None:
    """Measure in four processes, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="of each of 32 sequences (default: 128)")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds for one search (default: 40)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    mp.spawn(worker, args=(port, vars(options)), nprocs=WORLD)


def rows_of_experts(tokens: int) -> list[list[int]]:
    """Rows that each expert of each layer gets."""
    import torch

    from benchmarks.memory_models import mixtral

    model, batch = mixtral(sequence=tokens)
    with torch.no_grad():
        logits = model(**batch, output_router_logits=True).router_logits
    return [torch.bincount(one.topk(2, -1).indices.flatten(), minlength=len(one[0])).tolist() for one in logits]


def worker(rank: int, port: int, options: dict[str, Any]) -> None:
    """One process: plan, and measure a step of the parameters whose routing is known, case by case."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.ir.layout import imbalance_of
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from benchmarks.memory import memory_of
    from benchmarks.memory_models import mixtral
    from benchmarks.turns import stepper

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    rows = rows_of_experts(options["tokens"])
    found = []
    for name, (axes, asked) in CASES.items():
        parts = axes.get("expert", 1)
        measured = max(imbalance_of(tuple(map(float, one)), parts) for one in rows)
        asked = {key: measured if value is None else value for key, value in asked.items()}
        model, batch = mixtral(sequence=options["tokens"])
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        parallel = parallelize(model, mesh, batch, search=Search(time_limit=options["time_limit"], **asked))
        row = memory_of(parallel, stepper(parallel, batch, gradients_stay=True), 0.0, rate=0.0)
        peaks = [0.0] * WORLD
        dist.all_gather_object(peaks, row["peak"])
        predicted = sum(parallel.plan.predicted.peak_bytes.values())
        found.append({"case": name, "imbalance": measured, "predicted": predicted, "peaks": peaks})
    if rank == 0:
        print(json.dumps(found, indent=1) if options["json"] else table(found))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, sizes in MiB; off by: the prediction, over the mean of all processes and over the fullest."""
    lines = ["| case | imbalance | predicted | peaks | off the mean by | off the fullest by |", "| --- " * 6 + "|"]
    for r in rows:
        peaks = " ".join(f"{p / 2**20:.1f}" for p in r["peaks"])
        off = [r["predicted"] / of - 1 for of in (sum(r["peaks"]) / WORLD, max(r["peaks"]))]
        mean, fullest = (f"{share:+.1%}" for share in off)
        size = r["predicted"] / 2**20
        lines.append(f"| {r['case']} | {r['imbalance']:.2f} | {size:.1f} | {peaks} | {mean} | {fullest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
