"""`launch`: the processes of this node, under torch's elastic agent, and what is said when one fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autopar.runtime.launch.environment import AXES, BACKEND, FAILURES, NODES, PROGRESS, QUIET, SNAPSHOTS, TIMEOUT
from autopar.runtime.launch.script import MODULE
from autopar.runtime.launch.snapshot_folder import snapshot_folder

LOCAL = "localhost:0"
"""Where processes of one node meet: at a port that is free."""

COME_AND_GO = {"last_call_timeout": 3, "keep_alive_interval": 3, "keep_alive_max_attempt": 5, "read_timeout": 60}
"""Of torch's rendezvous, in seconds, where nodes come and go: how long those that have met wait for more of them, and
how often a node says that it is there. One that has not said so five times is gone: on a machine that is so busy that
launchers come to nothing for seconds, fewer would take living ones for gone."""

TOGETHER = 120.0
"""The most seconds that processes wait for each other when they have been started, where nodes come and go: of a node
that is lost then, nobody but they hears."""


@dataclass(frozen=True)
class Launch:
    """What is started.

    Attributes:
        processes: of this node.
        nodes: each of which has as many; the most, where they may come and go.
        axes: of the mesh, of which one size may be `autopar.runtime.launch.environment.OPEN`; empty: by nodes and
            devices.
        meeting: host and port at which the nodes meet; None where there is one node.
        name: of the run, the same on all nodes.
        timeout: seconds that a process waits for the others to start.
        restarts: how often all processes are started anew after one failed.
        backend: of `autopar.mesh`; None: by the devices.
        quiet: of this node's processes only the first prints; why one fails is said all the same.
        fewest: nodes with which the run goes on, where they may come and go; None: there are always ``nodes``.
    """

    processes: int
    nodes: int = 1
    axes: Mapping[str, int | str] | None = None
    meeting: str | None = None
    name: str = ""
    timeout: float = 600.0
    restarts: int = 0
    backend: str | None = None
    quiet: bool = False
    fewest: int | None = None


def launch(wanted: Launch, script: str, arguments: Sequence[str], *, is_module: bool = False, told: bool = True) -> int:
    """Run a script in all processes of this node; blocks until they have ended.

    Args:
        wanted: how many processes, and where they meet.
        script: a file, or the name of a module.
        arguments: of the script.
        is_module: whether ``script`` is a module.
        told: whether rank 0 prints its progress.

    Returns:
        The exit code: 0, that of the rank which failed first, or 128 and the number of the signal that ended the run.
    """
    starts_anew = wanted.fewest is not None or wanted.restarts > 0
    with (
        tempfile.TemporaryDirectory(prefix="autopar_run_") as folder,
        snapshot_folder() if starts_anew else nullcontext() as snapshots,
        _environment(wanted, folder, told, snapshots),
    ):
        elastic = _elastic()
        seconds = max(1, int(wanted.timeout))
        config = elastic.LaunchConfig(
            min_nodes=wanted.nodes if wanted.fewest is None else wanted.fewest,
            max_nodes=wanted.nodes,
            nproc_per_node=wanted.processes,
            run_id=wanted.name or uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=wanted.meeting or LOCAL,
            rdzv_configs={
                "timeout": seconds,
                "join_timeout": seconds,
                **(COME_AND_GO if wanted.fewest is not None else {}),
            },
            max_restarts=wanted.restarts,
            logs_specs=elastic.DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        words = ["-u", "-m", "autopar.runtime.launch.script", *([MODULE] if is_module else []), script, *arguments]
        try:
            elastic.elastic_launch(config, sys.executable)(*words)
        except elastic.ChildFailedError as failed:
            code, text = failure(failed.failures, Path(folder))
            sys.stderr.write(text)
            return code
        except elastic.SignalException as stop:
            sys.stderr.write("stopped\n")
            return 128 + int(stop.sigval)
        except AttributeError as error:
            # Torch's launcher has no result for a node that was one too many when the run ended.
            if wanted.fewest is None or "is_failed" not in str(error):
                raise
        except elastic.RendezvousError as error:
            if wanted.fewest is None:
                raise
            sys.stderr.write(f"error: {_not_met(wanted, elastic, error)}\n")
            return 1
    return 0


def _not_met(wanted: Launch, elastic: SimpleNamespace, error: Exception) -> str:
    """Why a node that may come and go is not in the run."""
    if isinstance(error, elastic.RendezvousTimeoutError):
        return f"{wanted.fewest} nodes did not meet at {wanted.meeting} within --timeout {wanted.timeout:g} s"
    if isinstance(error, elastic.RendezvousClosedError):
        return f"the run {wanted.name!r} at {wanted.meeting} has ended; give another --name to start one"
    reason = error.__cause__ or error
    return f"no rendezvous at {wanted.meeting}: {reason}; `autopar rendezvous` on that host keeps one open"


def failure(failures: Mapping[int, Any], folder: Path) -> tuple[int, str]:
    """The exit code and the traceback of the rank that failed first.

    Args:
        failures: torch's, by rank.
        folder: where ranks have written why they failed.
    """
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    latest = max((facts["attempt"] for facts in written), default=0)
    # A rank that another one leaves alone fails with a RankError: its cause is the other's error.
    of_latest = sorted(
        (f for f in written if f["attempt"] == latest), key=lambda f: (f["kind"] == "RankError", f["time"])
    )
    # The agent ends all when one has failed.
    by_agent = {r for r, f in failures.items() if f.exitcode == -signal.SIGTERM}
    failures = {r: f for r, f in failures.items() if r not in by_agent} or failures
    ended = {r: f for r, f in failures.items() if f.exitcode < 0}
    if not of_latest or (of_latest[0]["kind"] == "RankError" and ended):
        rank, own = min((ended or failures).items(), key=lambda x: x[1].timestamp)
        return _code(own.exitcode), f"rank {rank} {_described(own.exitcode)}\n"
    facts = of_latest[0]
    known = failures.get(facts["rank"])
    others = sorted({*failures, *(f["rank"] for f in of_latest)} - {facts["rank"]})
    behind = f"; after it ranks {', '.join(map(str, others))} failed" if others else ""
    return _code(
        1 if known is None else known.exitcode
    ), f"{facts['text'].rstrip()}\nerror: rank {facts['rank']} failed{behind}\n"


def _code(exit_code: int) -> int:
    """As shells have it: a signal's number and 128."""
    return exit_code if exit_code > 0 else 128 - exit_code


