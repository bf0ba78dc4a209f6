"""`autopar run`: real processes under torch's agent, what it prints, and what it does when one fails or is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar import cli
from autopar.runtime.launch.agent import failure
from autopar.runtime.launch.environment import require_world
from autopar.runtime.launch.mesh import axes_of_run

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.last = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, 2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.last(x))))

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.blocks, self.head = nn.Sequential(Block(16, 2)), nn.Linear(16, 32)

    def forward(self, ids, targets):
        x = self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def train(model, after=lambda step: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step)
    return losses
"""

TRAIN = (
    MODEL
    + """
import json, sys
import autopar

def after(step):
    if len(sys.argv) > 2 and step == 2 and autopar.mesh().get_rank() == 1:
        raise RuntimeError("no more")

torch.set_num_threads(1)
torch.manual_seed(0)
mesh = autopar.mesh()
model = autopar.parallelize(Gpt().double(), mesh, search=autopar.Search(recipe="fsdp"), timeout=60)
losses = train(model, after)
state = {name: value.tolist() for name, value in model.full_state_dict().items()}
if mesh.get_rank() == 0:
    found = {"losses": losses, "state": state, "axes": dict(zip(mesh.mesh_dim_names, mesh.shape))}
    json.dump(found, open(sys.argv[1], "w"))
"""
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(folder: Path, script: str, *words: str, options: tuple[str, ...] = ("--nproc", "2")) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "autopar.cli", "run", *options, "script.py", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment(), text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=240)
    finally:
        process.kill()


@pytest.mark.slow
def test_a_small_gpt_trains_as_in_eager_mode(tmp_path: Path) -> None:
    _, said = finish(process := start(tmp_path, TRAIN, "two.json", options=("--nproc", "2", "--axes", "data=2")))
    assert process.returncode == 0, said
    found, names = json.loads((tmp_path / "two.json").read_text()), {}  # type: ignore[var-annotated]
    exec(MODEL, names)
    torch.manual_seed(0)
    plain = names["Gpt"]().double()
    assert found["losses"] == pytest.approx(names["train"](plain), abs=1e-11)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.tensor(found["state"][name], dtype=torch.float64), value, rtol=0, atol=1e-9)
    assert found["axes"] == {"data": 2}
    # Rank 0 alone speaks, and says each phase and the plan once.
    lines = said.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("autopar: ")] == [
        "capture", "search", "rewrite", "first",
    ], said  # fmt: skip
    assert said.count("lower bound") == 1 and "HiGHS" not in said


