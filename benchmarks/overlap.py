"""How much of the communication do kernels hide? Llama-3-8B, 4096 tokens a GPU, by the simulator, on emitted graphs.

Each recipe's plan is emitted twice: with collectives where they are needed, one at a time, and with `Plan.overlap`. The
bound is the larger of what the compute stream works and what the busiest link sends; no order of the same nodes is
faster. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory
from autopar.search.options import Search
from autopar.simulate import COMMUNICATION, simulate
from autopar.simulate.graph_tasks import emitted

TOKENS = 4096
MESHES: tuple[dict[str, int], ...] = ({"gpu": 8}, {"node": 8, "gpu": 8})
RECIPES = ("ddp", "fsdp", "hsdp", "megatron")
COLUMNS = (
    "mesh",
    "recipe",
    "overlap",
    "step_ms",
    "compute_ms",
    "links_ms",
    "ratio",
    "collectives",
    "peak_GiB",
    "emit_s",
)


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the model's 32")
    parser.add_argument("--only", metavar="TEXT", default="", help="recipes that contain TEXT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for axes in MESHES:
        program = captured(math.prod(axes.values()), options.layers)
        for recipe in (r for r in RECIPES if options.only in r and (len(axes) > 1 or r in ("ddp", "fsdp"))):
            plan = solve(program, axes, "h100", search=Search(recipe=recipe))
            rows += [measured(program, replace(plan, overlap=on), axes, recipe) for on in (False, True)]
            if not options.json:
                for row in rows[-2:]:
                    print("  ".join(f"{row[c]!s:>11}" for c in COLUMNS), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


def captured(rows: int, layers: int) -> Program:
    """Llama-3-8B in bf16 on the meta device, a sequence for each GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(rows, TOKENS, dtype=torch.long, device="meta")
    return program_of(model, {"input_ids": ids, "labels": ids})


def measured(program: Program, plan: Plan, axes: Mapping[str, int], recipe: str) -> dict[str, Any]:
    """A row of the table."""
    started = time.perf_counter()
    local = rewrite(program, plan)
    emit = time.perf_counter() - started
    timeline = simulate(emitted(local, plan))
    links: Counter[str] = Counter()
    for task in timeline.tasks:
        if task.category == COMMUNICATION:
            links[task.stream] += task.seconds
    return {
        "mesh": "x".join(map(str, axes.values())),
        "recipe": recipe,
        "overlap": "yes" if plan.overlap else "no",
        "step_ms": round(1e3 * timeline.step_seconds, 1),
        "compute_ms": round(1e3 * timeline.busy[0], 1),
        "links_ms": "/".join(f"{1e3 * links[a]:.1f}" for a in axes),
        "ratio": round(timeline.step_seconds / max(timeline.busy[0], *links.values()), 3),
        "collectives": sum(info(n).collective is not None for n in local.graph.graph.nodes),
        "peak_GiB": round(sum(peak_memory(local, plan).values()) / 2**30, 1),
        "emit_s": round(emit, 1),
    }


if __name__ == "__main__":
    main()
