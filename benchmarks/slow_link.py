"""Across a slow link: does the planner choose a pipeline, and is that the fastest plan?

Four Gloo processes, two pairs in a network namespace each, and a link of so many Mbit/s between the namespaces (root
and iproute2 needed; skipped without). The machine is calibrated, the search may choose stages, every recipe without
stages is planned too, and the same pipeline is set up by hand with ``torch.distributed.pipelining`` (two stages of half
the blocks, two data ranks each, gradients summed once a step). All of them train the same model; they take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from predicted_time import AXES, PLANS, SEARCHED, measure, member, step_under  # noqa: E402

from benchmarks.turns import Step, agreed_losses, take_turns  # noqa: E402

PIPELINED, BY_HAND = "search with stages", "torch by hand"
BLOCKS, WIDTH, LENGTH, ROWS, WORDS = 8, 256, 32, 32, 512


def main() -> None:
    """Calibrate, plan, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200.0, metavar="MBIT", help="Mbit/s of the link (default: 200)")
    measure(parser, "rate", __file__, plan_all, work, table)


def plan_all(folder: Path, cluster: Path) -> None:
    """The model under the search, with stages and without, and under every recipe."""
    import torch

    from autopar.compiler import program_of, solve
    from autopar.costs.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.search.options import Search

    torch.set_num_threads(1)
    program, machine = program_of(*whole()), Cluster.load(cluster)
    found = []
    for kind in (PIPELINED, *PLANS):
        print(f"planning: {kind}", file=sys.stderr)
        stages = {"stages": "search"} if kind == PIPELINED else {}
        search = Search(recipe=None if kind in (PIPELINED, SEARCHED) else kind, pins=stages)
        try:
            plan = solve(program, AXES, machine, search=search)
        except (AutoparError, ValueError) as e:
            print(f"  {e}", file=sys.stderr)
            continue
        plan.save(folder / f"{kind}.json")
        what = str(plan.pipeline) if plan.pipeline else "no stages"
        found.append({"plan": kind, "predicted": plan.predicted.step_seconds, "what": what, "parts": plan.microbatches})
    (folder / "plans.json").write_text(json.dumps(found))


def work(folder: Path, rounds: int) -> None:
    """One process: all plans take turns."""
    with member(folder) as (mesh, rows):
        steps = {row["plan"]: step_under(whole, mesh, folder / f"{row['plan']}.json") for row in rows}
        parts = next((r["parts"] for r in rows if r["plan"] == PIPELINED and r["parts"] > 1), 8)
        steps[BY_HAND] = by_hand(mesh, parts)
        rows.append({"plan": BY_HAND, "predicted": None, "what": "1F1B", "parts": parts})
        agreed_losses(steps)
        times = take_turns(steps, rounds)
        for row in rows:
            row |= {"measured": statistics.median(times[row["plan"]])}


def by_hand(mesh: Any, parts: int) -> Step:
    """A step of two stages with torch's own schedule, summing gradients over the data ranks once."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy

    stage, replica = mesh.get_local_rank(0), mesh.get_local_rank(1)
    model, batch = whole()
    half = len(model.layers) // 2
    own = model.layers[:half] if stage == 0 else model.layers[half:]
    replicas = AXES["gpu"]
    inputs, labels = (batch[k].chunk(replicas)[replica] for k in ("tokens", "labels"))
    piece = PipelineStage(own, stage, 2, torch.device("cpu"), group=mesh.get_group(0))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(piece, n_microbatches=parts, loss_fn=loss)

    def step() -> float:
        losses: list[torch.Tensor] = []
        schedule.step(inputs) if stage == 0 else schedule.step(target=labels, losses=losses)
        for parameter in own.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group(1))
            parameter.grad = None
        mean = torch.stack(losses).mean() if stage else torch.zeros(())
        dist.all_reduce(mean)  # both data ranks of the last stage
        return float(mean) / replicas

    return step


def whole() -> tuple[Any, dict[str, Any]]:
    """A language model of blocks, which returns its loss."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = (Block() for _ in range(BLOCKS))
            self.layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.layers(tokens).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
    return Model(), {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Each plan, and the one with stages beside the others."""
    lines = [f"{'plan':<20} {'predicted ms':>13} {'measured ms':>12}  stages"]
    for r in rows:
        predicted = f"{1e3 * r['predicted']:13.1f}" if r["predicted"] else f"{'':13}"
        lines.append(f"{r['plan']:<20} {predicted} {1e3 * r['measured']:12.1f}  {r['what']}, {r['parts']} microbatches")
    by_name = {r["plan"]: r["measured"] for r in rows}
    others = [t for name, t in by_name.items() if name not in (PIPELINED, BY_HAND)]
    ratios = by_name[PIPELINED] / min(others), by_name[PIPELINED] / by_name[BY_HAND]
    lines.append(
        "\nthe search with stages over the fastest plan without: {:.3f}; over torch by hand: {:.3f}".format(*ratios)
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
