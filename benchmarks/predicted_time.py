"""How well are steps predicted on this machine, and does the planner pick the fastest plan?

Four Gloo processes on a mesh of 2 x 2. The machine is calibrated as it is, three models are planned by the search and
by every recipe, each plan is run (forward and backward, plans taking turns), and predicted times are set beside
measured ones. With ``--slow`` two processes each live in a network namespace of their own, and the link between them
carries so many Mbit/s (root and iproute2 needed; skipped without).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.turns import Step, agreed_losses, stepper, take_turns  # noqa: E402

AXES = {"node": 2, "gpu": 2}
WORLD = 4
SEARCHED = "search"
PLANS = (SEARCHED, "ddp", "fsdp", "hsdp", "megatron", "megatron-sequence")
SPACES = (f"autopar{os.getpid()}a", f"autopar{os.getpid()}b")  # others may measure at the same time
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def main() -> None:
    """Calibrate, plan, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", type=float, metavar="MBIT", help="Mbit/s of a link between two pairs of processes")
    measure(parser, "slow", __file__, plan_all, work, table)


def measure(
    parser: argparse.ArgumentParser,
    rate: str,
    file: str,
    plan_all: Callable[[Path, Path], None],
    work: Callable[[Path, int], None],
    table: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Calibrate, plan, run the plans in four processes, and report.

    Args:
        parser: with the benchmark's own arguments.
        rate: name of the argument for the Mbit/s of a link between two pairs of processes, None for no such link.
        file: the benchmark, which each of the processes runs again.
        plan_all: writes plans into a folder, for the machine of a file.
        work: what each process does in that folder, for so many rounds; the first writes ``rows.json``.
        table: of these rows.
    """
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="MS", help="of the link between pairs, there and back"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE.toml", help="calibrated before; default: calibrate")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for each part")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)  # one of the processes
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    if options.work:
        work(Path(options.work), options.rounds)
        return
    megabits = getattr(options, rate)
    if megabits and (os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc"))):
        print("skipped: a slow link needs root and iproute2 (ip, tc)")
        return
    with tempfile.TemporaryDirectory() as folder, shaped(megabits, options.delay) as prefixes:
        own = Path(folder)
        cluster = options.cluster or own / "machine.toml"
        if options.cluster is None:
            print("calibrating", file=sys.stderr)
            run(["-m", "autopar.cli", "calibrate", "--save", str(cluster), "--threads", "1"], prefixes, options.limit)
        plan_all(own, cluster)
        print("measuring", file=sys.stderr)
        run([file, "--work", folder, "--rounds", str(options.rounds)], prefixes, options.limit)
        rows = json.loads((own / "rows.json").read_text())
        print(json.dumps(rows, indent=1) if options.json else f"{table(rows)}\n\n{cluster.read_text()}")


@contextlib.contextmanager
def shaped(megabits: float | None, delay: float = 0.0) -> Iterator[list[list[str]]]:
    """What each process's command begins with; with ``megabits``, two namespaces and a link that carries so much.

    Args:
        megabits: per second, in each direction; None for no such link.
        delay: milliseconds that a message and its answer take longer.
    """
    if megabits is None:
        yield [[]] * WORLD
        return

    def ip(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    inside = [["ip", "netns", "exec", name] for name in SPACES]
    remove = [["ip", "netns", "del", name] for name in SPACES]
    relay: subprocess.Popen[str] | None = None
    try:
        for name in SPACES:
            ip("ip", "netns", "add", name)
        if delay:
            # Half in each direction.
            command = [sys.executable, str(ROOT / "benchmarks" / "delayed_link.py"), *SPACES, str(delay / 2e3)]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert relay.stdout is not None
            if relay.stdout.readline() != "ready\n":
                raise RuntimeError("no delayed link: is there /dev/net/tun?")
        else:
            near, far = (["netns", name] for name in SPACES)
            ip("ip", "link", "add", "veth0", *near, "type", "veth", "peer", "name", "veth1", *far)
        for i, (within, address) in enumerate(zip(inside, ADDRESSES, strict=True)):
            ip(*within, "ip", "address", "add", f"{address}/24", "dev", f"veth{i}")
            largest = ["mtu", "65500"] if delay else []
            ip(*within, "ip", "link", "set", f"veth{i}", *largest, "up")
            ip(*within, "ip", "link", "set", "lo", "up")
            rate = ["rate", f"{megabits:g}mbit", "burst", "128kb" if delay else "64kb", "latency", "200ms"]
            ip(*within, "tc", "qdisc", "add", "dev", f"veth{i}", "root", "tbf", *rate)
        yield [inside[0], inside[0], inside[1], inside[1]]
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for command in remove:
            subprocess.run(command, check=False, capture_output=True)


def run(arguments: Sequence[str], prefixes: Sequence[Sequence[str]], limit: float) -> None:
    """Start the processes as torchrun does, and wait for all of them.

    Raises:
        RuntimeError: one failed, or they are not done in time; says what it printed.
    """
    apart = bool(prefixes[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = WORLD // 2 if apart else WORLD
    processes, files = [], []
    for rank in range(WORLD):
        place = {"RANK": rank, "LOCAL_RANK": rank % members, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": members}
        address = {"MASTER_ADDR": ADDRESSES[0] if apart else "127.0.0.1", "MASTER_PORT": port}
        interface = {"GLOO_SOCKET_IFNAME": f"veth{rank // members}" if apart else "lo"}
        own = {key: str(value) for key, value in (place | address | interface).items()}
        files.append(tempfile.TemporaryFile("w+"))
        command = [*prefixes[rank], sys.executable, *arguments]
        environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        processes.append(subprocess.Popen(command, env=environment, stdout=files[-1], stderr=subprocess.STDOUT))
    deadline = time.monotonic() + limit
    try:
        while any(p.poll() is None for p in processes):
            failed = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if failed is not None or time.monotonic() > deadline:
                why = f"process {failed} failed" if failed is not None else f"not done after {limit:.0f} s"
                time.sleep(2)  # the others say why, unless they only lost this one
                said = []
                for rank, file in enumerate(files):
                    file.seek(0)
                    said.append(f"process {rank}: {file.read()[-1500:]}")
                raise RuntimeError(f"{' '.join(arguments)}: {why}\n" + "\n".join(said))
            time.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def plan_all(folder: Path, cluster: Path) -> None:
    """Every model under the search and every recipe; what does not apply is left out."""
    import torch

    from autopar.compiler import program_of, solve
    from autopar.costs.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.search.options import Search

    torch.set_num_threads(1)
    machine = Cluster.load(cluster)
    found = []
    for name, make in MODELS.items():
        model, batch = make()
        program = program_of(model, batch)
        for kind in PLANS:
            print(f"planning {name}: {kind}", file=sys.stderr)
            search = Search(recipe=None if kind == SEARCHED else kind)
            try:
                plan = solve(program, AXES, machine, search=search)
            except (AutoparError, ValueError) as e:
                print(f"  {e}", file=sys.stderr)
                continue
            plan.save(folder / f"{name} {kind}.json")
            compute = plan.predicted.compute_seconds
            found.append({"model": name, "plan": kind, "predicted": plan.predicted.step_seconds, "compute": compute})
    (folder / "plans.json").write_text(json.dumps(found))


def work(folder: Path, rounds: int) -> None:
    """One process: each model's plans take turns."""
    with member(folder) as (mesh, rows):
        for name, make in MODELS.items():
            steps = {}
            for row in (r for r in rows if r["model"] == name):
                steps[row["plan"]] = step_under(make, mesh, folder / f"{name} {row['plan']}.json")
            losses, times = agreed_losses(steps), take_turns(steps, rounds)
            for row in (r for r in rows if r["model"] == name):
                row |= {"measured": statistics.median(times[row["plan"]]), "loss": losses[row["plan"]]}


def step_under(make: Callable[[], tuple[Any, dict[str, Any]]], mesh: Any, plan: Path) -> Step:
    """A step of a model under a plan."""
    from autopar.parallelize import parallelize

    model, batch = make()
    return stepper(parallelize(model, mesh, batch, plan=str(plan)), batch)


@contextlib.contextmanager
def member(folder: Path) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The mesh of the processes and the rows of ``plans.json``, which the first writes as ``rows.json`` in the end."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rows = json.loads((folder / "plans.json").read_text())
    yield init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES)), rows
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """Each pair; errors, orders, and how much longer than the best the search's plan takes."""
    from scipy.stats import spearmanr

    lines = [f"{'model':<8} {'plan':<18} {'predicted ms':>13} {'measured ms':>12} {'off by':>8}"]
    for r in rows:
        off = r["predicted"] / r["measured"] - 1
        figures = f"{1e3 * r['predicted']:13.1f} {1e3 * r['measured']:12.1f} {off:+8.1%}"
        lines.append(f"{r['model']:<8} {r['plan']:<18} {figures}")
    lines.append("")
    for name in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == name]
        order = spearmanr([r["predicted"] for r in own], [r["measured"] for r in own]).statistic
        picked = next(r["measured"] for r in own if r["plan"] == SEARCHED)
        best = min(own, key=lambda r: float(r["measured"]))
        recipes = min(r["measured"] for r in own if r["plan"] != SEARCHED)
        lines.append(
            f"{name:<8} Spearman {order:.2f}; the search's plan over the fastest recipe {picked / recipes:.3f}; "
            f"fastest: {best['plan']}"
        )
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in rows]
    order = spearmanr([r["predicted"] for r in rows], [r["measured"] for r in rows]).statistic
    lines.append(f"{len(rows)} pairs: mean error {statistics.mean(errors):.1%}, Spearman {order:.3f}")
    return "\n".join(lines)


def llama() -> tuple[Any, dict[str, Any]]:
    """A Llama of 4 layers over bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (16, 128))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def gpt2() -> tuple[Any, dict[str, Any]]:
    """A GPT-2 of 2 layers with many words, whose table is most of it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192, n_embd=256, n_layer=2, n_head=8, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 8192, (8, 64))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def mlp() -> tuple[Any, dict[str, Any]]:
    """Wide layers, a small batch: parameters are what is expensive to move."""
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    torch.manual_seed(0)
    return Wide(), {"x": torch.randn(64, 1024)}


MODELS = {"llama": llama, "gpt2": gpt2, "mlp": mlp}

if __name__ == "__main__":
    main()
