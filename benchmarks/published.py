"""What do published training runs on A100s take, and what is predicted of them?

Reads ``published`` (a folder of data given by ``--data``; without it there is nothing to do): the steps of Table 1 of
PTD-P (arXiv 2104.04473), the steps, times of a layer and activations of "Reducing Activation Recomputation"
(2205.05198), and the bubbles of "Zero Bubble Pipeline Parallelism" (2401.10241). Steps are predicted by
`autopar.explain.hybrid.predict.predict_hybrid`, as ``autopar plan --recipe megatron`` does, of `benchmarks/gpt.py`;
nothing is fitted to them. They are predicted three times: with the kernels of the graph, with those that a compiler
fuses (``compile=True``), and without the passes over memory that the fused kernels of Megatron save (PTD-P, section
4.2), of a model that leaves these operators out. Activations are what the graph of a layer keeps alive. The
paper's selective recomputation is set beside what the search finds for the memory that it takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sympy  # noqa: E402
from rich.box import MARKDOWN  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import fx  # noqa: E402

from autopar.compiler import peak_of, program_of, program_to_plan, solve  # noqa: E402
from autopar.costs.cluster import Cluster  # noqa: E402
from autopar.explain.hybrid.layer_profile import Part, spend_each, step_of  # noqa: E402
from autopar.explain.hybrid.predict import predict_hybrid  # noqa: E402
from autopar.ir.graph import is_backward, module_path  # noqa: E402
from autopar.ir.plan import EVERY  # noqa: E402
from autopar.ir.program import Program  # noqa: E402
from autopar.memory.recompute import class_of  # noqa: E402
from autopar.search.options import Search  # noqa: E402
from autopar.search.predict import predict  # noqa: E402
from autopar.sharding.assignment import machine_of  # noqa: E402
from autopar.sharding.dims import Dims, analyze  # noqa: E402
from autopar.sharding.layer_classes import layer_classes  # noqa: E402
from autopar.sharding.redistribute.moves import Machine  # noqa: E402
from autopar.simulate import order, pipeline, simulate  # noqa: E402
from benchmarks.gpt import GPT, batch_of  # noqa: E402

SEQUENCE, VOCABULARY = 2048, 51200
SHAPES = {22: (6144, 64, 48), 175: (12288, 96, 96), 530: (20480, 128, 105), 1000: (25600, 160, 128)}
"""Hidden, heads and layers by billions of parameters: 2205.05198, Table 3, which the data leaves out."""

RUNS = {175: 3, 530: 3}
"""Runs of layers on each stage, from the same paper, section 6: interleaved."""

WAYS = {"graph": (False, False), "compiled": (False, True), "by hand": (True, False)}
"""Whether what Megatron's fused kernels save is left out of the model, and whether kernels are fused by a compiler."""

Way = tuple[bool, bool]

Row = Mapping[str, Any]


def main() -> None:
    """Predict and print, table by table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with published/")
    parser.add_argument("--cluster", default="a100-80gb", help="a preset or TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    folder = options.data and options.data / "published"
    if folder is None or not folder.is_dir():
        print("skipped: no data (--data DIR with published/)")
        return
    cluster = Cluster.resolve(options.cluster)

    def read(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    own = read("activation_recomputation")
    tables = {
        "Zero Bubble, smallest numbers of microbatches: bubble rates": bubbles(read("zero_bubble")),
        "A layer of 22B, microbatch 4, 8 tensor ranks: milliseconds": layer(own["layer_ms_22b"], cluster),
        "Activations of a layer of 22B, microbatch 4, 8 tensor ranks": activations(own["activation_bytes_per_layer"]),
        "The selective choice, and what is searched for its memory: 48 layers of 22B": selective(cluster),
        "Reducing Activation Recomputation, Table 5: seconds": recomputed(own["iteration_seconds"], cluster),
        "PTD-P, Table 1: full recomputation, 1F1B or interleaved": ptdp(read("megatron_ptdp_table1"), cluster),
    }
    found: dict[str, list[Row]] = {}
    console = Console(width=180)
    for title, rows in tables.items():
        print(title, file=sys.stderr)
        found[title] = list(rows)
        if not options.json:
            shown = Table(*found[title][0], title=title, caption="; ".join(_means(found[title])), box=MARKDOWN)
            for row in found[title]:
                shown.add_row(*(_cell(name, value) for name, value in row.items()))
            console.print(shown)
    if options.json:
        print(json.dumps(found, indent=1))


def _cell(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:+.1%}" if name.endswith("error") else f"{value:,.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _means(rows: Sequence[Row]) -> list[str]:
    """Of each column of errors."""
    columns = {name: [abs(row[name]) for row in rows] for name in rows[0] if name.endswith("error")}
    return [f"{name}: {sum(own) / len(own):.1%} on average, {max(own):.1%} at most" for name, own in columns.items()]


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Rows by the names of their columns."""
    return [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]]


