"""Parts of a trainer in the style of TorchTitan: each has a state, and a checkpoint is of all of them."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR


def cross_entropy_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1).to(torch.promote_types(pred.dtype, torch.float32)), labels.flatten(0, 1))


class ModelWrapper(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, model_state_dict=state_dict, options=StateDictOptions(strict=False))


class OptimizersContainer(Stateful):
    """One optimizer for each part of the model; here there is one part, whose norms are not decayed."""

    def __init__(self, model_parts, lr, weight_decay):
        self.model_parts = model_parts
        self.optimizers = []
        for model in model_parts:
            params = [p for p in model.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
                {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
            ]
            self.optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8))

    def __iter__(self):
        return iter(self.optimizers)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found = {}
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            found.update(get_optimizer_state_dict(model, optimizer, options=options))
        return found

    def load_state_dict(self, state_dict):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict, options=options)


class LRSchedulersContainer(Stateful):
    """Warm up, stay, decay linearly."""

    def __init__(self, optimizers, warmup, stable, decay):
        def factor(warmup, stable, decay, step):
            if step < warmup:
                return (step + 1) / warmup
            return 1.0 if step < warmup + stable else max(0.0, 1.0 - (step - warmup - stable) / decay)

        self.schedulers = [LambdaLR(o, functools.partial(factor, warmup, stable, decay)) for o in optimizers]

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self):
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict):
        for scheduler in self.schedulers:
            scheduler.load_state_dict(state_dict)


class TextDataset(torch.utils.data.IterableDataset, Stateful):
    """Windows of a file, one after the other, and where it is."""

    def __init__(self, path, seq_len, start=0):
        self.data, self.seq_len, self.start, self.position = (
            np.memmap(path, dtype=np.uint8, mode="r"),
            seq_len,
            start,
            0,
        )

    def __iter__(self):
        while True:
            begin = (self.start + self.position * self.seq_len) % (len(self.data) - self.seq_len - 1)
            chunk = torch.from_numpy(self.data[begin : begin + self.seq_len + 1].astype(np.int64))
            self.position += 1
            yield {"input": chunk[:-1]}, chunk[1:]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]
