"""Train a small Llama with Ray Train on several workers.

``python examples/ray_train.py`` on a CPU; add ``--cuda`` where each worker has a GPU.
Run it again with more ``--steps`` and another number of ``--workers``: the run goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.integrations import ray as autopar_ray


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Rows that count upwards from somewhere: the whole batch, on every worker."""
    ids = (torch.arange(32) + 7 * torch.arange(8 * step, 8 * step + 8)[:, None]) % 64
    return {"input_ids": ids, "labels": ids}


def train(config: dict) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    model = autopar.parallelize(model.to(get_device()), autopar_ray.mesh(), batch_of(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = autopar_ray.load(model, optimizer).step
    for step in range(first, config["steps"]):
        loss = model(**{name: t.to(get_device()) for name, t in batch_of(step).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {float(loss):.4f}", flush=True)
            autopar_ray.report({"loss": float(loss)}, model, optimizer, step=step + 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", default="out")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--cuda", action="store_true")
    given = options.parse_args()
    trainer = TorchTrainer(
        train, train_loop_config={"steps": given.steps},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.cuda),
        run_config=RunConfig(name="counting", storage_path=str(Path(given.output).resolve())),
    )  # fmt: skip
    print("loss", trainer.fit().metrics["loss"])


if __name__ == "__main__":
    main()
