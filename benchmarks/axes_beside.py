"""Are axes for a sequence and for experts as fast as those that people set up by hand?

Four Gloo processes on a mesh of 2 x 2, with ``--rate`` across a link between two network namespaces (root and iproute2
needed; skipped without). A Llama trains on one long sequence: the recipe ``context`` and the search beside torch's
``context_parallel``, whose keys are gathered or go round, with `fully_shard` and with `DistributedDataParallel`. A
Mixtral trains on short ones: the recipe ``expert`` and the search beside transformers' expert parallelism, of which
each process has a quarter of the samples and experts. All compute forward and backward in float32, losses are
compared, and they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from predicted_time import AXES, SEARCHED, WORLD, measure, member, step_under  # noqa: E402

from benchmarks.turns import Step, agreed_losses, stepper, take_turns  # noqa: E402

TOKENS = "AUTOPAR_BENCHMARK_TOKENS"
"""The environment variable that says to each process how long the sequence is."""


def main() -> None:
    """Calibrate, plan, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of a link between two pairs of processes")
    parser.add_argument("--tokens", type=int, default=2048, help="of the long sequence (default: 2048)")
    known, _ = parser.parse_known_args()
    os.environ.setdefault(TOKENS, str(known.tokens))
    measure(parser, "rate", __file__, plan_all, work, table)


def plan_all(folder: Path, cluster: Path) -> None:
    """Both models under the search and under the recipe."""
    import torch

    from autopar.compiler import program_of, solve
    from autopar.costs.cluster import Cluster
    from autopar.search.options import Search

    torch.set_num_threads(1)
    machine = Cluster.load(cluster)
    found = []
    for name, (make, recipe, _) in ZOO.items():
        program = program_of(*make())
        for kind in (SEARCHED, recipe):
            print(f"planning {name}: {kind}", file=sys.stderr)
            search = Search(recipe=recipe, roles=dict.fromkeys(AXES, recipe)) if kind == recipe else Search()
            plan = solve(program, AXES, machine, search=search)
            plan.save(folder / f"{name} {kind}.json")
            found.append({"model": name, "plan": kind, "predicted": plan.predicted.step_seconds})
    (folder / "plans.json").write_text(json.dumps(found))


def work(folder: Path, rounds: int) -> None:
    """One process: the plans of a model, and what is set up by hand, take turns."""
    from torch.distributed.device_mesh import init_device_mesh

    with member(folder) as (mesh, rows):
        flat = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
        for name, (make, _, peers) in ZOO.items():
            own = [row for row in rows if row["model"] == name]
            steps = {row["plan"]: step_under(make, mesh, folder / f"{name} {row['plan']}.json") for row in own}
            for kind, step in peers(flat, folder).items():
                steps[kind] = step
                own.append({"model": name, "plan": kind, "predicted": None})
                rows.append(own[-1])
            losses, times = agreed_losses(steps), take_turns(steps, rounds)
            for row in own:
                row |= {"measured": statistics.median(times[row["plan"]]), "loss": losses[row["plan"]]}


