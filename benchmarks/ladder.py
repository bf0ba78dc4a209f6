"""What does the search give up as memory falls?

A Llama and a U-Net on one axis of 4 and on two of 2. The first rung has as much memory as the plan without a budget
takes, each further one a quarter less, until one that nothing fits; then what lies between is halved, until the last
budget that a plan fits and the first that none does are 5% apart. Of each plan: predicted time and gap, predicted peak
by category, the peak of the emitted graph as one rank runs it (bytes that are allocated, collectives replaced by copies
of the same sizes), and what kind of plan it is. What should not be is listed under each ladder: a budget that is
exceeded, a run that takes more than predicted, a step that gets faster with less memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import fx  # noqa: E402

from autopar.compiler import peak_of, program_of, rewrite, solve  # noqa: E402
from autopar.costs.cluster import Cluster  # noqa: E402
from autopar.costs.memory import format_bytes  # noqa: E402
from autopar.errors import InfeasibleError  # noqa: E402
from autopar.ir.graph import map_nodes  # noqa: E402
from autopar.ir.layout import Replicate  # noqa: E402
from autopar.ir.node_info import info  # noqa: E402
from autopar.ir.ops.collectives import COALESCED, axis_index, c10d  # noqa: E402
from autopar.ir.ops.host import to_device, to_host  # noqa: E402
from autopar.ir.plan import Plan  # noqa: E402
from autopar.ir.program import Program  # noqa: E402
from autopar.ir.shards import block  # noqa: E402
from autopar.memory.liveness import memory_points  # noqa: E402
from autopar.memory.recompute import class_of  # noqa: E402
from autopar.search.options import Search  # noqa: E402
from autopar.verify.verify import global_values  # noqa: E402
from benchmarks.allocated import peak_allocated  # noqa: E402
from benchmarks.least_memory import least  # noqa: E402
from benchmarks.memory_models import MODELS  # noqa: E402

MESHES = {"4": {"gpu": 4}, "2x2": {"node": 2, "gpu": 2}}
FACTOR, RUNGS = 0.75, 9
CLOSE, HALVINGS = 1.05, 4
"""How near the last budget that a plan fits comes to the first that none does, and how many searches that may take."""

NOISE = 1e-3
"""Relative: steps within the search's gap of each other are as fast."""


def main() -> None:
    """Climb down each ladder and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="default: all")
    parser.add_argument("--meshes", default=",".join(MESHES), help="default: all")
    parser.add_argument("--rungs", type=int, default=RUNGS, help=f"budgets, each {FACTOR} of the one before")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds for one search (default: 40)")
    parser.add_argument("--cluster", default="cpu", help="preset or TOML file (default: cpu)")
    parser.add_argument("--host", type=float, default=0.0, metavar="GB/S", help="the way to a host; 0: there is none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rungs, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ladders = []
    cluster = Cluster.resolve(options.cluster)
    cluster = replace(cluster, device=replace(cluster.device, host_bandwidth=1e9 * options.host))
    for model in options.models.split(","):
        for mesh in options.meshes.split(","):
            found = ladder(model, mesh, cluster, options.rungs, options.time_limit)
            ladders.append(found)
            print(table(found), flush=True)
            if options.json:  # after each: a run that is cut short keeps what it measured
                options.json.write_text(json.dumps(ladders, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from benchmarks.ladder_plot import svg

        options.plot.write_text(svg(ladders), encoding="utf-8")


def ladder(model: str, mesh: str, cluster: Cluster, rungs: int, seconds: float) -> dict[str, Any]:
    """Plans of one model on one mesh, from ample memory down to the first budget that nothing fits."""
    network, batch = MODELS[model]()
    program, axes = program_of(network, batch), MESHES[mesh]
    values = global_values(program, network, batch)
    host = cluster.device.host_bandwidth > 0
    # Parts of the batch would be another ladder, and what is in flight is not emulated.
    pins = {"microbatches": 1, "overlap": "none"} | ({"offload": "search"} if host else {})
    search = Search(time_limit=seconds, pins=pins)

    def rung(budget: float) -> dict[str, Any]:
        start = time.perf_counter()
        row: dict[str, Any] = {"budget": budget}
        try:
            row |= described(program, solve(program, axes, cluster, memory=budget, search=search), values)
        except InfeasibleError as e:
            row |= {"needed": e.needed}
        row["search_s"] = time.perf_counter() - start
        print(model, mesh, format_bytes(budget), row.get("step_s"), f"{row['search_s']:.0f} s", file=sys.stderr)
        return row

    ample = sum(peak_of(program, solve(program, axes, cluster)).values())
    found: list[dict[str, Any]] = []
    while len(found) < rungs and not any("needed" in row for row in found):
        found.append(rung(ample * FACTOR ** len(found)))
    for _ in range(HALVINGS):
        low, high = limits(found)
        if high <= CLOSE * low:
            break
        found.append(rung(math.sqrt(low * high)))
    found.sort(key=lambda row: -row["budget"])
    name = f"{model} on {mesh}" + (", with a host" if host else "")
    bound = least(program, axes, away=host, copies=cluster.device.copies)
    return {"ladder": name, "bound": bound, "rungs": found, "anomalies": anomalies(found)}


def limits(rungs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The largest budget that no plan was found for, and the least that a plan is known to take."""
    low = max((r["budget"] for r in rungs if "needed" in r), default=math.inf)
    return low, min(r.get("peak") or r["needed"] or math.inf for r in rungs)


