"""Do meetings of elastic workers at a far store hide behind training?

Two workers in threads; each question to the store takes twice ``--away`` seconds, and each step `STEP`, in which no
core is used. What is exchanged is small: the seconds are those of the agreement. Predicted is what
`ElasticWorkers.predicted` counts for such a link, with the step that was measured without meetings.

    python -m benchmarks.far_meetings --away 0.02
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

import autopar
from autopar.costs.cluster import Link
from autopar.costs.outer_exchange import meeting_seconds, round_cost
from autopar.module.low_communication.elastic.meetings import PAUSE

STEP, STEPS = 0.05, 100
NEVER = 10 * STEPS

ROWS: tuple[dict[str, int], ...] = (
    {"every": NEVER}, {"every": 20}, {"every": 20, "delay": 12}, {"every": 40, "fragments": 2},
    {"every": 40, "fragments": 2, "delay": 12},
)  # fmt: skip


class Net(nn.Module):
    """Of two blocks, for two fragments."""

    def __init__(self) -> None:
        """As it comes."""
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = (self.down(self.up(x).tanh()) - x).square().mean()
        return loss


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--away", type=float, default=0.02, metavar="SECONDS", help="to the store (default: 0.02)")
    away = parser.parse_args().away
    torch.set_num_threads(1)
    link, alone = Link("far", bandwidth=1e9, latency=away), 0.0
    print("| settings | ms a step | predicted |\n| --- | --- | --- |")
    for given in ROWS:
        seconds = measured(given, away)
        alone = alone or seconds
        shape = {"every": given["every"], "fragments": given.get("fragments", 1), "delay": given.get("delay", 0)}
        cost = round_cost(144, 4, 2, None, link, alone, before=meeting_seconds(link, PAUSE), **shape)
        said = ", ".join(f"{name}={value}" for name, value in given.items() if value != NEVER) or "no meeting"
        predicted = "" if given["every"] == NEVER else f"{1000 * alone * (1 + cost.slowdown):.1f}"
        print(f"| {said} | {1000 * seconds:.1f} | {predicted} |", flush=True)


def measured(given: dict[str, int], away: float) -> float:
    """Seconds of a step of the slower worker."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    x = torch.randn(4, 8)
    workers: list[Any] = []
    for number in range(2):
        model = autopar.parallelize(Net(), None, (x,))
        model(x).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        client = TCPStore("localhost", store.port, is_master=False)
        workers.append(autopar.ElasticWorkers(model, optimizer, worker=number, workers=2, store=client, **given))

    def train(local: Any) -> float:
        local.join()
        register = local._meetings._register
        register._asked = late(register._asked, 2 * away)
        begun = time.monotonic()
        for _ in range(STEPS):
            local.optimizer.zero_grad()
            local.model(x).backward()
            time.sleep(STEP)
            local.optimizer.step()
        took = time.monotonic() - begun
        local.leave()
        return took / STEPS

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(train, workers))


def late(ask: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same, after a while."""

    def asked(question: Any) -> Any:
        time.sleep(seconds)
        return ask(question)

    return asked


if __name__ == "__main__":
    main()
