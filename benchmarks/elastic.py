"""Does a run go on as if nothing had happened when nodes are lost and join at any moment, and how soon?

Each sequence is a run of up to four nodes of one process each, on this machine. At random moments, of recoveries as
well, a node is killed (SIGKILL: its process, and the launcher), or a process alone, or a node joins. Every loss, every
learning rate and the parameters at the end must be those of eager steps on one device that nothing interrupts.

    python -m benchmarks.elastic --count 50
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.distributed.elastic_nodes import Nodes, children, expected, lost_steps

MOST, EVENTS, STEPS, PAUSE = 4, 3, 40, 0.5
"""Nodes, changes and steps of a sequence, and seconds that a step takes at least."""

KINDS: dict[str, dict[str, Any]] = {"replicas": {"recipe": "ddp"}, "shards, 2 copies": {"recipe": "fsdp", "copies": 2}}
"""How the state lies: all of it everywhere, or in parts, of which two other nodes have copies."""

LOST, PROCESS, JOINED = "a node is lost", "a process is lost", "a node joins"


@dataclass
class Outcome:
    """What came of a sequence.

    Attributes:
        kind: one of `KINDS`.
        worlds: sizes of the world, in order.
        recoveries: what happened, and the seconds from then to the next step; of several before that step each.
        restored: seconds in which each start has taken up the state.
        again: how many steps each start has done anew.
        difference: the largest of a loss from that of eager steps.
        wrong: what is not as it should be; empty: nothing.
    """

    kind: str
    worlds: list[int] = field(default_factory=list)
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    difference: float = 0.0
    wrong: str = ""


def main() -> None:
    """Run sequences, and print a table of recoveries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="sequences")
    parser.add_argument("--seed", type=int, default=49000000)
    parser.add_argument("--minutes", type=float, default=600.0, help="no sequence is begun after so many")
    options = parser.parse_args()
    begun, found = time.monotonic(), []
    for number in range(options.count):
        if time.monotonic() - begun > 60 * options.minutes:
            break
        kind = list(KINDS)[number % len(KINDS)]
        one = sequence(kind, random.Random(options.seed + number))
        found.append(one)
        events = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in one.recoveries)
        print(f"{number}: {kind}, worlds {one.worlds}: {events}; {one.wrong or 'right'}", flush=True)
    print("\n".join(table(found)))


def sequence(kind: str, draw: random.Random) -> Outcome:
    """One run, and what is done to it."""
    found = Outcome(kind)
    with tempfile.TemporaryDirectory(prefix="autopar_elastic_") as folder:
        nodes = Nodes(Path(folder), 1, MOST, STEPS, pause=PAUSE, **KINDS[kind])
        try:
            nodes.join(draw.randint(2, MOST))
            nodes.reach(1)
            events = _disturb(nodes, draw)
            nodes.finish()
            _judge(nodes, events, found)
        except AssertionError as error:
            found.wrong = str(error)[:2000]
        finally:
            nodes.close()
    return found


def _disturb(nodes: Nodes, draw: random.Random) -> list[tuple[str, float]]:
    """Changes at random moments; those of half of them do not wait for the recovery from the one before."""
    events: list[tuple[str, float]] = []
    for _ in range(EVENTS):
        if not events or draw.random() < 0.5:
            done = nodes.last_step()
            nodes.wait(lambda done=done: nodes.last_step() > done + 1, "next step")  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, 8.0))
        alive = nodes.alive()
        possible = [JOINED] * (len(alive) < MOST) + [LOST] * (len(alive) > 1) + [PROCESS]
        what = draw.choice(possible)
        events.append((what, time.time()))
        if what == JOINED:
            nodes.join()
        elif what == LOST:
            nodes.lose(draw.choice(alive))
        else:
            for pid in children(nodes.nodes[draw.choice(alive)].process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return events


def _judge(nodes: Nodes, events: Sequence[tuple[str, float]], found: Outcome) -> None:
    losses, rates, state = expected(STEPS)
    steps, facts = nodes.facts("step"), nodes.facts("time")
    starts = [f for f in facts if "pid" in f]
    for what, when in events:
        # The first step of processes that started after it.
        later = min((f["time"] for f in starts if f["time"] > when), default=None)
        ends = [f["time"] for f in steps if later is not None and f["time"] > later]
        if ends:
            found.recoveries.append((what, min(ends) - when))
    found.worlds = [f["world"] for f in nodes.starts()]
    found.restored = [f["seconds"] for f in nodes.starts()[1:]]
    found.again = lost_steps(facts)
    found.difference = max(abs(f["loss"] - losses[f["step"]]) for f in steps)
    wrong = [f"loss of step {f['step']}" for f in steps if abs(f["loss"] - losses[f["step"]]) > 1e-6]
    wrong += [f"learning rate of step {f['step']}" for f in steps if abs(f["lr"] - rates[f["step"]]) > 1e-12]
    wrong += [f"no step {i}" for i in set(range(STEPS)) - {f["step"] for f in steps}]
    wrong += [f"a start from {f['source']}" for f in nodes.starts()[1:] if f["source"] != "memory"]
    wrong += [f"{n} steps done anew" for n in found.again if n > 1]
    for ended in nodes.facts("state"):
        for name, value in state.items():
            if (torch.tensor(ended["state"][name]).double() - value).abs().max() > 1e-6:
                wrong.append(f"{name} at the end")
    found.wrong = "; ".join(wrong[:5])


def table(found: Sequence[Outcome]) -> list[str]:
    """Recoveries by what happened, and what was wrong."""
    rows = ["", "| what happens | times | seconds to the next step: median, most |", "| --- | --- | --- |"]
    for what in (LOST, PROCESS, JOINED):
        seconds = sorted(s for one in found for name, s in one.recoveries if name == what)
        if seconds:
            rows.append(f"| {what} | {len(seconds)} | {statistics.median(seconds):.1f}, {seconds[-1]:.1f} |")
    restored, again = [s for one in found for s in one.restored], [n for one in found for n in one.again]
    return [
        *rows, "",
        f"{len(found)} sequences, {sum(bool(one.wrong) for one in found)} wrong; {len(restored)} starts anew, of which "
        f"each did at most {max(again, default=0)} steps a second time; taking up the state: "
        f"{statistics.median(restored) if restored else 0:.2f} s, at most {max(restored, default=0):.2f} s; largest "
        f"difference of a loss {max((one.difference for one in found), default=0):.1e}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
