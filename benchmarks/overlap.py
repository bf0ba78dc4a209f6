"""How much of the communication do kernels hide? Llama-3-8B, 4096 tokens a GPU, by the simulator, on emitted graphs.

The plan of each recipe, and of the search, is emitted twice: with collectives where they are needed, one at a time, and
with `Plan.overlap`. The bound is the larger of what the compute stream works and what the busiest link sends; no order
of the same nodes is faster. With ``--pipelines``, models in stages instead: the bound is then that of each graph of a
stage, in the same schedule, so that it has its bubble. With ``--chunks``, tensor parallelism on 8 GPUs with products in
one piece and in chunks, and how much of what the forward pass sends is hidden. With ``--families``, tiny models of
every family, whose kernels take less than the host needs to launch them: what is predicted and what is simulated.
Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar import Float8, Precision
from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory
from autopar.passes import PASSES
from autopar.passes.collectives.chunk_collectives import chunk_collectives
from autopar.pipeline.schedules import in_two_parts, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.pipeline.stage_memory import memory_of_stages, peaks
from autopar.search.pipeline.stage_times import StageTime, plan_tasks, step_tasks, times_of_plan
from autopar.search.predict import predict
from autopar.search.recost import recosted
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.simulate import COMMUNICATION, simulate
from autopar.simulate.graph_tasks import emitted, node_seconds
from benchmarks.zoo import FAMILIES

TOKENS = 4096
MESHES: tuple[dict[str, int], ...] = ({"gpu": 8}, {"node": 8, "gpu": 8})
RECIPES = ("ddp", "fsdp", "hsdp", "megatron", "search")
PIPELINES: tuple[tuple[str, str, str, int], ...] = (
    ("ddp", "1f1b", "step", 1),
    ("fsdp", "1f1b", "step", 1),
    ("fsdp", "1f1b", "use", 1),
    ("fsdp", "interleaved", "use", 2),
    ("fsdp", "zb-h1", "use", 1),
    ("megatron", "1f1b", "step", 1),
)
"""Recipe of a stage's devices, schedule, how often parameters are gathered, and stages on a device."""

