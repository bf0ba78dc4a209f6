"""Attention along a split sequence: masked, in blocks that balance, or in a ring; and what the search takes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import default_memory, program_of, program_to_plan, solve
from autopar.costs.cluster import Cluster
from autopar.ir.ops.sequence import masked_parts
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.recompute import uniform
from autopar.search.emitted.rewritten import unverified
from autopar.search.options import Search
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.strategies.attention import operators as attention

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


class Windowed(nn.Module):
    """A decoder layer of Mistral-7B's sizes, with a sliding window, as transformers masks it, or without."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.norm = window, nn.RMSNorm(4096)
        self.q, self.kv, self.out = nn.Linear(4096, 4096), nn.Linear(4096, 2048), nn.Linear(4096, 4096)
        self.up, self.gate, self.down = nn.Linear(4096, 14336), nn.Linear(4096, 14336), nn.Linear(14336, 4096)

    def forward(self, x: Tensor) -> Tensor:
        """Of one sequence, ``[1, tokens, hidden]``."""
        h, at = self.norm(x), torch.arange(x.shape[1])
        q, *kv = (y.unflatten(-1, (-1, 128)).transpose(1, 2) for y in (self.q(h), *self.kv(h).chunk(2, -1)))
        shown = at <= at[:, None]
        shown = shown & (at > at[:, None] - self.window) if self.window else shown
        x = x + self.out(F.scaled_dot_product_attention(q, *kv, shown, enable_gqa=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def windowed(length: int, devices: int) -> Iterator[dict[str, Any]]:
    """Plans of two layers with a window and without, and with one whose keys cannot come from neighbors alone."""
    cluster = Cluster.preset("h100")
    for window, halo in ((0, True), (4096, True), (4096, False)):
        with torch.device("meta"):
            model = nn.Sequential(*(Windowed(window) for _ in range(LAYERS))).to(torch.bfloat16)
            x = torch.zeros(1, length, 4096, dtype=torch.bfloat16)
        # Heads stay whole: this is of keys that come from other devices.
        only = patch.object(attention, "_blocked", lambda *_: "bhgkde")
        with only, patch.object(masked_parts, "is_near", masked_parts.is_near if halo else lambda *_: False):
            program = program_of(model, (x,), loss_fn=lambda y, _: y.square().mean())
            found = solve(program, {"gpu": devices}, cluster, memory=76 * 2**30,
                          search=Search(roles={"gpu": "context"}, cache=False, time_limit=math.inf))  # fmt: skip
            seconds = simulated(program, found)
        kinds = found.predicted.communication_bytes["gpu"]
        yield {
            "tokens": length, "devices": devices, "window": window or "none", "halo": "yes" if halo else "no",
            "ms": 1e3 * found.predicted.step_seconds, "simulated": 1e3 * seconds, "sent MiB": kinds / 2**20,
            "GiB": sum(found.predicted.peak_bytes.values()) / 2**30, "taken": taken(found),
        }  # fmt: skip


WAYS = ("masked", "blocks", "ring")
"""Of queries that are split: keys are gathered, and hidden scores computed, or not; or keys go round in a ring, too."""


@contextmanager
def offered(way: str, only: bool = False) -> Iterator[None]:
    """Offer this way and those before it; ``only``: a ring, and no split of queries or heads beside it."""
    worth = attention.WORTH_BLOCKS if way != "masked" else float("inf")
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "WORTH_BLOCKS", worth))
        if way != "ring":
            stack.enter_context(patch.object(attention, "_ring", lambda *_: {}))
        if only:
            stack.enter_context(patch.object(attention, "_blocked", lambda *_: "hgqkde"))
        yield


def taken(found: Plan) -> str:
    """Strategies of attention, forward and backward."""
    return ", ".join(" ".join(names) for key, names in found.choices.items() if "autopar.attention" in key)


def simulated(program: Program, found: Plan) -> float:
    """Seconds of the emitted step; of repeated layers those that are captured, and as many more as there are."""

    def of(part: Program, plan: Plan) -> float:
        return simulate(emitted(unverified(part, plan), plan)).step_seconds

    if program.repeat is None:
        return of(program, found)
    counts = layer_classes(program, analyze(program)).count
    # Layers that are recomputed in several ways: each part is the whole model in one of them.
    parts = [(share, (of(program, plan), of(program.repeat.shorter, plan))) for share, plan in uniform(found, counts)]
    return float(sum(share * program.repeat.extrapolate(*seconds) for share, seconds in parts))