def _described(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; the system does that where memory is short" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


@contextmanager
def _environment(launch: Launch, folder: str, told: bool, snapshots: Path | None) -> Iterator[None]:
    """Variables of this process, which those that it starts inherit; afterwards they are as before."""
    before = dict(os.environ)
    wanted = {
        FAILURES: folder,
        PROGRESS: "1" if told else "0",
        TIMEOUT: str(launch.timeout if launch.fewest is None else min(launch.timeout, TOGETHER)),
        QUIET: "1" if launch.quiet else "0",
        # The agent's store has no prefix for each attempt: processes that are restarted would meet those of before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for name in (BACKEND, NODES, SNAPSHOTS):
        os.environ.pop(name, None)
    if snapshots is not None:
        wanted[SNAPSHOTS] = str(snapshots)
    if launch.fewest is not None:
        wanted[NODES] = f"{launch.fewest}:{launch.nodes}"
    if launch.backend:
        wanted[BACKEND] = launch.backend
    if launch.axes:
        wanted[AXES] = ",".join(f"{axis}={size}" for axis, size in launch.axes.items())
    else:
        os.environ.pop(AXES, None)
    os.environ.update(wanted)
    # Or the kernels of each process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.processes)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _elastic() -> SimpleNamespace:
    """Torch's launcher, without its own lines on a failure: `failure` says the same once.

    LOGLEVEL, torch's own variable, brings them back.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    return SimpleNamespace(
        DefaultLogsSpecs=DefaultLogsSpecs, SignalException=SignalException, ChildFailedError=ChildFailedError,
        LaunchConfig=LaunchConfig, elastic_launch=elastic_launch, RendezvousError=RendezvousError,
        RendezvousClosedError=RendezvousClosedError, RendezvousTimeoutError=RendezvousTimeoutError,
    )  # fmt: skip