def described(program: Program, plan: Plan, values: Sequence[torch.Tensor]) -> dict[str, Any]:
    """A rung, as plain data."""
    whole = sum(all(isinstance(p, Replicate) for p in layout) for layout in plan.parameters.values())
    operators = [name for name in plan.recompute if name == class_of(name)]
    held, local = plan.predicted.peak_bytes, rewrite(program, plan)
    always = memory_points(local, plan)[
        0
    ].held  # what lies on the host comes for the optimizer's step, which is not run
    return {
        "step_s": plan.predicted.step_seconds,
        "gap": plan.certificate.gap,
        "method": plan.certificate.method,
        "peak": sum(held.values()),
        "held": dict(held),
        "emulated": emulated_peak(local, plan, values) + always.get("optimizer", 0.0),
        "replicated": whole,
        "split": len(plan.parameters) - whole,
        "collectives": plan.predicted.collectives,
        "moved_again": sum(name.startswith("consumer ") for name in plan.recompute),
        "computed_again": len(operators),
        "on_host": plan.predicted.host_bytes,
    }


def emulated_peak(local: Program, plan: Plan, values: Sequence[torch.Tensor]) -> float:
    """Most bytes that are allocated at once when the first rank runs a rewritten graph, and its inputs."""
    inputs = []
    for node, value in zip(local.placeholders, values, strict=True):
        type_, layout = info(node).type(), info(node).layout()
        inputs.append(block(value, type_, layout, plan.axis_sizes, (0,) * len(plan.axes)).clone())
    with torch.no_grad():
        return peak_allocated(lambda: walk(local, inputs)) + float(sum(i.nbytes for i in inputs))


def walk(program: Program, inputs: Sequence[torch.Tensor]) -> None:
    """Run a rewritten graph, each value dropped behind its last user; collectives only make what they would receive."""
    nodes = list(program.graph.graph.nodes)
    last = {a: n for n in nodes for a in n.all_input_nodes}
    held: dict[fx.Node, Any] = dict(zip(program.placeholders, inputs, strict=True))
    for node in nodes:
        if node.op == "get_attr":
            held[node] = getattr(program.graph, str(node.target))
        elif node.op == "call_function":
            args, kwargs = map_nodes((node.args, node.kwargs), held.__getitem__)
            target: Any = STAND_INS.get(node.target, node.target)
            held[node] = target(*args, **kwargs)
            del args, kwargs
        for used in (node, *node.all_input_nodes):
            if used.op == "call_function" and last.get(used, node) is node:
                held.pop(used, None)


