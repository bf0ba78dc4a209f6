"""What it costs that a graph computes all rows of which a mask selects some.

A masked language model of two layers takes a share of the tokens to its head, `head(x[mask])`, in eager mode and
parallelized for one device, and so does one that takes all tokens and leaves them out of its loss by labels of -100.
Steps, forward and backward, by turns; medians.

    python benchmarks/selected_rows.py --json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar

SAMPLES, TOKENS, WIDTH, FIRST = 8, 64, 128, 3


class Masked(nn.Module):
    """Two layers, and a head that sees the tokens that are to be predicted, or all of them."""

    def __init__(self, words: int, selects: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(words, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head, self.selects = nn.Linear(WIDTH, words), selects

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x, mask = self.layers(self.words(ids)), labels != -100
        if self.selects:
            return functional.cross_entropy(self.head(x[mask]), labels[mask])
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def measured(words: int, share: float, steps: int) -> dict[str, float]:
    """Milliseconds of a step, by what takes it."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, words, (SAMPLES, TOKENS), generator=draw)
    labels = ids.masked_fill(torch.rand(SAMPLES, TOKENS, generator=draw) > share, -100)
    torch.manual_seed(0)
    selected, whole = Masked(words, selects=True), Masked(words, selects=False)
    models: dict[str, Any] = {"eager, x[mask]": selected, "eager, all rows": whole}
    for name, model in [*models.items()]:
        models[name.replace("eager", "autopar")] = autopar.parallelize(copy.deepcopy(model), None)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(FIRST + steps):
        for name, model in models.items():
            begun = time.perf_counter()
            model(ids, labels).backward()
            if step >= FIRST:
                seconds[name].append(time.perf_counter() - begun)
    return {name: 1e3 * statistics.median(own) for name, own in seconds.items()}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=8192, help="entries of the vocabulary")
    parser.add_argument("--share", type=float, default=0.15, help="of the tokens that are to be predicted")
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(options.words, options.share, options.steps)
    if options.json:
        print(json.dumps(found))
        return
    for name, milliseconds in found.items():
        print(f"{name:20} {milliseconds:8.1f} ms")


if __name__ == "__main__":
    main()
