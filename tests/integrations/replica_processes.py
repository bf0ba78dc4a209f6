"""Replica groups on this machine: each is some processes of a script, which can be killed and started anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

MODEL = '''
import torch
from torch import nn

ROWS, STEPS_OF_DATA = 24, 7


class Net(nn.Module):
    """With a buffer that every forward pass changes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.float64))

    def forward(self, x, y):
        self.calls.add_(1)
        return ((self.down(self.up(x).tanh()) - y) ** 2).mean()


class Sampler:
    """Which batch is next."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def batch(self):
        generator = torch.Generator().manual_seed(self.at % STEPS_OF_DATA)
        self.at += 1
        x = torch.randn(ROWS, 8, dtype=torch.float64, generator=generator)
        return x, x.flip(1)


def made():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Net().double()


def optimized(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)


def clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
'''

SCRIPT = (
    MODEL
    + """
import hashlib, json, os, signal, sys, time
import torch.distributed as dist
import autopar
from autopar.integrations.torchft import replica_groups
from autopar.integrations.replicas.state import own_state

told = json.loads(sys.argv[1])
rank, group, folder = told["rank"], told["group"], told["folder"]


def say(**facts):
    with open(f"{folder}/log", "a") as file:
        file.write(json.dumps({"group": group, "rank": rank, "time": time.time(), **facts}) + "\\n")


def wait_for(name):
    deadline = time.monotonic() + 240
    while not os.path.exists(f"{folder}/{name}"):
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.02)


def die(step, where):
    if [step, where] == told.get("die") and told.get("dies_alone", rank) == rank:
        time.sleep(1.0)  # what was sent has arrived
        say(dies=step, where=where)
        os.kill(os.getpid(), told.get("signal", signal.SIGKILL))


def digest(state):
    leaves = torch.utils._pytree.tree_flatten_with_path(state)[0]
    found = hashlib.sha256()
    for path, leaf in leaves:
        leaf = leaf.reshape(-1).view(torch.uint8).tolist() if isinstance(leaf, torch.Tensor) else leaf
        found.update(repr((path, leaf)).encode())
    return found.hexdigest()