def ptdp(data: Mapping[str, Any], cluster: Cluster) -> Iterator[Row]:
    """Steps of PTD-P's Table 1, from TFLOP/s a GPU by the paper's count."""
    for row in rows_of(data):
        hidden, layers, stages = row["hidden"], row["layers"], row["pipeline"]
        ranks = row["gpus"] // (row["tensor"] * stages)
        runs = layers // stages // (row["layers_per_virtual_stage"] or layers // stages)
        ratio = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        work = 96 * row["global_batch"] * SEQUENCE * layers * hidden**2 * ratio / row["gpus"] / 1e12
        published = work / row["tflops_per_gpu"]
        found: dict[str, Any] = {
            "params, B": row["params_billion"], "tensor": row["tensor"], "pipeline": stages, "data": ranks,
            "runs": runs, "published s": published, "published TFLOP/s": float(row["tflops_per_gpu"]),
        }  # fmt: skip
        for name, way in WAYS.items():
            seconds = step(row, (hidden, row["heads"], layers), ranks, runs, cluster, way=way)
            found |= {f"{name} s": seconds, f"{name} TFLOP/s": work / seconds, f"{name} error": seconds / published - 1}
        yield found


def step(
    row: Row,
    shape: tuple[int, int, int],
    data: int,
    runs: int,
    cluster: Cluster,
    recipe: str = "megatron",
    recompute: str = "full",
    *,
    way: Way,
) -> float:
    """Predicted seconds of the step of a row."""
    hidden, heads, layers = shape
    return predict_hybrid(
        GPT(hidden, heads, layers, SEQUENCE, VOCABULARY, fused=way[0]),
        batch_of(row["global_batch"], SEQUENCE),
        cluster=cluster,
        axes={"pp": row["pipeline"], "dp": data, "tp": row["tensor"]},
        microbatch=row["microbatch"],
        schedule="interleaved" if runs > 1 else "1f1b",
        virtual=runs,
        recipe=recipe,
        recompute=recompute,
        memory="1TB",  # that they fit is known
        compile=way[1],
    ).step_seconds


def recomputed(table: Mapping[str, Any], cluster: Cluster) -> Iterator[Row]:
    """Steps of "Reducing Activation Recomputation", Table 5."""
    ways = {"full_recompute_s": ("full", "megatron", "full"),
            "sequence_parallel_plus_selective_s": ("selective", "megatron-sequence", "selective")}  # fmt: skip
    for row in rows_of(table):
        name = row["params_billion"]
        for column, (kept, *how) in ways.items():
            found: dict[str, Any] = {"params, B": name, "recomputation": kept, "published s": row[column]}
            for kind, way in WAYS.items():
                seconds = step(row, SHAPES[name], 1, RUNS.get(name, 1), cluster, *how, way=way)
                found |= {f"{kind} s": seconds, f"{kind} error": seconds / row[column] - 1}
            yield found


def layer_22b(recipe: str, way: Way = (False, False)) -> tuple[Part, Machine]:
    """A layer of the 22B model, four samples on eight tensor ranks; the second one, as the first makes the mask."""
    hidden, heads, _ = SHAPES[22]
    program = program_of(GPT(hidden, heads, 2, SEQUENCE, VOCABULARY, fused=way[0]), batch_of(4, SEQUENCE), fused=way[1])
    dims = analyze(program)
    plan = solve(program, {"tensor": 8}, "a100-80gb", search=Search(recipe=recipe, padding=False))
    return next(p for p in step_of(program, dims, plan) if p.name == "layers.1"), machine_of(plan)


def layer(table: Mapping[str, Any], cluster: Cluster) -> Iterator[Row]:
    """Milliseconds of one layer."""
    for row in rows_of(table):
        name = row["variant"]
        recipe = "megatron-sequence" if "sequence" in name else "megatron"
        for column, index in (("forward_ms", 0), ("backward_ms", 1)):
            found: dict[str, Any] = {"variant": name, "pass": column.removesuffix("_ms"), "published": row[column]}
            for kind, way in WAYS.items():
                ms = _layer_ms(recipe, way, cluster)
                more = ms[0] if "full" in name else ms[2] if "selective" in name else 0.0
                own = ms[index] + more * index
                found |= {kind: own, f"{kind} error": own / row[column] - 1}
            yield found


