"""Does a device compute as long as predicted? Seconds of kernels, predicted and simulated, on emitted graphs.

Two layers of Llama-3-8B (a sequence of 4096 tokens a GPU, bf16), four of GPT-2 and of ViT-B, on 8 GPUs; recipes, the
search's own plans, and random ones on a mesh of 2 x 2. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.options import Search
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from benchmarks.overlap import captured

FLAT, NESTED, SQUARE = {"gpu": 8}, {"node": 2, "gpu": 4}, {"a": 2, "b": 2}
RECIPES: tuple[tuple[dict[str, int], str | None], ...] = (
    (FLAT, "ddp"), (FLAT, "fsdp"), (FLAT, "megatron"), (FLAT, None), (NESTED, "hsdp"), (NESTED, "megatron"),
    (NESTED, None),
)  # fmt: skip
MODELS = ("llama", "gpt2", "vit")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="models that contain TEXT")
    parser.add_argument("--random", type=int, default=4, help="random plans of each model")
    options = parser.parse_args()
    for name in (m for m in MODELS if options.only in m):
        program = captured(8, 2) if name == "llama" else small(name)
        for label, plan in plans(program, options.random):
            busy = simulate(emitted(rewrite(program, plan), plan)).busy[0]
            predicted = plan.predicted.compute_seconds
            print(f"{name:6} {label:16} {1e3 * predicted:9.2f} {1e3 * busy:9.2f} {busy / predicted:7.3f}", flush=True)


def plans(program: Program, count: int) -> Iterator[tuple[str, Plan]]:
    """Plans to emit, with their names."""
    for axes, recipe in RECIPES:
        plan = solve(program, axes, "h100", search=Search(recipe=recipe))
        yield f"{'x'.join(map(str, axes.values()))} {recipe or 'search'}", plan
    dims, cluster = analyze(program), Cluster.preset("h100")
    for seed in range(count):
        plan = random_plan(program, dims, SQUARE, cluster, seed, recompute=seed > 1)
        yield f"2x2 random {seed}", predict(program, dims, plan)


def small(name: str) -> Program:
    """Four layers of GPT-2, 8 sequences of 512 tokens, or of ViT-B, 8 images; in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

    batch: dict[str, Any]
    with torch.device("meta"):
        if name == "gpt2":
            ids = torch.zeros(8, 512, dtype=torch.long)
            model, batch = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)), {"input_ids": ids, "labels": ids}
        else:
            model = ViTForImageClassification(ViTConfig(num_hidden_layers=4, num_labels=1000))
            batch = {"pixel_values": torch.zeros(8, 3, 224, 224), "labels": torch.zeros(8, dtype=torch.long)}
    return program_of(model, batch)


if __name__ == "__main__":
    main()