def llama() -> tuple[Any, dict[str, Any]]:
    """A Llama of 2 layers and one sequence."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = int(os.environ[TOKENS])
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (1, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def by_hand(mesh: Any, folder: Path) -> dict[str, Step]:
    """Steps of torch's ``context_parallel``."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    take_kernels_of_a_cpu()
    found = {}
    for rotate in ("allgather", "alltoall"):
        model, batch = llama()
        for block in [*model.model.layers, model.model.embed_tokens, model.lm_head]:
            fully_shard(block, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
        found[f"context_parallel ({rotate}), fully_shard"] = split_step(sharded, batch, mesh, rotate)
    model, batch = llama()
    replicated = DistributedDataParallel(model)
    found["context_parallel, DistributedDataParallel"] = split_step(replicated, batch, mesh, "allgather")
    return found


def take_kernels_of_a_cpu() -> None:
    """Enter flash attention on a CPU in the table of ``context_parallel``, which has only GPUs' kernels.

    What is around them, the ring and the merge of its parts, is torch's own.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from autopar._torch_compat import context_parallel_internals

    rings, aten = context_parallel_internals(), torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    of_gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def wrapped(results: tuple[Any, ...], like: Any) -> tuple[Any, ...]:
        return tuple(DTensor.from_local(t, like.device_mesh, like.placements, run_check=False) for t in results)

    def forward(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        query, key, value, dropout, causal, *_ = (*given, *(0.0, False)[len(given) - 3 :])

        def op(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
            return kernel(q, k, v, dropout, is_causal, scale=options.get("scale"))

        local = (t.to_local() for t in (query, key, value))
        group = query.device_mesh.get_group()
        return wrapped(rings._templated_ring_attention(group, 2, op, *local, is_causal=causal), query)

    def backward(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        *given, dropout, causal = given

        def op(grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool) -> Any:
            tensors = grad_out, query, key, value, out, logsumexp
            return of_gradient(*tensors, dropout, is_causal, scale=options.get("scale"))

        grad, *local = (t.to_local() for t in given)
        group = given[1].device_mesh.get_group()
        results = rings._templated_ring_attention_backward(group, 2, op, grad, "grad_out", *local, causal)
        return wrapped(results, given[1])

    rings.custom_ops.update({kernel: forward, of_gradient: backward})


def split_step(model: Any, batch: dict[str, Any], mesh: Any, rotate: str) -> Step:
    """Forward and backward on this process's part of the sequence; returns the mean loss of all.

    The model's own mask is dropped, as Accelerate does: positions that are out of order would be taken for documents.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.functional import pad

    from autopar._torch_compat import context_parallel_internals

    def causal(_: Any, given: Any, named: dict[str, Any]) -> Any:
        return given, {**named, "attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(causal, with_kwargs=True)
    ids = batch["input_ids"]
    length = ids.shape[1]
    whole = {
        "input_ids": ids, "position_ids": torch.arange(length).unsqueeze(0),
        "shift_labels": pad(batch["labels"], (0, 1), value=-100)[:, 1:],
    }  # fmt: skip

    def step() -> float:
        context_parallel_internals().set_rotate_method(rotate)
        own = {name: t.clone() for name, t in whole.items()}
        buffers = list(own.values())
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)):
            # Gradients are averaged, and one process has a label fewer.
            loss = model(**own, labels=own["input_ids"], num_items_in_batch=(length - 1) / WORLD).loss
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / WORLD

    return step


def mixtral() -> tuple[Any, dict[str, Any]]:
    """A Mixtral of 2 layers, in float32: torch has no grouped products of it on a CPU, and all take their fallback."""
    from benchmarks.memory_models import mixtral

    return mixtral(256, 2048, 2 * WORLD, max(int(os.environ[TOKENS]) // 16, 8))


def transformers_own(mesh: Any, folder: Path) -> dict[str, Step]:
    """A step of transformers' expert parallelism, whose loss is the mean of all processes'."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    whole, batch = mixtral()
    saved = folder / "mixtral"
    if mesh.get_rank() == 0:
        whole.save_pretrained(saved)
    dist.barrier()
    placed = DistributedConfig(fsdp_size=WORLD, ep_size=WORLD)
    model = AutoModelForCausalLM.from_pretrained(
        saved, distributed_config=placed, experts_implementation="grouped_mm", dtype=torch.float32
    ).train()
    step = stepper(model, {name: t.chunk(WORLD)[mesh.get_local_rank()] for name, t in batch.items()})

    def averaged() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return float(loss) / WORLD

    return {"transformers, experts and FSDP": averaged}


Peers = Callable[[Any, Path], dict[str, Step]]

ZOO: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str, Peers]] = {
    "llama": (llama, "context", by_hand),
    "mixtral": (mixtral, "expert", transformers_own),
}
"""Each model's recipe, and what people set up by hand."""


def table(rows: list[dict[str, Any]]) -> str:
    """Each model's plans, best first, and the best by hand over the search and over the recipe."""
    lines = [f"{'model':<8} {'plan':<42} {'predicted ms':>13} {'measured ms':>12}"]
    for r in sorted(rows, key=lambda r: (list(ZOO).index(r["model"]), r["measured"])):
        predicted = f"{1e3 * r['predicted']:13.1f}" if r["predicted"] else f"{'':13}"
        lines.append(f"{r['model']:<8} {r['plan']:<42} {predicted} {1e3 * r['measured']:12.1f}")
    lines.append("")
    for name, (_, recipe, _) in ZOO.items():
        own = [r for r in rows if r["model"] == name]
        hand = min(r["measured"] for r in own if r["predicted"] is None)
        over = (f"{r['plan']} {hand / r['measured']:.3f}" for r in own if r["plan"] in (SEARCHED, recipe))
        lines.append(f"{name}: the best by hand over {', '.join(over)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