@functools.cache
def _layer_ms(recipe: str, way: Way, cluster: Cluster) -> tuple[float, float, float]:
    """Forward, backward, and what selective recomputation does before that."""
    part, machine = layer_22b(recipe, way)
    machine = Machine(machine.names, machine.sizes, cluster.link_for({"tensor": 8}), cluster.device)
    forward, backward, again = spend_each([part.forward, part.backward, part.recompute], [machine] * 3)
    return forward.device * 1e3, backward.device * 1e3, again.device * 1e3


def activations(formulas: Mapping[str, str]) -> Iterator[Row]:
    """Bytes that a layer of 22B keeps, by the formulas and in the graph."""
    hidden, heads, _ = SHAPES[22]
    values = {"s": SEQUENCE, "b": 4, "h": hidden, "a": heads, "t": 8}
    split, sequence = layer_22b("megatron")[0], layer_22b("megatron-sequence")[0]
    found = {"tensor": split.saved, "tensor + sequence": sequence.saved,
             "tensor + sequence + selective": sequence.saved - sequence.recomputed_bytes,
             "full": split.output_bytes}  # fmt: skip
    for name, size in found.items():
        expected = float(sympy.sympify(formulas[name]).subs(values))
        yield {"kind": name, "formula MB": expected / 1e6, "graph MB": size / 1e6, "bytes between": size - expected}


def selective(cluster: Cluster) -> Iterator[Row]:
    """The choice of the paper, as a plan of the search's space, and what the search finds for as much memory.

    It recomputes attention's core, what has the sequence twice, see `autopar.explain.hybrid.layer_profile.Part`.
    """
    hidden, heads, layers = SHAPES[22]
    program = program_to_plan(GPT(hidden, heads, layers, SEQUENCE, VOCABULARY), batch_of(4, SEQUENCE))
    dims = analyze(program)
    classes = layer_classes(program, dims)
    for recipe in ("megatron", "megatron-sequence"):
        search = Search(recipe=recipe, pins={"recompute": "search"}, padding=False)
        ample = solve(program, {"tensor": 8}, cluster, search=search)
        core = [k for k, (node, *_) in classes.members.items() if _is_core(program, dims, node)]
        core += [f"consumer {r}" for r in ample.consumer_layouts if class_of(f"consumer {r}") in core]
        chosen = predict(program, dims, replace(ample, recompute=dict.fromkeys(core, EVERY)), classes)
        held = peak_of(program, chosen, classes)
        found = solve(program, {"tensor": 8}, cluster, memory=sum(held.values()), search=search)
        for name, plan in (("nothing recomputed", ample), ("selective", chosen), ("search", found)):
            memory = peak_of(program, plan, classes)
            yield {
                "recipe": recipe, "plan": name, "step s": plan.predicted.step_seconds,
                "more than nothing ms": 1e3 * (plan.predicted.step_seconds - ample.predicted.step_seconds),
                "activations GB": memory["activations"] / 1e9, "peak GB": sum(memory.values()) / 1e9,
            }  # fmt: skip


def _is_core(program: Program, dims: Dims, node: fx.Node) -> bool:
    """Whether a forward operator in a layer makes something that has one factor twice."""
    if node not in program.sources or is_backward(node) or not module_path(node).startswith("layers."):
        return False
    made = [[id(f) for dim in o.dims for f in dim] for o in dims.operators[node].outputs if o is not None]
    return any(len(set(factors)) < len(factors) for factors in made)


def bubbles(data: Mapping[str, Any]) -> Iterator[Row]:
    """Bubble rates, from the paper's durations."""
    published = {row["model"]: row for row in rows_of(data["bubble_rate"])}
    for row in rows_of(data["durations_ms"]):
        for name, schedule in (("1F1B", "1f1b"), ("ZB-H1", "zb-h1")):
            times = [[row[part]] * row["stages"] for part in ("forward", "backward_input", "backward_weight")]
            actions = order(schedule, row["stages"], row["microbatches"], 1)
            found = simulate(pipeline(actions, *times, row["communication"])).mean_bubble
            own = published[row["model"]][name]
            yield {"model": row["model"], "schedule": name, "published rate": own, "simulated": round(found, 4)}


if __name__ == "__main__":
    main()
