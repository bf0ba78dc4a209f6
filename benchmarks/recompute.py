"""How much is recomputed at equal bytes kept: autopar's search, torch's memory budgets, a checkpoint around each layer.

One device. Torch's partitioner gets the graph as it was captured, with each of its solvers at several budgets, and
autopar's search the bytes that torch then keeps for the backward pass, or less. Both count as kept the distinct
storages that the backward pass takes of the forward pass, without parameters, buffers and the batch; as recomputed, the
operations (`torch.utils.flop_counter`'s formulas: matrix products and convolutions) and the bytes moved of operators
that run in both passes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

import autopar.strategies  # noqa: F401  registers every rule
from autopar._torch_compat import TracingContext, budget_partition, storage_id, tracing
from autopar.capture import capture
from autopar.compiler import rewrite
from autopar.costs.cluster import Cluster, Device, Link
from autopar.errors import InfeasibleError
from autopar.ir.graph import copy_graph, is_backward, is_operator, module_path, tensor_arguments, values_of
from autopar.ir.node_info import info
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program
from autopar.passes.canonicalize import canonical
from autopar.search.emitted.peak import saved_for_backward, state_bytes
from autopar.search.find import find_plan
from autopar.search.options import Job, Search
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

SOLVERS = ("dp", "greedy", "ilp")
BUDGETS = (0.5, 0.2)

# Memory so fast that an operator's time is its matrix products': what torch's solvers count, too. A thousandth of it is
# the traffic, so that of plans of equal products the one that moves less is found.
PRODUCTS = Cluster(
    "counts products", Device("products", {"float32": 1e12}, 1e15, 1e15, 1e-12), (Link("none", 1e15, 1e-12),)
)


@dataclass(frozen=True)
class Row:
    """What one way of recomputing keeps and does.

    Attributes:
        model: name.
        method: who decided.
        saved: bytes kept for the backward pass.
        flops: recomputed operations.
        moved: bytes that recomputed operators read and write.
        seconds: of deciding.
    """

    model: str
    method: str
    saved: float
    flops: float
    moved: float
    seconds: float


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    pairs = [pair for name in options.only or MODELS for pair in compare(name)]
    if options.json:
        print(json.dumps([[asdict(row) if row else None for row in pair] for pair in pairs], indent=1))
    else:
        print(table(pairs))


def compare(name: str) -> list[tuple[Row, Row | None]]:
    """Each way of recomputing beside autopar's at the same bytes, or fewer."""
    model, batch = MODELS[name]()
    raw = capture(model, batch)
    program = canonical(raw)
    theirs = [checkpointed(name, program)]
    for solver in SOLVERS:
        theirs += [partitioned(name, raw, solver, budget) for budget in BUDGETS]
    ours: dict[float, Row | None] = {}
    for row in theirs:
        if row.saved not in ours:
            print(f"{name}: {row.method}, {row.saved / 2**20:.2f} MiB kept", file=sys.stderr)
            ours[row.saved] = searched(name, program, row.saved)
    return [(row, ours[row.saved]) for row in theirs]


def partitioned(name: str, raw: Program, solver: str, budget: float) -> Row:
    """Torch's partitioner."""
    joint = copy_graph(raw.graph)
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    start = time.perf_counter()
    mode = next(v.fake_mode for n in inputs for v in values_of(n) if v is not None)  # type: ignore[attr-defined]
    with tracing(TracingContext(mode)):
        forward, backward = budget_partition(joint, raw.forward_outputs, budget, solver)
    seconds = time.perf_counter() - start
    returned: Any = forward.graph.output_node().args[0]
    given = storages(inputs)
    kept = storages(v for v in returned[raw.forward_outputs :] if isinstance(v, fx.Node))
    first = {n.name for n in forward.graph.nodes if is_operator(n)}
    again = [n for n in backward.graph.nodes if is_operator(n) and n.name in first]
    saved = sum(size for storage, size in kept.items() if storage not in given)
    return Row(name, f"torch, {solver} {budget:g}", saved, flops(again), moved(again), seconds)


def searched(name: str, program: Program, budget: float) -> Row | None:
    """Autopar's search, of at most so many bytes; None if it finds no such plan."""
    start = time.perf_counter()
    try:
        plan = plan_keeping(program, budget)
    except InfeasibleError:
        return None
    seconds = time.perf_counter() - start
    saved, again = kept_by(program, plan)
    return Row(name, "autopar", saved, flops(again), moved(again), seconds)


def plan_keeping(program: Program, budget: float) -> Plan:
    """The plan that is found if the backward pass takes at most so many bytes of the forward pass, at any moment.

    Raises:
        InfeasibleError: none is.
    """
    held = sum(state_bytes(program, "sgd", gradients=False).values())

    job = Job({"device": 1}, PRODUCTS, held + budget, "sgd", Search(gap=1e-6), all_points=False)
    return find_plan(program, analyze(program), job)


