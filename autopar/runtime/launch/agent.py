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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autopar.runtime.launch.environment import AXES, BACKEND, FAILURES, PROGRESS, QUIET, TIMEOUT
from autopar.runtime.launch.script import MODULE

LOCAL = "localhost:0"
"""Where processes of one node meet: at a port that is free."""


@dataclass(frozen=True)
class Launch:
    """What is started.

    Attributes:
        processes: of this node.
        nodes: each of which has as many.
        axes: of the mesh; empty: by nodes and devices.
        meeting: host and port at which the nodes meet; None where there is one node.
        name: of the run, the same on all nodes.
        timeout: seconds that a process waits for the others to start.
        restarts: how often all processes are started anew after one failed.
        backend: of `autopar.mesh`; None: by the devices.
        quiet: of this node's processes only the first prints; why one fails is said all the same.
    """

    processes: int
    nodes: int = 1
    axes: Mapping[str, int] | None = None
    meeting: str | None = None
    name: str = ""
    timeout: float = 600.0
    restarts: int = 0
    backend: str | None = None
    quiet: bool = False


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
    with tempfile.TemporaryDirectory(prefix="autopar_run_") as folder, _environment(wanted, folder, told):
        elastic = _elastic()
        config = elastic.LaunchConfig(
            min_nodes=wanted.nodes,
            max_nodes=wanted.nodes,
            nproc_per_node=wanted.processes,
            run_id=wanted.name or uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=wanted.meeting or LOCAL,
            rdzv_configs={"timeout": max(1, int(wanted.timeout)), "join_timeout": max(1, int(wanted.timeout))},
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
    return 0


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
def _environment(launch: Launch, folder: str, told: bool) -> Iterator[None]:
    """Variables of this process, which those that it starts inherit; afterwards they are as before."""
    before = dict(os.environ)
    wanted = {
        FAILURES: folder,
        PROGRESS: "1" if told else "0",
        TIMEOUT: str(launch.timeout),
        QUIET: "1" if launch.quiet else "0",
        # The agent's store has no prefix for each attempt: processes that are restarted would meet those of before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    os.environ.pop(BACKEND, None)
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
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    return SimpleNamespace(
        DefaultLogsSpecs=DefaultLogsSpecs, SignalException=SignalException, ChildFailedError=ChildFailedError,
        LaunchConfig=LaunchConfig, elastic_launch=elastic_launch,
    )  # fmt: skip
