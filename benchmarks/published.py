"""What do published training runs on A100s take, and what is predicted of them?

Reads ``published`` (a folder of data given by ``--data``; without it there is nothing to do): the steps of Table 1 of
PTD-P (arXiv 2104.04473), the steps, times of a layer and activations of "Reducing Activation Recomputation"
(2205.05198), and the bubbles of "Zero Bubble Pipeline Parallelism" (2401.10241). Steps are predicted by
`autopar.hybrid.predict_hybrid`, as ``autopar plan --recipe megatron`` does, of `benchmarks/gpt.py`; nothing is fitted
to them. They are predicted twice: with the kernels of the graph, and without the passes over memory that the fused
kernels of Megatron save (PTD-P, section 4.2). Activations are what the graph of a layer keeps alive.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sympy  # noqa: E402

from autopar.assignment import machine_of  # noqa: E402
from autopar.cluster import Cluster  # noqa: E402
from autopar.compiler import program_of, solve  # noqa: E402
from autopar.dims import analyze  # noqa: E402
from autopar.hybrid import predict_hybrid  # noqa: E402
from autopar.redistribute import Machine  # noqa: E402
from autopar.search.options import Search  # noqa: E402
from autopar.simulate import order, pipeline, simulate  # noqa: E402
from autopar.step import Part, spend_each, step_of  # noqa: E402
from benchmarks.gpt import GPT, batch_of  # noqa: E402

SEQUENCE, VOCABULARY = 2048, 51200
SHAPES = {22: (6144, 64, 48), 175: (12288, 96, 96), 530: (20480, 128, 105), 1000: (25600, 160, 128)}
"""Hidden, heads and layers by billions of parameters: 2205.05198, Table 3, which the data leaves out."""

RUNS = {175: 3, 530: 3}
"""Runs of layers on each stage, from the same paper, section 6: interleaved."""

Row = Mapping[str, Any]


def main() -> None:
    """Predict and print, table by table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with published/")
    parser.add_argument("--cluster", default="a100-80gb", help="a preset or TOML file")
    options = parser.parse_args()
    folder = options.data and options.data / "published"
    if folder is None or not folder.is_dir():
        print("skipped: no data (--data DIR with published/)")
        return
    cluster = Cluster.resolve(options.cluster)

    def read(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    bubbles(read("zero_bubble"))
    own = read("activation_recomputation")
    layer(own["layer_ms_22b"], cluster)
    activations(own["activation_bytes_per_layer"])
    recomputed(own["iteration_seconds"], cluster)
    ptdp(read("megatron_ptdp_table1"), cluster)


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """Rows by the names of their columns."""
    return [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]]


def ptdp(data: Mapping[str, Any], cluster: Cluster) -> None:
    """Steps of PTD-P's Table 1, from TFLOP/s a GPU by the paper's count."""
    print("\nPTD-P, Table 1: full recomputation, 1F1B or interleaved; TFLOP/s a GPU, then seconds")
    print("  params  t  p   d runs published kernels of the graph     fused kernels")
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row in rows_of(data):
        hidden, layers, stages = row["hidden"], row["layers"], row["pipeline"]
        ranks = row["gpus"] // (row["tensor"] * stages)
        runs = layers // stages // (row["layers_per_virtual_stage"] or layers // stages)
        ratio = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        work = 96 * row["global_batch"] * SEQUENCE * layers * hidden**2 * ratio / row["gpus"] / 1e12
        rate = row["tflops_per_gpu"]
        text = f"{row['params_billion']:7}B {row['tensor']:2} {stages:2} {ranks:3} {runs:4} {rate:9}"
        for fused, own in errors.items():
            seconds = step(row, (hidden, row["heads"], layers), ranks, runs, cluster, fused=fused)
            own.append(seconds / (work / rate) - 1)
            text += f"  {work / seconds:7.1f} {own[-1]:+8.1%}"
        print(f"{text}   {work / rate:7.2f} {seconds:7.2f}", flush=True)
    for fused, own in errors.items():
        print(f"{'fused' if fused else 'the graph'}: {_mean(own)}")


def step(
    row: Row,
    shape: tuple[int, int, int],
    data: int,
    runs: int,
    cluster: Cluster,
    recipe: str = "megatron",
    recompute: str = "full",
    *,
    fused: bool,
) -> float:
    """Predicted seconds of the step of a row."""
    hidden, heads, layers = shape
    return predict_hybrid(
        GPT(hidden, heads, layers, SEQUENCE, VOCABULARY, fused=fused),
        batch_of(row["global_batch"], SEQUENCE),
        cluster=cluster,
        axes={"pp": row["pipeline"], "dp": data, "tp": row["tensor"]},
        microbatch=row["microbatch"],
        schedule="interleaved" if runs > 1 else "1f1b",
        virtual=runs,
        recipe=recipe,
        recompute=recompute,
        memory="1TB",  # that they fit is known
    ).step_seconds


