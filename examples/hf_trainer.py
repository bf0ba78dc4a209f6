"""Train a small Llama with Hugging Face's `Trainer` on several processes.

``torchrun --nproc-per-node 4 examples/hf_trainer.py`` on a CPU; add ``--cuda`` where each has a GPU.
Run it again with other ranks and ``--resume``: the run goes on.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.integrations.hf_trainer import Trainer


class Counting(Dataset):
    """Rows that count upwards from somewhere, which a model learns soon."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(32) + 7 * index) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", default="out")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--resume", action="store_true")
    options.add_argument("--cuda", action="store_true")
    given = options.parse_args()

    args = TrainingArguments(
        output_dir=given.output, max_steps=given.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=5, save_steps=10, eval_strategy="steps", eval_steps=10, report_to=[],
        disable_tqdm=True, use_cpu=not given.cuda, ddp_backend="nccl" if given.cuda else "gloo",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    ).to(args.device)
    mesh = init_device_mesh(args.device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("device",))
    model = autopar.parallelize(model, mesh)
    trainer = Trainer(model=model, args=args, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train(resume_from_checkpoint=given.resume or None)
    trainer.save_model()
    trainer.end()


if __name__ == "__main__":
    main()
