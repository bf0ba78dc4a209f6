"""Teach a GPT to sort digits, in the style of minGPT's demo."""

import argparse
import os
from types import SimpleNamespace

import torch
from model import GPT
from torch.utils.data import Dataset
from trainer import Trainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--work-dir", default="out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--max-iters", type=int, default=20)
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
os.makedirs(args.work_dir, exist_ok=True)
ckpt_path = os.path.join(args.work_dir, "model.pt")


class SortDataset(Dataset):
    """Six digits and the same sorted: 1 0 2 1 0 1 gives 0 0 1 1 1 2. Positions of the input have no loss."""

    def __init__(self, length=6, num_digits=3):
        self.length, self.num_digits = length, num_digits

    def __len__(self):
        return 10000

    def get_block_size(self):
        return self.length * 2  # of which the last is never an input

    def __getitem__(self, idx):
        inp = torch.randint(self.num_digits, (self.length,), generator=torch.Generator().manual_seed(int(idx)))
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return torch.cat((x, x[-1:])), torch.cat((y, y.new_tensor([-1])))


torch.manual_seed(3407)
train_dataset = SortDataset()
model_config = SimpleNamespace(
    n_layer=3, n_head=4, n_embd=48, vocab_size=3, block_size=train_dataset.get_block_size(),
    embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1,
)  # fmt: skip
model = GPT(model_config)
if args.double:
    model.double()
train_config = SimpleNamespace(
    num_workers=0, max_iters=args.max_iters, batch_size=16, learning_rate=5e-4, betas=(0.9, 0.95), weight_decay=0.1,
    grad_norm_clip=1.0, seed=3407,
)  # fmt: skip
trainer = Trainer(train_config, model, train_dataset)


def load(trainer):
    if args.resume:
        checkpoint = torch.load(ckpt_path)
        trainer.model.load_state_dict(checkpoint["model"])
        trainer.optimizer.load_state_dict(checkpoint["optimizer"])
        trainer.iter_num = checkpoint["iter_num"]


def report(trainer):
    print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.9f}, grad norm {float(trainer.grad_norm):.6f}")


def evaluate_and_save(trainer):
    if trainer.iter_num % 10:
        return
    model.eval()
    inp = torch.stack([train_dataset[i][0][:6] for i in range(8)]).to(trainer.device)
    out = model.generate(inp, 6, do_sample=False)[:, 6:]
    right = (out == torch.sort(inp, dim=1)[0]).float().mean().item()
    print(f"iter {trainer.iter_num}: {right:.0%} of the digits are right")
    model.train()
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "iter_num": trainer.iter_num,
    }
    torch.save(checkpoint, ckpt_path)


trainer.set_callback("on_start", load)
trainer.add_callback("on_batch_end", report)
trainer.add_callback("on_batch_end", evaluate_and_save)
trainer.run()