def recomputed(table: Mapping[str, Any], cluster: Cluster) -> None:
    """Steps of "Reducing Activation Recomputation", Table 5."""
    print("\nReducing Activation Recomputation, Table 5: seconds, kernels of the graph, fused kernels")
    print("  params     full recomputation                     sequence parallel, selective")
    errors: dict[bool, list[float]] = {False: [], True: []}
    ways = {"full_recompute_s": ("megatron", "full"),
            "sequence_parallel_plus_selective_s": ("megatron-sequence", "selective")}  # fmt: skip
    for row in rows_of(table):
        name = row["params_billion"]
        text = f"{name:7}B"
        for column, way in ways.items():
            text += f" {row[column]:8.2f}"
            for fused, own in errors.items():
                seconds = step(row, SHAPES[name], 1, RUNS.get(name, 1), cluster, *way, fused=fused)
                own.append(seconds / row[column] - 1)
                text += f" {seconds:8.2f} {own[-1]:+7.1%}"
        print(text, flush=True)
    for fused, own in errors.items():
        print(f"{'fused' if fused else 'the graph'}: {_mean(own)}")


def _mean(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"mean error {sum(sizes) / len(sizes):.1%}, largest {max(sizes):.1%}, on average "
        f"{sum(errors) / len(errors):+.1%}"
    )


def layer_22b(recipe: str, fused: bool = False) -> tuple[Part, Machine]:
    """A layer of the 22B model, four samples on eight tensor ranks; the second one, as the first makes the mask."""
    hidden, heads, _ = SHAPES[22]
    program = program_of(GPT(hidden, heads, 2, SEQUENCE, VOCABULARY, fused=fused), batch_of(4, SEQUENCE))
    dims = analyze(program)
    plan = solve(program, {"tensor": 8}, "a100-80gb", search=Search(recipe=recipe, padding=False))
    return next(p for p in step_of(program, dims, plan) if p.name == "layers.1"), machine_of(plan)


def layer(table: Mapping[str, Any], cluster: Cluster) -> None:
    """Milliseconds of one layer."""
    print("\nA layer of 22B, microbatch 4, 8 tensor ranks: milliseconds, kernels of the graph, fused kernels")
    for row in rows_of(table):
        text, name = f"{row['variant']:31}", row["variant"]
        spent = [
            _layer_ms("megatron-sequence" if "sequence" in name else "megatron", fused, cluster)
            for fused in (False, True)
        ]
        for column, index in (("forward_ms", 0), ("backward_ms", 1)):
            text += f" {column.removesuffix('_ms')} {row[column]:5.1f}"
            for ms in spent:
                more = ms[0] if "full" in name else ms[2] if "selective" in name else 0.0
                own = ms[index] + more * index
                text += f" {own:5.1f} {own / row[column] - 1:+7.1%}"
        print(text)


@functools.cache
def _layer_ms(recipe: str, fused: bool, cluster: Cluster) -> tuple[float, float, float]:
    """Forward, backward, and what selective recomputation does before that."""
    part, machine = layer_22b(recipe, fused)
    machine = Machine(machine.names, machine.sizes, cluster.link_for({"tensor": 8}), cluster.device)
    forward, backward, again = spend_each([part.forward, part.backward, part.again], [machine] * 3)
    return forward.device * 1e3, backward.device * 1e3, again.device * 1e3


def activations(formulas: Mapping[str, str]) -> None:
    """Bytes that a layer of 22B keeps, by the formulas and in the graph."""
    hidden, heads, _ = SHAPES[22]
    print(
        "\nActivations of a layer of 22B, microbatch 4, 8 tensor ranks: MB by the formula, in the graph; bytes between"
    )
    values = {"s": SEQUENCE, "b": 4, "h": hidden, "a": heads, "t": 8}
    split, sequence = layer_22b("megatron")[0], layer_22b("megatron-sequence")[0]
    found = {"tensor": split.saved, "tensor + sequence": sequence.saved,
             "tensor + sequence + selective": sequence.saved - sequence.spared, "full": split.handed}  # fmt: skip
    for name, size in found.items():
        expected = float(sympy.sympify(formulas[name]).subs(values))
        print(f"{name:32} {expected / 1e6:9.2f} {size / 1e6:9.2f} {size - expected:+10.0f}")


def bubbles(data: Mapping[str, Any]) -> None:
    """Bubble rates, from the paper's durations."""
    print("\nZero Bubble, smallest numbers of microbatches: bubble rate, published and simulated")
    published = {row["model"]: row for row in rows_of(data["bubble_rate"])}
    for row in rows_of(data["durations_ms"]):
        for name, schedule in (("1F1B", "1f1b"), ("ZB-H1", "zb-h1")):
            times = [[row[part]] * row["stages"] for part in ("forward", "backward_input", "backward_weight")]
            actions = order(schedule, row["stages"], row["microbatches"], 1)
            found = simulate(pipeline(actions, *times, row["communication"])).mean_bubble
            print(f"{row['model']:8} {name:8} {published[row['model']][name]:8.4f} {found:8.4f}")


if __name__ == "__main__":
    main()
