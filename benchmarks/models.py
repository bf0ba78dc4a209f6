"""Which model families are captured, planned and verified: the table of docs/models.md.

Every family is built tiny, planned on axes a=2, b=2 of the "cpu" cluster and of one with slow devices (where splitting
tiny tensors pays), and compared in float64 with the plain model; a random plan is compared, too. A family runs in a
process of its own: one that fails is a line of the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = multiprocessing.get_context("fork")  # what every family needs is imported once, before
AXES = {"a": 2, "b": 2}
TOLERANCE = 1e-10
NOTES = {
    "mixtral": "experts split by token and along their matrices' dims",
    "qwen3-moe": "experts split by token and along their matrices' dims",
    "deepseek-v3": "experts split by token and along their matrices' dims",
    "resnet": "batch norm in training",
    "lstm": "unrolled into matrix products, a step for each token",
    "gru": "unrolled into matrix products, a step for each token",
    "spectrogram": "`torch.stft`: split by sample",
}
HEADER = """# Models

What `python benchmarks/models.py --write docs/models.md` measured with torch {torch} and transformers {transformers}.
Every family is built tiny with random weights and without dropout. Its training step is captured, planned on axes
`a=2, b=2`, and the distributed program of all four devices is compared with the plain model in float64: loss,
gradients, outputs and buffers.

- *operators*: distinct ones, and nodes of the canonical forward and backward graph.
- *gap*: of the plan for the `cpu` cluster, between its objective and the proven lower bound.
- *error*: the largest of any tensor, relative to its largest entry. *cpu*: the searched plan, which replicates much of
  a tiny model. *slow*: the searched plan for slow devices, where splitting tiny tensors pays, and the share of
  operators that it splits. *random*: a random plan.
- *plan*: seconds from the model to the plan for `cpu`, on 2 shared cores.

"""
COLUMNS = ("family", "class", "operators", "captured", "gap", "error: cpu", "slow", "random", "plan", "notes")
SLOW = """
name = "slow devices"
group_sizes = []
[device]
name = "slow"
memory = 1e9
bandwidth = 1e6
launch = 1e-9
efficiency = 1.0
[device.flops]
float32 = 1e6
[[links]]
name = "fast"
bandwidth = 1e9
latency = 1e-9
"""


def main() -> None:
    """Run the families and print a table, or JSON, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="this family; may be given several times")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each family")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}  # before torch is imported
    rows = []
    names = _names()
    for name in options.only or names:
        rows.append(in_a_process(name, options.timeout))
        if not options.json:
            print(line(rows[-1]), flush=True)
        if options.write:  # after each family: a run that is cut short keeps what it measured
            lines = known(options.write, names) | {name: line(rows[-1])}
            options.write.write_text(page(lines, names), encoding="utf-8")
    if options.json:
        print(json.dumps(rows, indent=1))
    sys.exit(any(not passed(row) for row in rows))


def _names() -> list[str]:
    """Every family; what is imported here, and by a first capture, the processes of the families have already."""
    import torch

    from autopar.compiler import program_of
    from benchmarks.zoo import FAMILIES

    torch.set_num_threads(1)
    program_of(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    return list(FAMILIES)


def in_a_process(name: str, timeout: float) -> dict[str, Any]:
    """What a family reports, or why it does not."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_report, args=(name, sender))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = {"family": name, "error": f"no result after {timeout:.0f} s"}
        if receiver.poll(timeout):
            row = receiver.recv()
    except EOFError:
        process.join()
        row = {"family": name, "error": f"its process ended with code {process.exitcode}"}
    process.kill()
    process.join()
    return row


def _report(name: str, sender: Connection) -> None:
    sender.send(measure(name))


def measure(name: str) -> dict[str, Any]:
    """Capture, plan and verify one family; where it stops, the row says why."""
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.zoo import FAMILIES

    torch.set_num_threads(1)
    row: dict[str, Any] = {"family": name, "captured": False}
    try:
        model, batch = FAMILIES[name]()
        row["class"] = _class(model)
        for found in _steps(model, batch):
            row |= found
    except Exception as e:
        row["error"] = f"{type(e).__name__}: {str(e).splitlines()[0]}"
    return row


def _steps(model: Any, batch: Any) -> Iterator[dict[str, Any]]:
    """What is found out about a model, in order."""
    import torch

    from autopar import Cluster, Search
    from autopar.compiler import program_of, rewrite, solve
    from autopar.ir.graph import operators
    from autopar.verify.verify import capture_error, compare, global_values

    start = time.perf_counter()
    program = program_of(model, batch)
    nodes = list(operators(program.graph.graph))
    yield {"captured": True, "nodes": len(nodes), "distinct": len({n.target for n in nodes})}
    limits = Search(time_limit=30.0)
    plans = {"cpu": solve(program, AXES, "cpu", search=limits)}
    yield {"plan_s": time.perf_counter() - start, "gap": plans["cpu"].certificate.gap}
    values = global_values(program, model, batch)
    yield {"capture": capture_error(program, model, batch, None, values)}
    plans["random"] = solve(program, AXES, "cpu", search=Search(recipe="random"))
    plans["slow"] = slow = solve(program, AXES, Cluster.from_toml(SLOW), search=limits)
    yield {"split": sum(set(c) != {"R"} for c in slow.choices.values()) / len(slow.choices)}
    for key, plan in plans.items():
        report = compare(program, rewrite(program, plan), plan, values, torch.float64)
        yield {key: report.max_error}
        if not report.max_error <= TOLERANCE:
            yield {"error": f"{key} plan: {report.worst} is off by {report.max_error:.2g}"}


def _class(model: Any) -> str:
    """The transformers class that is inside, or torch."""
    kinds = [type(m) for m in model.modules() if type(m).__module__.startswith("transformers.")]
    return kinds[0].__name__ if kinds else "torch"


def passed(row: dict[str, Any]) -> bool:
    """Captured, planned and equal under every plan."""
    return "error" not in row


def line(row: dict[str, Any]) -> str:
    """One line of the table; a number that was not reached is left out."""

    def number(key: str, text: str) -> str:
        return format(row[key], text) if key in row else ""

    count = f"{row['distinct']} / {row['nodes']}" if "nodes" in row else ""
    share = f" ({row['split']:.0%} split)" if "split" in row else ""
    notes = "; ".join(
        t for t in (f"**fails**: {row['error']}" if "error" in row else "", NOTES.get(row["family"])) if t
    )
    cells = [
        row["family"], row.get("class", ""), count, "yes" if row.get("captured") else "no", number("gap", ".1e"),
        number("cpu", ".1e"), number("slow", ".1e") + share, number("random", ".1e"), number("plan_s", ".0f"),
        notes.replace("|", "\\|"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def known(file: Path, names: Sequence[str]) -> dict[str, str]:
    """Lines of the page as it stands, by family: ``--only`` measures some of them again."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    cells = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| ")}
    return {name: cells[name] for name in names if name in cells}


def page(lines: Mapping[str, str], names: Sequence[str]) -> str:
    """The whole page, from the lines of families."""
    import torch
    import transformers

    versions = {"torch": str(torch.__version__).partition("+")[0], "transformers": transformers.__version__}
    head = [f"| {' | '.join(COLUMNS)} |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    table = [lines.get(name, f"| {name} |" + "  |" * (len(COLUMNS) - 2) + " **not measured** |") for name in names]
    good = sum("**" not in row for row in table)
    total = f"{good} of {len(names)} families pass: every error is at most {TOLERANCE:g}.\n"
    return HEADER.format(**versions) + "\n".join([total, *head, *table]) + "\n"


if __name__ == "__main__":
    main()
