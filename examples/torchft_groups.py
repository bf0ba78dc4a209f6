"""Train a small Llama in replica groups that may be killed and come back. Each group is some processes of torchrun.

In a terminal, and then one for each group, on CPUs (add ``--cuda`` where each process has a GPU)::

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/torchft_groups.py --group 0
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/torchft_groups.py --group 1

Kill the processes of a group: the other goes on alone, and what torchrun starts anew takes its state.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.integrations.torchft import replica_groups

ROWS = 8


def batch_of(step: int, rows: slice, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows that count upwards from somewhere, of the global batch of a step."""
    starts = torch.arange(ROWS * step, ROWS * (step + 1))[rows]
    ids = ((torch.arange(32) + 7 * starts[:, None]) % 64).to(device)
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--group", type=int, required=True)
    options.add_argument("--groups", type=int, default=2)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--pause", type=float, default=0.2, help="seconds between steps, to watch it")
    options.add_argument("--host", help="a name of this machine that other groups reach")
    options.add_argument("--cuda", action="store_true")
    args = options.parse_args()
    torch.manual_seed(0)  # all groups begin with the same weights
    mesh = autopar.mesh(device=None if args.cuda else "cpu")
    device = torch.device("cuda" if args.cuda else "cpu")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    example = batch_of(0, slice(0, ROWS // args.groups), device)
    model = autopar.parallelize(model.to(device), mesh, example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    run = replica_groups(model, optimizer, group=args.group, count=args.groups, host=args.host, scheduler=scheduler)
    for step in run.steps(args.steps):
        loss = model(**batch_of(step, run.rows(ROWS), device)).loss
        loss.backward()
        run.average_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if run.commit():
            optimizer.step()
            scheduler.step()
            print(f"step {step} of groups {list(run.members)}: loss {float(loss):.4f}", flush=True)
        optimizer.zero_grad()
        time.sleep(args.pause)
    run.close()


if __name__ == "__main__":
    main()
