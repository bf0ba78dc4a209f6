"""A pipelined step in one process: every device runs its actions, each as soon as it has what the action takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.plan import Plan
from autopar.ir.program import Output, Program
from autopar.pipeline.executor import Run, StageRun, begin, end, exchange_here
from autopar.pipeline.schedules import BACKWARD_WEIGHT, Action, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, StageGraph, StageGraphs
from autopar.verify.emulate import as_program, emulate

Inputs = Callable[[int], Sequence[Sequence[torch.Tensor]]]
"""``inputs(microbatch)[i][rank]``: the local tensors of each placeholder on the ranks of a stage."""


def emulate_pipeline(
    program: Program, plan: Plan, inputs: Inputs, draw: random.Random | None = None
) -> list[list[list[torch.Tensor | None]]]:
    """Run a rewritten program in stages.

    Args:
        program: as `autopar.compiler.rewrite` returns it, for a plan with stages.
        plan: the plan.
        inputs: what goes in.
        draw: see `autopar.verify.emulate.emulate`.

    Returns:
        ``outputs[microbatch][i][rank]`` on the ranks of a stage that has the output. What does not consist of rows is
        in the last only.

    Raises:
        RuntimeError: the schedule does not come to an end, or a stage takes a parameter that it does not have.
    """
    assert plan.pipeline is not None
    stage_graphs = StageGraphs(program, len(plan.stages))
    placeholders = {n.name: (i, s) for i, (n, s) in enumerate(zip(program.placeholders, program.inputs, strict=True))}
    described = stage_graphs.described
    rows = [v.name for o, v in described if o.kind == "result" and o.name in program.part.results and v]
    run = _runner(plan, draw)

    def stage_run(stage: int) -> StageRun:
        def source(name: str, microbatch: int) -> Any:
            index, spec = placeholders[name]
            # On real devices there would be nothing to take: here the emulation has all inputs, and must not help out.
            if spec.kind == "parameter" and stage not in stage_graphs.holders(spec.name):
                raise RuntimeError(f"stage {stage} takes parameter {spec.name!r}, which it does not hold")
            return list(inputs(max(microbatch, 0))[index])

        # Rows of microbatches stay apart: the caller compares and joins whole tensors.
        return StageRun(stage_graphs, stage, rows, run, source, lambda name, values: values)

    runs = {stage: stage_run(stage) for stage in range(stage_graphs.stages)}
    actions = order_of(plan)
    begin(stage_graphs, runs, actions, exchange_here)
    _run_actions([list(row) for row in actions], runs)
    end(stage_graphs, runs, exchange_here)
    outputs = {stage: r.outputs() for stage, r in runs.items()}
    ranks = range(len(inputs(0)[0]))

    def value_of(output: Output, value: fx.Node | None, microbatch: int) -> list[Any]:
        stage = None if value is None else stage_graphs.result_stage(output, value)
        if value is not None and value.name in rows:
            return list(outputs[stage or 0][value.name][microbatch])
        if value is None or microbatch < program.microbatches - 1:
            return [None for _ in ranks]
        if value.name in placeholders:
            return list(inputs(0)[placeholders[value.name][0]])
        # Where several stages have the value, from the last of them: it came there by a transfer, which is tested so.
        stages = stage_graphs.holders(output.name) if output.kind == "gradient" else tuple(runs)
        return list(outputs[stages[-1] if stage is None else stage][value.name])

    return [[value_of(o, v, i) for o, v in described] for i in range(program.microbatches)]


def _runner(plan: Plan, draw: random.Random | None) -> Run:
    """Runs a graph of a stage on all ranks of the stage."""
    inner, seed = plan.inner, current_seed()

    def run(graph: StageGraph, microbatch: int, values: list[Any]) -> list[Any]:
        with step_seed(derive_seed(seed, microbatch)):
            return emulate(as_program(graph.graph), inner.axis_names, inner.axis_sizes, values, draw=draw)

    return run


def _run_actions(remaining: list[list[Action]], runs: dict[int, StageRun]) -> None:
    """Run the actions of every device, each device as far as it can in its turn."""
    while any(remaining):
        progress = False
        for row in remaining:
            while row and _is_ready(row[0], runs):
                _run_action(row.pop(0), runs)
                progress = True
        if not progress:
            raise RuntimeError(f"the schedule hangs: {', '.join(str(row[0]) for row in remaining if row)} wait")


def _is_ready(action: Action, runs: dict[int, StageRun]) -> bool:
    """Whether the neighbor has sent what an action takes."""
    stage, kind, microbatch = action
    # It takes what its own stage has saved, in an action that comes before it on the same device.
    if kind == BACKWARD_WEIGHT:
        return True
    step = -1 if kind == FORWARD else 1
    if not 0 <= stage + step < len(runs):
        return True
    return runs[stage + step].has_sent(FORWARD if kind == FORWARD else BACKWARD, microbatch)


def _run_action(action: Action, runs: dict[int, StageRun]) -> None:
    stage, kind, microbatch = action
    run = runs[stage]
    if kind == BACKWARD_WEIGHT:
        run.weights(microbatch)
    elif kind == FORWARD:
        run.forward(microbatch, runs[stage - 1].take_sent(FORWARD, microbatch) if stage else [])
    else:
        last = stage == len(runs) - 1
        run.backward(microbatch, [] if last else runs[stage + 1].take_sent(BACKWARD, microbatch), kind)