def checkpointed(name: str, program: Program) -> Row:
    """Within each block everything is recomputed up to what the next one takes, as `torch.utils.checkpoint` does."""
    classes = layer_classes(program, analyze(program))

    def block(node: fx.Node) -> str:
        parts = module_path(node).split(".")
        prefixes = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return next((p for p in prefixes if p in program.blocks), "")

    handed = {s for n, sources in program.sources.items() if not is_backward(n) for s, _ in sources
              if block(s) != block(n)}  # fmt: skip
    inside = [n for n in program.sources if not is_backward(n) and block(n) and n not in handed]
    free = find_plan(program, analyze(program), Job({"device": 1}, PRODUCTS, optimizer="sgd"))
    names = [f"{classes.key[n]} @{n.name}" for n in inside]
    consumer_layouts = [f"consumer {classes.key[n]} @{n.name} {i}" for n in inside for i in range(len(values_of(n)))]
    plan = replace(free, recompute={name: EVERY for name in [*names, *consumer_layouts]})
    saved, again = kept_by(program, plan)
    return Row(name, "checkpoint a layer", saved, flops(again), moved(again), 0.0)


def kept_by(program: Program, plan: Plan) -> tuple[float, list[fx.Node]]:
    """Bytes that the emitted graph keeps for the backward pass, and the operators that it runs twice."""
    local = rewrite(program, plan)
    saved = saved_for_backward(local, plan)
    names = {n.name for n in local.graph.graph.nodes}
    backward = [n for n in local.graph.graph.nodes if n.op == "call_function" and is_backward(n)]
    return saved, [n for n in backward if info(n).recompute_of in names and is_operator(n)]


def storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Bytes of each distinct storage that these nodes' tensors lie in."""
    return {storage_id(v): v.untyped_storage().nbytes() for n in nodes for v in values_of(n) if v is not None}


def flops(nodes: Iterable[fx.Node]) -> float:
    """Operations by torch's own formulas; what has none counts nothing."""
    total = 0.0
    for node in nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            values: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += formula(*values[0], **values[1], out_val=node.meta["val"])
    return total


def moved(nodes: Iterable[fx.Node]) -> float:
    """Bytes that operators read and write, of those that make a storage."""
    total = 0.0
    for node in nodes:
        read, written = storages(tensor_arguments(node)), storages([node])
        if not written.keys() <= read.keys():
            total += sum(read.values()) + sum(written.values())
    return total


def table(pairs: Iterable[tuple[Row, Row | None]]) -> str:
    """Markdown."""
    lines = ["| model | method | kept MiB | recomputed MFLOP | moved again MiB | autopar: kept | MFLOP | moved | s |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip

    def cells(row: Row) -> list[str]:
        return [f"{row.saved / 2**20:.2f}", f"{row.flops / 1e6:.2f}", f"{row.moved / 2**20:.1f}"]

    for row, own in pairs:
        found = [*cells(own), f"{own.seconds:.1f}"] if own else ["none found", "", "", ""]
        lines.append(f"| {' | '.join([row.model, row.method, *cells(row), *found])} |")
    return "\n".join(lines)


# --- models


def llama() -> tuple[nn.Module, Any]:
    """Grouped queries, gated ffn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(128)


def gpt2() -> tuple[nn.Module, Any]:
    """Fused queries, keys and values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokens(128)


def tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    """A batch that is its own labels."""
    words = torch.randint(0, vocabulary, (8, 48))
    return {"input_ids": words, "labels": words.clone()}


def vit() -> tuple[nn.Module, Any]:
    """Patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=16, attn_implementation="eager",
    )  # fmt: skip
    labels = torch.randint(0, 16, (8,))
    return ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": labels}


class Convolutions(nn.Module):
    """Two convolutions with group norms."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, out) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Half of a level."""
        x = nn.functional.silu(self.norms[0](self.first(x)))
        return nn.functional.silu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    """Two levels down, two up, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(3, width), Convolutions(width, 2 * width)])
        self.middle = Convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([Convolutions(6 * width, 2 * width), Convolutions(3 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        skips = []
        for block in self.down:
            skips.append(block(x) if not skips else block(nn.functional.avg_pool2d(skips[-1], 2)))
        x = self.middle(nn.functional.avg_pool2d(skips[-1], 2))
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return nn.functional.mse_loss(self.head(x), y)


def unet() -> tuple[nn.Module, Any]:
    """Convolutions at three resolutions."""
    return UNet(), {"x": torch.randn(4, 3, 32, 32), "y": torch.randn(4, 3, 32, 32)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "unet": unet}


if __name__ == "__main__":
    main()