STAND_INS: dict[Any, Any] = {
    to_host: lambda x: x.to("meta"),  # takes nothing of the device
    to_device: lambda x: torch.zeros_like(x, device="cpu"),
    axis_index: lambda axis: 0,
    c10d.wait_tensor.default: lambda x: x,
    c10d.all_reduce.default: lambda x, *rest: x.clone(),
    c10d.all_reduce_.default: lambda x, *rest: x,
    c10d.all_to_all_single.default: lambda x, *rest: x.clone(),
    c10d.all_gather_into_tensor.default: lambda x, n, axis: x.repeat(n, *[1] * (x.dim() - 1)),
    c10d.reduce_scatter_tensor.default: lambda x, op, n, axis: x.chunk(n)[0].clone(),
}
STAND_INS |= {
    together: lambda xs, *rest, one=STAND_INS[one]: [one(x, *rest) for x in xs]
    for one, together in COALESCED.items()
    if one in STAND_INS
}


def anomalies(rungs: Sequence[dict[str, Any]]) -> list[str]:
    """What should not be."""
    found = []
    fitting = [r for r in rungs if "needed" not in r]
    for row in fitting:
        budget = format_bytes(row["budget"])
        if row["peak"] > row["budget"] * (1 + 1e-9):
            found.append(f"{budget}: the predicted peak is {format_bytes(row['peak'])}")
        if row["emulated"] > row["peak"] * 1.02:
            found.append(
                f"{budget}: the run takes {format_bytes(row['emulated'])}, {format_bytes(row['peak'])} was said"
            )
    for i, row in enumerate(fitting):
        for tighter in fitting[i + 1 :]:
            if tighter["step_s"] < row["step_s"] * (1 - NOISE):
                less = f"{1e3 * tighter['step_s']:.1f} ms with {format_bytes(tighter['budget'])}"
                found.append(f"{format_bytes(row['budget'])}: {1e3 * row['step_s']:.1f} ms, but {less}")
    missed = [r["budget"] for r in rungs if "needed" in r]
    found += [f"{format_bytes(b)}: nothing found, although less was enough" for b in missed
              if any(r["peak"] <= b for r in fitting)]  # fmt: skip
    return found


HELD = ("parameters", "optimizer", "gradients", "activations", "transient", "communication")


def table(found: dict[str, Any]) -> str:
    """A ladder as Markdown, sizes in MiB."""
    lines = [f"### {found['ladder']}", ""]
    head = [
        "budget",
        "step ms",
        "gap",
        "peak",
        "emulated",
        *HELD,
        "split",
        "moved again",
        "computed again",
        "on host",
        "search s",
    ]
    lines += [f"| {' | '.join(head)} |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for r in found["rungs"]:
        mib = 2**20
        if "needed" in r:
            needed = f"{r['needed'] / mib:.1f}" if r["needed"] else "?"
            lines.append(f"| {r['budget'] / mib:.1f} | none |  | {needed} |{'  |' * 11} {r['search_s']:.0f} |")
            continue
        sizes = [r["budget"], r["peak"], r["emulated"], *(r["held"].get(k, 0.0) for k in HELD)]
        budget, peak, emulated, *held = (f"{size / mib:.1f}" for size in sizes)
        split = f"{r['split']} of {r['split'] + r['replicated']}"
        cells = [budget, f"{1e3 * r['step_s']:.1f}", f"{r['gap']:.1%}", peak, emulated, *held, split]
        cells += [str(r["moved_again"]), str(r["computed_again"]), f"{r['on_host'] / mib:.1f}", f"{r['search_s']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    low, high = limits(found["rungs"])
    bound = found["bound"]
    lines += ["", f"Nothing fits below {format_bytes(bound)}. Plans are known down to {format_bytes(high)}"]
    if low < math.inf:
        place = f"{abs(low / bound - 1):.1%} {'above' if low > bound else 'below'} the bound"
        lines[-1] += f", {high / bound - 1:.1%} above that, and none for {format_bytes(low)}, {place}"
    lines[-1] += "."
    lines += [f"- {text}" for text in found["anomalies"]] or ["No anomalies."]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
