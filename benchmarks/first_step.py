"""Seconds until a script of examples/scripts has made its first step, and how many of its lines changed for that.

Each script runs on one device as it is, on several Gloo processes with autopar, with and without a cached plan, and on
as many by the lines in `OTHERS`: with FSDP2, and with accelerate, which has FSDP on GPUs only and takes
`DistributedDataParallel` here. Wall seconds are from the start of the command to the
line that the script prints about its first step, and CPU seconds those that all of its processes have used by then.

    python benchmarks/first_step.py --processes 4
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "examples" / "scripts"
FIRST = re.compile(r"^(iter [01]:|0 \||step: 1 )")
"""What a script prints when it has made its first step."""

DATA = str(ROOT / "LICENSE")
WORDS = {
    "nanogpt": [f"--dataset={DATA}", "--max_iters=1", "--out_dir={}"],
    "llama2c": ["--data", DATA, "--max-iters", "1", "--out-dir={}"],
    "mingpt": ["--max-iters", "1", "--work-dir={}"],
    "titan": ["--data", DATA, "--steps", "1", "--checkpoint-folder={}"],
}

IMPORT = ("import torch\nfrom model", "import torch\nfrom accelerate import Accelerator\nfrom model")
SETUP, SEED = 'ddp = int(os.environ.get("RANK", -1)) != -1\n', "torch.manual_seed(3407)\n"
MADE = "        self.optimizer = model.configure_optimizers(config)\n"
PREPARED = "        model, self.optimizer = config.accelerator.prepare(model, model.configure_optimizers(config))\n"
CLIP, SAVE = "torch.nn.utils.clip_grad_norm_", 'torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))'
BEFORE_LAST = "micro_step == gradient_accumulation_steps - 1"
FULL = "StateDictOptions(full_state_dict=True, cpu_offload=True)"
WRAPPED = '    model = DDP(model, device_ids=[device] if device_type == "cuda" else None)\n'
SHARDED = "for layer in [*model.transformer.h, model]:\n    fully_shard(layer)\n"
WHOLE = f"dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer, options={FULL})))"
FSDP2, ACCELERATE = "FSDP2", "accelerate, DDP"
OTHERS = {
    ("nanogpt", FSDP2): [
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n",
         "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict\n"
         "from torch.distributed.fsdp import fully_shard\n"),
        ("model.to(device)\n", f"model.to(device)\n{SHARDED}"),
        (f"if ddp:\n{WRAPPED}", ""),
        (f"model.require_backward_grad_sync = {BEFORE_LAST}", f"model.set_requires_gradient_sync({BEFORE_LAST})"),
        ("raw_model = model.module if ddp else model", "raw_model = model"),
        ("    if iter_num % eval_interval == 0 and master_process:", "    if iter_num % eval_interval == 0:"),
        ('"model": raw_model.state_dict(),', f"**{WHOLE},"),
        ('                    "optimizer": optimizer.state_dict(),\n', ""),
        (SAVE, f"_ = master_process and {SAVE}"),
    ],
    ("nanogpt", ACCELERATE): [
        IMPORT,
        (SETUP, "ddp = False; accelerator = Accelerator(cpu=True)\n"),
        ("    seed_offset = 0\n", "    seed_offset = accelerator.process_index\n"),
        ("    ddp_world_size = 1\n", "    ddp_world_size = 1\n    batch_size //= accelerator.num_processes\n"),
        ("if compile:\n", "model, optimizer = accelerator.prepare(model, optimizer)\nif compile:\n"),
        ("scaler.scale(loss).backward()", "accelerator.backward(loss)"),
        (CLIP, "accelerator.clip_grad_norm_"),
        (SAVE, "accelerator.save_state(out_dir)"),
    ],
    ("mingpt", ACCELERATE): [
        IMPORT,
        (SEED, f"{SEED}accelerator = Accelerator(cpu=True)\n"),
        ("batch_size=16", "batch_size=16 // accelerator.num_processes"),
        ("seed=3407", "seed=3407 + accelerator.process_index"),
        ("torch.save(checkpoint, ckpt_path)", "accelerator.save_state(args.work_dir)"),
        (MADE, PREPARED),
        ("grad_norm_clip=1.0", "accelerator=accelerator, grad_norm_clip=1.0"),
        ("self.loss.backward()", "config.accelerator.backward(self.loss)"),
        (CLIP, "config.accelerator.clip_grad_norm_"),
    ],
}  # fmt: skip
"""For a style and another way: what it needs to train and save, a text of a file and what replaces it."""


def copied(style: str, way: str, folder: Path) -> Path:
    """The script with the lines of another way in place of the plain ones."""
    shutil.copytree(SCRIPTS / style, folder)
    for before, after in OTHERS[style, way]:
        changed = [p for p in folder.glob("*.py") if p.name != "train_autopar.py" and before in p.read_text()]
        if len(changed) != 1:
            raise RuntimeError(f"{style}: {before!r} is in {len(changed)} files; OTHERS is for other scripts")
        changed[0].write_text(changed[0].read_text().replace(before, after, 1))
    return folder


def changed_lines(style: str, folder: Path) -> int:
    """Lines of a script that are others in a folder; a line and its replacement count once, empty ones do not."""
    total = 0
    for path in (SCRIPTS / style).glob("*.py"):
        name = "train_autopar.py" if folder == SCRIPTS / style and path.name == "train.py" else path.name
        if path.name == "train_autopar.py":
            continue
        sides = [[line for line in p.read_text().splitlines() if line.strip()] for p in (path, folder / name)]
        parts = difflib.SequenceMatcher(None, *sides, autojunk=False).get_opcodes()
        total += sum(max(b - a, d - c) for kind, a, b, c, d in parts if kind != "equal")
    return total


def first_step(command: list[str], folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds until the line of the first step.

    Raises:
        RuntimeError: the command ended without it.
    """
    begun = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if FIRST.match(line):
            found = time.monotonic() - begun, used_by(process.pid)
            process.stdout.read()  # to its end
            process.wait()
            return found
    raise RuntimeError(f"{' '.join(command)} made no step:\n{''.join(said[-30:])}")


