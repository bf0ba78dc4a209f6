"""Does the emitted module train as fast as the eager model on one device?

Forward and backward of a few small models without a mesh, one thread. The two take turns within each round, and start
in turn, so that what else the machine does slows both alike; figures are medians over rounds, of the seconds that pass
and of those that the thread computes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODELS = ("llama", "gpt2", "vit", "unet")
WARM = 3


def main() -> None:
    """Measure each model and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"of benchmarks/zoo (default: {','.join(MODELS)})")
    parser.add_argument("--rounds", type=int, default=100, help="measured rounds (default: 100)")
    parser.add_argument("--rows", type=int, default=1, help="how often the batch is repeated (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", AUTOPAR_CACHE="0")
    rows = [measure(name, options.rounds, options.rows) for name in options.models.split(",")]
    print(json.dumps(rows, indent=1) if options.json else table(rows))


def measure(name: str, rounds: int, times: int) -> dict[str, Any]:
    """Medians of one model.

    Raises:
        RuntimeError: the losses differ, so that the times would not be of the same work.
    """
    import torch

    from autopar.parallelize import parallelize
    from benchmarks.zoo import FAMILIES

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, batch = FAMILIES[name]()
    batch = {k: torch.cat([v] * times) if v.ndim else v for k, v in batch.items()}
    steps = {"eager": _step(copy.deepcopy(model), batch), "autopar": _step(parallelize(model, None, batch), batch)}
    losses = {key: [step() for _ in range(WARM)][-1] for key, step in steps.items()}
    if abs(losses["eager"] - losses["autopar"]) > 1e-4 * max(1.0, abs(losses["eager"])):
        raise RuntimeError(f"{name}: the losses differ: {losses}")
    wall: dict[str, list[float]] = {key: [] for key in steps}
    computing: dict[str, list[float]] = {key: [] for key in steps}
    for i in range(rounds):
        for key in list(steps)[:: 1 if i % 2 else -1]:
            start, own = time.perf_counter(), time.thread_time()
            steps[key]()
            computing[key].append(time.thread_time() - own)
            wall[key].append(time.perf_counter() - start)
    row: dict[str, Any] = {"model": name}
    for kind, seconds in (("wall", wall), ("thread", computing)):
        medians = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
        row |= {f"{key}_{kind}_ms": value for key, value in medians.items()}
        row[f"{kind}_ratio"] = medians["autopar"] / medians["eager"]
    return row


def _step(model: Any, batch: dict[str, Any]) -> Any:
    """Forward and backward; gradients are dropped first."""
    parameters = list(model.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        loss = model(**batch)
        loss = getattr(loss, "loss", loss)
        loss.backward()
        return float(loss.detach())

    return step


def table(rows: list[dict[str, Any]]) -> str:
    """Medians and ratios; less than 1 means faster than eager."""
    head = f"{'eager ms':>9} {'autopar ms':>11} {'ratio':>7}"
    lines = [f"{'model':<8} {head}   of the thread: {head}"]
    for r in rows:
        wall = f"{r['eager_wall_ms']:9.2f} {r['autopar_wall_ms']:11.2f} {r['wall_ratio']:7.3f}"
        own = f"{'':15}{r['eager_thread_ms']:9.2f} {r['autopar_thread_ms']:11.2f} {r['thread_ratio']:7.3f}"
        lines.append(f"{r['model']:<8} {wall}   {own}")
    return "\n".join([*lines, "", "ratio: median of autopar over median of eager; at most 1 is wanted"])


if __name__ == "__main__":
    main()
