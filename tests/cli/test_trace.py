"""A measured step beside the simulated one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.trace.timed import Range, Timed, measured_step
from autopar.compiler import program_of, rewrite
from autopar.explain.tables.trace import trace_facts, trace_table
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.simulate.trace import beside

ROOT = Path(__file__).resolve().parents[2]


def made() -> tuple[Any, Any, Any]:
    """A graph with collectives, its plan, and its simulated step."""
    model, batch = nn.Linear(8, 8), (torch.zeros(4, 8),)
    options: dict[str, Any] = {"loss_fn": lambda output, _: output.square().mean()}
    search = autopar.Search(pins={"batch.0": "S(0)", "weight": "R", "bias": "R"}, cache=False)
    plan = autopar.plan(model, batch, cluster="cpu", axes={"data": 2}, search=search, **options)
    local = rewrite(program_of(model, batch, **options), plan)
    return local, plan, simulate(emitted(local, plan))


def test_a_step_is_read_off_a_profile() -> None:
    local, _, simulated = made()
    graph = local.graph.graph
    calls = [n for n in graph.nodes if n.op == "call_function"]
    collectives = [n for n in calls if info(n).collective is not None]
    assert collectives
    ranges = [Range("step 0", 0.0, 1e6), Range("step 1", 2e6, 2e6 + 20.0 * len(calls)), Range("node mm", 5.0, 7.0)]
    for i, node in enumerate(calls):  # 10 us each, and as long between two
        ranges.append(Range(f"node {node.name}", 2e6 + 20.0 * i, 2e6 + 20.0 * i + 10))
    names = {task.name for task in simulated.tasks}
    step = measured_step(ranges, graph, names)
    assert {task.name for task in step.tasks} == names - {"inputs"}
    streams = {task.name: task.stream for task in simulated.tasks}
    assert all(task.stream == streams[task.name] for task in step.tasks)
    # Gloo has reported none: they last until the wait for them has ended.
    index = {n: i for i, n in enumerate(calls)}
    for node in collectives:
        (wait,) = [u for u in node.users if u.target is c10d.wait_tensor.default]
        task = next(t for t in step.tasks if t.name == node.name)
        assert task.seconds == pytest.approx((20 * (index[wait] - index[node]) + 10) / 1e6)
    # Now it has, in the order of their launches.
    for node in collectives:
        ranges.append(Range(f"gloo:{node.target}", 2e6 + 20.0 * index[node] + 1, 2e6 + 20.0 * index[node] + 13))
    step = measured_step(ranges, graph, names)
    assert all(t.seconds == pytest.approx(13e-6) for t in step.tasks if t.category == "communication")

    facts = trace_facts(simulated, step)
    assert facts["seconds"]["step"]["measured"] == step.step_seconds
    assert facts["nodes"].keys() <= names and "simulated" in trace_table(facts)
    events = beside({"simulated": simulated, "measured": step})["traceEvents"]
    titles = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert titles == {"simulated": 0, "measured": 1}
    shown = [{e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid} for pid in (0, 1)]
    assert shown[1] <= shown[0]
    with pytest.raises(ValueError, match="the profile has no step"):
        measured_step(ranges[2:], graph, names)


def test_a_timed_graph_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    found: Any = autopar.parallelize(model, None, (x,), cluster="cpu", loss_fn=lambda output, _: output.square().mean())
    graph = found.forward_graph
    plain = graph(*(p.detach() for p in model.parameters()), x)
    timed = Timed().executable(graph, ())(*(p.detach() for p in model.parameters()), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))


@pytest.mark.deep
@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n"
        "    return nn.Linear(256, 256), (torch.randn(64, 256),), lambda output, batch: output.square().mean()\n"
    )
    words = "trace --model net.py:make --axes data=2 --steps 2 --save trace.json --json".split()
    run = subprocess.run(
        [sys.executable, "-m", "autopar.cli", *words], cwd=tmp_path, text=True, capture_output=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["seconds"]["step"]["measured"] > 0 and facts["nodes"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