def used_by(pid: int) -> float:
    """CPU seconds of a process, of those that it has started, and of those that have ended."""
    ticks, total = os.sysconf("SC_CLK_TCK"), 0.0
    for each in [pid, *_below(pid)]:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / ticks
    return total


def _below(pid: int) -> list[int]:
    try:
        own = [int(n) for t in Path(f"/proc/{pid}/task").iterdir() for n in (t / "children").read_text().split()]
    except OSError:
        return []
    return [n for child in own for n in (child, *_below(child))]


def measured(style: str, processes: int) -> list[dict[str, Any]]:
    """A row for each way to run a script."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, plans = Path(name), {"AUTOPAR_CACHE": f"{name}/plans"}
        words = [w.format(folder / "out") for w in WORDS[style]]
        run = [
            sys.executable,
            "-m",
            "autopar.cli",
            "run",
            "--quiet",
            "--nproc",
            str(processes),
            "train_autopar.py",
            *words,
        ]
        ways = [
            ("one device", [sys.executable, "train.py", *words], SCRIPTS / style, {}),
            ("autopar", run, SCRIPTS / style, plans),
            ("autopar, plan cached", run, SCRIPTS / style, plans),
        ]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        more = [f"--gradient_accumulation_steps={processes}"]  # of which FSDP2's script gives each process its part
        for way in (FSDP2, ACCELERATE):
            if (style, way) in OTHERS:
                where = copied(style, way, folder / way)
                given = [*words, *(more if way == FSDP2 else [])]
                ways.append((way, [sys.executable, *launcher, "train.py", *given], where, {}))
        for way, command, where, variables in ways:
            wall, used = first_step(command, where, variables)
            lines = 0 if way == "one device" else changed_lines(style, where)
            rows.append({"script": style, "way": way, "wall": wall, "cpu": used, "lines": lines})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """A line of JSON for each script and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--scripts", default=",".join(WORDS))
    options = parser.parse_args()
    for style in options.scripts.split(","):
        measured(style, options.processes)


if __name__ == "__main__":
    main()
