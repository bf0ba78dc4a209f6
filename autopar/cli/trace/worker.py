"""What each process of ``autopar trace`` runs: some steps under torch's profiler. Rank 0 writes the trace."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autopar import mesh, parallelize
from autopar.cli.task import ModelAndBatch, load_task
from autopar.cli.trace.timed import NODE, STEP, Range, Timed, measured_step
from autopar.explain.tables.trace import trace_facts, trace_table
from autopar.ir.signature import binding, pytree
from autopar.module.parallel_module import ParallelModule
from autopar.search.microbatch.shares import last_device
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.simulate.trace import beside

WARM_UP = 2
"""Steps before those that are measured: kernels and collectives take longer at first."""


def main(facts: dict[str, Any]) -> None:
    """Run the steps, and write what rank 0 has seen."""
    torch.manual_seed(0)  # a function that seeds nothing makes the same model on all ranks
    task, here = load_task(facts["model"]), mesh(device="cpu")
    module = parallelize(
        task.model, here, cluster=facts["cluster"], plan=facts["plan"], precision=facts["precision"], **task.losses
    )
    session = module._autopar
    session.options = replace(session.options, compiler=Timed())
    module.specialize(task.batch)
    found = session.known(session.latest)
    if found.plan.pipeline is not None:
        raise ValueError("the plan has pipeline stages: their steps are not measured; autopar simulate shows them")
    for _ in range(WARM_UP):
        _step(module, task)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(facts["steps"]):
            with record_function(f"{STEP}{number}"):
                _step(module, task)
    if session.context.rank:
        return
    simulated = simulate(emitted(*last_device(found.step.program, found.plan)))
    ranges = [
        Range(e.name, e.time_range.start, e.time_range.end)
        for e in profiler.events() or ()
        if e.name.startswith((NODE, STEP, "gloo:"))
    ]
    names = {task.name for task in simulated.tasks}
    measured = measured_step(ranges, found.step.program.graph.graph, names)
    Path(facts["save"]).write_text(json.dumps(beside({"simulated": simulated, "measured": measured})), encoding="utf-8")
    figures = trace_facts(simulated, measured)
    print(json.dumps(figures, indent=1) if facts["json"] else trace_table(figures))


def _step(module: ParallelModule, task: ModelAndBatch) -> None:
    """Forward and backward pass of all results that have gradients."""
    args, kwargs = binding.passed(task.batch)
    results = pytree.flatten(module(*args, **kwargs))[0]
    total: Any = sum(r.sum() for r in results if r.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()  # type: ignore[no-untyped-call]
    module.zero_grad()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
