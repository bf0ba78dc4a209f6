"""How long a step waits for a batch of a new length, and what is left behind by lengths that are gone.

GPT-2 on an emulated mesh of 2 x 2, of which this process builds rank 0's graphs; nothing is trained. Each length is
planned twice: as all plans, which `lengths=` does, and split as the first, which a call does. Seconds are the
processor's. ``--layers 3`` for fewer blocks. Then small steps of many lengths on one device.

    python benchmarks/new_shapes.py --json
"""

from __future__ import annotations

import argparse
import gc
import json
import linecache
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar._torch_compat import FakeTensorMode
from autopar.costs.cluster import Cluster
from autopar.ir.signature import binding
from autopar.runtime.compiled.interpreter import Interpreter
from autopar.runtime.dtensor import to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.observer import Observer
from autopar.search.options import Search
from autopar.specialize import CompileOptions, Request, specialize

PAGE = 4096


class Phases(Observer):
    """Notes the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around one."""
        begun = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begun


def waits(layers: int, lengths: list[int]) -> list[dict[str, Any]]:
    """Seconds of each phase for each length, and what the plans are predicted to take."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    device, phases = torch.device("cpu"), Phases()
    context = MeshContext((("data", 2), ("model", 2)), (0, 0), device)
    options = CompileOptions(
        Cluster.preset("h100"), 80e9, "adamw", Search(cache=False), None, None, "global",
        compiler=Interpreter(device), observer=phases,
    )  # fmt: skip

    def made(length: int, **known: Any) -> Any:
        ids = torch.zeros(8, length, dtype=torch.long, device="meta")
        tensors, skeleton = binding.flatten(model, {"input_ids": ids, "labels": ids})
        request = Request(skeleton, tuple((tuple(t.shape), t.dtype) for t in tensors), {})
        return specialize(model, request, options, context, **known)

    first = made(lengths[0], placements=None)
    placements = {name: to_placements(*own) for name, own in first.step.types.parameters.items()}
    rows = []
    for length in lengths[1:]:
        for how, before in (("all plans", None), ("as the first", first)):
            found = made(length, placements=placements, before=before)
            step = found.plan.predicted.step_seconds
            rows.append({"length": length, "searched": how, **phases.seconds, "predicted step": step})
    return rows


def left_behind(count: int) -> dict[str, float]:
    """What a length adds once those before it are evicted: MiB of memory, and entries of torch's caches."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=256, n_embd=32, n_layer=1, n_head=4, use_cache=False)
    model: Any = autopar.parallelize(GPT2LMHeadModel(config), None, cluster="cpu", search=Search(cache=False))
    model._autopar.cache.limit = 2
    sizes = []
    for length in range(8, 8 + 2 * count):
        ids = torch.randint(0, 64, (2, length))
        model(input_ids=ids, labels=ids).loss.backward()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20
        sizes.append((resident, len(FakeTensorMode.cache), len(linecache.cache), len(gc.get_objects())))
    names = ("MiB", "results on fake tensors", "sources", "objects")
    return {name: (b - a) / count for name, a, b in zip(names, sizes[count - 1], sizes[-1], strict=True)}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lengths", default="512,640,768")
    parser.add_argument("--count", type=int, default=16, help="lengths on one device")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = waits(options.layers, list(map(int, options.lengths.split(","))))
    behind = left_behind(options.count)
    if options.json:
        print(json.dumps({"layers": options.layers, "waits": rows, "left behind by each length": behind}, indent=1))
        return
    for row in rows:
        print(
            "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    print("left behind by each length:", ", ".join(f"{value:.3g} {name}" for name, value in behind.items()))


if __name__ == "__main__":
    main()