if "die_healing" in told:
    from torchft.checkpointing import HTTPTransport
    taken = getattr(HTTPTransport, told["die_healing"])

    def killed(*args, **kwargs):
        say(dies="healing", where=told["die_healing"])
        if told["die_healing"] == "send_checkpoint":
            taken(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(HTTPTransport, told["die_healing"], killed)

say(starts=True)
if told["size"] > 1:
    store = dist.FileStore(told["store"], told["size"])
    dist.init_process_group("gloo", rank=rank, world_size=told["size"], store=store)
    mesh = dist.init_device_mesh("cpu", (told["size"],), mesh_dim_names=("gpu",))
else:
    mesh = None
model = made()
if told.get("frozen"):
    model.down.requires_grad_(False)
sampler = Sampler()
example = tuple(t[: ROWS // told["count"]] for t in sampler.batch())
sampler.at = 0
search = autopar.Search(**told["search"])
model = autopar.parallelize(model, mesh, example, search=search, timeout=60)
optimizer, scheduler = optimized(model)
torch.manual_seed(100 + 10 * group + rank)
run = replica_groups(
    model, optimizer, group=group, count=told["count"], lighthouse=told["lighthouse"], host="localhost",
    timeout=told["timeout"], quorum_timeout=120, scheduler=scheduler, sampler=sampler,
)
say(ready=True)
wait_for(told["go"])
for step in run.steps(told["total"]):
    say(begins=step, digest=digest(own_state(model, optimizer, run._stateful)), members=run.members, healed=run.healed)
    if str(step) in told.get("pauses", {}):
        wait_for(told["pauses"][str(step)])
    if step >= told.get("slow_from", 1000):
        time.sleep(0.2)
    die(step, "quorum")
    x, y = sampler.batch()
    rows = run.rows(ROWS)
    noise = torch.rand(1).item()
    loss = model(x[rows], y[rows])
    loss.backward()
    die(step, "backward")
    run.average_gradients()
    die(step, "exchange")
    if [step, rank] == told.get("errs"):
        run._manager.report_error(OSError("one rank has lost its connections"))
    norm = clip(model)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if run.commit():
        optimizer.step()
        scheduler.step()
        say(step=step, loss=loss.item(), norm=norm.item(), members=run.members, participants=run.participants,
            noise=noise, lr=scheduler.get_last_lr()[0], leads=run.leads)
    else:
        say(discards=step, members=run.members)
    optimizer.zero_grad()
state = {n: v.tolist() for n, v in model.full_state_dict().items()}
say(state=state, healed=run.healed, discarded=run.discarded, at=sampler.at)
run.close()
"""
)


def expected(members: dict[int, list[int]], count: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Eager steps on one device, each on the rows of the groups that took part in it.

    Returns:
        For each step the loss of each group, the norm of the mean gradient, and the learning rate; and the state.
    """
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model, sampler = names["made"](), names["Sampler"]()
    optimizer, scheduler = names["optimized"](model)
    found = []
    for step in range(len(members)):
        x, y = sampler.batch()
        part = len(x) // count
        rows = torch.cat([torch.arange(g * part, (g + 1) * part) for g in members[step]])
        with torch.no_grad():
            losses = {
                g: model(x[g * part : (g + 1) * part], y[g * part : (g + 1) * part]).item() for g in members[step]
            }
        # The mean over the rows that are there: what the concatenated batch gives.
        optimizer.zero_grad()
        model(x[rows], y[rows]).backward()
        norm = names["clip"](model).item()
        optimizer.step()
        scheduler.step()
        found.append((losses, norm, scheduler.get_last_lr()[0]))
    return found, model.state_dict()


class Groups:
    """Groups that meet by a lighthouse of this process.

    Attributes:
        log: of all processes, lines of JSON.
    """

    def __init__(self, folder: Path, count: int, size: int, **told: Any) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self.count, self.size, self.log = folder, count, size, folder / "log"
        (folder / "script.py").write_text(SCRIPT)
        self.log.touch()
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=20000, quorum_tick_ms=50, heartbeat_timeout_ms=3000
        )
        self.told = {"count": count, "size": size, "timeout": 60, "search": {}, **told}
        self.running: dict[int, list[subprocess.Popen[bytes]]] = {}
        self.starts = 0

    def start(self, group: int, **told: Any) -> None:
        """Start the processes of a group."""
        self.starts += 1
        port = self.lighthouse.address().rsplit(":", 1)[1]
        given = {
            **self.told, "group": group, "folder": str(self.folder), "lighthouse": f"http://localhost:{port}",
            "store": str(self.folder / f"store-{self.starts}"), "go": "go", **told,
        }  # fmt: skip
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        self.running[group] = []
        for rank in range(self.size):
            with (self.folder / f"said-{self.starts}-{group}-{rank}").open("wb") as out:
                self.running[group].append(
                    subprocess.Popen(
                        [sys.executable, "script.py", json.dumps({**given, "rank": rank})],
                        cwd=self.folder, env=environment, stdout=out, stderr=out,
                    )
                )  # fmt: skip

    def begin(self) -> None:
        """Let the groups that have been started take their first step together."""
        started = sum(len(p) for p in self.running.values())
        self.wait(lambda: len(self.facts("ready")) >= started, "group that is ready")
        (self.folder / "go").touch()

    def facts(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """Lines of the log with an entry of this name, and others of these values."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [f for f in lines if kind in f and all(f.get(k) == v for k, v in wanted.items())]

    def wait(self, done: Callable[[], Any], what: str, seconds: float = 240.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what}: {self.said()}")
            time.sleep(0.02)

    def ended(self, group: int) -> list[int]:
        """Exit codes of the processes of a group, when all have ended."""
        self.wait(lambda: all(p.poll() is not None for p in self.running[group]), f"end of group {group}")
        return [p.returncode for p in self.running[group]]

    def members(self) -> dict[int, list[int]]:
        """Which groups took part in each committed step."""
        found: dict[int, list[int]] = {}
        for f in self.facts("step"):
            assert found.setdefault(f["step"], f["members"]) == f["members"], f
            assert f["participants"] == len(f["members"])
        return found

    def require_equal(self, total: int, groups: list[int]) -> None:
        """Compare all that was logged with eager steps, and the digests of groups with each other."""
        steps, state = expected(self.members(), self.count)
        assert len(steps) == total
        for f in self.facts("step"):
            losses, norm, lr = steps[f["step"]]
            assert abs(f["loss"] - losses[f["group"]]) < 1e-12, f
            assert abs(f["norm"] - norm) < 1e-12, (f, norm)
            assert f["lr"] == lr
        for f in self.facts("state"):
            assert f["at"] == total
            for name, value in f["state"].items():
                if name != "calls":
                    torch.testing.assert_close(
                        torch.tensor(value, dtype=torch.float64), state[name], rtol=0, atol=1e-12
                    )
                else:
                    assert value == [total, total], "a discarded step has left something in a buffer"
        assert {f["group"] for f in self.facts("state")} == set(groups)

    def said(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-6000:]}" for p in sorted(self.folder.glob("said-*")))

    def close(self) -> None:
        for process in [p for processes in self.running.values() for p in processes]:
            process.kill()
            process.wait()
        self.lighthouse.shutdown()
