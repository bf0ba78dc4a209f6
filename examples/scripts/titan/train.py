"""Train a Llama on the bytes of a file, in the style of TorchTitan: parts with states, a loss outside of the model."""

import argparse
import contextlib
import logging
import os
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from components import (
    LRSchedulersContainer,
    ModelWrapper,
    OptimizersContainer,
    TextDataset,
    cross_entropy_loss,
)
from model import Transformer, TransformerModelArgs
from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger("titan")


class Trainer(Stateful):
    def __init__(self, job_config):
        self.job_config = job_config
        self.device = torch.device(job_config.device)
        self.step = 0
        torch.manual_seed(job_config.seed)
        with torch.device("meta"):
            model = Transformer(TransformerModelArgs(max_seq_len=job_config.seq_len))
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_weights()
        if job_config.dtype == "float64":
            model.double()
        model.train()
        self.model_parts = [model]
        self.loss_fn = cross_entropy_loss
        self.optimizers = OptimizersContainer(self.model_parts, job_config.lr, 0.1)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, warmup=4, stable=20, decay=20)
        self.dataset = TextDataset(job_config.data, job_config.seq_len)
        self.dataloader = torch.utils.data.DataLoader(self.dataset, batch_size=job_config.local_batch_size)
        self.states = {
            "model": ModelWrapper(model),
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "dataloader": self.dataset,
            "train_state": self,
        }
        self.maybe_enable_amp = (
            torch.autocast(self.device.type, dtype=torch.bfloat16)
            if job_config.dtype == "bfloat16"
            else contextlib.nullcontext()
        )

    def forward_backward_step(self, input_dict, labels):
        (model,) = self.model_parts
        with self.maybe_enable_amp:
            pred = model(input_dict["input"])
            loss = self.loss_fn(pred, labels) / self.job_config.accumulation
        del pred  # logits are the largest tensor there is
        loss.backward()
        return loss

    def train_step(self, batches):
        self.optimizers.zero_grad()
        losses = []
        for _ in range(self.job_config.accumulation):
            input_dict, labels = next(batches)
            moved = {k: v.to(self.device) for k, v in input_dict.items()}
            losses.append(self.forward_backward_step(moved, labels.to(self.device)).detach())
        parameters = [p for m in self.model_parts for p in m.parameters()]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        self.optimizers.step()
        self.lr_schedulers.step()
        logger.info(
            "step: %d  loss: %.9f  grad_norm: %.6f", self.step, float(torch.stack(losses).sum()), float(grad_norm)
        )

    @torch.no_grad()
    def validate(self):
        (model,) = self.model_parts
        model.eval()
        held_out = TextDataset(self.job_config.data, self.job_config.seq_len, start=4321)
        batches = iter(torch.utils.data.DataLoader(held_out, batch_size=self.job_config.local_batch_size))
        losses = []
        for _ in range(2):
            input_dict, labels = next(batches)
            with self.maybe_enable_amp:
                pred = model(input_dict["input"].to(self.device))
                losses.append(self.loss_fn(pred, labels.to(self.device)))
        model.train()
        logger.info("validate step: %d  loss: %.9f", self.step, float(torch.stack(losses).mean()))

    def train(self):
        folder = self.job_config.checkpoint_folder
        if self.job_config.load_step >= 0:
            dcp.load(self.states, checkpoint_id=os.path.join(folder, f"step-{self.job_config.load_step}"))
        batches = iter(self.dataloader)
        while self.step < self.job_config.steps:
            self.step += 1
            self.train_step(batches)
            if self.step % self.job_config.interval == 0:
                self.validate()
                dcp.save(self.states, checkpoint_id=os.path.join(folder, f"step-{self.step}"))

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="README.md")
    parser.add_argument("--checkpoint-folder", default=tempfile.gettempdir())
    parser.add_argument("--load-step", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--local-batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch").setLevel(logging.WARNING)
    Trainer(parser.parse_args()).train()


if __name__ == "__main__":
    main()
