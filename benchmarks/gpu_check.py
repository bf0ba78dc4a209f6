"""Does autopar do on this GPU what it does on a CPU, and are its predictions right there?

One command, one GPU, under 25 minutes. Each part runs in a process of its own, under a limit, and is written to the
file of ``--out`` when it ends: run the command again, and parts that are done are skipped. With ``--jobs`` parts that
time nothing run beside each other; the others follow, each alone. On a CPU the same parts run on small models, and what
needs a GPU says so. Parts are in `benchmarks/gpu_parts`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.gpu_parts import attention, costs, families, ranks, training  # noqa: E402
from benchmarks.gpu_parts.setting import NEEDS_GPU, Row, Setting  # noqa: E402

PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "attention": attention.attention,
    "equality": training.equality,
    "families": families.families,
    "cpu-plan": training.cpu_plan,
    "dropout": attention.dropout,
    "cross-entropy": costs.cross_entropy,
    "late-waits": ranks.late_waits,
    "emulated": ranks.emulated,
    "peak": costs.peak,
    "calibrate": costs.calibration,
    "operators": costs.operators,
    "steps": costs.steps,
    "training": training.training,
    "gloo": ranks.gloo,
}
TIMED = ("cross-entropy", "calibrate", "operators", "steps")
"""Parts that have the device for themselves."""
LIMIT = 450.0
"""Seconds of a part."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done, and print a table; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="only this one; may be given several times"
    )
    parser.add_argument("--out", type=Path, help="JSON file that keeps what is done")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of a part (default: {LIMIT:.0f})")
    parser.add_argument("--jobs", type=int, default=1, help="parts beside each other that time nothing (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(torch.device(name, 0) if name == "cuda" else torch.device(name), name == "cpu")
    found = resumed(options.out, machine(setting))
    left = [p for p in options.part or PARTS if found["parts"].get(p, {}).get("status") != "done"]
    written = threading.Lock()

    def one(part: str) -> None:
        print(f"{part} ...", file=sys.stderr, flush=True)
        done = run_part(part, setting, options.limit)
        with written:
            found["parts"][part] = done
            if options.out:
                options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, [p for p in left if p not in TIMED]))
    for part in left:
        if part in TIMED:
            one(part)
    print(json.dumps(found, indent=1) if options.json else table(found))
    return int(wrong(found["parts"].values()))


def machine(setting: Setting) -> dict[str, str]:
    """What figures hold for."""
    name = torch.cuda.get_device_name(setting.device) if setting.cuda else "cpu"
    return {"device": name, "torch": torch.__version__}


def resumed(file: Path | None, own: dict[str, str]) -> dict[str, Any]:
    """What an earlier run has left in the file; nothing if there is none.

    Raises:
        SystemExit: it is of another device or another torch.
    """
    if file is None or not file.is_file():
        return {**own, "parts": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    other = {key: found.get(key) for key in own}
    if other != own:
        raise SystemExit(f"{file} is of {other}, and this is {own}: give another --out")
    return found


def run_part(part: str, setting: Setting, limit: float) -> dict[str, Any]:
    """The rows of a part that runs in a process of its own, or why there are none."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # No daemon: a part may start processes.
    process = context.Process(target=_inside, args=(part, setting, sender))
    process.start()
    sender.close()  # the child has the only end that is open: when it dies, there is nothing to wait for
    found: dict[str, Any] = {"status": "timed out", "error": f"not done after {limit:.0f} s"}
    try:
        if receiver.poll(limit):
            found = receiver.recv()
    except EOFError:
        process.join(10)
        found = {"status": "failed", "error": f"the process ended with {process.exitcode}"}
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join(10)
    return {**found, "seconds": time.monotonic() - start}


def _inside(part: str, setting: Setting, sender: Connection) -> None:
    torch.set_num_threads(1)
    if setting.cuda:
        torch.cuda.set_device(setting.device)
    try:
        found: dict[str, Any] = {"status": "done", "rows": PARTS[part](setting)}
    except Exception:  # another part may work
        found = {"status": "failed", "error": traceback.format_exc()}
    sender.send(found)


def wrong(parts: Iterable[dict[str, Any]]) -> bool:
    """Whether a part did not end, or a row of it is not as it should be."""
    return any(p["status"] != "done" or any(r["passed"] is False for r in p["rows"]) for p in parts)


def table(found: dict[str, Any]) -> str:
    """All rows, and the seconds of each part."""
    lines = [f"{found['device']}, torch {found['torch']}", ""]
    order = {name: i for i, name in enumerate(PARTS)}
    for name, part in sorted(found["parts"].items(), key=lambda item: order.get(item[0], len(order))):
        lines.append(f"{name}: {part['status']}, {part['seconds']:.0f} s")
        if "error" in part:
            lines += [f"    {line}" for line in part["error"].rstrip().splitlines()[-3:]]
        lines += [f"    {_row(row)}" for row in part.get("rows", ())]
    return "\n".join(lines)


def _row(row: Row) -> str:
    states = {True: "right", False: "WRONG", None: "skipped" if row.get("note") == NEEDS_GPU else ""}
    texts = [f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}"
             for key, v in row.items() if key not in ("check", "passed", "note")]  # fmt: skip
    return f"{row['check']:<44} {states[row['passed']]:<8} {row.get('note', '')}{', '.join(texts)}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
