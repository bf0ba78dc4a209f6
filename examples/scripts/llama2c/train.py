"""Train a small Llama on the bytes of a file, in the style of llama2.c."""

import argparse
import math
import os
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from model import ModelArgs, Transformer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="README.md")
parser.add_argument("--out-dir", default="out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--max-iters", type=int, default=20)
parser.add_argument("--eval-interval", type=int, default=10)
parser.add_argument("--eval-iters", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum", type=int, default=2)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

master_process = int(os.environ.get("RANK", 0)) == 0
device_type = "cuda" if "cuda" in args.device else "cpu"
ctx = torch.amp.autocast(device_type, torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()
os.makedirs(args.out_dir, exist_ok=True)
checkpoint_path = os.path.join(args.out_dir, "ckpt.pt")
torch.manual_seed(1337)


class PretokDataset(torch.utils.data.IterableDataset):
    """Windows of a file of tokens, in an order of its own random generator; endless."""

    def __init__(self, path, split, max_seq_len, seed):
        super().__init__()
        self.path, self.split, self.max_seq_len, self.seed = path, split, max_seq_len, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(self.seed + (0 if worker is None else worker.id))
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        border = int(0.9 * len(data))
        data = data[:border] if self.split == "train" else data[border:]
        while True:
            start = int(rng.integers(len(data) - self.max_seq_len))
            chunk = torch.from_numpy(data[start : start + self.max_seq_len + 1].astype(np.int64))
            yield chunk[:-1], chunk[1:]


def iter_batches(split, seed=0):
    ds = PretokDataset(args.data, split, model_args.max_seq_len, seed)
    for x, y in torch.utils.data.DataLoader(
        ds, batch_size=args.batch_size, num_workers=0, pin_memory=device_type == "cuda"
    ):
        yield x.to(args.device, non_blocking=True), y.to(args.device, non_blocking=True)


iter_num, best_val_loss = 0, 1e9
checkpoint = torch.load(checkpoint_path, map_location="cpu", weights_only=False) if args.resume else None
model_args = checkpoint["model_args"] if checkpoint else ModelArgs()
model = Transformer(model_args)
if args.dtype == "float64":
    model.to(torch.float64)
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
model.to(args.device)

optimizer = model.configure_optimizers(0.1, args.lr, (0.9, 0.95), device_type)
if checkpoint:
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
raw_model = model


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        batch_iter = iter_batches(split, seed=7)
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            X, Y = next(batch_iter)
            with ctx:
                model(X, Y)
                loss = raw_model.last_loss
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it, warmup=4, decay=40):
    if it < warmup:
        return args.lr * it / warmup
    return args.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (it - warmup) / (decay - warmup))))


train_batch_iter = partial(iter_batches, split="train")(seed=iter_num)
X, Y = next(train_batch_iter)
t0 = time.time()
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % args.eval_interval == 0:
        losses = estimate_loss()
        if master_process:
            print(f"step {iter_num}: train loss {losses['train']:.9f}, val loss {losses['val']:.9f}")
        best_val_loss = min(best_val_loss, losses["val"])
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "model_args": model_args,
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
                "config": vars(args),
            }
            torch.save(checkpoint, checkpoint_path)
            train_batch_iter = iter_batches("train", seed=iter_num)
            X, Y = next(train_batch_iter)
    for _ in range(args.grad_accum):
        with ctx:
            model(X, Y)
            loss = raw_model.last_loss
            loss = loss / args.grad_accum
        X, Y = next(train_batch_iter)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        lossf = loss.item() * args.grad_accum
        print(f"{iter_num} | loss {lossf:.9f} | lr {lr:e} | {(time.time() - t0) * 1000:.2f}ms")
    t0 = time.time()
    iter_num += 1
    if iter_num > args.max_iters:
        break
