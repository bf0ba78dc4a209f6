"""Nodes of a run on this machine: each an ``autopar run --elastic`` with one process, which can be lost or join."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]

MODEL = '''
import contextlib

import torch
from torch import nn


class Net(nn.Module):
    """The loss alone; random numbers are those of one device."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(24, 48), nn.Linear(48, 24), nn.Dropout(0.25)

    def forward(self, x, y):
        return ((self.down(self.drop(self.up(x).tanh())) - y) ** 2).mean()


class Sampler:
    """Rows in another order in each epoch, from where it was."""

    def __init__(self, rows, batch):
        self.rows, self.batch, self.at, self.epoch = rows, batch, 0, 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]

    def __call__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.epoch))
        found = order[self.at : self.at + self.batch]
        self.at += self.batch
        if self.at == self.rows:
            self.at, self.epoch = 0, self.epoch + 1
        return found


def made(distribute):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.randn(60, 24, dtype=torch.float64)
    model = distribute(Net().double(), (torch.zeros(12, 24).double(), torch.zeros(12, 24).double()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, scheduler, Sampler(60, 12), data


def train(model, optimizer, scheduler, sampler, data):
    x = data[sampler()]
    loss = model(x + 0.1 * torch.randn_like(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item()


def accumulate(step, model, optimizer, scheduler, sampler, data):
    """A third of an optimizer's step, whose gradients wait for their reduction, or not."""
    x = data[sampler()]
    waits = step % 3 == 0 and hasattr(model, "no_sync")
    with model.no_sync() if waits else contextlib.nullcontext():
        loss = model(x + 0.1 * torch.randn_like(x), x)
        (loss / 3).backward()
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return loss.item()
'''

SCRIPT = (
    MODEL
    + """
import json, os, sys, time
import autopar

log, total, pause, settings = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])


def distribute(model, batch):
    search = autopar.Search(recipe=settings.pop("recipe", None))
    return autopar.parallelize(model, autopar.mesh(), batch, deterministic=True, timeout=120, search=search)


def say(**facts):
    facts |= {"time": time.time(), "world": int(os.environ["WORLD_SIZE"]), "rank": int(os.environ["RANK"])}
    with open(log, "a") as file:
        file.write(json.dumps(facts) + "\\n")


say(pid=os.getpid(), agent=os.getppid())
model, optimizer, scheduler, sampler, data = made(distribute)
run = autopar.elastic(model, optimizer, scheduler=scheduler, sampler=sampler, **settings)
say(begins=run.step, agent=os.getppid(), source=run.source, seconds=run.seconds)
for step in run.steps(total):
    time.sleep(pause)
    say(step=step, loss=train(model, optimizer, scheduler, sampler, data), lr=scheduler.get_last_lr()[0])
state = {n: v.tolist() for n, v in model.full_state_dict().items()}
say(state=state)
"""
)


def expected(total: int, *, accumulates: bool = False) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, learning rates and parameters of eager steps on one device that nothing interrupts."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model, *rest = names["made"](lambda model, batch: model)
    losses, rates = [], []
    for step in range(total):
        losses.append(names["accumulate"](step, model, *rest) if accumulates else names["train"](model, *rest))
        rates.append(rest[1].get_last_lr()[0])
    return losses, rates, model.state_dict()


WAIT = 240.0
"""Seconds in which whatever a test waits for has come, on a machine that is busy."""


class Node(NamedTuple):
    """A launcher, and where what it says goes."""

    process: subprocess.Popen[bytes]
    said: Path


class Nodes:
    """A run that is started on a first node, which has the rendezvous unless there is one, and on others.

    Attributes:
        log: lines of JSON, of all processes of the run.
    """

    def __init__(
        self,
        folder: Path,
        least: int,
        most: int,
        total: int,
        *,
        pause: float = 0.0,
        stable: bool = True,
        **settings: Any,
    ) -> None:
        self.folder, self.log = folder, folder / "log"
        (folder / "script.py").write_text(SCRIPT)
        self.log.touch()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.at = f"127.0.0.1:{free.getsockname()[1]}"
        self.command = [
            sys.executable, "-m", "autopar.cli", "run", "--elastic", f"{least}:{most}", "--nproc", "1",
            "--rendezvous", self.at, "--axes", "data=*", "--timeout", "200", "script.py",
            str(self.log), str(total), str(pause), json.dumps(settings),
        ]  # fmt: skip
        self.nodes: list[Node] = []
        self.keeper = (
            self._start([sys.executable, "-m", "autopar.cli", "rendezvous", self.at], "keeper") if stable else None
        )
        if self.keeper is not None:
            self.wait(self._is_open, "the rendezvous")

    def _start(self, command: list[str], name: str) -> Node:
        said = self.folder / f"{name}.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with said.open("wb") as out:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=out)
        return Node(process, said)

    def join(self, count: int = 1) -> None:
        """Start further nodes; the first of all is there before the others come."""
        for _ in range(count):
            self.nodes.append(self._start(self.command, f"node-{len(self.nodes)}"))
            if self.keeper is None and len(self.nodes) == 1:
                self.wait(self._is_open, "the first node")

    def _is_open(self) -> bool:
        host, port = self.at.split(":")
        with socket.socket() as other:
            return other.connect_ex((host, int(port))) == 0

    def lose(self, number: int) -> None:
        """Kill a node, its process first: the launcher would start it anew."""
        agent = self.nodes[number].process
        agent.send_signal(signal.SIGSTOP)
        for pid in children(agent.pid):
            os.kill(pid, signal.SIGKILL)
        agent.kill()
        agent.wait()

    def alive(self) -> list[int]:
        """Numbers of the nodes that have not ended."""
        return [i for i, node in enumerate(self.nodes) if node.process.poll() is None]

    def holders(self) -> list[int]:
        """Numbers of the nodes that are left and have had the state."""
        agents = {f["agent"] for f in self.facts("begins")}
        return [i for i in self.alive() if self.nodes[i].process.pid in agents]

    def facts(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the log that have an entry of this name."""
        lines = self.log.read_text().splitlines()
        return [f for line in lines if kind in (f := json.loads(line))]

    def starts(self) -> list[dict[str, Any]]:
        """Where each start of the run has begun, as its first rank says."""
        return [f for f in self.facts("begins") if f["rank"] == 0]

    def last_step(self) -> int:
        """The last step that any process has done; -1: none."""
        return max((f["step"] for f in self.facts("step")), default=-1)

    def processes(self) -> int:
        """How many processes of the script there have been."""
        return len(self.facts("pid"))

    def wait(self, done: Callable[[], Any], what: str, seconds: float = WAIT) -> None:
        """Wait until something is so; what the nodes have said is in the error."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline or (self.nodes and not self.alive()):
                raise AssertionError(f"no {what}: {self.said()}")
            time.sleep(0.02)

    def reach(self, step: int, world: int | None = None) -> None:
        """Wait until a step has been done, in a world of some size."""
        self.wait(
            lambda: any(f["step"] >= step and f["world"] in (world, f["world"] if world is None else None)
                        for f in self.facts("step")),
            f"step {step} in a world of {world}",
        )  # fmt: skip

    def said(self) -> str:
        return "\n".join(f"{n.said.name}: {n.said.read_text()[-9000:]}" for n in self.nodes)

    def finish(self) -> None:
        """Wait until those that are left have ended well."""
        left = self.alive()
        deadline = time.monotonic() + WAIT
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [self.nodes[i].process.returncode for i in left]
        assert codes == [0] * len(left), f"exit codes {dict(zip(left, codes, strict=True))}: {self.said()}"

    def close(self) -> None:
        for i in self.alive():
            self.lose(i)
        if self.keeper is not None:
            self.keeper.process.kill()
            self.keeper.process.wait()


def children(pid: int) -> list[int]:
    """Processes that one has started."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def lost_steps(facts: list[dict[str, Any]]) -> list[int]:
    """For each start after the first, how many steps that were done it does anew."""
    found, done = [], -1
    for f in facts:
        if "begins" in f and done >= 0:
            found.append(max(0, done + 1 - f["begins"]))
        done = max(done, f["step"]) if "step" in f else done
    return found
