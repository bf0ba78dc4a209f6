"""Is a step of expert parallelism as fast as transformers' own? Four Gloo ranks, in turns, the same Mixtral.

Transformers has `DistributedConfig(fsdp_size=4, ep_size=4)`: a rank has a quarter of the samples and experts, and rows
travel (all-to-all). Beside it are the recipe ``expert`` and the search. Losses must agree before times count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks.turns import Step, agreed_losses, stepper, take_turns

RANKS = 4


def config() -> Any:
    """A small Mixtral in float32, which grouped products of torch do not take on a CPU: both have the same fallback."""
    import transformers

    return transformers.MixtralConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip


def theirs(folder: Path, batch: dict[str, Any], rank: int) -> Step:
    """A step of transformers; the loss is the mean of all ranks'."""
    import torch
    import transformers
    from torch.distributed import all_reduce
    from transformers.distributed import DistributedConfig

    placed = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=placed, experts_implementation="grouped_mm", dtype=torch.float32
    ).train()
    step = stepper(model, {name: t.chunk(RANKS)[rank] for name, t in batch.items()})

    def averaged() -> float:
        loss = torch.tensor(step())
        all_reduce(loss)
        return float(loss) / RANKS

    return averaged


def ours(folder: Path, batch: dict[str, Any], recipe: str | None) -> Step:
    """A step of a plan."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="grouped_mm").train()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("expert",))
    return stepper(parallelize(model, mesh, cluster="cpu", search=Search(recipe=recipe)), batch)


def run(rank: int, folder: Path, options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Transformers reads these, as torchrun sets them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ids = torch.randint(0, 2048, (options.batch, options.sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    steps = {"transformers": theirs(folder, batch, rank)}
    steps |= {recipe or "search": ours(folder, batch, recipe) for recipe in ("expert", None)}
    losses = agreed_losses(steps)
    times = take_turns(steps, options.rounds)
    ratios = {
        name: statistics.median(b / a for a, b in zip(times["transformers"], own, strict=True))
        for name, own in times.items()
    }
    if rank == 0:
        medians = {name: 1e3 * statistics.median(own) for name, own in times.items()}
        print(json.dumps({"tokens": ids.numel(), "losses": losses, "ms": medians, "of theirs": ratios}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences in all")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(folder)
        torch.multiprocessing.spawn(run, (Path(folder), options), nprocs=RANKS)


if __name__ == "__main__":
    main()