@pytest.mark.slow
def test_the_rank_that_fails_is_named_once(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            raise RuntimeError("this rank " + sys.argv[2])
        time.sleep(300)
    """
    begun = time.monotonic()
    _, said = finish(process := start(tmp_path, script, "--name", "fails"))
    assert process.returncode == 1 and time.monotonic() - begun < 200
    assert said.count("RuntimeError: this rank fails") == 1 and said.count("Traceback") == 1
    assert 'script.py", line 4' in said and "runpy" not in said
    assert said.splitlines()[-1] == "error: rank 1 failed"


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    script = """
        import os, time
        open(os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(300)
    """
    process = start(tmp_path, script)
    deadline = time.monotonic() + 200
    files = [tmp_path / rank for rank in "01"]
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(f.read_text()) for f in files]
    process.send_signal(signal.SIGINT)
    _, said = finish(process)
    assert process.returncode == 130 and said.splitlines()[-1] == "stopped"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.deep
def test_a_rank_that_others_wait_for(tmp_path: Path) -> None:
    """What they say, that they were left alone, is not the cause."""
    _, said = finish(process := start(tmp_path, TRAIN, "x.json", "fail"))
    assert process.returncode == 1
    assert said.count("RuntimeError: no more") == 1 and "error: rank 1 failed" in said and "RankError" not in said


@pytest.mark.deep
def test_restarts_meet_anew(tmp_path: Path) -> None:
    script = """
        import os, torch.distributed as dist, autopar
        mesh = autopar.mesh()
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            raise SystemExit("once")
        dist.barrier()
        print("done", dist.get_rank())
    """
    out, said = finish(process := start(tmp_path, script, options=("--nproc", "2", "--restarts", "1")))
    assert process.returncode == 0, said
    assert out.count("done") == 2 and "attempt 1 of 2" in said


def test_the_cause_is_not_what_follows_from_it(tmp_path: Path) -> None:
    def write(rank: int, when: float, kind: str, attempt: int = 0) -> None:
        facts = {
            "rank": rank,
            "attempt": attempt,
            "time": when,
            "kind": kind,
            "message": "",
            "text": f"{kind} of {rank}",
        }
        (tmp_path / f"{attempt}-{rank}.json").write_text(json.dumps(facts))

    def ended(code: int, when: float = 0.0) -> Any:
        return SimpleNamespace(exitcode=code, timestamp=when)

    assert failure({1: ended(-9), 0: ended(7, 1.0)}, tmp_path) == (
        137, "rank 1 was ended by SIGKILL; the system does that where memory is short\n")  # fmt: skip
    write(0, 1.0, "RankError")
    assert failure({0: ended(1), 1: ended(-15)}, tmp_path)[1] == "RankError of 0\nerror: rank 0 failed\n"
    # A rank that was killed has written nothing, and left the other alone.
    assert failure({0: ended(1), 1: ended(-11)}, tmp_path)[1] == "rank 1 was ended by SIGSEGV\n"
    write(1, 2.0, "ValueError")
    code, said = failure({0: ended(1), 1: ended(3)}, tmp_path)
    assert (code, said.splitlines()) == (3, ["ValueError of 1", "error: rank 1 failed; after it ranks 0 failed"])
    write(0, 3.0, "KeyError", attempt=1)
    assert failure({0: ended(1)}, tmp_path)[1].splitlines()[0] == "KeyError of 0"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nproc 2 none.py", "no file none.py"),
        ("--nproc 2 --axes a=4 x.py", "a=4 is a mesh of 4 = 4 devices, and the world has 2 processes"),
        ("--nproc 4 --nnodes 2 --rendezvous h:1 --axes a=2,b=2 x.py", "2 x 2 = 4 devices, and the world has 8"),
        ("--nnodes 2 x.py", "--nnodes 2 needs --rendezvous"), ("--rendezvous h:1 x.py", "--nnodes 1 takes no"),
        ("--elastic 2 x.py", "--elastic '2' is not MIN:MAX"), ("--elastic 4:2 --rendezvous h:1 x.py", "write 2:4"),
        ("--elastic 0:2 x.py", "is not MIN:MAX"), ("--elastic 1:2 x.py", "--elastic 1:2 needs --rendezvous"),
        ("--elastic 1:2 --nnodes 2 --rendezvous h:1 x.py", "both say how many nodes there are"),
        ("--elastic 2:4 --nproc 1 --rendezvous h:1 --axes a=2,b=2 x.py", "no open size, and there are 2 to 4"),
        ("--elastic 2:3 --nproc 1 --rendezvous h:1 --axes a=*,b=4 x.py", "3 processes do not divide by the 4 devices"),
        ("--nproc 4 --axes a=*,b=* x.py", "leaves the sizes of a and b open"),
        ("--timeout nan x.py", "--timeout nan"), ("--axes a x.py", "is not NAME=SIZE"), ("--nproc 0 x.py", "--nproc"),
    ],
)  # fmt: skip
def test_wrong_options(words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    found = CliRunner().invoke(cli.app, ["run", *words.split()])
    assert found.exit_code == 2 and says in found.output


@pytest.mark.parametrize("at", ["host", "host:0", "host:x", ":1", "host:70000"])
def test_wrong_rendezvous(at: str) -> None:
    found = CliRunner().invoke(cli.app, ["rendezvous", at])
    assert found.exit_code == 2 and "is not HOST:PORT" in found.output


def test_fewer_nodes_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_NODES", "2:4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(autopar.RankError, match="4 processes are left of a run that needs 8"):
        autopar.mesh()


def test_worlds() -> None:
    require_world({"a": 2, "b": 3}, 6, "axes")
    with pytest.raises(ValueError, match=r"axes a=2,b=3 is a mesh of 2 x 3 = 6 devices, and the world has 4 processes"):
        require_world({"a": 2, "b": 3}, 4, "axes")


def test_a_script_alone_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "AUTOPAR_AXES"):
        monkeypatch.delenv(name, raising=False)
    assert autopar.mesh() is None and autopar.mesh({"a": 1}) is None
    with pytest.raises(ValueError, match=r"axes a=2 is a mesh of 2 = 2 devices, and the world has 1 processes"):
        autopar.mesh({"a": 2})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("AUTOPAR_AXES", "a=3")
    with pytest.raises(ValueError, match=r"AUTOPAR_AXES \(of autopar run --axes\) a=3 .* world has 4"):
        autopar.mesh()


def test_axes_follow_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_AXES", raising=False)
    for local, world, axes in (
        (8, 32, {"node": 4, "gpu": 8}),
        (4, 4, {"gpu": 4}),
        (1, 4, {"gpu": 4}),
        (3, 8, {"gpu": 8}),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        assert axes_of_run(world, "cuda") == axes


@pytest.mark.parametrize(("rank", "quiet", "heard"), [("1", "1", False), ("0", "1", True), ("1", "0", True)])
def test_only_the_first_process_prints(rank: str, quiet: str, heard: bool, tmp_path: Path) -> None:
    lines = ("import os, sys", 'print("said")', 'print("warned", file=sys.stderr)', 'os.write(1, b"written")')
    script = "\n".join((*lines, 'raise ValueError("no")\n'))
    (tmp_path / "x.py").write_text(script)
    words = [sys.executable, "-m", "autopar.runtime.launch.script", "x.py"]
    own = {"RANK": rank, "LOCAL_RANK": rank, "AUTOPAR_QUIET": quiet, "AUTOPAR_FAILURES": str(tmp_path)}
    done = subprocess.run(
        words, cwd=tmp_path, env={**environment(), **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    found = ("said" in done.stdout, "written" in done.stdout, "warned" in done.stderr)
    assert found == (heard,) * 3 and bool(done.stdout) == heard
    (failed,) = tmp_path.glob("*.json")
    assert "ValueError: no" in json.loads(failed.read_text())["text"]  # which the launcher prints
