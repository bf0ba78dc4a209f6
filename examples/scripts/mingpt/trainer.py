"""A trainer in the style of minGPT: it knows nothing of language, and calls back after each batch."""

import time
from collections import defaultdict

import torch
from torch.utils.data import DataLoader, RandomSampler


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer = None
        self.callbacks = defaultdict(list)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.iter_num, self.iter_time, self.iter_dt = 0, 0.0, 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def set_callback(self, onevent, callback):
        self.callbacks[onevent] = [callback]

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        self.trigger_callbacks("on_start")
        order = RandomSampler(
            self.train_dataset,
            replacement=True,
            num_samples=10**6,
            generator=torch.Generator().manual_seed(config.seed),
        )
        loader = DataLoader(
            self.train_dataset, sampler=order, batch_size=config.batch_size, num_workers=config.num_workers
        )
        model.train()
        data_iter = iter(loader)
        for _ in range(self.iter_num):
            next(data_iter)
        self.iter_time = time.time()
        while True:
            torch.manual_seed(config.seed + self.iter_num)  # masks of dropout, of this step
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                batch = next(data_iter)
            x, y = [t.to(self.device) for t in batch]
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            self.grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt, self.iter_time = tnow - self.iter_time, tnow
            self.trigger_callbacks("on_batch_end")
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break
