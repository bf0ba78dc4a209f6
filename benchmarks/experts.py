"""What it saves that each device sorts its own tokens by expert: predicted steps, with that and without."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes import canonicalize
from autopar.search.options import Search

AXES = {"node": 8, "gpu": 8}
RECIPES = ("ddp", "fsdp", "hsdp", "expert", None)
LAYERS = 2
HOW = {"sorted as a whole": False, "each device its own": True}


def models() -> Iterator[tuple[str, Any]]:
    """Two layers of two models, on the meta device in bfloat16."""
    import transformers

    common = {"num_hidden_layers": LAYERS, "use_cache": False, "tie_word_embeddings": False}
    yield (
        "Mixtral 8x7B",
        transformers.MixtralConfig(
            **common, vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096,
        ),
    )  # fmt: skip
    yield (
        "Qwen3 30B-A3B",
        transformers.Qwen3MoeConfig(
            **common, vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        ),
    )  # fmt: skip


def milliseconds(config: Any, recipe: str | None, routed: bool, shape: tuple[int, int]) -> float | str:
    """Of the plan's predicted step; or why there is none."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        ids = torch.zeros(*shape, dtype=torch.long)
    kept = patch.object(canonicalize, "route_experts", (lambda p: p) if not routed else canonicalize.route_experts)
    with kept:
        program = program_of(model, {"input_ids": ids, "labels": ids})
    try:
        plan = solve(program, AXES, Cluster.preset("h100"), search=Search(recipe=recipe, time_limit=120))
    except AutoparError as error:
        return type(error).__name__
    return 1e3 * plan.predicted.step_seconds


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--batch", type=int, default=128, help="sequences in all")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each")
    arguments = parser.parse_args()
    shape = arguments.batch, arguments.sequence
    rows = []
    for name, config in models():
        for recipe in RECIPES:
            seconds = {how: milliseconds(config, recipe, own, shape) for how, own in HOW.items()}
            rows.append({"model": name, "recipe": recipe or "search", **seconds})
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| " + " | ".join(rows[0]) + " |\n" + "| --- " * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


if __name__ == "__main__":
    main()
