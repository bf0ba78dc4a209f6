"""What is left when a run ends, by itself, an error, Ctrl-C or a kill: nothing. And what grows while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]

MARK = "AUTOPAR_TEST_RUN"
"""In the environment of all processes of a run, those that they start included."""

RUN = """
import gc, json, os, signal, sys, threading, time
import torch, psutil
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch import nn
import autopar

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in what it runs in the background
how, steps, ranks = sys.argv[1], int(sys.argv[2]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
if ranks > 1:
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",)) if ranks > 1 else None
batch = (torch.randn(16, 32),)
module = autopar.parallelize(model, mesh, batch, cluster="cpu", loss_fn=lambda o, _: o.square().mean(), timeout=60)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
own, sizes = psutil.Process(), {}
for step in range(steps):
    loss = module(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        print("ready", flush=True)
        if how == "error" and os.environ["RANK"] == str(ranks - 1):
            raise RuntimeError("this rank has had enough")
    if how in ("wait", "die") and step > 2:
        time.sleep(0.2)  # far longer than a step, so that Ctrl-C finds it here
    if step % 100 == 99:
        gc.collect()
        sizes[step + 1] = [own.memory_info().rss, len(gc.get_objects()), threading.active_count(), own.num_fds()]
if ranks > 1:
    dist.destroy_process_group()
left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
print(json.dumps({"threads": left, "sizes": sizes, "loss": loss.item().hex()}), flush=True)
"""


class Ended(NamedTuple):
    """A rank that has ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


def living(mark: str) -> list[int]:
    """Processes of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes() and not zombie:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def shared_memory(pids: set[int], before: set[str]) -> list[str]:
    """Files in /dev/shm that are new and bear the number of one of these processes."""
    new = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in new if pids & set(map(int, re.findall(r"\d+", name))))


def run(tmp_path: Path, how: str, ranks: int, steps: int = 20, seed: str = "0") -> list[Ended]:
    """Start ranks, end them as told, and wait until they have ended; nothing is left of them then."""
    (tmp_path / "run.py").write_text(RUN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark, before = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    common = {
        **os.environ, MARK: mark, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "AUTOPAR_CACHE": "0",
    }  # fmt: skip
    # Files, and no pipes: what is read of these with the first line would be missing in the rest.
    paths = [(tmp_path / f"out {rank}", tmp_path / f"err {rank}") for rank in range(ranks)]
    processes = []
    for rank, (out, err) in enumerate(paths):
        with out.open("wb") as to_out, err.open("wb") as to_err:
            processes.append(subprocess.Popen(
                [sys.executable, str(tmp_path / "run.py"), how, str(steps)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=to_out, stderr=to_err,
            ))  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        for process, (out, _) in zip(processes, paths, strict=True):
            while not out.read_bytes() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        pids = {*living(mark), *(p.pid for p in processes)}
        if how == "wait":
            for process in processes:
                process.send_signal(signal.SIGINT)
        if how == "die":
            processes[-1].kill()
        ended = []
        for process, (out, err) in zip(processes, paths, strict=True):
            process.wait(timeout=240)
            ended.append(Ended(process.returncode, out.read_text(), err.read_text()))
        deadline = time.monotonic() + 5
        while living(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert living(mark) == []
        assert shared_memory(pids, before) == []
        return ended
    finally:
        for pid in living(mark):
            os.kill(pid, signal.SIGKILL)


NOISE = ("Traceback", "Exception ignored", "leaked", "resource_tracker", "terminate called", "destroy_process_group")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_run_that_ends_is_quiet_and_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    for rank in run(tmp_path, "end", ranks):
        assert rank.code == 0, rank.err
        assert not [word for word in NOISE if word in rank.err], rank.err
        assert json.loads(rank.out.splitlines()[-1])["threads"] == []


@pytest.mark.deep
def test_an_error_of_one_rank_ends_both(tmp_path: Path) -> None:
    healthy, failed = run(tmp_path, "error", 2, steps=2000)
    assert "this rank has had enough" in failed.err
    assert failed.code == 1
    assert healthy.code == 1
    assert "RankError" in healthy.err


@pytest.mark.deep
def test_a_killed_rank_ends_the_other(tmp_path: Path) -> None:
    healthy, killed = run(tmp_path, "die", 2, steps=100_000)
    assert killed.code == -signal.SIGKILL
    assert healthy.code == 1
    assert "RankError" in healthy.err


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_all(tmp_path: Path, ranks: int) -> None:
    ended = run(tmp_path, "wait", ranks, steps=100_000)
    assert any("KeyboardInterrupt" in rank.err for rank in ended)
    for rank in ended:
        assert rank.code in (-signal.SIGINT, 1, 130)
        assert "Exception ignored" not in rank.err, rank.err


@pytest.mark.deep
def test_runs_are_the_same_under_any_hash_seed(tmp_path: Path) -> None:
    losses = set()
    for seed in ("1", "2"):
        (rank,) = run(tmp_path, "end", 1, seed=seed)
        assert rank.code == 0, rank
        losses.add(json.loads(rank.out.splitlines()[-1])["loss"])
    assert len(losses) == 1


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thousand_steps_take_no_more_memory(tmp_path: Path, ranks: int) -> None:
    for rank in run(tmp_path, "end", ranks, steps=1000):
        sizes = {int(step): values for step, values in json.loads(rank.out.splitlines()[-1])["sizes"].items()}
        print(f"{ranks} ranks: [bytes, objects, threads, files] {sizes}")
        (size, objects, *others), (after, objects_after, *others_after) = sizes[200], sizes[1000]
        assert after - size < 4 * 2**20
        assert objects_after - objects < 1000
        assert others == others_after
