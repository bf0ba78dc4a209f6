"""What causal attention in blocks that balance saves where queries are split: predicted, with and without."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of, solve
from autopar.costs.cluster import Cluster
from autopar.search.options import Search
from autopar.strategies import attention

HIDDEN, HEADS, LAYERS = 1024, 8, 2


class Block(nn.Module):
    """A decoder layer whose heads are fewer than the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Of one sequence, ``[1, tokens, hidden]``."""
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def row(length: int, devices: int, recipe: str | None, blocks: bool) -> dict[str, Any]:
    """One plan of one sequence."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
        x = torch.zeros(1, length, HIDDEN, dtype=torch.bfloat16)
    program = program_of(model, (x,), loss_fn=lambda y, batch: y.square().mean())
    worth = attention.WORTH_BLOCKS if blocks else float("inf")
    search, cluster = Search(recipe=recipe), Cluster.preset("h100")
    with patch.object(attention, "WORTH_BLOCKS", worth):
        found = solve(program, {"gpu": devices}, cluster, memory=76 * 2**30, search=search)
    return {
        "tokens": length, "devices": devices, "recipe": recipe or "search", "blocks": blocks,
        "ms": 1e3 * found.predicted.step_seconds, "GiB": sum(found.predicted.peak_bytes.values()) / 2**30,
    }  # fmt: skip


def llama(length: int, devices: int) -> dict[str, Any]:
    """The search's plan of one sequence of Llama-3-8B in bfloat16, in the default budget of an H100."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False, tie_word_embeddings=False, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long)
    begin = time.perf_counter()
    found = plan(model, {"input_ids": ids, "labels": ids}, cluster="h100", axes={"gpu": devices})
    return {
        "tokens": length, "devices": devices, "s": found.predicted.step_seconds, "gap": found.certificate.gap,
        "GiB": sum(found.predicted.peak_bytes.values()) / 2**30, "planned in s": time.perf_counter() - begin,
        "all-to-alls": sum(kinds.get("all_to_all", 0) for kinds in found.predicted.collectives.values()),
        "recomputed": len(found.recompute),
    }  # fmt: skip


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument(
        "--llama", type=int, metavar="TOKENS", help="plan Llama-3-8B with a sequence of so many instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = (
        [llama(arguments.llama, arguments.devices)]
        if arguments.llama
        else [
            row(length, arguments.devices, recipe, blocks)
            for length in (16384, 65536, 131072)
            for recipe in ("context", None)
            for blocks in (False, True)
        ]
    )
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| " + " | ".join(rows[0]) + " |\n" + "| --- " * len(rows[0]) + "|")
    for found in rows:
        print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in found.values()) + " |")


if __name__ == "__main__":
    main()