STAGE_AXES = {"pipe": 4, "gpu": 8}
MICROBATCHES = 16
COLUMNS = (
    "mesh",
    "recipe",
    "overlap",
    "predicted_ms",
    "step_ms",
    "compute_ms",
    "links_ms",
    "ratio",
    "collectives",
    "peak_GiB",
    "emit_s",
)
CHUNK_COLUMNS = (
    "recipe",
    "chunks",
    "predicted_ms",
    "step_ms",
    "compute_ms",
    "links_ms",
    "forward_ms",
    "exposed_ms",
    "hidden",
    "collectives",
    "peak_GiB",
)
PIPELINE_COLUMNS = (
    "recipe",
    "schedule",
    "gathered",
    "overlap",
    "predicted_ms",
    "step_ms",
    "bound_ms",
    "ratio",
    "collectives",
    "peak_GiB",
)
FAMILY_COLUMNS = (
    "family", "mesh", "recipe", "predicted_us", "waiting_us", "simulated_us", "ratio", "without"
)  # fmt: skip
"""``without``: as if launches were not predicted."""


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the model's 32")
    parser.add_argument("--only", metavar="TEXT", default="", help="recipes that contain TEXT")
    parser.add_argument("--pipelines", action="store_true", help=f"on {STAGE_AXES}, {MICROBATCHES} microbatches")
    parser.add_argument("--chunks", action="store_true", help="tensor parallelism on 8 GPUs")
    parser.add_argument(
        "--float8", metavar="SCALING", help="of linear layers in chunks, such as rowwise; default: bf16"
    )
    parser.add_argument("--families", action="store_true", help="tiny models of `benchmarks/zoo` on 4 devices")
    parser.add_argument("--preset", default="h100", help="devices of the families: h100, cpu, or another preset")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for row in chunks(options.layers, options.only, options.float8) if options.chunks else ():
        rows.append(row)
        if not options.json:
            print("  ".join(f"{row[c]!s:>17}" for c in CHUNK_COLUMNS), flush=True)
    if options.pipelines:
        for row in pipelines(options.layers, options.only):
            rows.append(row)
            if not options.json:
                print("  ".join(f"{row[c]!s:>11}" for c in PIPELINE_COLUMNS), flush=True)
    for row in families(options.only, options.preset) if options.families else ():
        rows.append(row)
        if not options.json:
            print("  ".join(f"{row[c]!s:>12}" for c in FAMILY_COLUMNS), flush=True)
    for axes in () if options.pipelines or options.chunks or options.families else MESHES:
        program = captured(math.prod(axes.values()), options.layers)
        dims = analyze(program)
        for recipe in (r for r in RECIPES if options.only in r and (len(axes) > 1 or r not in ("hsdp", "megatron"))):
            plan = solve(program, axes, "h100", search=Search(recipe=None if recipe == "search" else recipe))
            both = [predict(program, dims, replace(plan, overlap=on)) for on in (False, True)]
            rows += [measured(program, each, axes, recipe) for each in both]
            if not options.json:
                for row in rows[-2:]:
                    print("  ".join(f"{row[c]!s:>11}" for c in COLUMNS), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


def captured(rows: int, layers: int, float8: str | None = None) -> Program:
    """Llama-3-8B in bf16 on the meta device, a sequence for each GPU; linear layers may be in float8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(rows, TOKENS, dtype=torch.long, device="meta")
    narrow = torch.bfloat16
    precision = Precision(narrow, narrow, narrow, Float8(float8)) if float8 else None
    return program_of(model, {"input_ids": ids, "labels": ids}, precision=precision)


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
        "predicted_ms": round(1e3 * plan.predicted.step_seconds, 1),
        "step_ms": round(1e3 * timeline.step_seconds, 1),
        "compute_ms": round(1e3 * timeline.busy[0], 1),
        "links_ms": "/".join(f"{1e3 * links[a]:.1f}" for a in axes),
        "ratio": round(timeline.step_seconds / max(timeline.busy[0], *links.values()), 3),
        "collectives": sum(info(n).collective is not None for n in local.graph.graph.nodes),
        "peak_GiB": round(sum(peak_memory(local, plan).values()) / 2**30, 1),
        "emit_s": round(emit, 1),
    }


def chunks(layers: int, only: str, float8: str | None = None) -> Iterator[dict[str, Any]]:
    """Rows of the table of chunks: a plan emitted without them, and with them."""
    program = captured(8, layers, float8)
    for recipe in ("megatron-sequence", "megatron"):
        if only not in recipe:
            continue
        plan = solve(program, {"gpu": 8}, "h100", search=Search(recipe=recipe))
        known = plan.predicted
        for passes in (tuple(p for p in PASSES if p is not chunk_collectives), PASSES):
            cut = passes is PASSES
            local = rewrite(program, plan, passes=passes)
            timeline = simulate(emitted(local, plan))
            sent, exposed = forward_seconds(local, plan)
            yield {
                "recipe": recipe,
                "chunks": "yes" if cut else "no",
                "predicted_ms": round(1e3 * (known.step_seconds + (0 if cut else known.chunked_seconds)), 1),
                "step_ms": round(1e3 * timeline.step_seconds, 1),
                "compute_ms": round(1e3 * timeline.busy[0], 1),
                "links_ms": round(1e3 * sum(t.seconds for t in timeline.tasks if t.category == COMMUNICATION), 1),
                "forward_ms": round(1e3 * sent, 1),
                "exposed_ms": round(1e3 * exposed, 1),
                "hidden": f"{1 - exposed / sent:.0%}",
                "collectives": sum(info(n).collective is not None for n in local.graph.graph.nodes),
                "peak_GiB": round(sum(peak_memory(local, plan).values()) / 2**30, 2),
            }


def families(only: str, preset: str = "h100") -> Iterator[dict[str, Any]]:
    """Rows of the table of tiny models."""
    for name, make in FAMILIES.items():
        if only not in name:
            continue
        program = program_of(*make())
        for axes, recipe in itertools.product(({"a": 4}, {"a": 2, "b": 2}), RECIPES):
            try:
                plan = solve(program, axes, preset, search=Search(recipe=None if recipe == "search" else recipe))
            except (InfeasibleError, ValueError):  # no such plan of this model, or on so many axes
                continue
            known, step = plan.predicted, simulate(emitted(rewrite(program, plan), plan)).step_seconds
            yield {
                "family": name,
                "mesh": "x".join(map(str, axes.values())),
                "recipe": recipe,
                "predicted_us": round(1e6 * known.step_seconds),
                "waiting_us": round(1e6 * known.waiting_seconds),
                "simulated_us": round(1e6 * step),
                "ratio": round(step / known.step_seconds, 3),
                "without": round(step / known.device_seconds, 2),
            }


def forward_seconds(local: Program, plan: Plan) -> tuple[float, float]:
    """What collectives of the forward pass take, and how long its kernels wait for them."""
    backward = {n.name for n in local.graph.graph.nodes if is_backward(n)}
    tasks = list(itertools.takewhile(lambda t: t.name not in backward, emitted(local, plan)))
    timeline = simulate([replace(t, at_start=(), at_end=()) for t in tasks])
    sent = sum(t.seconds for t in tasks if t.category == COMMUNICATION)
    return sent, timeline.exposed_communication[0]


def pipelines(layers: int, only: str) -> Iterator[dict[str, Any]]:
    """Rows of the table of pipelines: without overlap, and with it."""
    for recipe, schedule, gathered, virtual in PIPELINES:
        if only not in recipe:
            continue
        sequences = MICROBATCHES * (1 if recipe == "megatron" else STAGE_AXES["gpu"])
        program = captured(sequences, layers)
        pins = {
            "stages": STAGE_AXES["pipe"], "stage_axis": "pipe", "microbatches": MICROBATCHES, "schedule": schedule,
            "virtual": virtual, "recompute": "none",
        }  # fmt: skip
        roles = {"gpu": "tensor"} if recipe == "megatron" else {}
        plan = solve(program, STAGE_AXES, "h100", search=Search(recipe=recipe, roles=roles, pins=pins))
        if gathered == "use":
            plan = gathered_per_use(program, plan)
        for on in (False, True):
            yield {**measured_pipeline(program, replace(plan, overlap=on)), "recipe": recipe, "gathered": gathered}


def gathered_per_use(program: Program, plan: Plan) -> Plan:
    """A plan that gathers parameters in each microbatch, and again for its backward pass, as where memory is short."""
    part = microbatch_program(program, plan.microbatches, deterministic=False)
    classes = layer_classes(part, analyze(part)).key
    # Nothing that is computed from parameters alone is saved: neither their transposes, nor how these are laid out.
    own = {name for node, name in classes.items() if node in part.microbatch_invariant}
    moved = [f"consumer {name}" for name in plan.consumer_layouts if name.rpartition(" ")[0] in own]
    return replace(plan, recompute=dict.fromkeys([*sorted(own), *moved], EVERY))


def measured_pipeline(program: Program, plan: Plan) -> dict[str, Any]:
    """A row of the table of pipelines."""
    assert plan.pipeline is not None
    local, order = rewrite(program, plan), order_of(plan)
    step, bound = simulate(plan_tasks(local, plan)).step_seconds, bound_seconds(local, plan)
    held = peaks(memory_of_stages(StageGraphs(local, len(plan.stages)), plan.inner, in_two_parts(order)), order)
    return {
        "schedule": plan.pipeline.schedule,
        "overlap": "yes" if plan.overlap else "no",
        "predicted_ms": round(1e3 * recosted(program, plan).predicted.step_seconds, 1),
        "step_ms": round(1e3 * step, 1),
        "bound_ms": round(1e3 * bound, 1),
        "ratio": round(step / bound, 3),
        "collectives": sum(info(n).collective is not None for n in local.graph.graph.nodes),
        "peak_GiB": round(max(sum(each.values()) for each in held) / 2**30, 1),
    }


def bound_seconds(local: Program, plan: Plan) -> float:
    """Seconds of a step in which each graph takes as long as its kernels, or as the busiest of its links."""
    graphs, seconds, order = StageGraphs(local, len(plan.stages)), node_seconds(local, plan.inner), order_of(plan)

    def of(piece: StageGraph) -> float:
        streams: Counter[str] = Counter()
        for node in piece.nodes:
            made = info(node).collective
            streams[made.axis if made else ""] += seconds.get(node.name, 0.0)  # type: ignore[assignment]
        return max(streams.values(), default=0.0)

    def bounded(stage: int, own: StageTime) -> StageTime:
        kinds = FORWARD, BACKWARD, INPUT, WEIGHT
        each = {kind: of(graphs.microbatch_graph(stage, kind)) for kind in kinds}
        after, after_parts = (of(graphs.last_graph(stage, kind)) - each[kind] for kind in (BACKWARD, WEIGHT))
        return replace(
            own, forward=each[FORWARD], backward=each[BACKWARD], for_input=each[INPUT], for_weights=each[WEIGHT],
            after=after, after_parts=after_parts,
        )  # fmt: skip

    times = [bounded(stage, own) for stage, own in enumerate(times_of_plan(local, plan))]
    return simulate(step_tasks(times, order)).step_seconds


if __name__ == "__main__":
    main()
