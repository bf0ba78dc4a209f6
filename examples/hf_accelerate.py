"""A training loop with Hugging Face's accelerate on several processes.

``torchrun --nproc-per-node 4 examples/hf_accelerate.py`` on a CPU; add ``--cuda`` where each has a GPU.
Run it again with other ranks and ``--resume``: the run goes on.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations.hf_accelerate import Accelerator


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", default="out")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--resume", action="store_true")
    options.add_argument("--cuda", action="store_true")
    given = options.parse_args()

    accelerator = Accelerator(cpu=not given.cuda, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    data = TensorDataset(x, x[:, :8].argmax(1))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(accelerator.device)
    mesh = init_device_mesh(accelerator.device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("device",))
    model = autopar.parallelize(model, mesh, (x[:16],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if given.resume:
        accelerator.load_state(given.output)

    for epoch in range(given.epochs):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.save_state(given.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
