"""How well does the cost model predict measured training steps of GPTs on A100s?

Reads the iteration times of ``megatron_measured`` (a folder of data given by ``--data``; without it there is nothing to
do). The model's graph is captured with two blocks for each shape, planned with the recipe ``megatron``, and costed as
`autopar plan --recipe megatron` does. What no datasheet says of the device and its links is fitted, robustly, to half
of the rows, and reported of the other half; then the halves change places. Assumed, since the data does not say:
everything recomputed on several nodes and nothing on one; kernels that a compiler fuses on several nodes, where
Megatron has its own, and kernels as the graph has them on one; 16-bit gradients; a vocabulary of 51200, but of 50257,
which is not padded, on one node without tensor parallelism.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import multiprocessing
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from autopar.costs.calibrate.several_starts import Expected, fit_positive  # noqa: E402
from autopar.costs.cluster import Cluster  # noqa: E402
from autopar.explain.hybrid.layer_profile import Part, Spent, spend_each  # noqa: E402
from autopar.explain.hybrid.training_step import Stages, Training, simulated_seconds, stages_of, step_seconds  # noqa: E402
from autopar.sharding.redistribute.moves import Machine  # noqa: E402

Floats = NDArray[np.float64]

BASE = "a100-80gb"
EXPECTED = {  # what is fitted: where it is expected, and how far off it may be, as a ratio's logarithm
    "efficiency": Expected(0.9, 0.1, highest=1.0),
    "ramp": Expected(200.0, 0.7),
    "streaming": Expected(0.9, 0.2, highest=1.0),
    "host": Expected(3e-5, 0.5),
    "launch": Expected(1e-5, 1.0),
    "node bandwidth": Expected(230e9, 0.25),
    "node latency": Expected(5e-6, 0.5),
    "network bandwidth": Expected(15e9, 0.7),
    "network latency": Expected(1e-5, 0.7),
    "contention": Expected(0.5, 0.7),
}
PRIOR_WEIGHT = 2.0
FILES = (("single_node.csv", False), ("multi_node.csv", True), ("multi_node_39b.csv", True))  # and on several nodes?
SEVERAL_NODES = 8.0  # as many rows a row counts as: there are 18 times as many of one node
# Relative errors beyond which a row counts as an outlier, the less the further it is: the first fit looks at all rows,
# each later one starts from it and looks less at those that it could not explain.
ROBUST = (0.1, 0.07, 0.05)


@dataclass(frozen=True)
class Row:
    """One measured configuration."""

    gpus: int
    global_batch: int
    microbatch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float
    several_nodes: bool

    @property
    def shape(self) -> tuple[int, int, int, int, int, bool]:
        """What is captured: hidden, heads, sequence, microbatch, vocabulary, and whether kernels are fused."""
        padded = self.several_nodes or self.tensor > 1
        vocabulary = 51200 if padded else 50257
        return self.hidden, self.heads, self.sequence, self.microbatch, vocabulary, self.several_nodes

    @property
    def training(self) -> Training:
        """How the step is spread."""
        microbatches = self.global_batch // self.data // self.microbatch
        recompute = "full" if self.several_nodes else "none"
        return Training(self.layers, self.pipeline, microbatches, self.data, recompute)


def main() -> None:
    """Capture, fit, predict and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with megatron_measured/")
    parser.add_argument("--steps", type=Path, help="file that keeps what was captured for the next run")
    parser.add_argument("--workers", type=int, default=2, help="processes that capture (default: 2)")
    parser.add_argument("--without", type=int, help="fit to all rows but those of this hidden size, and report those")
    parser.add_argument("--fixed", action="store_true", help="fit nothing: the preset as it is")
    parser.add_argument("--save", type=Path, help="write the cluster that the first half gives to this TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    folder = options.data and options.data / "megatron_measured"
    if folder is None or not folder.is_dir():
        print("skipped: no data (--data DIR with megatron_measured/)")
        return
    rows = read(folder)
    steps = capture(rows, options.steps, options.workers)
    if options.without:
        fitted = [np.array([row.hidden != options.without for row in rows])]
    else:
        first = np.array([half(row) for row in rows])
        fitted = [first, ~first]
    clusters = [Cluster.preset(BASE)] * len(fitted) if options.fixed else fit_all(rows, steps, fitted, options.workers)
    if options.save:
        clusters[0].save(options.save)
    found = np.array([predict(rows, steps, cluster, simulate=True) for cluster in clusters])
    if options.without:
        figures = {f"fit without hidden {options.without}": report(rows, fitted[0], found[0])}
    else:
        figures = {
            "fit to the first half": report(rows, first, found[0]),
            "fit to the second half": report(rows, ~first, found[1]),
            "each row by the fit to the half without it": report(
                rows, ~(first | ~first), np.where(first, found[1], found[0])
            ),
        }
    print(json.dumps(figures, indent=1) if options.json else table(figures, clusters[0], rows, found[0], fitted[0]))


def read(folder: Path) -> list[Row]:
    """All rows of the files."""
    rows = []
    for name, several in FILES:
        with (folder / name).open(encoding="utf-8") as file:
            lines = list(csv.reader(file))[1:]
        for line in lines:
            values = [float(v) for v in line[several:]]  # the second file begins with the parameters
            rows.append(Row(*map(int, values[:10]), values[10] / 1e3, several))
    return rows


def half(row: Row) -> bool:
    """Whether the row is one that the fit may see: by a hash of its configuration, so that no order matters."""
    text = repr(replace(row, seconds=0.0))
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 0


Steps = dict[tuple[Any, ...], tuple[Part, ...]]
"""Parts by shape and tensor ranks."""


def capture(rows: Iterable[Row], file: Path | None, workers: int) -> Steps:
    """The parts of every shape and number of tensor ranks; from the file if it has them."""
    wanted: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for row in rows:
        wanted[row.shape].add(row.tensor)
    steps: Steps = pickle.loads(file.read_bytes()) if file is not None and file.is_file() else {}
    jobs = [(s, sorted(t for t in ts if (*s, t) not in steps)) for s, ts in sorted(wanted.items())]
    jobs = [job for job in jobs if job[1]]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(max(1, min(workers, len(jobs)))) as pool:
        for number, made in enumerate(pool.imap_unordered(_capture, jobs), 1):
            steps.update(made)
            if file is not None:  # so that what was captured is there if this ends early
                file.write_bytes(pickle.dumps(steps))
            seconds = time.monotonic() - began
            print(f"\rcaptured {number} of {len(jobs)} shapes, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    if jobs:
        print(file=sys.stderr)
    return steps


def _capture(job: tuple[tuple[int, ...], list[int]]) -> Steps:
    from autopar.compiler import program_of, solve
    from autopar.explain.hybrid.layer_profile import step_of
    from autopar.search.options import Search
    from autopar.sharding.dims import analyze
    from benchmarks.gpt import GPT, batch_of

    (hidden, heads, sequence, microbatch, vocabulary, fused), ranks = job
    model = GPT(hidden, heads, 2, sequence, vocabulary)  # as the command line captures it
    program = program_of(model, batch_of(microbatch, sequence), fused=bool(fused))
    dims = analyze(program)
    found = {}
    for tensor in ranks:
        search = Search(recipe="megatron" if tensor > 1 else None, padding=False)
        plan = solve(program, {"tensor": tensor}, BASE, search=search)
        found[(*job[0], tensor)] = step_of(program, dims, plan)
    return found


def predict(rows: Sequence[Row], steps: Steps, cluster: Cluster, *, simulate: bool = False) -> list[float]:
    """Seconds of each row's step: by the closed form, which is fast enough to fit, or by the simulator."""
    seconds_of = simulated_seconds if simulate else step_seconds
    wanted = list(dict.fromkeys((*row.shape, row.tensor) for row in rows))
    links = {row.tensor: cluster.link_for({"tensor": row.tensor}) for row in rows}
    machine = {t: Machine(("tensor",), (t,), found, cluster.device) for t, found in links.items()}
    passes = [(key, p, activity) for key in wanted for p in steps[key] for activity in (p.forward, p.backward)]
    seconds = spend_each([a for *_, a in passes], [machine[key[-1]] for key, *_ in passes])
    spent: dict[Any, dict[str, tuple[Spent, Spent]]] = defaultdict(dict)
    for (key, part, _), forward, backward in zip(passes[::2], seconds[::2], seconds[1::2], strict=True):
        spent[key][part.name] = forward, backward
    found = []
    known: dict[Any, Stages] = {}
    for row in rows:
        own, training = (*row.shape, row.tensor), row.training
        case = (own, row.layers, row.pipeline, row.data, row.several_nodes)
        if case not in known:
            known[case] = stages_of(steps[own], cluster, machine[row.tensor], training, spent[own])
        found.append(seconds_of(known[case], training.microbatches))
    return found


def fit_all(rows: Sequence[Row], steps: Steps, fitted: Sequence[NDArray[np.bool_]], workers: int) -> list[Cluster]:
    """The cluster that each choice of rows gives."""
    chosen = [[row for row, own in zip(rows, choice, strict=True) if own] for choice in fitted]
    with multiprocessing.get_context("spawn").Pool(max(1, min(workers, len(fitted)))) as pool:
        return pool.starmap(fit, [(own, steps) for own in chosen])


def fit(rows: Sequence[Row], steps: Steps, prior: float = PRIOR_WEIGHT) -> Cluster:
    """The preset with what the datasheet does not say fitted to rows: least squares of logarithms, robust."""
    measured = np.array([row.seconds for row in rows])

    def errors(value: dict[str, float]) -> Floats:
        return np.log(np.array(predict(rows, steps, cluster_of(value))) / measured)

    weights = np.array([SEVERAL_NODES if row.several_nodes else 1.0 for row in rows])
    return cluster_of(fit_positive(EXPECTED, errors, weights=weights, robust=ROBUST, prior=prior))


def cluster_of(value: Mapping[str, float]) -> Cluster:
    """The preset with fitted values, by the names of `EXPECTED`."""
    base = Cluster.preset(BASE)
    own = {name: value[name] for name in ("efficiency", "ramp", "streaming", "host", "launch")}
    near, far = (
        replace(link, bandwidth=value[f"{level} bandwidth"], latency=value[f"{level} latency"])
        for link, level in zip(base.links, ("node", "network"), strict=True)
    )
    far = replace(far, contention=value["contention"])
    return replace(base, device=replace(base.device, **own), links=(near, far))


def report(rows: Sequence[Row], training: NDArray[np.bool_], found: Floats) -> dict[str, Any]:
    """Errors on rows seen and not seen, orders, and regret."""
    from scipy.stats import spearmanr

    measured = np.array([row.seconds for row in rows])
    several = np.array([row.several_nodes for row in rows])
    error = np.abs(found / measured - 1)
    figures: dict[str, Any] = {}
    staged = np.array([row.pipeline > 1 for row in rows])
    kinds = {"one node": ~several, "several nodes": several}
    kinds |= {f"{name}, pipelines": chosen & staged for name, chosen in kinds.items()}
    for name, chosen in kinds.items():
        for half_name, part in (("fitted", training), ("held out", ~training)):
            own = error[chosen & part]
            if not own.size:
                continue
            figures[f"{name}, {half_name}"] = {
                "rows": len(own), "mean error": float(own.mean()), "median error": float(np.median(own)),
                "largest error": float(own.max()),
            }  # fmt: skip
    regrets = []
    for name, members in groups(rows).items():
        regrets.append(regret(measured[members], found[members]))
        if rows[members[0]].several_nodes:
            order = {"rows": len(members), "spearman": float(spearmanr(found[members], measured[members]).statistic)}
            order["ordered pairs"] = ordered(measured[members], found[members])
            figures[f"order of {name}"] = {**order, "regret": regrets[-1]}
    apart = [figures[name]["regret"] for name in figures if name.startswith("order of")]
    for name, each in (("regret", regrets), ("regret on several nodes", apart)):
        figures[name] = {"groups": len(each), "mean": float(np.mean(each)), "largest": float(np.max(each))}
    figures["ordered pairs of one node"] = float(np.mean([
        ordered(measured[m], found[m]) for m in groups(rows).values() if not rows[m[0]].several_nodes and len(m) > 2
    ]))  # fmt: skip
    return figures


def groups(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Rows that train the same model on as many GPUs with the same batch: what a planner chooses among."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        found[f"hidden {row.hidden}, {row.layers} layers, {row.gpus} GPUs, batch {row.global_batch}"].append(i)
    return {name: members for name, members in found.items() if len(members) > 1}


def regret(measured: Floats, found: Floats) -> float:
    """How much longer than the best the configuration takes that is predicted to be the best."""
    return float(measured[found.argmin()] / measured.min() - 1)


def ordered(measured: Floats, found: Floats, apart: float = 0.03) -> float:
    """Share of the pairs further apart than 3% that are predicted in the right order."""
    ratio = measured[:, None] / measured[None, :]
    pairs = ratio > 1 + apart
    right = pairs & (found[:, None] > found[None, :])
    return float(right.sum() / max(pairs.sum(), 1))


def table(
    figures: dict[str, dict[str, Any]], cluster: Cluster, rows: Sequence[Row], found: Floats, fitted: NDArray[np.bool_]
) -> str:
    """For people: all figures, and of the first fit its rows of several nodes and what was fitted."""
    lines = []
    for title, named in figures.items():
        lines += [title]
        for name, values in named.items():
            shown = values.items() if isinstance(values, dict) else [("", values)]
            texts = [f"{key} {v:.4f}".strip() if isinstance(v, float) else f"{key} {v}" for key, v in shown]
            lines.append(f"  {name:<48} {', '.join(texts)}")
        lines += [""]
    lines += ["several nodes: microbatch, tensor, data, pipeline; measured and predicted seconds"]
    for row, seconds, own in zip(rows, found, fitted, strict=True):
        if row.several_nodes:
            layout = f"{row.hidden:6d} {row.microbatch:4d} {row.tensor:4d} {row.data:4d} {row.pipeline:4d}"
            seen = "" if own else "  held out"
            lines.append(f"{layout} {row.seconds:9.3f} {seconds:9.3f} {seconds / row.seconds - 1:+8.1%}{seen}")
    return "\n".join([*lines, "", cluster.to_toml()])


if __name__ == "__main__":
    main()
