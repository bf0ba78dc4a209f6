"""Does a run go on as if nothing had happened when nodes are lost and join at any moment, and how soon?

Each sequence is a run of up to three nodes of one process each, on this machine. At random moments, of recoveries as
well, a node is killed (SIGKILL: its process, and the launcher), or a process alone, or a node joins. Every loss, every
learning rate and the parameters at the end must be those of eager steps on one device that nothing interrupts.

    python -m benchmarks.elastic --count 50 --jobs 2
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.distributed.elastic_nodes import Nodes, children, expected, lost_steps

MOST, EVENTS, STEPS, PAUSE = 3, 3, 40, 0.25
"""Nodes, changes and steps of a sequence, and seconds that a step takes at least."""

LAST = 3
"""Steps before the end from which on nothing is done to a run: torch's agents may wait for a node lost in the last."""

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
        within: how many changes came while the run recovered from one before.
        met, begun, first: of each recovery that no further change fell into, seconds until processes start, until they
            have taken up the state, and until they have done a step.
        restored: seconds in which each start has taken up the state.
        again: how many steps each start has done anew.
        difference: the largest of a loss from that of eager steps.
        wrong: what is not as it should be; empty: nothing.
    """

    kind: str
    worlds: list[int] = field(default_factory=list)
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    within: int = 0
    met: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
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
    parser.add_argument("--jobs", type=int, default=1, help="sequences at the same time")
    options = parser.parse_args()
    _right()
    until = time.monotonic() + 60 * options.minutes

    def one(number: int) -> Outcome | None:
        if time.monotonic() > until:
            return None
        kind = list(KINDS)[number % len(KINDS)]
        found = sequence(kind, random.Random(options.seed + number))
        events = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in found.recoveries)
        print(f"{number}: {kind}, worlds {found.worlds}: {events}; {found.wrong or 'right'}", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        done = [found for found in pool.map(one, range(options.count)) if found is not None]
    print("\n".join(table(done)))


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
            found.wrong = str(error)
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
            time.sleep(draw.uniform(0.0, 1.0))
        else:
            time.sleep(draw.uniform(0.0, 8.0))
        alive = nodes.alive()
        if nodes.last_step() >= STEPS - LAST:
            break
        # A state that only killed nodes had is lost, which is an error of the run and no recovery.
        holders = nodes.holders()
        may_go = [i for i in alive if set(holders) - {i}]
        possible = [JOINED] * (len(alive) < MOST) + [LOST] * bool(may_go) + [PROCESS]
        what = draw.choice(possible)
        events.append((what, time.time()))
        if what == JOINED:
            nodes.join()
        elif what == LOST:
            nodes.lose(draw.choice(may_go))
        else:
            for pid in children(nodes.nodes[draw.choice(alive)].process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return events


@cache
def _right() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """What eager steps give; with random numbers of this process, which sequences at the same time would share."""
    return expected(STEPS)


def _judge(nodes: Nodes, events: Sequence[tuple[str, float]], found: Outcome) -> None:
    losses, rates, state = _right()
    steps, facts = nodes.facts("step"), nodes.facts("time")
    starts = [f for f in facts if "pid" in f]
    begins = [f["time"] for f in nodes.facts("begins")]
    before = 0.0  # when the run went on after the changes so far
    for i, (what, when) in enumerate(events):
        # The first step of processes that started after it.
        later = min((f["time"] for f in starts if f["time"] > when), default=None)
        ends = [f["time"] for f in steps if later is not None and f["time"] > later]
        if later is None or not ends:
            continue
        end = min(ends)
        found.recoveries.append((what, end - when))
        found.within += when < before
        alone = when > before and (i + 1 == len(events) or events[i + 1][1] > end)
        before = max(before, end)
        if alone:
            last = max(f["time"] for f in starts if f["time"] < end)
            ready = max(t for t in begins if t < end)
            found.met.append(last - when)
            found.begun.append(ready - last)
            found.first.append(end - ready)
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
    rows = ["", "| what happens | times | least, median and most seconds to the next step |", "| --- | --- | --- |"]
    every = [recovery for one in found for recovery in one.recoveries]
    parts = {
        **{what: [s for name, s in every if name == what] for what in (LOST, PROCESS, JOINED)},
        "of those that nothing fell into: until processes have started": [s for one in found for s in one.met],
        "imports, capture, plan, rewriting, taking up the state": [s for one in found for s in one.begun],
        "the first step": [s for one in found for s in one.first],
    }
    for what, seconds in parts.items():
        if seconds:
            figures = ", ".join(f"{s:.1f}" for s in (min(seconds), statistics.median(seconds), max(seconds)))
            rows.append(f"| {what} | {len(seconds)} | {figures} |")
    wrong, within = sum(bool(one.wrong) for one in found), sum(one.within for one in found)
    restored, again = [s for one in found for s in one.restored], [n for one in found for n in one.again]
    return [
        *rows, "",
        f"{len(found)} sequences, {wrong} wrong; {within} changes came during a recovery; {len(restored)} starts anew, "
        f"of which each did at most {max(again, default=0)} steps a second time; taking up the state: "
        f"{statistics.median(restored) if restored else 0:.2f} s, at most {max(restored, default=0):.2f} s; largest "
        f"difference of a loss {max((one.difference for one in found), default=0):.1e}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
