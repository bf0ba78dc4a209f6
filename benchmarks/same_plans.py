"""Whether a change of the code changed a plan: decisions, objective, bound and emitted graphs of small models.

    python benchmarks/same_plans.py --write before.json     (on the code before)
    python benchmarks/same_plans.py --compare before.json   (on the code after)

Numbers are compared to the last bit, graphs up to the names of nodes. Times of both runs are printed beside each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' models

import autopar
from autopar.compiler import program_of, rewrite, solve
from tests import models

MESHES: dict[str, dict[str, int]] = {
    "4": {"a": 4},
    "2x2": {"a": 2, "b": 2},
    "2x2x2": {"a": 2, "b": 2, "c": 2},
}
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "encoder": models.encoder,
    "gpt2": models.gpt2,
    "llama": models.llama,
    "vit": models.vit,
    "wide mlp": partial(models.mlp, 1024, 4096, 64),
    "wide gpt2": partial(models.gpt2, hidden=512),
}
SHARE = 0.6
"""Of the peak without a budget, the budget that binds."""

FORMER_WORDS = {
    "each relay ": "each consumer ",
    "relay ": "consumer ",
}
"""Words in plans that were renamed, so that plans of before are compared with those of after."""


def cases() -> Iterator[tuple[str, str, dict[str, int], float | None, dict[str, Any], str]]:
    """Name, model, axes, share of the unlimited peak, pins, cluster."""
    for model in MODELS:
        for mesh, axes in MESHES.items():
            if mesh == "2x2x2" and model not in ("mlp", "cnn", "gpt2"):
                continue
            for share in (None, SHARE):
                if share and ("mlp" in model or mesh == "2x2x2"):
                    continue
                for cluster in ("cpu", "h100"):  # on the faster devices plans of models so small split nothing
                    if cluster == "cpu" or (share and mesh == "4"):
                        name = f"{model} on {mesh} {cluster}{f' at {share}' if share else ''}"
                        yield name, model, axes, share, {}, cluster
    for mesh in ("4", "2x2"):
        yield f"gpt2 on {mesh} with stages", "gpt2", MESHES[mesh], None, {"stages": 2, "microbatches": 2}, "cpu"


def decided(plan: Any) -> dict[str, Any]:
    """What a plan decides, in words that survive a renaming."""
    relays = plan.consumer_layouts if hasattr(plan, "consumer_layouts") else plan.relays
    held = plan.forced_consumer_layouts if hasattr(plan, "forced_consumer_layouts") else plan.held

    def layouts(rows: Any) -> dict[str, list[str]]:
        return {_renamed(k): [str(p) for p in v] for k, v in rows.items()}

    return {
        "parameters": layouts(plan.parameters),
        "batch": layouts(plan.batch),
        "results": layouts(plan.results),
        "choices": layouts(plan.choices),
        "consumer layouts": layouts(relays),
        "forced": sorted(_renamed(k) for k in held),
        "recompute": {_renamed(k): [list(r) for r in v] for k, v in plan.recompute.items()},
        "offload": {_renamed(k): [list(r) for r in v] for k, v in plan.offload.items()},
        "padding": {k: list(v) for k, v in plan.padding.items()},
        "microbatches": plan.microbatches,
        "stages": [list(s.modules) for s in plan.stages],
        "schedule": plan.pipeline and [plan.pipeline.axis, plan.pipeline.schedule],
    }


def _renamed(text: str) -> str:
    for old, new in FORMER_WORDS.items():
        if text.startswith(old):
            return new + text.removeprefix(old)
    return text


def graph_hash(graph: fx.Graph) -> str:
    """Of operators, arguments and shapes; nodes by number."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        value = node.meta.get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None
        name = str(node.target).split(" at 0x")[0] if node.op == "call_function" else ""  # without a function's address
        digest.update(f"{node.op} {name} {arguments!r} {shape}\n".encode())
    return digest.hexdigest()[:16]


def measure() -> dict[str, Any]:
    """The answers of all cases."""
    found = {}
    for name, model, axes, share, pins, cluster in cases():
        program = program_of(*MODELS[model]())
        search = autopar.Search(gap=0.0 if len(axes) < 3 else 0.05, pins=pins, cache=False)
        start = time.perf_counter()
        memory = None
        try:
            if share:
                free = solve(program, axes, cluster, memory=1e12, search=search)
                memory = share * sum(free.predicted.peak_bytes.values())
            plan = solve(program, axes, cluster, memory=memory, search=search)
        except Exception as e:  # the same one is expected again
            found[name] = {"error": type(e).__name__, "seconds": time.perf_counter() - start}
            print(f"{name:<28} {type(e).__name__}", flush=True)
            continue
        seconds = time.perf_counter() - start
        found[name] = {
            "objective": plan.certificate.objective.hex(),
            "bound": plan.certificate.lower_bound.hex(),
            "peak": {k: float(v).hex() for k, v in plan.predicted.peak_bytes.items()},
            "decisions": decided(plan),
            "graph": graph_hash(rewrite(program, plan).graph.graph),
            "seconds": seconds,
        }
        print(
            f"{name:<28} {plan.certificate.objective:.6g} s, gap {plan.certificate.gap:.2%}, {seconds:.1f} s",
            flush=True,
        )
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, by case and key."""
    wrong = [f"{name}: missing" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        for key in before[name].keys() - {"seconds"}:
            if before[name][key] != after[name][key]:
                wrong.append(f"{name}: {key} differs: {before[name][key]!r:.200} -> {after[name][key]!r:.200}")
    return sorted(wrong)


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="file to write")
    parser.add_argument("--compare", type=Path, help="file that an earlier run wrote")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure()
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    if given.compare:
        before = json.loads(given.compare.read_text())
        wrong = differences(before, found)
        print("\n".join(wrong) or f"the same in all {len(found)} cases")
        old, new = (sum(c["seconds"] for c in d.values()) for d in (before, found))
        print(f"{old:.1f} s of planning before, {new:.1f} s now")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
