"""Does the search's plan beat what people set up by hand, and does a recipe here match the same thing by hand?

Four Gloo processes on a mesh of 2 x 2; with ``--rate`` two of them each live in a network namespace of their own, and
the link between them carries so many Mbit/s (root and iproute2 needed; skipped without). Three models are planned by
the search, without and with pipeline stages, and by the recipes; beside them `DistributedDataParallel`, `fully_shard`
with its prefetch (over all, and with replicas across the link), tensor parallelism by `parallelize_module` inside a
pair with gradients averaged across, and `torch.distributed.pipelining` are set up by hand. All train the same model on
the same batch (forward and backward), losses are compared, and they take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from predicted_time import AXES, MODELS, SEARCHED, WORLD, measure, member, step_under  # noqa: E402
from slow_link import by_hand, whole  # noqa: E402

from benchmarks.turns import Step, agreed_losses, take_turns  # noqa: E402

PIPELINED = "search with stages"
RECIPES = {"DistributedDataParallel": "ddp", "fully_shard": "fsdp", "fully_shard, replicas": "hsdp"}
"""What a recipe here is called by hand."""

ZOO: dict[str, Callable[[], Any]] = {"llama": MODELS["llama"], "mlp": MODELS["mlp"], "blocks": whole}


def main() -> None:
    """Calibrate, plan, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of a link between two pairs of processes")
    measure(parser, "rate", __file__, plan_all, work, table)


def plan_all(folder: Path, cluster: Path) -> None:
    """Every model under the search, with stages and without, and under the recipes that people set up by hand."""
    import torch

    from autopar.compiler import program_of, solve
    from autopar.costs.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.search.options import Search

    torch.set_num_threads(1)
    machine = Cluster.load(cluster)
    found = []
    for name, make in ZOO.items():
        program = program_of(*make())
        for kind in (SEARCHED, PIPELINED, *RECIPES.values()):
            print(f"planning {name}: {kind}", file=sys.stderr)
            stages = {"stages": "search"} if kind == PIPELINED else {}
            search = Search(recipe=kind if kind in RECIPES.values() else None, pins=stages)
            try:
                plan = solve(program, AXES, machine, search=search)
            except (AutoparError, ValueError) as e:
                print(f"  {e}", file=sys.stderr)
                continue
            if kind == PIPELINED and plan.pipeline is None:
                continue  # the same as without
            plan.save(folder / f"{name} {kind}.json")
            found.append({"model": name, "plan": kind, "predicted": plan.predicted.step_seconds})
    (folder / "plans.json").write_text(json.dumps(found))


def work(folder: Path, rounds: int) -> None:
    """One process: each model's plans, and what is set up by hand, take turns."""
    with member(folder) as (mesh, rows):
        for name, make in ZOO.items():
            own = [row for row in rows if row["model"] == name]
            steps = {row["plan"]: step_under(make, mesh, folder / f"{name} {row['plan']}.json") for row in own}
            for kind, step in peers(name, make, mesh).items():
                steps[kind] = step
                own.append({"model": name, "plan": kind, "predicted": None})
                rows.append(own[-1])
            agreed_losses(steps)
            times = take_turns(steps, rounds)
            for row in own:
                row["measured"] = statistics.median(times[row["plan"]])


def peers(name: str, make: Callable[[], tuple[Any, dict[str, Any]]], mesh: Any) -> dict[str, Step]:
    """Steps of what people set up by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    flat = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
    found: dict[str, Step] = {}
    model, batch = make()
    found["DistributedDataParallel"] = averaged(DistributedDataParallel(model), batch, flat)
    for kind, over in (("fully_shard", flat), ("fully_shard, replicas", mesh)):
        model, batch = make()
        for block in blocks_of(model):
            fully_shard(block, mesh=over)
        found[kind] = averaged(fully_shard(model, mesh=over), batch, flat)
    model, batch = make()
    tensor_parallel(name, model, mesh["gpu"])
    found["tensor parallel by hand"] = averaged(model, batch, mesh["node"], model.parameters())
    if name == "blocks":
        parts = 4
        found["pipelining by hand"] = by_hand(mesh, parts)
    return found


def blocks_of(model: Any) -> list[Any]:
    """The modules that repeat, and tables beside them."""
    from torch import nn

    if hasattr(model, "model"):
        return [*model.model.layers, model.model.embed_tokens, model.lm_head]
    return list(next(c for c in model.children() if isinstance(c, nn.ModuleList | nn.Sequential)))


def averaged(model: Any, batch: dict[str, Any], mesh: Any, summed: Any = ()) -> Step:
    """Forward and backward on this rank's rows; returns the mean loss of all.

    Args:
        model: by hand.
        batch: the whole one.
        mesh: whose members have other rows.
        summed: parameters whose gradients nothing averages over that mesh yet; in one all-reduce, as people write it.
    """
    import torch
    import torch.distributed as dist

    members, place, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    own = {name: value.chunk(members)[place] for name, value in batch.items()}
    summed = list(summed)

    def step() -> float:
        loss = model(**own)
        loss = getattr(loss, "loss", loss)
        loss.backward()
        if summed:
            local = [getattr(p.grad, "_local_tensor", p.grad) for p in summed]
            flat = torch.cat([g.flatten() for g in local])
            dist.all_reduce(flat, group=group)
        for parameter in model.parameters():
            parameter.grad = None
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        return float(mean) / members

    return step


def tensor_parallel(name: str, model: Any, mesh: Any) -> None:
    """Column and row parallel pairs, as torch's tutorial has them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ColwiseParallel(), RowwiseParallel()
    for block in blocks_of(model):
        if name == "llama" and hasattr(block, "mlp"):
            places = {f"self_attn.{n}_proj": column for n in "qkv"} | {"self_attn.o_proj": row}
            places |= {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
        elif name == "mlp":
            places = {"0": column, "2": row}
        elif hasattr(block, "up"):
            places = {"up": column, "down": row}  # a fused projection of heads cannot be split there
        else:
            continue
        parallelize_module(block, mesh, places)


def table(rows: list[dict[str, Any]]) -> str:
    """Each model's plans, best first; the search over the best by hand, and recipes over their likes."""
    lines = [f"{'model':<8} {'plan':<26} {'predicted ms':>13} {'measured ms':>12}"]
    for r in sorted(rows, key=lambda r: (list(ZOO).index(r["model"]), r["measured"])):
        predicted = f"{1e3 * r['predicted']:13.1f}" if r["predicted"] else f"{'':13}"
        lines.append(f"{r['model']:<8} {r['plan']:<26} {predicted} {1e3 * r['measured']:12.1f}")
    lines.append("")
    ratios = []
    for name in ZOO:
        by_name = {r["plan"]: r["measured"] for r in rows if r["model"] == name}
        hand = min(t for kind, t in by_name.items() if kind in RECIPES or "by hand" in kind)
        chosen = min((r for r in rows if r["model"] == name and r["plan"] in (SEARCHED, PIPELINED)),
                     key=lambda r: float(r["predicted"]))  # fmt: skip
        ratios.append(hand / chosen["measured"])
        alike = [f"{recipe} {by_name[recipe] / by_name[kind]:.3f} of {kind}" for kind, recipe in RECIPES.items()
                 if recipe in by_name]  # fmt: skip
        lines.append(f"{name:<8} best by hand over {chosen['plan']}: {ratios[-1]:.3f}; {'; '.join(alike)}")
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    lines.append(f"geometric mean of the best by hand over the search's plan: {mean:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