def row(length: int, devices: int, recipe: str | None, way: str) -> dict[str, Any]:
    """One plan of one sequence."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
        x = torch.zeros(1, length, HIDDEN, dtype=torch.bfloat16)
    program = program_of(model, (x,), loss_fn=lambda y, batch: y.square().mean())
    search, cluster = Search(recipe=recipe, cache=False), Cluster.preset("h100")
    with offered(way):
        found = solve(program, {"gpu": devices}, cluster, memory=76 * 2**30, search=search)
        seconds = simulated(program, found)
    return {
        "tokens": length, "devices": devices, "recipe": recipe or "search", "offered": way,
        "ms": 1e3 * found.predicted.step_seconds, "simulated": 1e3 * seconds,
        "GiB": sum(found.predicted.peak_bytes.values()) / 2**30, "taken": taken(found),
    }  # fmt: skip


def fresh(program: Program) -> Program:
    """The same, of which nothing is known."""
    repeat = program.repeat
    return replace(program, repeat=repeat and replace(repeat, shorter=replace(repeat.shorter)))


LLAMA_WAYS = {"ring": ("ring", False), "blocks": ("blocks", False), "ring only": ("ring", True)}
"""What is offered, and whether there is nothing else, along one axis of all devices."""


def llama(length: int, meshes: Sequence[int], devices: int, which: str | None) -> Iterator[dict[str, Any]]:
    """Plans of one sequence of Llama-3-8B in bfloat16, in the default budget of an H100."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False, tie_word_embeddings=False, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.long)
    program, cluster = program_to_plan(model, {"input_ids": ids, "labels": ids}), Cluster.preset("h100")
    ways = [LLAMA_WAYS[which]] if which else list(LLAMA_WAYS.values())
    for nodes, (way, only) in itertools.product(meshes, ways):
        flat = only or nodes == 1
        axes = {"gpu": nodes * devices} if flat else {"node": nodes, "gpu": devices}
        begin = time.process_time()
        roles = dict.fromkeys(axes, "context") if only else {}
        # Whatever else the machine does: what is found must not depend on it.
        search = Search(roles=roles, pins={"recompute": "search"}, cache=False, time_limit=math.inf)
        with offered(way, only):
            # Rules are bound to a program as it is analyzed.
            own = fresh(program)
            found = solve(own, axes, cluster, memory=default_memory(cluster, axes), search=search)
            seconds = simulated(own, found)
        yield {
            "tokens": length, "mesh": "x".join(map(str, axes.values())), "offered": way + " only" * only,
            "s": found.predicted.step_seconds, "simulated": seconds, "gap": found.certificate.gap,
            "GiB": sum(found.predicted.peak_bytes.values()) / 2**30, "planned in s": time.process_time() - begin,
            "all-to-alls": sum(kinds.get("all_to_all", 0) for kinds in found.predicted.collectives.values()),
            "sends": sum(kinds.get("send", 0) for kinds in found.predicted.collectives.values()),
            "recomputed": len(found.recompute), "taken": taken(found),
        }  # fmt: skip


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=16, help="of a node, for --llama")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1], help="for --llama")
    parser.add_argument("--only", choices=LLAMA_WAYS, help="for --llama, one of the rows")
    parser.add_argument(
        "--llama", type=int, metavar="TOKENS", help="plan Llama-3-8B with a sequence of so many instead"
    )
    parser.add_argument("--windows", action="store_true", help="plan layers with a sliding window instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.windows:
        rows = windowed(131072, arguments.devices)
    elif arguments.llama:
        rows = llama(arguments.llama, arguments.nodes, arguments.devices, arguments.only)
    else:
        rows = (
            row(length, arguments.devices, recipe, way)
            for length in (16384, 65536, 131072)
            for recipe in ("context", None)
            for way in WAYS
        )
    if arguments.json:
        print(json.dumps(list(rows)))
        return
    for i, found in enumerate(rows):
        if not i:
            print("| " + " | ".join(found) + " |\n" + "| --- " * len(found) + "|")
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in found.values())
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
