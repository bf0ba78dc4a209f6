"""Train with Lightning on several processes.

``python examples/lightning_strategy.py --devices 4`` on CPUs, or under torchrun; add ``--cuda`` where there are GPUs.
Run it again with other devices and ``--resume PATH``: the run goes on.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning_strategy import AutoparStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def training_step(self, batch, number):
        rows, labels = batch
        loss = nn.functional.cross_entropy(self.net(rows), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        rows, labels = batch
        self.log("right", (self.net(rows).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--devices", type=int, default=4)
    options.add_argument("--output", default="out")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--resume")
    options.add_argument("--cuda", action="store_true")
    given = options.parse_args()

    lightning.seed_everything(0)
    x = torch.randn(128, 64)
    loader = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cuda" if given.cuda else "cpu", devices=given.devices, strategy=AutoparStrategy(),
        max_steps=given.steps, gradient_clip_val=1.0, default_root_dir=given.output, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader, loader, ckpt_path=given.resume)
    trainer.print({name: float(value) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
